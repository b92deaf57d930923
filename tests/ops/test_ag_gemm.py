"""ag_gemm against the fp64 oracle, torch.distributed and plain gemm; several weights, gradients and refusals."""

from __future__ import annotations

import dataclasses
import random
import time
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import tileflux
from tileflux import GemmConfig
from tileflux.kernels import gemm_host
from tileflux.ops import ag_gemm_reference
from tileflux.symm.group import Group
from tileflux.testing import GEMM_SHAPES, assert_close, run_ranks
from tileflux.testing.dense import DENSE_DTYPES, ag_case, dense_shapes, expected, expected_gemm, gathered, reduction
from tileflux.testing.numerics import poisoned

from .cases import check_registration
from .dense_cases import (
    SMALL,
    STRATEGIES,
    check_call,
    check_compiled_alike,
    check_dense_refusals,
    check_interpreted,
    check_shapes,
    drawn_case,
    drawn_factors,
    gradients,
    install_interpreter,
    interpreted,
    needs_interpreter,
    uneven_widths,
    weighted,
)

INTERPRETED_SHAPES = [(0, 8, 8), (9, 4, 0), (1, 3, 5), (18, 20, 17), (20, 33, 16), (33, 10, 18), (7, 0, 8)]


@pytest.mark.parametrize(("world_size", "strategies"), [(1, [None]), (2, STRATEGIES), (3, [None]), (4, STRATEGIES)])
def test_every_shape_and_type(world_size: int, strategies: list[str | None]) -> None:
    num_calls = len(GEMM_SHAPES) * len(DENSE_DTYPES) * len(strategies)
    arguments = ("ag_gemm", world_size, GEMM_SHAPES, DENSE_DTYPES, strategies)
    assert run_ranks(check_shapes, world_size, args=arguments) == [num_calls] * world_size


def test_eight_ranks() -> None:
    run_ranks(check_shapes, 8, args=("ag_gemm", 8, GEMM_SHAPES[3:7], (torch.bfloat16, torch.int8)))


@settings(deadline=None, max_examples=2, phases=[Phase.generate])
@given(st.lists(dense_shapes(), min_size=8, max_size=8), st.integers(0, 2**32))
def test_drawn_shapes(shapes: list[tuple[int, int, int]], seed: int) -> None:
    run_ranks(check_shapes, 3, args=("ag_gemm", seed, shapes, (torch.float32, torch.bfloat16, torch.float8_e4m3fn)))


@needs_interpreter
@pytest.mark.parametrize("world_size", [2, 4])
def test_interpreted(world_size: int) -> None:
    install_interpreter()
    run_ranks(check_interpreted, world_size, args=("ag_gemm", world_size, INTERPRETED_SHAPES), timeout_s=120)


def _against_reference(group: Group) -> None:
    draws = random.Random(group.world_size)
    for dtype in DENSE_DTYPES:
        for _ in range(4):
            case = drawn_case("ag_gemm", group.world_size, (26, 40, 24), dtype, draws)
            arguments = case.arguments("ag_gemm", group.rank)
            result = tileflux.ag_gemm(**arguments, group=group)
            assert_close(result, ag_gemm_reference(**arguments), reduction=reduction(case, "ag_gemm"))


@pytest.mark.parametrize("world_size", [1, 3])
def test_equals_torch_distributed(world_size: int) -> None:
    run_ranks(_against_reference, world_size)


def _like_gemm(group: Group) -> None:
    """The same tiles are added up in the same order, wherever their rows come from: every bit is alike."""
    draws = random.Random(group.world_size)
    with interpreted():
        for dtype in DENSE_DTYPES:
            case = drawn_case("ag_gemm", group.world_size, (18, 5 * group.world_size, 19), dtype, draws)
            arguments = case.arguments("ag_gemm", group.rank)
            whole = {name: value for name, value in arguments.items() if name != "sizes"} | {"x": gathered(case)}
            if "scale_x" in arguments:
                pairs = zip(case.scales_x, case.sizes, strict=True)
                whole["scale_x"] = torch.cat([torch.as_tensor(scale).expand(rows) for scale, rows in pairs])
            right = tileflux.gemm(**whole, config=SMALL)
            for strategy in STRATEGIES:
                result = tileflux.ag_gemm(**arguments, group=group, strategy=strategy, config=SMALL)
                assert_close(result, right, reduction=0, what=f"{strategy} {dtype}")


@needs_interpreter
@pytest.mark.parametrize("world_size", [2, 4])
def test_equals_gemm_of_the_gathered_rows_bit_for_bit(world_size: int) -> None:
    install_interpreter()
    run_ranks(_like_gemm, world_size, timeout_s=120)


