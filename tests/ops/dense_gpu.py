"""Problems for the dense ops on a GPU: what ``test_dense_gpu.py`` runs, and what ``scripts/gpu-test`` compiles before.

Compiling takes most of the time of a first run, and goes in parallel where running cannot:
``python -m tests.ops.dense_gpu INDEX COUNT`` compiles one part of COUNT, launching nothing.
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
from tileflux.kernels import gemm_hopper_launch, gemm_launch, steps
from tileflux.kernels.dense import multiply
from tileflux.kernels.operands import Operands
from tileflux.kernels.prepare import prepare
from tileflux.kernels.shards import gather_shards
from tileflux.kernels.turns import turn
from tileflux.ops._dense import as_scale
from tileflux.symm.group import Group
from tileflux.testing import assert_close, poisoned
from tileflux.testing.dense import DENSE_DTYPES, SCALED_DTYPES, DenseCase, ag_case, expected, reduction, rs_case
from tileflux.testing.hopper_cases import hopper_config

SMALL = GemmConfig(64, 64, 64, num_warps=4, num_stages=2, num_feeders=2, num_chunks=2, span=2, alone=1)
STRATEGIES = ("fused", "pipelined", "sequential")
HOPPER_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
"""What Hopper's loop multiplies."""


def tiles(dtype: torch.dtype, hopper: bool) -> GemmConfig:
    """Small ones, so that small problems have many. On GPUs other than Hopper, ``hopper`` changes little."""
    if hopper:
        return dataclasses.replace(hopper_config(64, 64, dtype), num_feeders=2, num_chunks=2, span=2, alone=1)
    return SMALL


_once = threading.Lock()


@dataclass(frozen=True)
class Problem:
    """One call: an op, what it is given, and the strategies to try."""

    op: str
    case: DenseCase
    strategies: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)

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
    yield Problem("ag_gemm", ag_case(world_size, odd, dtype, 1, ragged=True, **same), STRATEGIES, small)
    yield Problem("ag_gemm", ag_case(world_size, tiny, dtype, 2, **same), ("fused",), small)
    whole = (120 * world_size, 128, 64 * world_size)
    yield Problem("gemm_rs", rs_case(world_size, whole, dtype, 3, **same), STRATEGIES, small)
    yield Problem("gemm_rs", rs_case(world_size, whole, dtype, 7, **same), ("fused",), apart)
    odd, tiny = (301, 130, 72 * world_size + 8), (5, 9, 3 * world_size)
    yield Problem("gemm_rs", rs_case(world_size, odd, dtype, 4, ragged=True, **same), STRATEGIES, small)
    yield Problem("gemm_rs", rs_case(world_size, odd, dtype, 8, ragged=True, **same), ("fused",), apart)
    yield Problem("gemm_rs", rs_case(world_size, tiny, dtype, 5, **same), ("fused",), small)
    for algorithm in ("one_shot", "two_shot"):
        usable = ("fused", "sequential") if algorithm == "one_shot" else STRATEGIES
        case = rs_case(world_size, (40, 128, 64 * world_size), dtype, 6, **same)
        yield Problem("gemm_ar", case, usable, {**small, "algorithm": algorithm})


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


class NothingToDo:
    """Stands in for a kernel: every launch has an empty grid."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: object) -> Any:
        return self._kernel[(0,)]


def compile_part(index: int, count: int) -> None:
    """Compile every ``count``-th part from ``index`` on, as virtual ranks and as processes would have it."""
    gemm_launch._gemm_kernel = NothingToDo(gemm_launch._gemm_kernel)
    gemm_hopper_launch._gemm_hopper_kernel = NothingToDo(gemm_hopper_launch._gemm_hopper_kernel)
    stream = Group.stream
    work = [(world_size, dtype, True, False) for world_size in (2, 4, 8) for dtype in DENSE_DTYPES]
    work += [(world_size, dtype, False, False) for world_size in (2, 4) for dtype in DENSE_DTYPES]
    work += [(world_size, dtype, True, True) for world_size in (2, 4, 8) for dtype in HOPPER_DTYPES]
    work += [(world_size, dtype, False, True) for world_size in (2, 4) for dtype in HOPPER_DTYPES]
    work += [(4, None, True, False), (4, "large", True, False), (4, "large", False, False)]
    for world_size, dtype, is_virtual, hopper in work[index::count]:
        if isinstance(dtype, torch.dtype) and is_virtual:
            _compile_steps(one_rank(world_size, 0), dtype)
        for rank in {0, world_size - 1}:
            group = one_rank(world_size, rank)
            Group.stream = stream if is_virtual else property(lambda group: None)  # type: ignore[assignment]
            if dtype == "large":
                _compile_large(group)
            else:
                for problem in activations(world_size) if dtype is None else problems(world_size, dtype, hopper):
                    _compile(group, problem)


def one_rank(world_size: int, rank: int) -> Group:
    """A rank of a world of its own: the others make no calls. Its stream becomes the current one."""
    group = tileflux.local_groups(world_size, "cuda")[rank]
    torch.cuda.set_stream(group._transport.stream)
    return group


def _compile_steps(group: Group, dtype: torch.dtype) -> None:
    """The collectives and the steps of the pipelined strategy."""
    prepare(group)
    scaled = dtype in SCALED_DTYPES
    x = torch.empty(16, 16, device="cuda").to(dtype)
    out = torch.empty(16, 16, device="cuda", dtype=torch.bfloat16 if scaled else dtype)
    for op in ("ag_gemm", "gemm_rs"):
        plan = gather_shards(op, (16,) * group.world_size, 16 * x.element_size(), scaled and op == "ag_gemm", 1)
        scale = torch.ones(16, device="cuda") if scaled else None
        steps.load(turn(group, plan), x, scale, out, group.world_size)


def _compile(group: Group, problem: Problem) -> None:
    arguments = problem.case.arguments(problem.op, group.rank, "cuda")
    if problem.options.get("algorithm") != "two_shot":
        getattr(tileflux, problem.op)(**arguments, group=group, strategy="fused", **problem.options)
    if group.stream is not None and problem.options:  # what virtual ranks multiply with instead of the library
        weight = arguments["weight"]
        scales = [as_scale(arguments.get(name), weight) for name in ("scale_x", "scale_weight")]
        out = torch.empty(len(arguments["x"]), len(weight), dtype=problem.case.out_dtype, device="cuda")
        operands = Operands(arguments["x"], weight, out, arguments.get("bias"), *scales)
        multiply(group, operands, problem.options["config"], load_only=True)
    elif arguments["x"].dtype in SCALED_DTYPES:  # what torch does not multiply
        arguments.pop("sizes", None)
        tileflux.gemm(**arguments, config=problem.options["config"])


def _compile_large(group: Group) -> None:
    x, weight = (
        torch.empty(512, 512, dtype=torch.bfloat16, device="cuda"),
        torch.empty(4096, 512, dtype=torch.bfloat16, device="cuda"),
    )
    tileflux.ag_gemm(x, weight, group=group, strategy="fused")
    tileflux.gemm_rs(weight[:2048, :128], weight[:, :128].contiguous(), group=group, strategy="fused")
    for k in (64, 128):
        x = torch.empty(64, k, dtype=torch.bfloat16, device="cuda")
        for op, how in (("ag_gemm", {}), ("gemm_rs", {}), ("gemm_ar", {"algorithm": "one_shot"})):
            getattr(tileflux, op)(x, x, group=group, strategy="fused", config=SMALL, **how)


if __name__ == "__main__":
    compile_part(int(sys.argv[1]), int(sys.argv[2]))
