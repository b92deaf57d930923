"""moe_ag_gemm against the fp64 oracle and torch.distributed: types, strategies, several weights, calls in a row."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

import tileflux
from tileflux.kernels import gemm_host
from tileflux.kernels.groups import Groups
from tileflux.ops import moe_ag_gemm_reference
from tileflux.symm.group import Group
from tileflux.testing import assert_close, run_ranks
from tileflux.testing.dense import DENSE_DTYPES
from tileflux.testing.moe import expected_ag, moe_ag_case, moe_routing
from tileflux.testing.numerics import poisoned

from .dense_cases import (
    SMALL,
    STRATEGIES,
    install_interpreter,
    needs_interpreter,
)
from .moe_cases import CONFIGS, check_call, drawn_case, on, routed


def _every_type(group: Group, seed: int, backend: str, rounds: int = 1, tokens: int = 24) -> int:
    draws, num_calls = random.Random(seed), 0
    for _ in range(rounds):
        for dtype in DENSE_DTYPES:
            for strategy in (*STRATEGIES, "auto") if backend == "host" else STRATEGIES[1:]:
                case = drawn_case(group.world_size, dtype, draws, tokens)
                config = draws.choice(CONFIGS) if backend == "host" else SMALL
                check_call(group, case, draws, backend, strategy=strategy, config=config)
                num_calls += 1
    return num_calls


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_type_and_strategy(world_size: int) -> None:
    seed = int(torch.randint(2**30, ()))
    assert run_ranks(_every_type, world_size, args=(seed, "host", 3)) == [3 * 4 * len(DENSE_DTYPES)] * world_size


@needs_interpreter
@pytest.mark.parametrize("world_size", [2, 4])
def test_interpreted(world_size: int) -> None:
    """Sequential is the plain product, which is compared with these below."""
    install_interpreter()
    args = (int(torch.randint(2**30, ())), "interpret", 1, 32 // world_size)
    run_ranks(_every_type, world_size, args=args, timeout_s=120)


def test_virtual_ranks() -> None:
    run_ranks(_every_type, 2, args=(int(torch.randint(2**30, ())), "host"), where="virtual")


def _against_reference(group: Group) -> None:
    draws = random.Random(group.world_size)
    for dtype in DENSE_DTYPES:
        case = drawn_case(group.world_size, dtype, draws)
        routing, arguments = routed(group, case), case.arguments(group.rank)
        num_rows = len(case.routing.rows(group.rank))
        result = tileflux.moe_ag_gemm(**arguments, routing=routing)[:num_rows]
        right = moe_ag_gemm_reference(**arguments, routing=routing)[:num_rows]
        assert_close(result, right, reduction=case.num_terms)


@pytest.mark.parametrize("world_size", [1, 3])
def test_equals_torch_distributed(world_size: int) -> None:
    run_ranks(_against_reference, world_size)


def _agree(group: Group, seed: int, backend: str, dtypes: tuple[torch.dtype, ...]) -> None:
    draws = random.Random(seed)
    for dtype in dtypes:
        case = drawn_case(group.world_size, dtype, draws, tokens=40)
        first, *others = (
            check_call(group, case, draws, backend, strategy=strategy, config=CONFIGS[1]) for strategy in STRATEGIES
        )
        for strategy, other in zip(STRATEGIES[1:], others, strict=True):
            assert_close(other, first, reduction=0, what=f"{strategy} {dtype}")


@pytest.mark.parametrize(
    ("backend", "world_size"), [("host", 3), ("host", 4), pytest.param("interpret", 2, marks=needs_interpreter)]
)
def test_strategies_agree_bit_for_bit(backend: str, world_size: int) -> None:
    dtypes = DENSE_DTYPES
    if backend == "interpret":
        install_interpreter()
        dtypes = (torch.bfloat16, torch.int8)
    run_ranks(_agree, world_size, args=(int(torch.randint(2**30, ())), backend, dtypes), timeout_s=120)


def _sequence(group: Group, seed: int) -> None:
    """One gather for several weights: each result is that of a call of its own, and the rows are everybody's."""
    draws, rank = random.Random(seed), group.rank
    for strategy in STRATEGIES:
        for scales in ("tensor", "expert", "channel"):
            routing = moe_routing(
                [draws.randrange(9) for _ in range(group.world_size)], 6, 2, draws.randrange(2**32), kind="dropped"
            )
            cases = [
                moe_ag_case(routing, 24, n * group.world_size, torch.int8, seed, bias=True, scales=scales)  # type: ignore[arg-type]
                for n in (9, 20, 16)
            ]
            same = [dataclasses.replace(each, xs=cases[0].xs, scales_x=cases[0].scales_x) for each in cases]
            here = routed(group, cases[0], SMALL)
            given = [case.arguments(rank) for case in same]
            outs = [poisoned((here.capacity, each["weight"].shape[1]), torch.bfloat16) for each in given]
            results, rows = tileflux.moe_ag_gemm(
                given[0]["x"], [each["weight"] for each in given], here, [each["bias"] for each in given],
                scale_x=given[0]["scale_x"], scale_weight=[each["scale_weight"] for each in given],
                strategy=strategy, return_gathered=True, config=SMALL, out=outs,
            )  # fmt: skip
            assert isinstance(results, tuple) and all(a is b for a, b in zip(results, outs, strict=True))
            assert_close(rows, torch.cat(cases[0].xs), reduction=0)
            num_rows = len(routing.rows(rank))
            for each, result in zip(given, results, strict=True):
                alone = tileflux.moe_ag_gemm(**each, routing=here, strategy=strategy, config=SMALL)
                assert_close(result[:num_rows], alone[:num_rows], reduction=0, what=f"{strategy} {scales}")
                assert result[num_rows:].isnan().all()
            (single,), again = tileflux.moe_ag_gemm(
                given[0]["x"], (given[0]["weight"],), here, strategy=strategy, return_gathered=True
            )
            assert single.shape == outs[0].shape and torch.equal(again, rows)
            check_call(group, same[1], draws, strategy=strategy, config=SMALL)


