"""gemm_rs against the fp64 oracle and torch.distributed; the same bits every time, its gradient and refusals."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import tileflux
from tileflux.kernels import gemm_host
from tileflux.ops import gemm_rs_reference
from tileflux.ops._call import sum_in_rank_order
from tileflux.symm.group import Group
from tileflux.testing import GEMM_SHAPES, assert_close, run_ranks
from tileflux.testing.dense import DENSE_DTYPES, SCALED_DTYPES, dense_shapes, reduction, rs_case

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
    arguments = ("gemm_rs", world_size, GEMM_SHAPES, DENSE_DTYPES, strategies)
    assert run_ranks(check_shapes, world_size, args=arguments) == [num_calls] * world_size


def test_eight_ranks() -> None:
    run_ranks(check_shapes, 8, args=("gemm_rs", 8, GEMM_SHAPES[3:7], (torch.bfloat16, torch.int8)))


@settings(deadline=None, max_examples=2, phases=[Phase.generate])
@given(st.lists(dense_shapes(), min_size=8, max_size=8), st.integers(0, 2**32))
def test_drawn_shapes(shapes: list[tuple[int, int, int]], seed: int) -> None:
    run_ranks(check_shapes, 3, args=("gemm_rs", seed, shapes, (torch.float32, torch.bfloat16, torch.float8_e4m3fn)))


@needs_interpreter
@pytest.mark.parametrize("world_size", [2, 4])
def test_interpreted(world_size: int) -> None:
    install_interpreter()
    run_ranks(check_interpreted, world_size, args=("gemm_rs", world_size, INTERPRETED_SHAPES), timeout_s=120)


def _partial_sums(case: Any, **settings: Any) -> list[torch.Tensor]:
    """Every rank's part of the sum, rounded as it is before it is sent: what ``gemm`` makes of it."""
    parts = []
    for rank in range(case.world_size):
        arguments = {name: value for name, value in case.arguments("gemm_rs", rank).items() if name != "sizes"}
        if rank:
            arguments.pop("bias", None)
        parts.append(tileflux.gemm(**arguments, **settings))
    return parts


def _bits(group: Group, backend: str) -> None:
    """Partial sums in the result's type, added in fp32 from rank 0 on: not one bit is left to chance."""
    draws = random.Random(group.world_size)
    # torch may add up the terms of a product in another order when it is cut into tiles; of int8 that is exact.
    dtypes, shape = ((torch.int8,), (21, 34, 40)) if backend == "host" else (DENSE_DTYPES[1::3], (13, 18, 12))
    with interpreted() if backend == "interpret" else torch.no_grad():
        for dtype in dtypes:
            for out_dtype in (torch.float32, torch.bfloat16):
                options: dict[str, Any] = {"scales": "channel"} if dtype in SCALED_DTYPES else {}
                seed = draws.randrange(2**32)
                case = rs_case(group.world_size, shape, dtype, seed, bias=True, out_dtype=out_dtype, **options)
                total = sum_in_rank_order(_partial_sums(case, config=SMALL)).split(case.sizes)[group.rank]
                for strategy in STRATEGIES:
                    y = check_call(group, "gemm_rs", case, draws, strategy=strategy, config=SMALL)
                    assert_close(y, total, reduction=0, what=f"{strategy} {dtype}")


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sums_in_rank_order_bit_for_bit(world_size: int) -> None:
    run_ranks(_bits, world_size, args=("host",))


@needs_interpreter
def test_sums_in_rank_order_bit_for_bit_interpreted() -> None:
    install_interpreter()
    run_ranks(_bits, 3, args=("interpret",), timeout_s=120)


def _repeats(group: Group) -> None:
    draws = random.Random(4)
    for strategy in ("auto", *STRATEGIES):
        case = rs_case(group.world_size, (50, 70, 90), torch.bfloat16, draws.randrange(2**32), bias=True)
        arguments = case.arguments("gemm_rs", group.rank)
        first, *others = (tileflux.gemm_rs(**arguments, group=group, strategy=strategy) for _ in range(4))
        assert all(torch.equal(first, other) for other in others)


