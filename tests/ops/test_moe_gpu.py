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
from tileflux.testing.moe import ROUTING_KINDS, MoeCase, expected_ag, expected_rs, moe_routing, moe_rs_case

from .moe_gpu import AG_STRATEGIES, RS_STRATEGIES, SMALL, combine, combine_arguments, gather, layers, routed

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


def _layer(group: Group, ids: torch.Tensor, weights: torch.Tensor, x: torch.Tensor, up: Any, down: Any) -> torch.Tensor:
    routing = tileflux.route(ids, weights, num_experts=8, group=group, block_m=SMALL.block_m)
    inner = tileflux.moe_ag_gemm(x, up, routing, strategy="fused", config=SMALL, activation="silu")
    return tileflux.moe_gemm_rs(inner, down, routing, strategy="fused", config=SMALL)


def _replayed(group: Group) -> None:
    """A graph of a whole layer, replayed with other tokens, choices and weights; checked each time."""
    device, rank = group.device, group.rank
    draws = torch.Generator().manual_seed(5)
    up = torch.randn(8, 48, 64, generator=draws).bfloat16()
    down = torch.randn(8, 64, 48, generator=draws).bfloat16()
    own_up, own_down = up.to(device), down.to(device)  # every rank has a whole layer: results are W times one
    ids, weights = torch.zeros(40, 2, dtype=torch.int32, device=device), torch.ones(40, 2, device=device)
    x = torch.zeros(40, 64, dtype=torch.bfloat16, device=device)
    _layer(group, ids, weights, x, own_up, own_down)
    group.synchronize()
    group.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = _layer(group, ids, weights, x, own_up, own_down)
    for call in range(20):
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
        exact *= group.world_size
        assert_close(y.cpu(), exact, dtype=torch.bfloat16, reduction=64 * 48 * group.world_size, what=f"replay {call}")


def test_a_graph_of_a_layer_is_replayed_with_other_routings() -> None:
    run_ranks(_replayed, 2, where="mps", timeout_s=120)


def _stress(group: Group, num_calls: int) -> None:
    """Calls queued without a look, token counts from a shared seed; then every result."""
    draws, calls = random.Random(7), []
    for number in range(num_calls):
        sizes = [draws.randrange(60) for _ in range(group.world_size)]
        routing = moe_routing(sizes, 8, 2, number, kind=draws.choice(ROUTING_KINDS))
        case = moe_rs_case(routing, 64, 48 * group.world_size, torch.bfloat16, number)
        here = routed(group, case)
        given = combine_arguments(group, case, here)
        strategy = draws.choice(("fused", "pipelined"))
        calls.append((case, tileflux.moe_gemm_rs(**given, routing=here, strategy=strategy, config=SMALL)))
    group.synchronize()
    for number, (case, out) in enumerate(calls):
        right, reduction = expected_rs(case, group.rank), case.num_terms * group.world_size
        assert_close(out.cpu(), right, dtype=case.out_dtype, reduction=reduction, what=f"call {number}")


@pytest.mark.parametrize("where", ["virtual", "mps"])
def test_calls_in_a_row(where: Any) -> None:
    run_ranks(_stress, 4, args=(60,), where=where, device="cuda", timeout_s=200)