@pytest.mark.parametrize("world_size", [1, 3])
def test_several_weights_share_the_rows(world_size: int) -> None:
    run_ranks(_sequence, world_size, args=(int(torch.randint(2**30, ())),))


def _lists(group: Group) -> int:
    """How often the tiles are put into lists by rank."""
    install_interpreter()
    case, by_stages = drawn_case(group.world_size, torch.bfloat16, random.Random(7)), Groups.by_stages
    given, routing = case.arguments(group.rank), routed(group, case, SMALL)
    made: list[object] = []

    def noted(groups: Groups, bands: Sequence[range]) -> list[Groups]:
        made.append(bands)
        return by_stages(groups, bands)

    with on("interpret"), mock.patch.object(Groups, "by_stages", noted):
        weights = [given["weight"], given["weight"].clone()]
        tileflux.moe_ag_gemm(given["x"], weights, routing, strategy="pipelined", config=SMALL)
    return len(made)


@needs_interpreter
def test_several_weights_share_the_lists() -> None:
    assert run_ranks(_lists, 2, timeout_s=120) == [1, 1]


def _gathered(group: Group, backend: str) -> None:
    draws = random.Random(group.world_size)
    for strategy in STRATEGIES:
        case = drawn_case(group.world_size, torch.bfloat16, draws)
        routing = routed(group, case, SMALL)
        with on(backend):
            result, rows = tileflux.moe_ag_gemm(
                **case.arguments(group.rank), routing=routing, strategy=strategy, return_gathered=True, config=SMALL
            )
        assert_close(rows, torch.cat(case.xs), reduction=0, what=strategy)
        right = expected_ag(case, group.rank)
        assert_close(result[: len(right)], right, dtype=case.out_dtype, reduction=case.num_terms, what=strategy)


@pytest.mark.parametrize(
    ("backend", "world_size"), [("host", 1), ("host", 4), pytest.param("interpret", 2, marks=needs_interpreter)]
)
def test_gathered_rows(backend: str, world_size: int) -> None:
    if backend == "interpret":
        install_interpreter()
    run_ranks(_gathered, world_size, args=(backend,))


def _back_to_back(group: Group, strategy: str, backend: str) -> None:
    """Nobody meets anybody between calls, and no two calls are alike: ranks run ahead by as much as they can."""
    draws, waiting, is_slow = random.Random(7), [], backend == "interpret"
    cases = [
        drawn_case(group.world_size, draws.choice((torch.float32, torch.int8)), draws, 10 if is_slow else 24)
        for _ in range(4 if is_slow else 15)
    ]
    routings = [routed(group, case, SMALL) for case in cases]  # beforehand, since this is where ranks meet
    with on(backend):
        for call, (case, routing) in enumerate(2 * list(zip(cases, routings, strict=True))):
            if call % group.world_size == group.rank:
                time.sleep(0.005)
            arguments = case.arguments(group.rank)
            result = tileflux.moe_ag_gemm(**arguments, routing=routing, strategy=strategy, config=SMALL)
            waiting.append((case, result))
    for number, (case, result) in enumerate(waiting):
        right = expected_ag(case, group.rank)
        what = f"call {number} on rank {group.rank}"
        assert_close(result[: len(right)], right, dtype=case.out_dtype, reduction=case.num_terms, what=what)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_calls_in_a_row_with_other_routings(strategy: str) -> None:
    run_ranks(_back_to_back, 3, args=(strategy, "host"))


@needs_interpreter
@pytest.mark.parametrize("strategy", ["pipelined", "fused"])
def test_calls_in_a_row_with_other_routings_interpreted(strategy: str) -> None:
    install_interpreter()
    run_ranks(_back_to_back, 2, args=(strategy, "interpret"), timeout_s=120)


