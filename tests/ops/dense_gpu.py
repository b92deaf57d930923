"""Problems for the dense ops on a GPU: what ``test_dense_gpu.py`` runs, and what ``scripts/gpu-test`` compiles before.

Compiling takes most of the time of a first run, and goes in parallel where running cannot:
``python -m tests.ops.dense_gpu INDEX COUNT`` compiles one part of COUNT, launching nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import tileflux
from tileflux import GemmConfig
from tileflux.kernels import gemm_launch
from tileflux.symm.group import Group
from tileflux.testing import assert_close, poisoned
from tileflux.testing.dense import DENSE_DTYPES, SCALED_DTYPES, DenseCase, ag_case, expected, reduction, rs_case

SMALL = GemmConfig(64, 64, 64, num_warps=4, num_stages=2, num_feeders=2, num_chunks=2)
STRATEGIES = ("fused", "pipelined", "sequential")


@dataclass(frozen=True)
class Problem:
    """One call: an op, what it is given, and the strategies to try."""

    op: str
    case: DenseCase
    strategies: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)


def problems(world_size: int, dtype: torch.dtype) -> Iterator[Problem]:
    """Calls of every op with one element type: aligned and odd, even and ragged."""
    scales = "channel" if dtype in SCALED_DTYPES else "none"
    small = {"config": SMALL}
    even, odd, tiny = (96 * world_size, 64 * world_size, 64), (300, 200, 136), (13, 17 * world_size, 7)
    yield Problem("ag_gemm", ag_case(world_size, even, dtype, 0, scales=scales), STRATEGIES, small)
    yield Problem("ag_gemm", ag_case(world_size, odd, dtype, 1, ragged=True, scales=scales), STRATEGIES, small)
    yield Problem("ag_gemm", ag_case(world_size, tiny, dtype, 2, bias=True, scales=scales), ("fused",), small)
    whole = (120 * world_size, 128, 64 * world_size)
    yield Problem("gemm_rs", rs_case(world_size, whole, dtype, 3, scales=scales), STRATEGIES, small)
    # Ranks with different K would load different kernels of the library while a peer's sum waits for them.
    odd, tiny = (301, 130, 72 * world_size + 8), (5, 9, 3 * world_size)
    yield Problem("gemm_rs", rs_case(world_size, odd, dtype, 4, ragged=True, scales=scales), ("fused",), small)
    yield Problem("gemm_rs", rs_case(world_size, tiny, dtype, 5, bias=True, scales=scales), ("fused",), small)
    for algorithm in ("one_shot", "two_shot"):
        options = {**small, "algorithm": algorithm}
        usable = ("fused", "sequential") if algorithm == "one_shot" else STRATEGIES
        whole = (40, 128, 64 * world_size)
        yield Problem("gemm_ar", rs_case(world_size, whole, dtype, 6, bias=True, scales=scales), usable, options)


def activations(world_size: int) -> Iterator[Problem]:
    """The epilogues, with the tiles that lookup picks."""
    for seed, activation in enumerate(("relu", "gelu", "silu", "swiglu")):
        case = ag_case(world_size, (128 * world_size, 64 * world_size, 128), torch.bfloat16, seed, bias=True,
                       activation=activation, transposed_weight=seed % 2 == 1)  # fmt: skip
        yield Problem("ag_gemm", case, STRATEGIES)


def run(group: Group, problem: Problem, strategy: str) -> None:
    """Make the call and compare with the exact result."""
    op, case, rank = problem.op, problem.case, group.rank
    exact = expected(case, op, rank)
    out = poisoned(exact.shape, case.out_dtype, group.device)
    arguments = case.arguments(op, rank, group.device)
    getattr(tileflux, op)(**arguments, group=group, strategy=strategy, out=out, **problem.options)
    group.synchronize()
    group.barrier()
    what = f"{op} {strategy} {case.shape} {case.xs[0].dtype} on rank {rank} of {group.world_size}"
    assert_close(out.cpu(), exact, reduction=reduction(case, op), what=what)


class _NothingToDo:
    """Stands in for a kernel: every launch has an empty grid."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: object) -> Any:
        return self._kernel[(0,)]


def compile_part(index: int, count: int) -> None:
    """Compile every ``count``-th variant from ``index`` on, as the first virtual rank and as a process of its own."""
    gemm_launch._gemm_kernel = _NothingToDo(gemm_launch._gemm_kernel)
    work = [(world_size, dtype) for world_size in (2, 4, 8) for dtype in DENSE_DTYPES] + [(4, None)]
    for world_size, dtype in work[index::count]:
        group = tileflux.local_groups(world_size, "cuda")[0]
        given = activations(world_size) if dtype is None else problems(world_size, dtype)
        with torch.cuda.stream(group.stream):
            for problem in given:
                if "fused" in problem.strategies and problem.options.get("algorithm") != "two_shot":
                    arguments = problem.case.arguments(problem.op, 0, "cuda")
                    getattr(tileflux, problem.op)(**arguments, group=group, strategy="fused", **problem.options)


if __name__ == "__main__":
    compile_part(int(sys.argv[1]), int(sys.argv[2]))
