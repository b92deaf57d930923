"""gemm_ar against the fp64 oracle and torch.distributed; the same bits on every rank, its gradient and refusals."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import tileflux
from tileflux.ops import all_gather, gemm_ar_reference
from tileflux.ops._call import sum_in_rank_order
from tileflux.symm.group import Group
from tileflux.testing import GEMM_SHAPES, assert_close, run_ranks
from tileflux.testing.dense import DENSE_DTYPES, dense_shapes, reduction, rs_case

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
    needs_interpreter,
    uneven_widths,
    weighted,
)

INTERPRETED_SHAPES = [(0, 8, 8), (9, 4, 0), (1, 3, 5), (18, 20, 17), (20, 33, 16), (7, 0, 8)]
WAYS = [
    {"strategy": strategy, "algorithm": algorithm}
    for strategy in STRATEGIES
    for algorithm in ("one_shot", "two_shot")
    if (strategy, algorithm) != ("pipelined", "one_shot")
]
"""All strategies in all algorithms they have."""


@pytest.mark.parametrize(("world_size", "strategies"), [(1, [None]), (2, STRATEGIES), (3, [None]), (4, STRATEGIES)])
def test_every_shape_and_type(world_size: int, strategies: list[str | None]) -> None:
    num_calls = len(GEMM_SHAPES) * len(DENSE_DTYPES) * len(strategies)
    arguments = ("gemm_ar", world_size, GEMM_SHAPES, DENSE_DTYPES, strategies)
    assert run_ranks(check_shapes, world_size, args=arguments) == [num_calls] * world_size


def test_eight_ranks() -> None:
    run_ranks(check_shapes, 8, args=("gemm_ar", 8, GEMM_SHAPES[3:7], (torch.bfloat16, torch.int8)))


@settings(deadline=None, max_examples=2, phases=[Phase.generate])
@given(st.lists(dense_shapes(), min_size=8, max_size=8), st.integers(0, 2**32))
def test_drawn_shapes(shapes: list[tuple[int, int, int]], seed: int) -> None:
    run_ranks(check_shapes, 3, args=("gemm_ar", seed, shapes, (torch.float32, torch.bfloat16, torch.float8_e4m3fn)))


@needs_interpreter
@pytest.mark.parametrize("world_size", [2, 4])
def test_interpreted(world_size: int) -> None:
    install_interpreter()
    run_ranks(check_interpreted, world_size, args=("gemm_ar", world_size, INTERPRETED_SHAPES), timeout_s=120)


def _same_everywhere(group: Group) -> None:
    """The same bits on all ranks, each time, whichever way they came; int8's are known beforehand."""
    draws = random.Random(group.world_size)
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        scales: dict[str, Any] = {"scales": "channel"} if dtype == torch.int8 else {}
        seed = draws.randrange(2**32)
        case = rs_case(group.world_size, (21, 34, 40), dtype, seed, bias=True, out_dtype=torch.float32, **scales)
        for way in WAYS:
            # In the same layout: a CPU's library may add up in another order where rows lie elsewhere.
            state = draws.getstate()
            first = check_call(group, "gemm_ar", case, draws, config=SMALL, **way)
            draws.setstate(state)
            second = check_call(group, "gemm_ar", case, draws, config=SMALL, **way)
            assert_close(second, first, reduction=0, what=f"{way} {dtype}")
            everywhere = all_gather(first.reshape(1, -1), group=group)
            assert all(torch.equal(everywhere[0], row) for row in everywhere), f"{way} {dtype}"
            if dtype == torch.int8:
                assert_close(first, sum_in_rank_order(_partial_sums(case)), reduction=0, what=f"{way}")


def _partial_sums(case: Any) -> list[torch.Tensor]:
    parts = []
    for rank in range(case.world_size):
        arguments = case.arguments("gemm_ar", rank)
        if rank:
            arguments.pop("bias", None)
        parts.append(tileflux.gemm(**arguments))
    return parts


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_same_bits_on_every_rank(world_size: int) -> None:
    run_ranks(_same_everywhere, world_size)


def _against_reference(group: Group) -> None:
    draws = random.Random(group.world_size)
    for dtype in DENSE_DTYPES:
        for _ in range(4):
            case = drawn_case("gemm_ar", group.world_size, (26, 40, 24), dtype, draws)
            arguments = case.arguments("gemm_ar", group.rank)
            result = tileflux.gemm_ar(**arguments, group=group)
            assert_close(result, gemm_ar_reference(**arguments), reduction=reduction(case, "gemm_ar"))


@pytest.mark.parametrize("world_size", [1, 3])
def test_equals_torch_distributed(world_size: int) -> None:
    run_ranks(_against_reference, world_size)