def test_repeats_bit_for_bit() -> None:
    run_ranks(_repeats, 3)


def _against_reference(group: Group) -> None:
    draws = random.Random(group.world_size)
    for dtype in DENSE_DTYPES:
        for _ in range(4):
            case = drawn_case("gemm_rs", group.world_size, (26, 40, 24), dtype, draws)
            arguments = case.arguments("gemm_rs", group.rank)
            result = tileflux.gemm_rs(**arguments, group=group)
            assert_close(result, gemm_rs_reference(**arguments), reduction=reduction(case, "gemm_rs"))


@pytest.mark.parametrize("world_size", [1, 3])
def test_equals_torch_distributed(world_size: int) -> None:
    run_ranks(_against_reference, world_size)


def _exact(group: Group) -> None:
    draws = torch.Generator().manual_seed(9)
    x, weight = (torch.randint(-100, 101, (n, 60), dtype=torch.int8, generator=draws) for n in (17, 30))
    right = (x.long() @ weight.long().t()).float().tensor_split(group.world_size)[group.rank]
    x, weight = (tensor.tensor_split(group.world_size, dim=1)[group.rank] for tensor in (x, weight))
    for strategy in STRATEGIES:
        for config in (None, SMALL):
            y = tileflux.gemm_rs(
                x, weight.contiguous(), group=group, out_dtype=torch.float32, strategy=strategy, config=config
            )
            assert_close(y, right, reduction=0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_int8_is_exact(world_size: int) -> None:
    run_ranks(_exact, world_size)


def _one_bias(group: Group) -> None:
    """Nothing but the bias, which all ranks pass and only rank 0's counts."""
    x, weight, bias = torch.zeros(7, 3), torch.zeros(4, 3), torch.full((4,), 10.0 + group.rank)
    num_rows = len(range(7)[group.rank :: group.world_size])
    for strategy in ("auto", *STRATEGIES):
        y = tileflux.gemm_rs(x, weight, bias, group=group, strategy=strategy)
        assert_close(y, torch.full((num_rows, 4), 10.0), reduction=0)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_bias_is_added_once(world_size: int) -> None:
    run_ranks(_one_bias, world_size)


def _depths(group: Group) -> None:
    """Ranks with terms of any number, also none; with whatever strategy is looked up, too."""
    draws, values = random.Random(group.world_size), torch.Generator().manual_seed(2)
    for call in range(6):
        depths, sizes = uneven_widths(group.world_size, draws), draws.sample(range(9), group.world_size)
        x, weight = (torch.randn(n, sum(depths), generator=values) for n in (sum(sizes), 24))
        right = (x.double() @ weight.double().t()).split(sizes)[group.rank]
        x, weight = (tensor.split(depths, dim=1)[group.rank].contiguous() for tensor in (x, weight))
        for strategy in ("auto", *STRATEGIES):
            y = tileflux.gemm_rs(x, weight, group=group, sizes=sizes, strategy=strategy)
            what = f"call {call}, rows {sizes}, terms {depths}, {strategy}"
            assert_close(y, right, dtype=torch.float32, reduction=sum(depths), what=what)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_with_other_depths_and_with_none(world_size: int) -> None:
    run_ranks(_depths, world_size, group_kwargs={"timeout_s": 5.0})


def _rushing(group: Group, num_calls: int) -> None:
    """Rank 0 gets no rows, so it waits for nobody's sums; it must not overwrite slots that rank 1 has yet to read."""
    product = gemm_host._Weight.product

    def slow(*arguments: Any) -> torch.Tensor:
        time.sleep(0.03)
        return product(*arguments)

    if group.rank:
        gemm_host._Weight.product = slow  # type: ignore[method-assign]
    for call in range(num_calls):
        x = torch.full((4, 1), float(call))
        y = tileflux.gemm_rs(x, torch.ones(3, 1), group=group, sizes=[0, 4], strategy="fused")
        assert_close(y, torch.full((4 * group.rank, 3), 2.0 * call), reduction=0, what=f"call {call}")


def test_a_quick_rank_does_not_overwrite_what_others_read() -> None:
    run_ranks(_rushing, 2, args=(8,))


def _gradient(group: Group, dtype: torch.dtype) -> None:
    """Against the whole, unsharded computation, whose loss is the sum of all ranks' losses."""
    rank, world_size = group.rank, group.world_size
    torch.manual_seed(23)
    sizes, depths, num_columns = [5, 0, 7][:world_size], [9, 4, 6][:world_size], 12
    num_rows = sum(sizes)
    xs, weights = ([torch.randn(n, k).to(dtype) for k in depths] for n in (num_rows, num_columns))
    bias = torch.randn(num_columns).to(dtype)
    factors = drawn_factors(num_rows, num_columns)

    def loss(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = tileflux.gemm_rs(x, weight, bias, group=group, sizes=sizes)
        return weighted(y, factors.split(sizes)[rank])

    found = gradients(loss, (xs[rank], weights[rank], bias))
    leaves = [[tensor.double().requires_grad_() for tensor in each] for each in (xs, weights, [bias])]
    parts = [x @ weight.t() for x, weight in zip(leaves[0], leaves[1], strict=True)]
    (sum(parts, leaves[2][0]) * factors).sum().backward()
    rights = (leaves[0][rank].grad, leaves[1][rank].grad, leaves[2][0].grad)
    for actual, right, num_terms in zip(found, rights, (num_columns, num_rows, num_rows), strict=True):
        assert right is not None
        assert_close(actual, right, dtype=dtype, reduction=num_terms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [1, 3])
def test_gradients(world_size: int, dtype: torch.dtype) -> None:
    run_ranks(_gradient, world_size, args=(dtype,))


def _compiled(group: Group) -> None:
    factors = drawn_factors(4, 5)

    def loss(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return weighted(tileflux.gemm_rs(x, weight, bias, group=group, config=SMALL), factors)

    check_compiled_alike(loss, (torch.randn(4 * group.world_size, 6), torch.randn(5, 6), torch.randn(5)))


def test_compiled() -> None:
    run_ranks(_compiled, 2, timeout_s=120)


def _registration(group: Group) -> None:
    op = torch.ops.tileflux.gemm_rs.default
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((4, 3), (6, 3), (6,)))
    check_registration(group, op, x, weight, bias, None, None, group.name, [4], torch.float32, "auto", "")


def test_registration() -> None:
    run_ranks(_registration, 1, timeout_s=120)


def _refusals(group: Group) -> None:
    check_dense_refusals(tileflux.gemm_rs, group)
    x, weight = torch.ones(4, 3), torch.ones(5, 3)
    with pytest.raises(ValueError, match=r"gemm_rs: sizes=\[3\] add up to 3 rows, but the tensor has 4"):
        tileflux.gemm_rs(x, weight, group=group, sizes=[3])
    with pytest.raises(ValueError, match=r"gemm_rs: sizes=\[2, 2\] has 2 entries for 1 ranks"):
        tileflux.gemm_rs(x, weight, group=group, sizes=[2, 2])
    with pytest.raises(TypeError, match="activation"):
        tileflux.gemm_rs(x, weight, group=group, activation="relu")  # type: ignore[call-arg]
    small = [tensor.to(torch.int8) for tensor in (x, weight)]
    with pytest.raises(ValueError, match="gemm_rs: there is no gradient through products of torch.int8"):
        tileflux.gemm_rs(*small, torch.ones(5, requires_grad=True), group=group)


def test_refusals() -> None:
    run_ranks(_refusals, 1)
