"""The ops of experts on one GPU: virtual ranks, processes under MPS, graphs with other routings, and calls in a row."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import tileflux
from tileflux.symm.group import Group
from tileflux.testing import assert_close, run_ranks
from tileflux.testing.dense import DENSE_DTYPES
from tileflux.testing.moe import (
    ROUTING_KINDS,
    MoeCase,
    expected_ag,
    expected_rs,
    moe_ag_case,
    moe_routing,
    moe_rs_case,
)

from .moe_gpu import AG_STRATEGIES, RS_STRATEGIES, SMALL, TOP_KS, combine, combine_arguments, gather, layers, routed

pytestmark = pytest.mark.gpu


def _check_gather(group: Group, case: MoeCase, strategy: str, right: torch.Tensor) -> None:
    out = gather(group, case, strategy)
    group.synchronize()
    what = f"moe_ag_gemm {strategy} {case.xs[0].dtype} {case.routing.sizes} on rank {group.rank}"
    result = out.cpu()  # where looking at it loads no kernel: a virtual peer may wait already
    assert_close(result[: len(right)], right, dtype=case.out_dtype, reduction=case.num_terms, what=what)
    assert result[len(right) :].isnan().all(), f"{what}: written behind the last row"


def _check_combine(group: Group, case: MoeCase, strategy: str, right: torch.Tensor) -> None:
    routing = routed(group, case)
    results = [out.cpu() for out in combine(group, case, strategy, routing, num_calls=2)]
    what = f"moe_gemm_rs {strategy} {case.xs[0].dtype} {case.routing.sizes} on rank {group.rank}"
    reduction = case.num_terms * group.world_size
    assert_close(results[0], right, dtype=case.out_dtype, reduction=reduction, what=what)
    assert torch.equal(*results), f"{what}: does not repeat bit for bit"


def _every_type(group: Group) -> None:
    for dtype in DENSE_DTYPES:
        for first, second in layers(group.world_size, dtype):
            right = expected_ag(first, group.rank)
            for strategy in AG_STRATEGIES:
                _check_gather(group, first, strategy, right)
            right = expected_rs(second, group.rank)
            for strategy in RS_STRATEGIES:
                _check_combine(group, second, strategy, right)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_virtual_ranks(world_size: int) -> None:
    run_ranks(_every_type, world_size, where="virtual", device="cuda", timeout_s=300)


def test_processes_sharing_one_gpu() -> None:
    run_ranks(_every_type, 4, where="mps", timeout_s=300)


def _layer(
    group: Group, ids: torch.Tensor, weights: torch.Tensor, x: torch.Tensor, layer: tuple[torch.Tensor, torch.Tensor],
    strategy: str, ep_size: int, capacity: int | None,
) -> torch.Tensor:  # fmt: skip
    routing = tileflux.route(
        ids, weights, num_experts=8, group=group, ep_size=ep_size, capacity=capacity, block_m=SMALL.block_m
    )
    how: dict[str, Any] = {"strategy": strategy, "config": SMALL}
    inner = tileflux.moe_ag_gemm(x, layer[0], routing, activation="silu", **how)
    return tileflux.moe_gemm_rs(inner, layer[1], routing, **how)


def _replayed(group: Group, strategy: str, ep_size: int, capacity: int | None) -> None:
    """A graph of a whole layer, replayed with other tokens, choices and weights; checked each time."""
    device, rank = group.device, group.rank
    draws = torch.Generator().manual_seed(5)
    up = torch.randn(8, 48, 64, generator=draws).bfloat16()
    down = torch.randn(8, 64, 48, generator=draws).bfloat16()
    num_each = 8 // ep_size
    first = rank // (group.world_size // ep_size) * num_each
    # Ranks that share experts have them whole, so that results are that many times one.
    own = up[first : first + num_each].to(device), down[first : first + num_each].to(device)
    ids, weights = torch.full((40, 2), -1, dtype=torch.int32, device=device), torch.ones(40, 2, device=device)
    x = torch.zeros(40, 64, dtype=torch.bfloat16, device=device)
    _layer(group, ids, weights, x, own, strategy, ep_size, capacity)
    group.synchronize()
    group.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = _layer(group, ids, weights, x, own, strategy, ep_size, capacity)
    for call in range(12):
        draw = torch.Generator().manual_seed(100 * call + rank)
        now = torch.randint(-1, 8, (40, 2), generator=draw)
        gates, tokens = torch.rand(40, 2, generator=draw), torch.randn(40, 64, generator=draw).bfloat16()
        for old, new in ((ids, now), (weights, gates), (x, tokens)):
            old.copy_(new.to(old.dtype))
        graph.replay()
        torch.cuda.synchronize()
        exact = torch.zeros(40, 64, dtype=torch.float64)
        for choice in range(2):
            for token in range(40):
                expert = int(now[token, choice])
                if expert >= 0:
                    inner = torch.nn.functional.silu(tokens[token].double() @ up[expert].double().t())
                    exact[token] += gates[token, choice] * (inner @ down[expert].double().t())
        exact *= group.world_size // ep_size
        assert_close(y.cpu(), exact, dtype=torch.bfloat16, reduction=64 * 48 * group.world_size, what=f"replay {call}")
    if capacity is not None:
        ids.fill_(0)  # all rows to one expert: more than there is room for
        graph.replay()
        with pytest.raises(tileflux.CapacityExceeded, match="did not fit: capacity="):
            group.synchronize()


@pytest.mark.parametrize("strategy", ["fused", "pipelined", "sequential"])
@pytest.mark.parametrize(("ep_size", "capacity"), [(1, None), (2, 130)], ids=["tp", "ep with little room"])
def test_a_graph_of_a_layer_is_replayed_with_other_routings(strategy: str, ep_size: int, capacity: int | None) -> None:
    run_ranks(_replayed, 2, args=(strategy, ep_size, capacity), where="mps", timeout_s=120)


def _overflow(group: Group) -> None:
    """Told when everything is done, though all ops were called before the number came."""
    ids, gates = torch.zeros(3, 2, dtype=torch.int64, device=group.device), torch.ones(3, 2, device=group.device)
    x, up = torch.ones(3, 64, device=group.device), torch.ones(4, 32, 64, device=group.device)
    down = torch.ones(4, 64, 32, device=group.device)

    def layer(capacity: int) -> None:
        routing = tileflux.route(ids, gates, num_experts=4, group=group, capacity=capacity)
        tileflux.moe_gemm_rs(tileflux.moe_ag_gemm(x, up, routing), down, routing)

    # Kernels are loaded and memory is there before anybody gets to know: who does leaves, and is met by nobody.
    for capacity in (6 * group.world_size, 6 * group.world_size - 1):
        group.synchronize()
        group.barrier()
        torch.cuda._sleep(2 * 10**9)  # a second, in which both ranks queue everything
        layer(capacity)
    with pytest.raises(tileflux.CapacityExceeded, match="1 of 12 rows of a rank's experts did not fit"):
        group.synchronize()


def test_more_rows_than_there_is_room_for() -> None:
    run_ranks(_overflow, 2, where="mps", timeout_s=120)


def _stress(group: Group, num_calls: int) -> None:
    """Calls queued without a look, token counts from a shared seed; then every result."""
    draws, calls = random.Random(7), []
    for number in range(num_calls):
        sizes = [draws.randrange(60) for _ in range(group.world_size)]
        top_k, kind = draws.choice(TOP_KS), draws.choice(ROUTING_KINDS)
        routing = moe_routing(sizes, 8, top_k, number, kind=kind)
        strategy = draws.choice(("fused", "pipelined"))
        how: dict[str, Any] = {"strategy": strategy, "config": SMALL}
        if draws.random() < 0.5:
            case = moe_rs_case(routing, 64, 48 * group.world_size, torch.bfloat16, number)
            here = routed(group, case)
            out = tileflux.moe_gemm_rs(**combine_arguments(group, case, here), routing=here, **how)
        else:
            case = moe_ag_case(routing, 64, 48 * group.world_size, torch.bfloat16, number)
            here = routed(group, case)
            out = tileflux.moe_ag_gemm(**case.arguments(group.rank, group.device), routing=here, **how)
        calls.append((case, out))
    group.synchronize()
    for number, (case, out) in enumerate(calls):
        sums = case.op == "moe_gemm_rs"
        right = expected_rs(case, group.rank) if sums else expected_ag(case, group.rank)
        reduction = case.num_terms * (group.world_size if sums else 1)
        result = out.cpu()[: len(right)]
        assert_close(result, right, dtype=case.out_dtype, reduction=reduction, what=f"call {number}")


@pytest.mark.parametrize("where", ["virtual", "mps"])
def test_calls_in_a_row(where: Any) -> None:
    run_ranks(_stress, 4, args=(80,), where=where, device="cuda", timeout_s=200)
