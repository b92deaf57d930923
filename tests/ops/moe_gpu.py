"""Calls of the ops of experts on a GPU: what ``test_moe_gpu.py`` makes, and what ``scripts/gpu-test`` compiles before.

``python -m tests.ops.moe_gpu INDEX COUNT`` compiles one part of COUNT, with or without a GPU.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

import tileflux
from tileflux import GemmConfig
from tileflux.ops.routing import Routing
from tileflux.symm.group import Group
from tileflux.testing import poisoned
from tileflux.testing.dense import DENSE_DTYPES
from tileflux.testing.moe import ROUTING_KINDS, MoeCase, moe_ag_case, moe_routing, moe_rs_case
from tileflux.testing.rehearsal import rehearse, stand_in_for

from .dense_gpu import gpu

SMALL = GemmConfig(64, 64, 64, num_warps=4, num_stages=2, num_feeders=2, num_chunks=2)
AG_STRATEGIES = ("fused", "sequential", "pipelined")
TOP_KS = (1, 2, 3, 5, 8)
RS_STRATEGIES = ("fused", "summed apart", "sequential", "pipelined")
"""Of ``moe_gemm_rs``; fused with the sums of ranks in the same launch, or in one of their own."""


def layers(world_size: int, dtype: torch.dtype) -> Iterator[tuple[MoeCase, MoeCase]]:
    """Both products of a layer, of every kind of routing: uneven and no tokens, TP, EP and both.

    Every world has every number of choices; which kind of routing has which differs between worlds.
    """
    draws, shift = random.Random(3), world_size.bit_length()
    for number, kind in enumerate(ROUTING_KINDS):
        ep_size = (1, 2, world_size)[number % 3]
        sizes = [draws.choice((0, 17, 64, 130)) for _ in range(world_size)]
        top_k = TOP_KS[(number + shift) % len(TOP_KS)]
        routing = moe_routing(sizes, 4 * ep_size, top_k, draws.randrange(2**32), ep_size=ep_size, kind=kind)
        scales: Any = "channel" if dtype.itemsize == 1 else "none"
        hidden, ffn = (64, 48 * routing.tp_size) if number % 2 else (136, 72 * routing.tp_size)
        seed = draws.randrange(2**32)
        yield (
            moe_ag_case(routing, hidden, ffn, dtype, seed, bias=True, scales=scales),
            moe_rs_case(routing, hidden, ffn, dtype, seed, scales=scales),
        )


def routed(group: Group, case: MoeCase, **options: Any) -> Routing:
    """What the ranks of a case route, with tiles of ``SMALL``; done when it returns, as ``combine`` says why."""
    given = case.routing.arguments(group.rank, group.device)
    routing = tileflux.route(**given, group=group, block_m=SMALL.block_m, **options)
    group.synchronize()
    return routing


def gather(group: Group, case: MoeCase, strategy: str) -> torch.Tensor:
    """``moe_ag_gemm`` into memory full of NaN."""
    routing, given = routed(group, case), case.arguments(group.rank, group.device)
    out = poisoned((routing.capacity, given["weight"].shape[1]), case.out_dtype).to(group.device)
    return tileflux.moe_ag_gemm(**given, routing=routing, strategy=strategy, config=SMALL, out=out)


def combine_arguments(group: Group, case: MoeCase, routing: Routing) -> dict[str, Any]:
    """What a rank passes to ``moe_gemm_rs``, by name, less its routing: rows with what there is room for behind them.

    Made on the CPU: torch would load kernels for it, perhaps while a virtual rank waits (``kernels/loading.py``).
    """
    given = case.arguments(group.rank)
    rows, scale = given.pop("x"), given.pop("scale_x", None)
    given["h"] = torch.cat((rows, rows.new_zeros((routing.capacity - len(rows), rows.shape[1]))))
    if isinstance(scale, torch.Tensor) and scale.dim():
        scale = torch.cat((scale, scale.new_ones(routing.capacity - len(rows))))
    if scale is not None:
        given["scale_h"] = scale
    return {name: each.to(group.device) if isinstance(each, torch.Tensor) else each for name, each in given.items()}


def combine(group: Group, case: MoeCase, strategy: str, routing: Routing, num_calls: int = 1) -> list[torch.Tensor]:
    """``moe_gemm_rs`` into memory full of NaN, again and again.

    Everything is brought to the GPU before the first call: during a copy from pageable memory on one virtual rank's
    stream no other can copy, and the call that this one is queued behind may wait for that other rank.
    """
    given = combine_arguments(group, case, routing)
    shape = (routing.sizes[group.rank], given["weight"].shape[1])
    outs = [poisoned(shape, case.out_dtype).to(group.device) for _ in range(num_calls)]
    group.synchronize()
    apart = strategy == "summed apart"
    config = dataclasses.replace(SMALL, sums_apart=apart)
    how = {"strategy": "fused" if apart else strategy, "config": config}
    for out in outs:
        tileflux.moe_gemm_rs(**given, routing=routing, **how, out=out)
    group.synchronize()
    return outs


def compile_part(index: int, count: int) -> None:
    """Compile every ``count``-th part from ``index`` on, as virtual ranks and as processes would have it."""
    rehearse(gpu())
    worlds = [(world_size, True) for world_size in (2, 4, 8)] + [(4, False)]
    for (world_size, is_virtual), dtype in [(world, dtype) for dtype in DENSE_DTYPES for world in worlds][index::count]:
        group = stand_in_for(world_size, world_size - 1, is_virtual=is_virtual)
        for first, second in layers(world_size, dtype):
            for strategy in RS_STRATEGIES:
                if strategy in AG_STRATEGIES:
                    gather(group, first, strategy)
                combine(group, second, strategy, routed(group, second))


if __name__ == "__main__":
    compile_part(int(sys.argv[1]), int(sys.argv[2]))
