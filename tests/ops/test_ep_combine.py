"""ep_combine against a plain oracle, bit for bit: types, worlds, strategies, repeats, gradients, refusals."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import tileflux
from tileflux import env
from tileflux.ops import ep_combine_reference
from tileflux.symm.group import Group
from tileflux.testing import assert_close, run_ranks
from tileflux.testing.moe import ROUTING_KINDS
from tileflux.testing.numerics import poisoned

from .cases import check_registration
from .dense_cases import drawn_factors, gradients, install_interpreter, needs_interpreter, weighted
from .ep_cases import FLOATS, NARROW, dispatch, drawn_case, drawn_rows, with_room
from .moe_cases import on

STRATEGIES = ("fused", "sequential")


def _every_type(group: Group, seed: int, backend: str, tokens: int = 24) -> int:
    """Rows of another type and width than the tokens had: what comes back need not be what went."""
    draws, num_calls = random.Random(seed), 0
    for dtype in FLOATS:
        for kind in ROUTING_KINDS if backend == "host" else draws.sample(ROUTING_KINDS, 2):
            case = drawn_case(group.world_size, torch.int8 if num_calls % 2 else dtype, draws, tokens, kind)
            rows = drawn_rows(case, dtype, draws.randrange(2**32), draws.choice((1, 3, 8, 33, 40, 130)))
            right = case.combined(group.rank, rows)
            for strategy in STRATEGIES if backend == "host" else STRATEGIES[:1]:
                found = dispatch(group, case, capacity=draws.choice((None, case.most)))
                padded = with_room(rows[group.rank], found.capacity * found.top_k)
                out = poisoned(right.shape, dtype) if draws.random() < 0.5 else None
                with on(backend):
                    result = tileflux.ep_combine(padded, found, strategy=strategy, out=out)
                assert out is None or result is out
                assert torch.equal(result, right), f"{dtype} {strategy} {case.routing.sizes} on rank {group.rank}"
            num_calls += 1
    return num_calls


@pytest.mark.parametrize("config", [None, NARROW], ids=["", "narrow"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_against_the_oracle(world_size: int, config: Any) -> None:
    args = (int(torch.randint(2**30, ())), "host")
    counts = run_ranks(_every_type, world_size, args=args, group_kwargs={"config": config})
    assert counts == [len(FLOATS) * len(ROUTING_KINDS)] * world_size


@needs_interpreter
@pytest.mark.parametrize(("world_size", "config"), [(1, None), (2, NARROW), (4, None)])
def test_interpreted(world_size: int, config: Any) -> None:
    install_interpreter()
    args = (int(torch.randint(2**30, ())), "interpret", 12 // world_size)
    run_ranks(_every_type, world_size, args=args, group_kwargs={"config": config}, timeout_s=150)


def test_virtual_ranks() -> None:
    run_ranks(_every_type, 2, args=(int(torch.randint(2**30, ())), "host"), where="virtual")


@pytest.mark.parametrize("config", [None, NARROW], ids=["", "narrow"])
def test_through_a_link(config: Any) -> None:
    """There and back by the group's copying thread."""
    with env.scoped({"TILEFLUX_LINK": "500MB/s,50us"}):
        args = (int(torch.randint(2**30, ())), "host", 6)
        run_ranks(_every_type, 2, args=args, group_kwargs={"config": config})


def _against_reference(group: Group) -> None:
    draws = random.Random(group.world_size)
    for dtype in FLOATS:
        case = drawn_case(group.world_size, dtype, draws)
        found = dispatch(group, case)
        rows = with_room(drawn_rows(case, dtype, 1, 7)[group.rank], found.capacity * found.top_k)
        assert torch.equal(tileflux.ep_combine(rows, found), ep_combine_reference(rows, found))


@pytest.mark.parametrize("world_size", [1, 3])
def test_equals_torch_distributed(world_size: int) -> None:
    run_ranks(_against_reference, world_size)


