"""Problems for the dense ops on a GPU: what ``test_dense_gpu.py`` runs, and what ``scripts/gpu-test`` compiles before.

Compiling takes most of the time of a first run, and goes in parallel where running cannot:
``python -m tests.ops.dense_gpu INDEX COUNT`` compiles one part of COUNT, with or without a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import tileflux
from tileflux import GemmConfig
from tileflux import device as device_info
from tileflux.symm.group import Group
from tileflux.testing import assert_close, poisoned
from tileflux.testing.dense import DENSE_DTYPES, SCALED_DTYPES, DenseCase, ag_case, expected, reduction, rs_case
from tileflux.testing.hopper_cases import hopper_config
from tileflux.testing.rehearsal import H200, rehearse, stand_in_for
from tileflux.tune.lookup import Gpu

SMALL = GemmConfig(64, 64, 64, num_warps=4, num_stages=2, num_feeders=2, num_chunks=2, span=2, alone=1)
STRATEGIES = ("fused", "pipelined", "sequential")
HOPPER_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
"""What Hopper's loop multiplies."""


def tiles(dtype: torch.dtype, hopper: bool) -> GemmConfig:
    """Small ones, so that small problems have many. On GPUs other than Hopper, ``hopper`` changes little."""
    if hopper:
        return dataclasses.replace(hopper_config(64, 64, dtype), num_feeders=2, num_chunks=2, span=2, alone=-1)
    return SMALL


_once = threading.Lock()


@dataclass(frozen=True)
class Problem:
    """One call: an op, what it is given, and the strategies to try."""

    op: str
    case: DenseCase
    strategies: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    falls_back: bool = False
    """Whether Hopper's loop, asked for, leaves it to Triton's: misaligned, or programs must fetch their tiles."""

    def exact(self, rank: int) -> torch.Tensor:
        """What ``rank`` should get. Once for all strategies and virtual ranks: it takes longer than the call."""
        with _once:
            return self._exact[rank]

    @functools.cached_property
    def _exact(self) -> tuple[torch.Tensor, ...]:
        if self.op == "ag_gemm":
            return tuple(expected(self.case, self.op, rank) for rank in range(self.case.world_size))
        whole = expected(self.case, "gemm_ar")
        return whole.split(self.case.sizes) if self.op == "gemm_rs" else (whole,) * self.case.world_size


def problems(world_size: int, dtype: torch.dtype, hopper: bool = False) -> tuple[Problem, ...]:
    """Calls of every op with one element type: aligned and odd, even and ragged. Drawn once for all virtual ranks."""
    with _once:
        return _drawn(world_size, dtype, hopper)


@functools.cache
def _drawn(world_size: int, dtype: torch.dtype, hopper: bool) -> tuple[Problem, ...]:
    return tuple(_problems(world_size, dtype, hopper))


def _problems(world_size: int, dtype: torch.dtype, hopper: bool) -> Iterator[Problem]:
    scales = ("tensor" if hopper else "channel") if dtype in SCALED_DTYPES else "none"
    same: dict[str, Any] = {"bias": True, "scales": scales}
    small = {"config": tiles(dtype, hopper)}
    apart = {"config": dataclasses.replace(tiles(dtype, hopper), sums_apart=True)}
    even, odd, tiny = (96 * world_size, 64 * world_size, 64), (300, 200, 136), (13, 17 * world_size, 7)
    yield Problem("ag_gemm", ag_case(world_size, even, dtype, 0, **same), STRATEGIES, small)
    misfit = hopper and odd[2] * dtype.itemsize % 16 != 0
    yield Problem("ag_gemm", ag_case(world_size, odd, dtype, 1, ragged=True, **same), STRATEGIES, small, misfit)
    yield Problem("ag_gemm", ag_case(world_size, tiny, dtype, 2, **same), ("fused",), small, hopper)
    whole = (120 * world_size, 128, 64 * world_size)
    yield Problem("gemm_rs", rs_case(world_size, whole, dtype, 3, **same), STRATEGIES, small)
    yield Problem("gemm_rs", rs_case(world_size, whole, dtype, 7, **same), ("fused",), apart)
    odd, tiny = (301, 130, 72 * world_size + 8), (5, 9, 3 * world_size)
    yield Problem("gemm_rs", rs_case(world_size, odd, dtype, 4, ragged=True, **same), STRATEGIES, small, hopper)
    yield Problem("gemm_rs", rs_case(world_size, odd, dtype, 8, ragged=True, **same), ("fused",), apart, hopper)
    yield Problem("gemm_rs", rs_case(world_size, tiny, dtype, 5, **same), ("fused",), small, hopper)
    if hopper:
        yield from _aligned(world_size, dtype, same, small, apart)
    for algorithm in ("one_shot", "two_shot"):
        usable = ("fused", "sequential") if algorithm == "one_shot" else STRATEGIES
        case = rs_case(world_size, (40, 128, 64 * world_size), dtype, 6, **same)
        yield Problem("gemm_ar", case, usable, {**small, "algorithm": algorithm}, hopper and algorithm == "one_shot")