def _late_rows(group: Group, strategy: str, backend: str) -> None:
    """Ranks of any width, some with nothing to multiply: what they return must have arrived all the same."""
    draws = random.Random(group.world_size)
    x_draws = torch.Generator().manual_seed(5)
    for call in range(8):
        widths, others = uneven_widths(group.world_size, draws), uneven_widths(group.world_size, draws)
        sizes = draws.sample(range(12), group.world_size)
        x = torch.randn(sum(sizes), 20, generator=x_draws)
        pair = [torch.randn(n[group.rank], 20) for n in (widths, others)]
        if call % group.world_size == group.rank:
            time.sleep(0.02)
        run = interpreted() if backend == "interpret" else torch.no_grad()
        with run:
            results, rows = tileflux.ag_gemm(
                x.split(sizes)[group.rank], pair, group=group, sizes=sizes, strategy=strategy, return_gathered=True,
                config=SMALL,
            )  # fmt: skip
        assert_close(rows, x, reduction=0, what=f"call {call}, rank {group.rank}: rows {sizes}, columns {widths}")
        for weight, result in zip(pair, results, strict=True):
            what = f"call {call}, rank {group.rank}: rows {sizes}, columns {widths} and {others}"
            assert_close(result, expected_gemm(x, weight), dtype=torch.float32, reduction=20, what=what)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_with_other_widths_and_with_none(strategy: str) -> None:
    run_ranks(_late_rows, 3, args=(strategy, "host"))


@needs_interpreter
@pytest.mark.parametrize("strategy", ["pipelined", "fused"])
def test_ranks_with_other_widths_and_with_none_interpreted(strategy: str) -> None:
    install_interpreter()
    run_ranks(_late_rows, 2, args=(strategy, "interpret"))


def _sequence(group: Group) -> None:
    draws, rank, world_size = random.Random(11), group.rank, group.world_size
    for strategy in STRATEGIES:
        for scales in ("tensor", "channel"):
            seed = draws.randrange(2**32)
            cases = [
                ag_case(world_size, (30, n, 24), torch.int8, seed, bias=True, scales=scales, out_dtype=torch.float32)  # type: ignore[arg-type]
                for n in (33, 60, 31)
            ]
            x, scale_x = cases[0].xs[rank], cases[0].scales_x[rank]
            outs = [poisoned((30, len(case.weights[rank])), torch.float32) for case in cases]
            results, rows = tileflux.ag_gemm(
                x, [case.weights[rank] for case in cases], [case.biases[rank] for case in cases],
                group=group, scale_x=scale_x, scale_weight=[case.scales_weight[rank] for case in cases],
                strategy=strategy, out_dtype=torch.float32, return_gathered=True, out=outs,
            )  # fmt: skip
            assert isinstance(results, tuple) and all(a is b for a, b in zip(results, outs, strict=True))
            assert_close(rows, gathered(cases[0]), reduction=0)
            for case, result in zip(cases, results, strict=True):
                with_these_rows = _with_rows(case, cases[0])
                assert_close(result, expected(with_these_rows, "ag_gemm", rank), dtype=torch.float32, reduction=24)
    (alone,) = tileflux.ag_gemm(torch.ones(2, 3), (torch.ones(4, 3),), group=group)
    assert_close(alone, torch.full((2 * world_size, 4), 3.0), reduction=0)


def _with_rows(case: Any, other: Any) -> Any:
    return dataclasses.replace(case, xs=other.xs, scales_x=other.scales_x)


@pytest.mark.parametrize("world_size", [1, 3])
def test_several_weights_share_the_rows(world_size: int) -> None:
    run_ranks(_sequence, world_size)


def _own_scales(group: Group) -> None:
    """A number per rank belongs to that rank's rows, and must reach the others with them."""
    x, weight = torch.ones(3, 4, dtype=torch.int8), torch.ones(5, 4, dtype=torch.int8)
    right = torch.arange(1.0, group.world_size + 1).repeat_interleave(3)[:, None].expand(-1, 5) * 4
    for strategy in STRATEGIES:
        for scale in (float(group.rank + 1), torch.tensor(group.rank + 1.0), torch.full((3,), group.rank + 1.0)):
            y = tileflux.ag_gemm(x, weight, group=group, scale_x=scale, strategy=strategy, out_dtype=torch.float32)
            assert_close(y, right.contiguous(), reduction=0, what=strategy)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_has_its_own_scale(world_size: int) -> None:
    run_ranks(_own_scales, world_size)


