"""The oracle of the ops of experts: what is drawn, in which order rows are, and that only right programs pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tileflux.testing import assert_close
from tileflux.testing.dense import ACTIVATIONS, DENSE_DTYPES, SCALED_DTYPES
from tileflux.testing.moe import (
    ROUTING_KINDS,
    MoeCase,
    Row,
    expected_ag,
    expected_rs,
    moe_ag_case,
    moe_routing,
    moe_rs_case,
)


def run_ag(case: MoeCase, rank: int) -> torch.Tensor:
    """A right program: choice by choice, in fp32."""
    routing, results = case.routing, []
    tokens, scales = torch.cat(case.xs), torch.ones(sum(routing.sizes))
    for source, scale in enumerate(case.scales_x):
        first = sum(routing.sizes[:source])
        scales[first : first + routing.sizes[source]] = 1.0 if scale is None else torch.as_tensor(scale)
    for row in routing.rows(rank):
        local, token = row.expert - routing.experts(rank).start, row.slot // routing.top_k
        y = (tokens[token].float() * case.weights[rank][local].float()).sum(dim=1) * scales[token]
        given = case.scales_weight[rank]
        y = y * (given if not isinstance(given, torch.Tensor) else given[local]) if given is not None else y
        y = y if case.biases[rank] is None else y + case.biases[rank][local].float()
        results.append(y if case.activation is None else ACTIVATIONS[case.activation](y[None])[0])
    columns = case.weights[rank].shape[1] // (2 if case.activation == "swiglu" else 1)
    return torch.stack(results).to(case.out_dtype) if results else torch.empty(0, columns, dtype=case.out_dtype)


def check(case: MoeCase, rank: int, actual: torch.Tensor) -> None:
    right = (expected_ag if case.op == "moe_ag_gemm" else expected_rs)(case, rank)
    assert_close(actual, right, dtype=case.out_dtype, reduction=case.num_terms)


def test_kinds_of_routing() -> None:
    drawn = {kind: torch.cat(moe_routing((40, 0, 60), 8, 3, 5, kind=kind).expert_ids) for kind in ROUTING_KINDS}
    assert all(ids.shape == (100, 3) and int(ids.max()) < 8 for ids in drawn.values())
    assert all(len(set(chosen)) == 3 for chosen in drawn["uniform"].tolist())
    assert len(drawn["uniform"].unique()) == 8 and len(drawn["one_expert"].unique()) == 1
    assert len(drawn["some_empty"].unique()) == 4
    counts = drawn["skewed"].flatten().bincount(minlength=8).sort(descending=True).values
    assert counts[:2].sum() > 150
    assert any(len(set(chosen)) < 3 for chosen in drawn["skewed"].tolist())
    num_dropped = int((drawn["dropped"] == -1).sum())
    assert 50 < num_dropped < 150 and all((ids >= 0).all() for kind, ids in drawn.items() if kind != "dropped")


def test_draws_follow_the_seed() -> None:
    first, again, other = (moe_routing((5, 3), 4, 2, seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.expert_ids, again.expert_ids, strict=True))
    assert not torch.equal(first.weights[0], other.weights[0])
    assert_close(first.weights[0].sum(dim=1), torch.ones(5), reduction=2)


def test_rows_by_expert_then_arrival_then_slot() -> None:
    """By hand: three ranks, two choices; rank 1's own tokens come first, then rank 2's, then rank 0's."""
    routing = moe_routing((2, 1, 2), 4, 2, 0)
    ids = tuple(torch.tensor(each) for each in ([[3, 0], [0, -1]], [[0, 3]], [[1, 0], [3, 3]]))
    routing = replace(routing, expert_ids=ids)
    assert routing.rows(1) == [
        Row(0, 0, 4), Row(0, 1, 7), Row(0, 2, 1), Row(0, 2, 2), Row(1, 1, 6),
        Row(3, 0, 5), Row(3, 1, 8), Row(3, 1, 9), Row(3, 2, 0),
    ]  # fmt: skip
    assert routing.counts(1) == [4, 1, 0, 4]


def test_experts_are_shared_by_neighbours() -> None:
    routing = moe_routing((1,) * 4, 8, 1, 0, ep_size=2)
    assert routing.tp_size == 2
    assert [routing.experts(rank) for rank in range(4)] == [range(4), range(4), range(4, 8), range(4, 8)]


def options(dtype: torch.dtype, number: int) -> dict[str, Any]:
    scales = ("none", "tensor", "expert", "channel")[number % 4] if dtype in SCALED_DTYPES else "none"
    return {"scales": scales, "out_dtype": (None, torch.float32, torch.bfloat16)[number % 3]}