def _exact(group: Group) -> None:
    draws = torch.Generator().manual_seed(9)
    x, weight = (torch.randint(-100, 101, (n, 60), dtype=torch.int8, generator=draws) for n in (17, 30))
    right = (x.long() @ weight.long().t()).float()
    x, weight = (tensor.tensor_split(group.world_size, dim=1)[group.rank] for tensor in (x, weight))
    for way in WAYS:
        for config in (None, SMALL):
            y = tileflux.gemm_ar(x, weight.contiguous(), group=group, out_dtype=torch.float32, config=config, **way)
            assert_close(y, right, reduction=0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_int8_is_exact(world_size: int) -> None:
    run_ranks(_exact, world_size)


def _one_bias(group: Group) -> None:
    """Nothing but the bias, which all ranks pass and only rank 0's counts."""
    x, weight, bias = torch.zeros(7, 3), torch.zeros(4, 3), torch.full((4,), 10.0 + group.rank)
    for way in WAYS:
        y = tileflux.gemm_ar(x, weight, bias, group=group, **way)
        assert_close(y, torch.full((7, 4), 10.0), reduction=0)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_bias_is_added_once(world_size: int) -> None:
    run_ranks(_one_bias, world_size)


def _depths(group: Group) -> None:
    """Ranks with terms of any number, also none; with whatever is looked up, too."""
    draws, values = random.Random(group.world_size), torch.Generator().manual_seed(2)
    for num_rows in (11, 2, 600):
        depths = uneven_widths(group.world_size, draws)
        x, weight = (torch.randn(n, sum(depths), generator=values) for n in (num_rows, 250))
        right = x.double() @ weight.double().t()
        x, weight = (tensor.split(depths, dim=1)[group.rank].contiguous() for tensor in (x, weight))
        for way in ({}, *WAYS):
            y = tileflux.gemm_ar(x, weight, group=group, **way)
            what = f"{num_rows} rows, terms {depths}, {way}"
            assert_close(y, right, dtype=torch.float32, reduction=sum(depths), what=what)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_with_other_depths_and_with_none(world_size: int) -> None:
    run_ranks(_depths, world_size, group_kwargs={"timeout_s": 5.0})


def _gradient(group: Group, dtype: torch.dtype) -> None:
    """Against the whole, unsharded computation: every rank's result counts in the loss."""
    rank, world_size = group.rank, group.world_size
    torch.manual_seed(29)
    depths, num_rows, num_columns = [9, 4, 6][:world_size], 10, 12
    xs, weights = ([torch.randn(n, k).to(dtype) for k in depths] for n in (num_rows, num_columns))
    bias = torch.randn(num_columns).to(dtype)
    factors = [drawn_factors(num_rows, num_columns) for _ in range(world_size)]

    def loss(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return weighted(tileflux.gemm_ar(x, weight, bias, group=group), factors[rank])

    found = gradients(loss, (xs[rank], weights[rank], bias))
    leaves = [[tensor.double().requires_grad_() for tensor in each] for each in (xs, weights, [bias])]
    parts = [x @ weight.t() for x, weight in zip(leaves[0], leaves[1], strict=True)]
    (sum(parts, leaves[2][0]) * sum(factors)).sum().backward()
    rights = (leaves[0][rank].grad, leaves[1][rank].grad, leaves[2][0].grad)
    for actual, right, num_terms in zip(found, rights, (num_columns, num_rows, num_rows), strict=True):
        assert right is not None
        assert_close(actual, right, dtype=dtype, reduction=num_terms * world_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [1, 3])
def test_gradients(world_size: int, dtype: torch.dtype) -> None:
    run_ranks(_gradient, world_size, args=(dtype,))


def _compiled(group: Group) -> None:
    factors = drawn_factors(4, 5)

    def loss(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return weighted(tileflux.gemm_ar(x, weight, bias, group=group, config=SMALL), factors)

    check_compiled_alike(loss, (torch.randn(4, 6), torch.randn(5, 6), torch.randn(5)))


def test_compiled() -> None:
    run_ranks(_compiled, 2, timeout_s=120)


def _registration(group: Group) -> None:
    op = torch.ops.tileflux.gemm_ar.default
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((4, 3), (6, 3), (6,)))
    check_registration(group, op, x, weight, bias, None, None, group.name, "auto", torch.float32, "auto", "")


def test_registration() -> None:
    run_ranks(_registration, 1, timeout_s=120)


def _refusals(group: Group) -> None:
    check_dense_refusals(tileflux.gemm_ar, group)
    x, weight = torch.ones(4, 3), torch.ones(5, 3)
    with pytest.raises(ValueError, match="gemm_ar: algorithm='ring' is not one of auto, one_shot, two_shot"):
        tileflux.gemm_ar(x, weight, group=group, algorithm="ring")
    with pytest.raises(ValueError, match="gemm_ar: strategy='pipelined' sends finished shards, which is two_shot"):
        tileflux.gemm_ar(x, weight, group=group, algorithm="one_shot", strategy="pipelined")
    with pytest.raises(TypeError, match="activation"):
        tileflux.gemm_ar(x, weight, group=group, activation="relu")  # type: ignore[call-arg]
    small = [tensor.to(torch.int8) for tensor in (x, weight)]
    with pytest.raises(ValueError, match="gemm_ar: there is no gradient through products of torch.int8"):
        tileflux.gemm_ar(*small, torch.ones(5, requires_grad=True), group=group)


def test_refusals() -> None:
    run_ranks(_refusals, 1)