def _chunks(group: Group, backend: str) -> None:
    draws, rows = random.Random(2), (260 if backend == "interpret" else 900) * group.world_size
    config = GemmConfig(128, 16, 16, num_warps=4, num_chunks=4)
    with interpreted() if backend == "interpret" else torch.no_grad():
        for strategy in ("pipelined", "fused"):
            case = ag_case(group.world_size, (rows, 32, 16), torch.int8, 3, ragged=True, scales="channel")
            check_call(group, "ag_gemm", case, draws, config=config, strategy=strategy)


def test_rows_in_several_chunks() -> None:
    run_ranks(_chunks, 3, args=("host",))


@needs_interpreter
def test_rows_in_several_chunks_interpreted() -> None:
    install_interpreter()
    run_ranks(_chunks, 2, args=("interpret",))


def _rushing(group: Group) -> None:
    """Rank 0 is done with a call while the others still read its rows: the next call's must not overwrite them."""
    product = gemm_host._Weight.product

    def slow(*arguments: Any) -> torch.Tensor:
        time.sleep(0.05)
        return product(*arguments)

    if group.rank:
        gemm_host._Weight.product = slow  # type: ignore[method-assign]
    weight = torch.eye(4)
    for call in range(4):
        y = tileflux.ag_gemm(torch.full((2, 4), 10.0 * call + group.rank), weight, group=group, strategy="fused")
        assert_close(y, torch.arange(3.0).add(10 * call).repeat_interleave(2)[:, None].expand(6, 4), reduction=0)


def test_a_quick_rank_does_not_overwrite_what_others_read() -> None:
    run_ranks(_rushing, 3)


def _nothing_to_multiply(group: Group) -> None:
    """Rank 0 has no columns in the first call. Rank 2's rows come late: rank 1 must not be told before that it may
    send the next call's, which have another place and would be overwritten by them."""
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

    if group.rank == 2:
        group.copy_async = late  # type: ignore[method-assign]
    if group.rank == 0:
        gemm_host._Weight.product = slow  # type: ignore[method-assign]
    for call, sizes in enumerate(([2, 2, 6], [2, 6, 2])):
        weight = torch.eye(4)[: 4 if call or group.rank else 0]
        x = torch.full((sizes[group.rank], 4), 10.0 * call + group.rank)
        y = tileflux.ag_gemm(x, weight, group=group, sizes=sizes, strategy="fused")
        right = torch.arange(3.0).add(10 * call).repeat_interleave(torch.tensor(sizes))[:, None]
        assert_close(y, right.expand(sum(sizes), len(weight)), reduction=0)


def test_a_rank_with_no_columns_keeps_its_buffer_until_all_rows_have_come() -> None:
    run_ranks(_nothing_to_multiply, 3)


def _gradient(group: Group, dtype: torch.dtype) -> None:
    """Against the whole, unsharded computation, whose loss is the sum of all ranks' losses."""
    rank, world_size = group.rank, group.world_size
    torch.manual_seed(17)
    sizes, widths, depth = [5, 0, 7][:world_size], [9, 4, 6][:world_size], 12
    xs, weights, others, biases = (
        [torch.randn(n, *rest).to(dtype) for n in counts]
        for counts, rest in ((sizes, [depth]), (widths, [depth]), (widths, [depth]), (widths, []))
    )
    num_rows = sum(sizes)
    factors = [[drawn_factors(num_rows, n) for n in (widths[r], widths[r], depth)] for r in range(world_size)]

    def loss(x: torch.Tensor, weight: torch.Tensor, other: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        results, rows = tileflux.ag_gemm(
            x, [weight, other], [bias, bias], group=group, sizes=sizes, return_gathered=True
        )
        parts = zip((*results, rows), factors[rank], strict=True)
        return torch.stack([weighted(part, factor) for part, factor in parts]).sum()

    found = gradients(loss, (xs[rank], weights[rank], others[rank], biases[rank]))
    leaves = [[t.double().requires_grad_() for t in each] for each in (xs, weights, others, biases)]
    whole = torch.cat(leaves[0])
    for r in range(world_size):
        ys = [whole @ leaves[i][r].t() + leaves[3][r] for i in (1, 2)]
        parts = zip((*ys, whole), factors[r], strict=True)
        torch.stack([(part * factor).sum() for part, factor in parts]).sum().backward(retain_graph=True)
    for actual, each, depth_of_sum in zip(found, leaves, (2 * sum(widths) + world_size, *[num_rows] * 3), strict=True):
        right = each[rank].grad
        assert right is not None
        assert_close(actual, right, dtype=dtype, reduction=depth_of_sum)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [1, 3])
def test_gradients(world_size: int, dtype: torch.dtype) -> None:
    run_ranks(_gradient, world_size, args=(dtype,))


