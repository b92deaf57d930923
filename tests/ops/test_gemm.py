"""gemm against the fp64 oracle, on the host and interpreted; its gradient, registration and refusals."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tileflux
from tileflux import GemmConfig
from tileflux.ops import gemm_reference
from tileflux.ops._dense import config_text
from tileflux.testing import GEMM_SHAPES, assert_close, run_ranks
from tileflux.testing.dense import ACTIVATIONS, DENSE_DTYPES, dense_shapes, expected_gemm, gemm_case, reduction
from tileflux.testing.shapes import GemmShape

from .cases import check_registration
from .dense_cases import (
    CONFIGS,
    SMALL,
    check_call,
    check_compiled_alike,
    check_out_refusals,
    drawn_case,
    drawn_factors,
    drawn_settings,
    gradients,
    install_interpreter,
    interpreted,
    needs_interpreter,
    weighted,
)

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ODD_SHAPES = [(0, 5, 4), (5, 0, 4), (6, 7, 0), (1, 1, 1), (17, 33, 19), (16, 32, 48), (40, 18, 31)]


@pytest.mark.parametrize("shape", GEMM_SHAPES, ids=lambda shape: shape.name)
def test_every_shape_and_type(shape: GemmShape) -> None:
    draws = random.Random(shape.name)
    for dtype in DENSE_DTYPES:
        for config in CONFIGS:
            check_call(None, "gemm", drawn_case("gemm", 1, shape, dtype, draws), draws, config=config)


@settings(deadline=None)
@given(dense_shapes(), st.sampled_from(DENSE_DTYPES), st.integers(0, 2**32))
def test_drawn_shapes(shape: tuple[int, int, int], dtype: torch.dtype, seed: int) -> None:
    draws = random.Random(seed)
    check_call(None, "gemm", drawn_case("gemm", 1, shape, dtype, draws), draws, **drawn_settings("gemm", draws))


@needs_interpreter
@pytest.mark.parametrize("dtype", DENSE_DTYPES, ids=str)
def test_interpreted(dtype: torch.dtype) -> None:
    install_interpreter()
    draws = random.Random(str(dtype))
    with interpreted():
        for shape in ODD_SHAPES:
            check_call(None, "gemm", drawn_case("gemm", 1, shape, dtype, draws), draws, config=SMALL)


@needs_interpreter
@settings(deadline=None, max_examples=15)
@given(dense_shapes(33), st.sampled_from(DENSE_DTYPES), st.integers(0, 2**32))
def test_drawn_shapes_interpreted(shape: tuple[int, int, int], dtype: torch.dtype, seed: int) -> None:
    install_interpreter()
    draws = random.Random(seed)
    with interpreted():
        check_call(None, "gemm", drawn_case("gemm", 1, shape, dtype, draws), draws, config=SMALL)


def test_every_kind_of_scale_with_every_activation() -> None:
    """What is drawn elsewhere, here without exception."""
    draws = random.Random(3)
    for dtype in (torch.float8_e4m3fn, torch.int8):
        for scales in ("tensor", "channel"):
            for activation in (None, *ACTIVATIONS):
                for bias in (False, True):
                    options = {"scales": scales, "activation": activation, "bias": bias, "out_dtype": torch.float32}
                    case = gemm_case((33, 20, 24), dtype, draws.randrange(2**32), **options)  # type: ignore[arg-type]
                    check_call(None, "gemm", case, draws)


def test_numbers_scalars_and_vectors_scale_alike() -> None:
    x, weight = (torch.randint(-100, 100, shape, dtype=torch.int8) for shape in ((9, 16), (7, 16)))
    right = (x.double() @ weight.double().t()).float() * 0.125
    for scale in (0.125, torch.tensor(0.125), torch.full((9,), 0.125)):
        y = tileflux.gemm(x, weight, scale_x=scale, out_dtype=torch.float32)
        assert_close(y, right, reduction=0)
    for scale in (0.125, torch.tensor(0.125), torch.full((7,), 0.125), torch.full((14,), 0.125)[::2]):
        y = tileflux.gemm(x, weight, scale_weight=scale, out_dtype=torch.float32)
        assert_close(y, right, reduction=0)


def test_int8_is_exact() -> None:
    x, weight = torch.full((3, 1 << 16), -128, dtype=torch.int8), torch.full((5, 1 << 16), -128, dtype=torch.int8)
    assert_close(tileflux.gemm(x, weight, out_dtype=torch.float32), torch.full((3, 5), 2.0**30), reduction=0)
    x, weight = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((40, 511), (33, 511)))
    right = x.long() @ weight.long().t()
    for config in (None, SMALL):
        y = tileflux.gemm(x, weight, out_dtype=torch.float32, config=config)
        assert_close(y, right.float(), reduction=0)


def test_results_have_the_type_asked_for() -> None:
    for dtype in DENSE_DTYPES:
        x, weight = (torch.ones(4, 4).to(dtype) for _ in range(2))
        assert tileflux.gemm(x, weight).dtype == (dtype if dtype in FLOATS else torch.bfloat16)
        for wanted in FLOATS:
            assert tileflux.gemm(x, weight, out_dtype=wanted).dtype == wanted


def test_rounded_once() -> None:
    """An accumulator in the result's type would lose every term but the first."""
    x, weight = torch.full((2, 513), 2.0**-5), torch.full((3, 513), 2.0**-5)
    x[:, 0] = weight[:, 0] = 1.0
    for dtype in (torch.float16, torch.bfloat16):
        y = tileflux.gemm(x.to(dtype), weight.to(dtype), config=SMALL)
        assert_close(y, torch.full((2, 3), 1.5, dtype=dtype), reduction=0)


