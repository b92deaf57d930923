"""ep_dispatch and ep_combine on one GPU: virtual ranks, processes under MPS, graphs with other routings, many calls."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

import tileflux
from tileflux.ops import Dispatched
from tileflux.symm.group import Group
from tileflux.testing import assert_close, run_ranks
from tileflux.testing.moe import ROUTING_KINDS, moe_routing

from .ep_cases import FLOATS, SCALED, EpCase, check_dispatched, drawn_case, drawn_rows, with_room

pytestmark = pytest.mark.gpu

STRATEGIES = ("fused", "sequential")


def on_cpu(found: Dispatched) -> Dispatched:
    """Where looking at it loads no kernel: a virtual peer may wait already."""
    tensors = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    return dataclasses.replace(
        found, **{name: each.cpu() for name, each in tensors.items() if isinstance(each, torch.Tensor)}
    )


def _there_and_back(group: Group, case: EpCase, dtype: torch.dtype, strategy: str, room: int | None) -> None:
    found = tileflux.ep_dispatch(
        **case.arguments(group.rank, group.device), group=group, capacity=room, strategy=strategy
    )
    rows = drawn_rows(case, dtype, 3, 72)
    padded = with_room(rows[group.rank], found.capacity * found.top_k).to(group.device)
    results = [tileflux.ep_combine(padded, found, strategy=strategy) for _ in range(2)]
    group.synchronize()
    check_dispatched(group, case, on_cpu(found))
    first, second = (result.cpu() for result in results)
    # Products are not rounded before they are added: a GPU has one instruction for both.
    right, reduction = case.combined(group.rank, rows), case.routing.top_k * group.world_size
    what = f"{dtype} {strategy} {case.routing.sizes} on rank {group.rank}"
    assert_close(first, right, dtype=dtype, reduction=reduction, what=what)
    assert torch.equal(first, second), f"{what}: does not repeat bit for bit"


def _every_type(group: Group) -> None:
    draws = random.Random(group.world_size)
    for number, dtype in enumerate((*FLOATS, *SCALED)):
        for strategy in STRATEGIES:
            for kind in draws.sample(ROUTING_KINDS, 2):
                case = drawn_case(group.world_size, dtype, draws, draws.choice((24, 130)), kind)
                room = draws.choice((None, case.most))
                _there_and_back(group, case, FLOATS[number % 3], strategy, room)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_virtual_ranks(world_size: int) -> None:
    run_ranks(_every_type, world_size, where="virtual", device="cuda", timeout_s=400)


def test_processes_sharing_one_gpu() -> None:
    run_ranks(_every_type, 4, where="mps", timeout_s=400)


def _large(group: Group) -> None:
    """Rows that are longer than a slot, and so many that a lane has many messages."""
    draws = random.Random(1)
    for hidden, size in ((40000, 9), (4096, 700)):
        routing = moe_routing([size] * group.world_size, 8, 3, draws.randrange(2**32), ep_size=group.world_size)
        xs = tuple(
            torch.randn(size, hidden, generator=torch.Generator().manual_seed(r)) for r in range(group.world_size)
        )
        case = EpCase(routing, xs, (None,) * group.world_size)
        found = tileflux.ep_dispatch(**case.arguments(group.rank, group.device), group=group)
        y = tileflux.ep_combine(found.rows(), found)
        group.synchronize()
        own = xs[group.rank]
        assert_close(y.cpu(), own.double() * routing.weights[group.rank].double().sum(1)[:, None], reduction=8)
        here, tokens = on_cpu(found), case.tokens(group.rank)
        assert torch.equal(here.tokens[: len(tokens)], torch.stack([xs[source][token] for source, token in tokens]))


@pytest.mark.parametrize("where", ["virtual", "mps"])
def test_long_rows_and_many_tokens(where: Any) -> None:
    run_ranks(_large, 4, where=where, device="cuda", timeout_s=200)


def _layer(group: Group, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    found = tileflux.ep_dispatch(x, ids, weights, num_experts=8, group=group)
    return tileflux.ep_combine(tileflux.grouped_gemm(found.rows(), up, found.counts), found)


def _replayed(group: Group) -> None:
    """A graph of a layer, replayed with other tokens, choices and weights; checked each time."""
    device, rank, each = group.device, group.rank, 8 // group.world_size
    up = torch.randn(8, 48, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    own = up[rank * each : (rank + 1) * each].to(device)
    ids, weights = torch.zeros(40, 3, dtype=torch.int32, device=device), torch.ones(40, 3, device=device)
    x = torch.zeros(40, 64, dtype=torch.bfloat16, device=device)
    _layer(group, x, ids, weights, own)
    group.synchronize()
    group.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = _layer(group, x, ids, weights, own)
    for call in range(20):
        draw = torch.Generator().manual_seed(100 * call + rank)
        now = torch.randint(-1, 8, (40, 3), generator=draw)
        gates, tokens = torch.rand(40, 3, generator=draw), torch.randn(40, 64, generator=draw).bfloat16()
        for old, new in ((ids, now), (weights, gates), (x, tokens)):
            old.copy_(new.to(old.dtype))
        graph.replay()
        torch.cuda.synchronize()
        exact = torch.zeros(40, 48, dtype=torch.float64)
        for token in range(40):
            for choice, expert in enumerate(now[token].tolist()):
                if expert >= 0:
                    exact[token] += gates[token, choice] * (tokens[token].double() @ up[expert].double().t())
        assert_close(y.cpu(), exact, dtype=torch.bfloat16, reduction=64 * 3, what=f"replay {call}")
    group.synchronize()


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_graph_of_a_layer_is_replayed_with_other_routings(world_size: int) -> None:
    run_ranks(_replayed, world_size, where="mps", timeout_s=120)


def _stress(group: Group, num_calls: int) -> None:
    """Calls queued without a look, token counts from a shared seed; then every result."""
    draws, calls = random.Random(7), []
    for number in range(num_calls):
        sizes = [draws.randrange(60) for _ in range(group.world_size)]
        routing = moe_routing(sizes, 8, 2, number, ep_size=group.world_size, kind=draws.choice(ROUTING_KINDS))
        numbers = torch.Generator().manual_seed(number)
        xs = tuple(torch.randn(size, 72, generator=numbers).bfloat16() for size in sizes)
        case = EpCase(routing, xs, (None,) * group.world_size)
        found = tileflux.ep_dispatch(**case.arguments(group.rank, group.device), group=group)
        calls.append((case, found, tileflux.ep_combine(found.rows(), found)))
    group.synchronize()
    for number, (case, found, y) in enumerate(calls):
        check_dispatched(group, case, on_cpu(found))
        chosen, gates = case.routing.expert_ids[group.rank], case.routing.weights[group.rank]
        right = case.xs[group.rank].double() * torch.where(chosen >= 0, gates, 0).double().sum(1)[:, None]
        assert_close(y.cpu(), right, dtype=torch.bfloat16, reduction=2 * group.world_size, what=f"call {number}")


@pytest.mark.parametrize("where", ["virtual", "mps"])
def test_calls_in_a_row(where: Any) -> None:
    run_ranks(_stress, 4, args=(60,), where=where, device="cuda", timeout_s=200)


def _overflow(group: Group) -> None:
    x, ids, weights = torch.ones(3, 8), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    given = [each.to(group.device) for each in (x, ids, weights)]
    with pytest.raises(tileflux.CapacityExceeded, match="1 of 6 tokens for a rank did not fit"):
        tileflux.ep_dispatch(*given, num_experts=4, group=group, capacity=5).synchronize()


def test_more_tokens_than_there_is_room_for() -> None:
    run_ranks(_overflow, 2, where="mps", timeout_s=120)