def _needed_by_some(group: Group) -> None:
    """Only one rank needs a gradient of its weight: the others take part all the same."""
    weight = torch.randn(4, 3, requires_grad=group.rank == 0)
    x = torch.randn(2, 3, requires_grad=True)
    tileflux.ag_gemm(x, weight, group=group).sum().backward()
    assert x.grad is not None and (weight.grad is not None) == (group.rank == 0)


def test_gradients_that_only_some_ranks_need() -> None:
    run_ranks(_needed_by_some, 2)


def _compiled(group: Group) -> None:
    factors = drawn_factors(4 * group.world_size, 5), drawn_factors(4 * group.world_size, 6)

    def loss(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        y = tileflux.ag_gemm(x, weight, bias, group=group)
        (z,), rows = tileflux.ag_gemm(2 * x, [other], group=group, return_gathered=True, strategy="fused", config=SMALL)
        return weighted(y, factors[0]) + weighted(z, factors[0]) + weighted(rows, factors[1])

    check_compiled_alike(loss, (torch.randn(4, 6), torch.randn(5, 6), torch.randn(5), torch.randn(5, 6)))


def test_compiled() -> None:
    run_ranks(_compiled, 2, timeout_s=120)


def _registration(group: Group) -> None:
    op = torch.ops.tileflux.ag_gemm.default
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((4, 3), (6, 3), (6,)))
    how: tuple[Any, ...] = (group.name, [4], "", torch.float32, "auto", True, "")
    check_registration(group, op, x, [weight, weight], [bias, bias], None, [], *how)


def test_registration() -> None:
    run_ranks(_registration, 1, timeout_s=120)


def _refusals(group: Group) -> None:
    check_dense_refusals(tileflux.ag_gemm, group)
    x, weight, bias = torch.ones(4, 3), torch.ones(5, 3), torch.ones(5)
    small = [tensor.to(torch.int8) for tensor in (x, weight)]
    with pytest.raises(ValueError, match="ag_gemm: weight is an empty sequence; give at least one"):
        tileflux.ag_gemm(x, [], group=group)
    for wrong in ([bias], [bias, None], [bias] * 3):
        for name in ("bias", "scale_weight", "out"):
            message = f"ag_gemm: {name} should be None or one for each of the 2 weights"
            with pytest.raises(ValueError, match=message):
                tileflux.ag_gemm(small[0], [small[1]] * 2, group=group, **{name: wrong})
    for name in ("bias", "scale_weight", "out"):
        with pytest.raises(ValueError, match=f"ag_gemm: weight is a sequence, so {name} should be a list too, not Ten"):
            tileflux.ag_gemm(small[0], [small[1]] * 5, group=group, **{name: bias})
    whole = torch.zeros(8, 5)
    for outs in ([whole[:4]] * 2, [whole[:4], whole[3:7]]):
        with pytest.raises(ValueError, match=r"ag_gemm: out\[0\] and out\[1\] overlap; give them separate memory"):
            tileflux.ag_gemm(x, [weight, weight], group=group, out=outs)
    assert whole.abs().sum() == 0, "nothing was written"
    tileflux.ag_gemm(x, [weight, weight], group=group, out=[whole[:4], whole[4:]])
    assert_close(whole, torch.full((8, 5), 3.0), reduction=0)
    with pytest.raises(ValueError, match=r"ag_gemm: x has 4 rows but sizes\[0\] is 3"):
        tileflux.ag_gemm(x, weight, group=group, sizes=[3])
    with pytest.raises(ValueError, match=r"ag_gemm: sizes=\[4, 4\] has 2 entries for 1 ranks"):
        tileflux.ag_gemm(x, weight, group=group, sizes=[4, 4])
    with pytest.raises(ValueError, match=r"ag_gemm: sizes=\[-4\] has a negative entry"):
        tileflux.ag_gemm(x, weight, group=group, sizes=[-4])
    for tensors in ((x.clone().requires_grad_(), weight), (x, weight.clone().requires_grad_())):
        with pytest.raises(ValueError, match="ag_gemm: there is no gradient through activation='relu'; do"):
            tileflux.ag_gemm(*tensors, group=group, activation="relu")
    with pytest.raises(ValueError, match="ag_gemm: there is no gradient through products of torch.int8"):
        tileflux.ag_gemm(*small, torch.ones(5, requires_grad=True), group=group)
    with pytest.raises(ValueError, match=r"ag_gemm: x \(4, 3\) and weight \(5, 4\) differ in K"):
        tileflux.ag_gemm(x, [weight, torch.ones(5, 4)], group=group)


def test_refusals() -> None:
    run_ranks(_refusals, 1)