@pytest.mark.parametrize("dtype", DENSE_DTYPES, ids=str)
def test_right_programs_pass(dtype: torch.dtype) -> None:
    number = 0
    for activation in (None, *ACTIVATIONS):
        for sizes, ep_size in (((7,), 1), ((5, 0, 3), 3), ((9, 1, 0, 6), 2)):
            number += 1
            kind = ROUTING_KINDS[number % len(ROUTING_KINDS)]
            routing = moe_routing(sizes, 12, 1 + number % 3, number, ep_size=ep_size, kind=kind)
            case = moe_ag_case(
                routing, 24, 20, dtype, number, activation=activation, bias=number % 2 == 0, **options(dtype, number)
            )
            for rank in range(len(sizes)):
                check(case, rank, run_ag(case, rank))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_second_layer_is_the_weighted_sum_of_choices(dtype: torch.dtype) -> None:
    """Against the exact sum over whole experts, which no rank has, of rows that are put together again."""
    for number, (sizes, ep_size) in enumerate((((7,), 1), ((5, 0, 6), 3), ((9, 1, 0, 6), 2), ((4, 5), 1))):
        routing = moe_routing(sizes, 6, 2, number, ep_size=ep_size, kind=ROUTING_KINDS[-1 - number])
        case = moe_rs_case(routing, 16, 8, dtype, number, **options(dtype, number + 2))
        gates, whole = torch.cat(routing.weights).flatten().double(), torch.zeros(sum(sizes), 16, dtype=torch.float64)
        for rank in range(len(sizes)):
            for number_of_row, row in enumerate(routing.rows(rank)):
                local = row.expert - routing.experts(rank).start
                y = case.weights[rank][local].double() @ case.xs[rank][number_of_row].double()
                if (scale := case.scales_x[rank]) is not None:
                    y = y * (scale if scale.dim() == 0 else scale[number_of_row])
                if (factor := case.scales_weight[rank]) is not None:
                    y = y * (factor[local] if isinstance(factor, torch.Tensor) else factor)
                whole[row.slot // routing.top_k] += y * gates[row.slot]
        for rank, right in enumerate(whole.split(list(sizes))):
            assert expected_rs(case, rank).dtype == case.out_dtype
            assert_close(expected_rs(case, rank), right, reduction=case.num_terms)


def test_parts_of_an_expert_add_up_to_it() -> None:
    """Ranks that share experts have the same rows, and each its own columns of gate and up."""
    shared, whole = (
        moe_ag_case(moe_routing(sizes, 4, 2, 3), 8, 24, torch.float32, 1, activation="swiglu")
        for sizes in ((6, 6), (12,))
    )
    assert [weight.shape for weight in shared.weights] == [(4, 24, 8)] * 2
    parts = [[weight.view(4, 2, 12, 8)[:, part] for weight in shared.weights] for part in range(2)]
    assert torch.equal(torch.cat([torch.cat(part, dim=1) for part in parts], dim=1), whole.weights[0])


def test_sums_that_might_cancel_are_of_positive_numbers() -> None:
    few = moe_ag_case(moe_routing((2,), 2, 1, 0), 30, 8, torch.float32, 0, bias=True)
    many = moe_ag_case(moe_routing((20,), 2, 1, 0), 30, 8, torch.float32, 0, bias=True)
    assert all((each >= 0).all() for each in (few.xs[0], few.weights[0], few.biases[0]))
    assert all((each < 0).any() for each in (many.xs[0], many.weights[0], many.biases[0]))


def test_only_what_is_not_the_default_is_passed() -> None:
    routing = moe_routing((3, 2), 4, 2, 0)
    assert set(moe_ag_case(routing, 4, 4, torch.int8, 0).arguments(0)) == {"x", "weight"}
    given = moe_ag_case(
        routing, 4, 4, torch.int8, 0, bias=True, scales="tensor", activation="silu", out_dtype=torch.float32
    )
    assert set(given.arguments(1)) == {
        "x", "weight", "bias", "scale_x", "scale_weight", "activation", "out_dtype"
    }  # fmt: skip
    assert given.scales_x[0] != given.scales_x[1]
    assert set(routing.arguments(0)) == {"expert_ids", "weights", "num_experts", "ep_size", "sizes"}
    expert, channel = (moe_ag_case(routing, 4, 4, torch.int8, 0, scales=kind) for kind in ("expert", "channel"))
    assert expert.scales_weight[0].shape == (4,) and channel.scales_weight[0].shape == (4, 2)


@pytest.mark.parametrize("dtype", DENSE_DTYPES, ids=str)
def test_wrong_programs_do_not_pass(dtype: torch.dtype) -> None:
    scales = "channel" if dtype in SCALED_DTYPES else "none"
    routing = moe_routing((9, 0, 14), 6, 2, 4, ep_size=3)
    case = moe_ag_case(routing, 33, 16, dtype, 7, bias=True, scales=scales)
    wrong = {
        "another expert's weight": replace(case, weights=tuple(w.roll(1, 0) for w in case.weights)),
        "the next token": replace(case, xs=tuple(x.roll(1, 0) for x in case.xs)),
        "another expert's bias": replace(case, biases=tuple(b.roll(1, 0) for b in case.biases)),
        "no bias": replace(case, biases=(None,) * 3),
    }
    if scales == "channel":
        wrong["another expert's scales"] = replace(case, scales_weight=tuple(s.roll(1, 0) for s in case.scales_weight))
        wrong["scales of the next token"] = replace(case, scales_x=tuple(s.roll(1) for s in case.scales_x))
    check(case, 0, run_ag(case, 0))
    for what, other in wrong.items():
        with pytest.raises(AssertionError, match="off by more than rounding explains"):
            check(case, 0, run_ag(other, 0))
            pytest.fail(f"not noticed: {what}")
    unsorted = torch.argsort(torch.tensor([row.slot for row in routing.rows(0)]))
    with pytest.raises(AssertionError, match="off by more than rounding explains"):
        check(case, 0, run_ag(case, 0)[unsorted])