def _aligned(
    world_size: int, dtype: torch.dtype, same: dict[str, Any], small: dict[str, Any], apart: dict[str, Any]
) -> Iterator[Problem]:
    """Odd in rows and columns, but rows begin at multiples of 16 bytes, as TMA wants them: so they stay on Hopper's."""
    odd, tiny = (301, 203 * world_size, 144), (13, 17 * world_size, 16)
    yield Problem("ag_gemm", ag_case(world_size, odd, dtype, 9, ragged=True, **same), STRATEGIES, small)
    yield Problem("ag_gemm", ag_case(world_size, tiny, dtype, 10, **same), ("fused",), small)
    odd, tiny = (301, 131, 80 * world_size), (5, 9, 16 * world_size)
    yield Problem("gemm_rs", rs_case(world_size, odd, dtype, 11, ragged=True, **same), STRATEGIES, small)
    yield Problem("gemm_rs", rs_case(world_size, odd, dtype, 12, ragged=True, **same), ("fused",), apart)
    yield Problem("gemm_rs", rs_case(world_size, tiny, dtype, 13, **same), ("fused",), small)


def activations(world_size: int) -> Iterator[Problem]:
    """The epilogues, with the tiles that lookup picks."""
    for seed, activation in enumerate(("relu", "gelu", "silu", "swiglu")):
        case = ag_case(world_size, (128 * world_size, 64 * world_size, 128), torch.bfloat16, seed, bias=True,
                       activation=activation, transposed_weight=seed % 2 == 1)  # fmt: skip
        yield Problem("ag_gemm", case, STRATEGIES)


def run(group: Group, problem: Problem, strategy: str) -> None:
    """Make the call and compare with the exact result."""
    op, case, rank = problem.op, problem.case, group.rank
    exact = problem.exact(rank)
    out = poisoned(exact.shape, case.out_dtype, group.device)
    arguments = case.arguments(op, rank, group.device)
    getattr(tileflux, op)(**arguments, group=group, strategy=strategy, out=out, **problem.options)
    group.synchronize()
    group.barrier()
    what = f"{op} {strategy} {case.shape} {case.xs[0].dtype} on rank {rank} of {group.world_size}"
    assert_close(out.cpu(), exact, reduction=reduction(case, op), what=what)


def gpu() -> Gpu:
    """What to compile for: the GPU, or an H200 where there is none."""
    if not torch.cuda.is_available():
        return H200
    device = torch.device("cuda", 0)
    return Gpu(device_info.arch(device), device_info.num_sms(device), torch.cuda.get_device_name(device))


def compile_part(index: int, count: int) -> None:
    """Compile every ``count``-th part from ``index`` on, as virtual ranks and as processes would have it."""
    rehearse(gpu())
    virtual, sharing = [(size, True) for size in (2, 4, 8)], [(size, False) for size in (2, 4)]
    kinds: list[tuple[torch.dtype | None, bool]] = [(dtype, False) for dtype in DENSE_DTYPES]
    kinds += [(dtype, True) for dtype in HOPPER_DTYPES] + [(None, False)]
    for (world_size, is_virtual), (dtype, hopper) in [(w, kind) for w in virtual + sharing for kind in kinds][
        index::count
    ]:
        for rank in (0, world_size - 1):
            group = stand_in_for(world_size, rank, is_virtual=is_virtual)
            if dtype is None:
                _compile_others(group)
                continue
            for problem in problems(world_size, dtype, hopper):
                _compile(group, problem)


def _compile(group: Group, problem: Problem) -> None:
    given = problem.case.arguments(problem.op, group.rank)
    for strategy in problem.strategies:
        getattr(tileflux, problem.op)(**given, group=group, strategy=strategy, **problem.options)


def _compile_others(group: Group) -> None:
    """What the tests of graphs, large tiles, many calls and the like make of bf16."""
    world_size = group.world_size
    if world_size == 4:
        for problem in activations(world_size):
            _compile(group, problem)
    small: list[dict[str, Any]] = [{"config": config} for config in (SMALL, tiles(torch.bfloat16, hopper=True))]
    shapes = [(64, 96, 64, small), (256, 256, 64, small), (64, 2048, 64, [{}]), (512, 4096, 512, [{}])]
    for m, n, k, configs in shapes:
        x, weight = (torch.empty(size, k, dtype=torch.bfloat16) for size in (m, n))
        for how in configs:
            for strategy in STRATEGIES:
                tileflux.ag_gemm(x, weight, group=group, strategy=strategy, **how)
                tileflux.gemm_rs(x, weight, group=group, strategy=strategy, **how)
                algorithm = "two_shot" if strategy == "pipelined" else "one_shot"
                tileflux.gemm_ar(x, weight, group=group, strategy=strategy, algorithm=algorithm, **how)


if __name__ == "__main__":
    compile_part(int(sys.argv[1]), int(sys.argv[2]))
