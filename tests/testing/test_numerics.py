"""assert_close: right programs pass, small defects do not, and the message says where."""

from __future__ import annotations

import math
import re

import pytest
import torch

from tileflux.testing.numerics import assert_close, nan_like, poisoned, tolerance

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
OTHER_FP8 = [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def product(num_rows: int, reduction: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix product as a right program computes it, and the exact one."""
    inputs = [torch.randn(num_rows, reduction).to(dtype) for _ in range(2)]
    left, right = (tensor.double() / math.sqrt(reduction) ** 0.5 for tensor in inputs)
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    return (left.to(accumulator) @ right.to(accumulator).T).to(dtype), left @ right.T


@pytest.mark.parametrize("reduction", [1, 64, 4096])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_right_program_passes_with_room_to_spare(dtype: torch.dtype, reduction: int) -> None:
    torch.manual_seed(reduction)
    actual, expected = product(200, reduction, dtype)
    assert_close(actual, expected, reduction=reduction)
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < 0.6 * tolerance(dtype, reduction).norm


def test_sums_in_order_of_same_sign_fit_the_model() -> None:
    terms = torch.rand(4096, 300, generator=torch.Generator().manual_seed(1))
    actual = torch.zeros(300)
    for row in terms:
        actual += row
    assert_close(actual, terms.double().sum(0), reduction=4096)


def test_partial_results_rounded_on_the_way_pass() -> None:
    torch.manual_seed(2)
    parts = torch.randn(8, 300, 300)
    actual = parts.bfloat16().float().sum(0).bfloat16()
    assert_close(actual, parts.double().sum(0), reduction=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_one_missing_term_fails(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    left, right = torch.randn(64, 1024).to(dtype).double(), torch.randn(64, 1024).to(dtype).double()
    actual = (left[:, 1:] @ right[:, 1:].T).to(dtype)
    with pytest.raises(AssertionError, match="off by more than rounding explains"):
        assert_close(actual, left @ right.T, reduction=1024)


def test_one_wrong_element_among_a_million_fails() -> None:
    expected = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(5))
    actual = expected.bfloat16()
    actual[123, 456] += 1.0
    with pytest.raises(AssertionError) as caught:
        assert_close(actual, expected, what="ag_gemm output")
    message = str(caught.value)
    assert message.startswith("ag_gemm output: off by more than rounding explains (torch.bfloat16, sums of 1)")
    assert "Worst element, at (123, 456)" in message and "Elements out of bounds: 1 of 1000000" in message
    assert f"{actual[123, 456].item():.6g} instead of {expected[123, 456].item():.6g}" in message


def test_a_small_error_of_all_elements_fails() -> None:
    expected = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(6))
    actual = (expected * 1.015).bfloat16()  # within what one element may be off
    with pytest.raises(AssertionError, match=r"Elements out of bounds: 0 of"):
        assert_close(actual, expected)


def test_a_small_element_may_be_off_by_the_scale_of_the_others_but_not_more() -> None:
    expected = torch.ones(10_000, dtype=torch.float64)
    expected[77] = 1e-12
    limit = tolerance(torch.float64).element
    error = torch.zeros_like(expected)
    error[77] = 1.0
    assert_close(expected + 0.99 * limit * error, expected)
    with pytest.raises(AssertionError, match=r"at \(77,\).* Elements out of bounds: 1 of 10000"):
        assert_close(expected + 1.01 * limit * error, expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_pass_only_where_expected(bad: float) -> None:
    clean = torch.ones(3, 4)
    dirty = clean.clone()
    dirty[1, 2] = bad
    assert_close(dirty, dirty.clone())
    other = dirty.clone()
    other[1, 2] = math.inf if math.isnan(bad) else -bad
    for actual, expected in ((dirty, clean), (clean, dirty), (dirty, other)):
        with pytest.raises(AssertionError, match=r"1 of 12 elements are NaN or infinite .* at \(1, 2\)"):
            assert_close(actual, expected)


def test_an_error_beside_an_expected_nan_is_still_found() -> None:
    expected = torch.tensor([math.nan, 1.0, math.inf, 1.0])
    with pytest.raises(AssertionError, match=r"at \(3,\)"):
        assert_close(torch.tensor([math.nan, 1.0, math.inf, 1.1]), expected)


def test_zeros_are_expected_exactly() -> None:
    assert_close(torch.zeros(5), torch.zeros(5))
    with pytest.raises(AssertionError, match="instead of 0,"):
        assert_close(torch.full((5,), 1e-30), torch.zeros(5))


def test_results_below_the_smallest_number_of_their_dtype_may_vanish() -> None:
    assert_close(torch.zeros(4, dtype=torch.float16), torch.full((4,), 2.0**-25))


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool], ids=str)
def test_integers_are_exact(dtype: torch.dtype) -> None:
    expected = torch.ones(2, 3).to(dtype)
    actual = expected.clone()
    assert_close(actual, expected, reduction=1000)
    actual[1, 1] = 0
    with pytest.raises(AssertionError, match=r"1 of 6 elements differ.* at \(1, 1\), is (0|False) instead of (1|True)"):
        assert_close(actual, expected, reduction=1000)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values_only_moved_must_agree_bit_for_bit(dtype: torch.dtype) -> None:
    expected = torch.tensor([1.0, math.nan, 0.0]).to(dtype)
    assert_close(expected.clone(), expected, reduction=0)
    with pytest.raises(AssertionError, match="1 of 3 elements differ, and every bit should agree"):
        assert_close(torch.tensor([1.0, math.nan, -0.0]).to(dtype), expected, reduction=0)


def test_shapes_and_dtypes_are_compared() -> None:
    with pytest.raises(AssertionError, match=re.escape("y: shape is (2, 3), and should be (3, 2)")):
        assert_close(torch.ones(2, 3), torch.ones(3, 2), what="y")
    with pytest.raises(AssertionError, match="dtype is torch.float32, and should be torch.bfloat16"):
        assert_close(torch.ones(2), torch.ones(2), dtype=torch.bfloat16)
    for actual, expected in (
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.int32, torch.float32),
        (torch.int32, torch.int64),
    ):
        with pytest.raises(AssertionError, match=f"dtype is {actual}, and {expected} was expected"):
            assert_close(torch.ones(2, dtype=actual), torch.ones(2, dtype=expected))


def test_empty_tensors_are_close_if_their_shapes_agree() -> None:
    assert_close(torch.ones(0, 4), torch.ones(0, 4))
    with pytest.raises(AssertionError, match="shape"):
        assert_close(torch.ones(0, 4), torch.ones(0, 5))


def test_scalars_and_views_that_are_not_contiguous() -> None:
    assert_close(torch.tensor(1.0), torch.tensor(1.0))
    matrix = torch.randn(4, 6)
    wrong = matrix.T.contiguous()
    wrong[5, 3] += 1.0
    for reduction in (0, 1):
        assert_close(matrix.T, matrix.T.contiguous(), reduction=reduction)
        with pytest.raises(AssertionError, match=r"at \(5, 3\)"):
            assert_close(matrix.T, wrong, reduction=reduction)


def test_tolerance_follows_the_formula() -> None:
    assert tolerance(torch.bfloat16, 1).norm == pytest.approx(2**-7, rel=1e-4)
    assert tolerance(torch.float32, 10_000).norm == pytest.approx(2**-23 * 101)
    assert tolerance(torch.float32, 10_000).element == pytest.approx(3 * 2**-23 * 101)
    assert tolerance(torch.float64, 10_000).norm == pytest.approx(2**-52 * 101)
    assert tolerance(torch.int32, 9) == tolerance(torch.float32, 0) == (0.0, 0.0)
    with pytest.raises(ValueError, match="reduction=-1"):
        tolerance(torch.float32, -1)
    with pytest.raises(ValueError, match="complex64"):
        tolerance(torch.complex64)


@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
@pytest.mark.parametrize("dtype", [*FLOATS, *OTHER_FP8], ids=str)
def test_poisoned_floats_are_nan(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = poisoned(shape, dtype)
    assert tensor.shape == shape and tensor.dtype == dtype
    assert tensor.float().isnan().all()


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_poisoned_integers_are_full_of_one_byte(dtype: torch.dtype) -> None:
    tensor = poisoned((3, 5), dtype)
    assert tensor.shape == (3, 5) and tensor.dtype == dtype
    assert (tensor == int("7f" * dtype.itemsize, 16)).all()


def test_nan_like_follows_its_model() -> None:
    tensor = nan_like(torch.zeros(2, 3, dtype=torch.bfloat16))
    assert tensor.shape == (2, 3) and tensor.dtype == torch.bfloat16 and tensor.isnan().all()
    assert poisoned((2,), torch.bool).all()
