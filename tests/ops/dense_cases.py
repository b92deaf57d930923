"""What the tests of the dense ops share: calls with everything drawn, checked against the fp64 oracle."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import tileflux
from tileflux import GemmConfig, env
from tileflux.symm.group import Group
from tileflux.testing import GEMM_SHAPES, assert_close
from tileflux.testing.dense import (
    ACTIVATIONS,
    DENSE_DTYPES,
    SCALED_DTYPES,
    DenseCase,
    Shape,
    ag_case,
    expected,
    gemm_case,
    reduction,
    rs_case,
)
from tileflux.testing.numerics import nan_like, poisoned

STRATEGIES = ("sequential", "pipelined", "fused")
SMALL = GemmConfig(16, 16, 16, group_m=2, num_warps=4, num_feeders=3)
"""Tiles small enough that small problems have several of them in every dimension."""
CONFIGS = (None, SMALL, GemmConfig(32, 16, 32, num_warps=4, num_chunks=3, span=2, alone=-1, sums_apart=True))
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
OUT_DTYPES = (None, torch.float32, torch.float16, torch.bfloat16)

needs_interpreter = pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """CPU tensors go through the Triton kernels, interpreted."""
    with env.scoped({"TILEFLUX_CPU_BACKEND": "interpret"}):
        yield


def install_interpreter() -> None:
    """Before ranks are forked: each would otherwise spend seconds on it."""
    from tileflux.testing import interpreter

    interpreter.install()


def drawn_case(op: str, world_size: int, shape: Shape, dtype: torch.dtype, draws: random.Random) -> DenseCase:
    """A problem of this shape and type, with everything else drawn. All ranks draw alike."""
    is_scaled = dtype in SCALED_DTYPES
    options: dict[str, Any] = {
        "bias": draws.random() < 0.5,
        "scales": draws.choice(["none", "tensor", "channel"]) if is_scaled else "none",
        "transposed_weight": draws.random() < 0.5,
        "weight_dtype": draws.choice(FP8) if dtype in FP8 else None,
        "out_dtype": draws.choice(OUT_DTYPES),
    }
    ragged, activation, seed = draws.random() < 0.5, draws.choice([None, *ACTIVATIONS]), draws.randrange(2**32)
    if op in ("gemm_rs", "gemm_ar"):
        return rs_case(world_size, shape, dtype, seed, ragged=ragged and op == "gemm_rs", **options)
    if activation == "swiglu" and is_scaled and options["scales"] == "none" and options["out_dtype"] == torch.float16:
        activation = "silu"  # two unscaled sums multiplied do not fit into fp16
    if op == "gemm":
        return gemm_case(shape, dtype, seed, activation=activation, **options)
    return ag_case(world_size, shape, dtype, seed, activation=activation, ragged=ragged, **options)


def drawn_layout(x: torch.Tensor, draws: random.Random) -> torch.Tensor:
    """The same values: as they are, with room between the rows, or between all elements."""
    rows, columns = draws.choice([(1, 1), (3, 1), (2, 3)])
    room = poisoned((rows * x.shape[0], columns * x.shape[1] + 5), x.dtype)
    view = room[::rows, 0 : columns * x.shape[1] : columns]
    view.copy_(x)
    return x if rows == columns == 1 else view


def check_call(group: Group | None, op: str, case: DenseCase, draws: random.Random, **settings: Any) -> torch.Tensor:
    """One call, its result compared with the exact one. Returns what it returned."""
    rank = 0 if group is None else group.rank
    right = expected(case, op, rank)
    arguments = case.arguments(op, rank)
    arguments["x"] = drawn_layout(arguments["x"], draws)
    if group is not None:
        settings["group"] = group
    out = poisoned(right.shape, case.out_dtype) if draws.random() < 0.5 else None
    result: torch.Tensor = getattr(tileflux, op)(**arguments, **settings, out=out)
    assert out is None or result is out
    how = {name: value for name, value in settings.items() if name != "group"}
    what = f"rank {rank}, {op} of {case.shape} {case.xs[0].dtype}, rows {case.sizes}, {how}"
    assert_close(result, right, dtype=case.out_dtype, reduction=reduction(case, op), what=what)
    return result


def drawn_settings(op: str, draws: random.Random, strategy: str | None = None) -> dict[str, Any]:
    """How to run: strategy, tiles and algorithm."""
    settings: dict[str, Any] = {"config": draws.choice(CONFIGS)}
    if op == "gemm":
        return settings
    settings["strategy"] = strategy or draws.choice(["auto", *STRATEGIES])
    if op == "gemm_ar":
        shots = ["auto", "two_shot"] if settings["strategy"] == "pipelined" else ["auto", "one_shot", "two_shot"]
        settings["algorithm"] = draws.choice(shots)
    return settings


def check_shapes(
    group: Group,
    op: str,
    seed: int,
    shapes: Sequence[Shape] = GEMM_SHAPES,
    dtypes: Sequence[torch.dtype] = DENSE_DTYPES,
    strategies: Sequence[str | None] = STRATEGIES,
) -> int:
    """Every shape in every type and strategy, all else drawn (a strategy that is None, too); the number of calls."""
    draws = random.Random(seed)
    num_calls = 0
    for shape in shapes:
        for dtype in dtypes:
            for strategy in strategies:
                case = drawn_case(op, group.world_size, shape, dtype, draws)
                check_call(group, op, case, draws, **drawn_settings(op, draws, strategy))
                num_calls += 1
    return num_calls


def check_interpreted(group: Group, op: str, seed: int, shapes: Sequence[Shape]) -> int:
    """Every type and strategy through the interpreted kernels, each with one of the shapes."""
    draws = random.Random(seed)
    num_calls = 0
    with interpreted():
        for dtype in DENSE_DTYPES:
            for strategy in STRATEGIES:
                shape = shapes[num_calls % len(shapes)]
                case = drawn_case(op, group.world_size, shape, dtype, draws)
                settings = drawn_settings(op, draws, strategy) | {"config": SMALL}
                check_call(group, op, case, draws, **settings)
                num_calls += 1
    return num_calls


def uneven_widths(world_size: int, draws: random.Random) -> list[int]:
    """Columns, or terms, per rank: all different where possible, and none on one rank."""
    widths = draws.sample(range(1, 40), world_size)
    widths[draws.randrange(world_size)] = 0
    return widths


Gradients = list[torch.Tensor]


def gradients(call: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor]) -> Gradients:
    """Gradients of a sum of ``call``'s result, weighted so that no two elements count alike, by all ``tensors``."""
    leaves = [tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_() for tensor in tensors]
    call(*leaves).backward()
    found = [leaf.grad for leaf in leaves]
    assert all(grad is not None for grad in found)
    return [grad for grad in found if grad is not None]