def _rushing(group: Group) -> None:
    """Rank 0 has no rows at all and is done at once; the others still read what it sent when it sends again."""
    product = gemm_host._Weight.product

    def slow(*arguments: Any) -> torch.Tensor:
        time.sleep(0.05)
        return product(*arguments)

    if group.rank:
        gemm_host._Weight.product = slow  # type: ignore[method-assign]
    ids, weights = torch.full((2, 1), 2), torch.ones(2, 1)
    routing = tileflux.route(ids, weights, num_experts=3, group=group, ep_size=3)
    assert routing.counts.tolist() == ([6] if group.rank == 2 else [0])
    for call in range(4):
        x = torch.full((2, 4), 10.0 * call + group.rank)
        y = tileflux.moe_ag_gemm(x, torch.eye(4)[None], routing, strategy="fused")
        if group.rank == 2:
            right = torch.tensor([2.0, 0.0, 1.0]).add(10 * call).repeat_interleave(2)[:, None].expand(6, 4)
            assert_close(y, right.contiguous(), reduction=0)


def test_a_rank_whose_experts_nobody_chose() -> None:
    run_ranks(_rushing, 3)


def _late_rows(group: Group) -> None:
    """Rank 0 multiplies nothing. Rank 2's rows come late: rank 1 must not be told before that its buffer is free,
    since the next call's rows have another place there, and would be overwritten by them."""
    copy_async, product, num_copies = group.copy_async, gemm_host._Weight.product, 0

    def late(*arguments: Any, **named: Any) -> Any:
        nonlocal num_copies
        num_copies += 1
        if num_copies == 2:
            time.sleep(0.2)
        return copy_async(*arguments, **named)

    def slow(*arguments: Any) -> torch.Tensor:
        time.sleep(0.2)
        return product(*arguments)

    routings = []
    for sizes, expert in (([2, 2, 6], 1), ([2, 6, 2], 0)):
        ids = torch.full((sizes[group.rank], 1), expert)
        routings.append(tileflux.route(ids, torch.ones(ids.shape), num_experts=3, group=group, ep_size=3, sizes=sizes))
    if group.rank == 2:
        group.copy_async = late  # type: ignore[method-assign]
    if group.rank == 0:
        gemm_host._Weight.product = slow  # type: ignore[method-assign]
    for call, routing in enumerate(routings):
        x = torch.full((routing.sizes[group.rank], 4), 10.0 * call + group.rank)
        y = tileflux.moe_ag_gemm(x, torch.eye(4)[None], routing, strategy="fused")
        if routing.counts.sum():
            order = [(group.rank + hop) % 3 for hop in range(3)]
            right = torch.cat([torch.full((routing.sizes[source], 4), 10.0 * call + source) for source in order])
            assert_close(y, right, reduction=0)


def test_a_rank_without_rows_keeps_its_buffer_until_all_have_come() -> None:
    run_ranks(_late_rows, 3)


def _nothing(group: Group, backend: str = "host") -> None:
    none, some = torch.zeros(0, 2, dtype=torch.long), torch.tensor([[1, 0], [1, -1], [3, 1]])

    def call(*arguments: Any, **settings: Any) -> Any:
        with on(backend):
            return tileflux.moe_ag_gemm(*arguments, config=SMALL, **settings)

    for strategy in STRATEGIES:
        for capacity in (None, 4):
            routing = tileflux.route(none, none.float(), num_experts=4, group=group, capacity=capacity, block_m=16)
            y, rows = call(torch.ones(0, 8), torch.ones(4, 6, 8), routing, strategy=strategy, return_gathered=True)
            assert y.shape == (capacity or 0, 6) and rows.shape == (0, 8)
        # Tokens without columns: what is left is the bias, and the activation.
        routing = tileflux.route(some, torch.ones(3, 2), num_experts=4, group=group, block_m=16)
        bias = torch.arange(4.0)[:, None].expand(4, 5).contiguous() - 1
        y = call(torch.ones(3, 0), torch.ones(4, 5, 0), routing, bias, strategy=strategy, activation="relu")
        right = torch.repeat_interleave(bias.relu(), torch.tensor([1, 3, 0, 1]) * group.world_size, dim=0)
        assert_close(y[: len(right)], right, reduction=0)
        # And tokens whose experts have no columns.
        assert call(torch.ones(3, 2), torch.ones(4, 0, 2), routing, strategy=strategy).shape == (
            6 * group.world_size,
            0,
        )


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_tokens_or_no_columns(world_size: int) -> None:
    run_ranks(_nothing, world_size)


@needs_interpreter
def test_no_tokens_or_no_columns_interpreted() -> None:
    install_interpreter()
    run_ranks(_nothing, 2, args=("interpret",))