def _gradient(group: Group, strategy: str) -> None:
    """Of rows and of weights that have come, of this op alone, against fp64 autograd of all ranks' sums."""
    draws, rank = random.Random(2), group.rank
    case = drawn_case(group.world_size, torch.float32, draws, 12, "skewed", 2)
    torch.manual_seed(7)
    rows = [drawn_factors(*each.shape) for each in drawn_rows(case, torch.float32, 1, 5)]
    factors = [drawn_factors(size, 5) for size in case.routing.sizes]
    found = dispatch(group, case, capacity=case.most)
    room = found.capacity * found.top_k

    def loss(own: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        arguments = (found.positions, found.row_tokens, found.counts, found.arrived, found.sent, group.name)
        padded = torch.cat((own, own.new_full((room - len(own), 5), torch.nan)))
        y = torch.ops.tileflux.ep_combine(padded, weights, *arguments, list(found.sizes), strategy)
        return weighted(y, factors[rank])

    of_rows, of_weights = gradients(loss, (rows[rank], found.weights))
    tokens = case.tokens(rank)
    right = torch.zeros(len(rows[rank]), 5, dtype=torch.float64)
    right_weights = torch.zeros(found.weights.shape, dtype=torch.float64)
    for place, (_, number, choice) in enumerate(case.sorted_rows(rank)):
        source, token = tokens[number]
        grad = factors[source][token].double()
        right[place] = case.routing.weights[source][token, choice].double() * grad
        right_weights[number, choice] = grad @ rows[rank][place].double()
    assert_close(of_rows, right, reduction=1)
    assert_close(of_weights, right_weights, reduction=5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients(strategy: str) -> None:
    run_ranks(_gradient, 3, args=(strategy,))


def _registration(group: Group) -> None:
    ids, gates = torch.tensor([[0, 1], [1, 1], [0, -1]]), torch.rand(3, 2)
    found = tileflux.ep_dispatch(torch.randn(3, 4), ids, gates, num_experts=2, group=group)
    rows, weights = torch.randn(6, 4, requires_grad=True), found.weights.requires_grad_()
    how = (found.positions, found.row_tokens, found.counts, found.arrived, found.sent, group.name, [3], "auto")
    check_registration(group, torch.ops.tileflux.ep_combine.default, rows, weights, *how)


def test_registration() -> None:
    run_ranks(_registration, 1, timeout_s=120)


def test_refusals() -> None:
    (group,) = tileflux.local_groups(1)
    found = tileflux.ep_dispatch(
        torch.ones(3, 4), torch.zeros(3, 2).long(), torch.ones(3, 2), num_experts=2, group=group
    )
    rows = found.rows()
    for message, given in (
        ("dispatched should be what tileflux.ep_dispatch gives, not Tensor", {"dispatched": rows}),
        (r"rows should be \[6, H\], one for each choice of each token that there is room for, not \(3, 4\)",
         {"rows": rows[:3]}),
        (r"rows should be \[6, H\]", {"rows": rows[:, 0]}),
        ("rows should be a tensor, not list", {"rows": [1.0]}),
        ("cannot sum torch.int8; convert to one of float32, float16, bfloat16", {"rows": rows.to(torch.int8)}),
        ("strategy='pipelined' is not one of auto, sequential, fused", {"strategy": "pipelined"}),
        (r"out should be contiguous \(3, 4\) torch.float32 on cpu", {"out": torch.ones(3, 5)}),
        ("out= records no gradient", {"rows": rows.clone().requires_grad_(), "out": torch.ones(3, 4)}),
        ("out overlaps the input", {"out": rows[:3]}),
    ):  # fmt: skip
        arguments: dict[str, Any] = {"rows": rows, "dispatched": found} | given
        with pytest.raises(ValueError, match=f"ep_combine: {message}"):
            tileflux.ep_combine(**arguments)
    assert_close(tileflux.ep_combine(rows, found), torch.full((3, 4), 2.0), reduction=0)
    group.close()