def check_compiled_alike(call: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """A compiled loss has the eager one's gradients, all of them; one that got lost would be zero."""
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for number, (eager, traced) in enumerate(zip(gradients(call, tensors), gradients(compiled, tensors), strict=True)):
        assert eager.abs().sum() > 0, f"the gradient of tensor {number} is zero"
        assert torch.equal(eager, traced), f"tensor {number}"


def weighted(y: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient by ``y`` is ``factors``."""
    return (y.float() * factors).sum()


def drawn_factors(*shape: int) -> torch.Tensor:
    """Random numbers that are exact in every type, so that a gradient is rounded only where it is computed."""
    return torch.randint(-8, 9, shape) / 4.0


def check_dense_refusals(call: Callable[..., Any], group: Group) -> None:
    """Mistakes that every dense op of a group refuses alike. One rank."""
    name, x, weight = call.__name__, torch.ones(4, 3), torch.ones(5, 3)
    with pytest.raises(ValueError, match=f"{name}: group should be a tileflux.Group, not str"):
        call(x, weight, group="world")
    with pytest.raises(ValueError, match=f"{name}: x should be a tensor, not list"):
        call([1.0], weight, group=group)
    with pytest.raises(ValueError, match=f"{name}: weight should be a tensor, not int"):
        call(x, [3] if name == "ag_gemm" else 3, group=group)
    for place in range(3):
        tensors = [x, weight, torch.ones(5)]
        tensors[place] = tensors[place].to("meta")
        what = ("x", "weight", "bias")[place]
        with pytest.raises(ValueError, match=f"{name}: {what} is on meta but the group is on cpu; move it there"):
            call(*tensors, group=group)
    with pytest.raises(ValueError, match=f"{name}: weight has layout torch.sparse_coo"):
        call(x, weight.to_sparse(), group=group)
    with pytest.raises(ValueError, match=f"{name}: strategy='magic' is not one of auto, sequential, pipelined, fused"):
        call(x, weight, group=group, strategy="magic")
    with pytest.raises(ValueError, match=f"{name}: config should be a tileflux.GemmConfig, not dict"):
        call(x, weight, group=group, config={})
    check_out_refusals(lambda *given, **named: call(*given, group=group, **named), name)
    (other,) = tileflux.local_groups(1)
    other.close()
    with pytest.raises(tileflux.GroupClosed, match="was closed"):
        call(x, weight, group=other)


def check_out_refusals(call: Callable[..., Any], name: str) -> None:
    """What may not be given as ``out=``."""
    x, weight = torch.ones(4, 3), torch.ones(5, 3)
    wanted = rf"{name}: out should be contiguous \(4, 5\) torch.float32 on cpu"
    for wrong in (torch.ones(5, 4), torch.ones(4, 5).bfloat16(), torch.ones(5, 4).t(), torch.ones(4, 5, device="meta")):
        with pytest.raises(ValueError, match=wanted):
            call(x, weight, out=wrong)
    for place in range(3):
        tensors = [x, weight, torch.ones(5)]
        tensors[place] = tensors[place].clone().requires_grad_()
        with pytest.raises(ValueError, match=f"{name}: out= records no gradient, and a tensor here requires one"):
            call(*tensors, out=torch.ones(4, 5))
        with torch.no_grad():
            assert not call(*tensors, out=nan_like(torch.ones(4, 5))).isnan().any()
    buffer = torch.ones(40)
    with pytest.raises(ValueError, match=f"{name}: out overlaps the input; give them separate memory"):
        call(buffer[8:20].view(4, 3), weight, out=buffer[:20].view(4, 5))
    with pytest.raises(ValueError, match=f"{name}: out overlaps the input; give them separate memory"):
        call(x, buffer[5:20].view(5, 3), out=buffer[:20].view(4, 5))