def test_the_reference_is_right_too() -> None:
    draws = random.Random(5)
    for dtype in DENSE_DTYPES:
        for _ in range(10):
            case = drawn_case("gemm", 1, (33, 20, 24), dtype, draws)
            y = gemm_reference(**case.arguments("gemm", 0))
            named = {name: value for name, value in case.arguments("gemm", 0).items() if name != "out_dtype"}
            assert_close(y, expected_gemm(**named), dtype=case.out_dtype, reduction=reduction(case, "gemm"))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients(dtype: torch.dtype, transposed: bool) -> None:
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((33, 20), (18, 20), (18,)))
    if transposed:
        weight = weight.t().contiguous().t()
    factors = drawn_factors(33, 18)
    found = gradients(lambda *given: weighted(tileflux.gemm(*given, config=SMALL), factors), (x, weight, bias))
    rights = (factors.double() @ weight.double(), factors.t().double() @ x.double(), factors.double().sum(0))
    for actual, right, depth in zip(found, rights, (18, 33, 33), strict=True):
        assert_close(actual, right, dtype=dtype, reduction=depth)


def test_gradients_only_where_they_are_needed() -> None:
    x, weight = torch.randn(4, 6), torch.randn(5, 6, requires_grad=True)
    tileflux.gemm(x, weight).sum().backward()
    assert weight.grad is not None and x.grad is None
    assert_close(weight.grad, x.double().sum(0).expand(5, 6), reduction=4)
    bias = torch.randn(5, requires_grad=True)
    tileflux.gemm(x, weight.detach(), bias).sum().backward()
    assert bias.grad is not None
    assert_close(bias.grad, torch.full((5,), 4.0), reduction=0)
    assert not tileflux.gemm(x, weight.detach()).requires_grad


def _compiled(group: tileflux.Group) -> None:
    factors = drawn_factors(9, 5)
    tensors = torch.randn(9, 6), torch.randn(5, 6), torch.randn(5)
    check_compiled_alike(lambda *given: weighted(tileflux.gemm(*given, config=SMALL), factors), tensors)


def test_compiled() -> None:
    run_ranks(_compiled, 1, timeout_s=120)


def _registration(group: tileflux.Group) -> None:
    op = torch.ops.tileflux.gemm.default
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((4, 3), (6, 3), (6,)))
    check_registration(group, op, x, weight, bias, None, None, "", torch.float32, "")
    scales = torch.tensor(0.5), torch.rand(6)
    small = [torch.ones(4, 3).to(torch.int8), torch.ones(6, 3).to(torch.int8)]
    check_registration(group, op, *small, None, *scales, "swiglu", torch.bfloat16, config_text(SMALL))


def test_registration() -> None:
    run_ranks(_registration, 1, timeout_s=120)


def test_a_gradient_through_an_activation_is_refused() -> None:
    tensors = [torch.randn(4, 3), torch.randn(6, 3), torch.randn(6)]
    for place in range(3):
        given_tensors = [tensor.clone().requires_grad_(i == place) for i, tensor in enumerate(tensors)]
        with pytest.raises(ValueError, match="gemm: there is no gradient through activation='swiglu'; do"):
            tileflux.gemm(*given_tensors, activation="swiglu")
        with torch.no_grad():
            tileflux.gemm(*given_tensors, activation="swiglu")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_a_gradient_of_fp8_or_int8_is_refused(dtype: torch.dtype) -> None:
    """It would be computed in their type, without the scales."""
    x, weight = torch.ones(4, 3).to(dtype), torch.ones(5, 3).to(dtype)
    with pytest.raises(ValueError, match=f"gemm: there is no gradient through products of {dtype}; do"):
        tileflux.gemm(x, weight, torch.zeros(5, requires_grad=True))
    if dtype.is_floating_point:
        with pytest.raises(ValueError, match=f"gemm: there is no gradient through products of {dtype}; do"):
            tileflux.gemm(x.clone().requires_grad_(), weight)


def test_refusals() -> None:
    x, weight = torch.ones(4, 3), torch.ones(5, 3)
    with pytest.raises(ValueError, match="gemm: x should be a tensor, not list"):
        tileflux.gemm([1.0], weight)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gemm: bias should be a tensor, not int"):
        tileflux.gemm(x, weight, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gemm: weight has layout torch.sparse_coo; only dense tensors are multiplied"):
        tileflux.gemm(x, weight.to_sparse())
    with pytest.raises(ValueError, match="gemm: weight is on meta but x is on cpu; move it there"):
        tileflux.gemm(x, weight.to("meta"))
    with pytest.raises(ValueError, match="gemm: config should be a tileflux.GemmConfig, not CommConfig"):
        tileflux.gemm(x, weight, config=tileflux.CommConfig())  # type: ignore[arg-type]
    check_out_refusals(tileflux.gemm, "gemm")


@needs_interpreter
def test_autograd_notices_an_output_that_a_kernel_overwrites() -> None:
    install_interpreter()
    saved = torch.ones(4, 5, requires_grad=True) * 2
    product = saved * saved
    with torch.no_grad(), interpreted():
        tileflux.gemm(torch.zeros(4, 3), torch.zeros(5, 3), out=saved)
    assert saved.abs().sum() == 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@needs_interpreter
def test_the_tiles_asked_for_are_used() -> None:
    """Two tiles of K are added up in another order than one: some bits differ, and those of torch's blocks too."""
    install_interpreter()
    x, weight = torch.randn(16, 512), torch.randn(16, 512)
    with interpreted():
        results = [tileflux.gemm(x, weight, config=GemmConfig(16, 16, depth, num_warps=4)) for depth in (16, 512)]
    assert not torch.equal(*results)
