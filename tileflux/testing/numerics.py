"""``assert_close``: the one comparison of results, with tolerances that no test chooses.

The model of the error. A result of dtype D is a sum of R terms, accumulated in fp32 (fp64 for fp64) and rounded to
D. Let ``u(D) = finfo(D).eps / 2`` be the relative error of one rounding.

- Rounding to D: ``u(D)`` per element, about ``0.4 u(D)`` in the norm. A sum of partial results that were each
  rounded to D on the way (as between ranks) adds about as much again.
- Accumulating R terms: each of R additions errs by up to ``u(fp32)`` of a partial sum. These errors are independent,
  so they grow like ``sqrt(R)``, not R: about ``0.4 u(fp32) sqrt(R)`` of the result, for terms of mixed sign and
  for terms of one sign.

So the norm of the error, relative to the norm of the expected values, may be ``2 u(D) + 2 u(fp32) sqrt(R)``: some
five times what a right program shows with one rounding, and in bf16 no more than what one missing term among 16,000
changes. The worst element may be off by three times that, relative to the larger of its own size and the root mean
square of all: a sum may come out near zero, but its error is that of its terms. The norm alone would pass one wrong
element in a large tensor; the worst element alone would pass an error of all elements.

The model holds for random data. Sums built to cancel have no tolerance here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["Tolerance", "assert_close", "nan_like", "poisoned", "tolerance"]

_ELEMENT_FACTOR = 3.0
_POISON_BYTE = 0x7F  # NaN in fp8 e4m3fn and e5m2; improbable as an integer
_NAN_BYTES = {torch.float8_e4m3fnuz: 0x80, torch.float8_e5m2fnuz: 0x80, torch.float8_e8m0fnu: 0xFF}


class Tolerance(NamedTuple):
    """Bounds on the error of a result."""

    norm: float
    """Norm of the error over norm of the expected values."""
    element: float
    """Error of one element over the larger of its expected size and the root mean square of all."""


def tolerance(dtype: torch.dtype, reduction: int = 1) -> Tolerance:
    """Bounds for results of ``dtype`` that are sums of ``reduction`` terms; the formula is in the module's docstring.

    Zero for integers, and for ``reduction=0``: values that were only moved are equal bit for bit.
    """
    if reduction < 0:
        raise ValueError(f"reduction={reduction} should be the number of terms summed, or 0 for values only moved")
    if dtype.is_complex:
        raise ValueError(f"dtype={dtype} has no tolerance; compare real and imaginary parts")
    if not dtype.is_floating_point or reduction == 0:
        return Tolerance(0.0, 0.0)
    unit = torch.finfo(dtype).eps / 2
    accumulator_unit = min(unit, torch.finfo(torch.float32).eps / 2)
    norm = 2 * unit + 2 * accumulator_unit * math.sqrt(reduction)
    return Tolerance(norm, _ELEMENT_FACTOR * norm)


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    reduction: int = 1,
    what: str = "",
) -> None:
    """Raise ``AssertionError`` unless ``actual`` is ``expected`` up to the rounding of a right program.

    ``dtype`` is what ``actual`` must be (default: what it is) and sets the tolerance with ``reduction``, the number of
    terms summed into each element; 0 means that nothing was computed and every bit must agree. ``expected`` has that
    dtype or a wider one. NaN and infinity pass only where ``expected`` has the same. ``what`` begins the message.
    """
    dtype = actual.dtype if dtype is None else dtype
    bound = tolerance(dtype, reduction)
    prefix = f"{what}: " if what else ""
    if actual.dtype != dtype:
        raise AssertionError(f"{prefix}dtype is {actual.dtype}, and should be {dtype}")
    if actual.shape != expected.shape:
        raise AssertionError(f"{prefix}shape is {tuple(actual.shape)}, and should be {tuple(expected.shape)}")
    if expected.dtype != dtype and not _is_wider(expected.dtype, dtype):
        raise AssertionError(f"{prefix}dtype is {dtype}, and {expected.dtype} was expected")
    if actual.numel() == 0:
        return
    actual, expected = actual.detach(), expected.detach().to(actual.device)
    if bound.norm == 0.0:
        _assert_same_bits(actual, expected.to(dtype), prefix)
    else:
        basis = f"{dtype}, sums of {reduction}"
        _assert_within(actual.double(), expected.double(), bound, _smallest(dtype), basis, prefix)


def poisoned(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A tensor to be overwritten, filled with what no right result contains, so that an element left out shows.

    NaN for floating-point numbers, 0x7f in every byte for integers, True for booleans.
    """
    if dtype == torch.bool:
        return torch.ones(tuple(shape), dtype=dtype, device=device)
    if (dtype.is_floating_point and dtype.itemsize > 1) or dtype.is_complex:
        return torch.full(tuple(shape), math.nan, dtype=dtype, device=device)
    byte = _NAN_BYTES.get(dtype, _POISON_BYTE)
    data = torch.full((math.prod(shape) * dtype.itemsize,), byte, dtype=torch.uint8, device=device)
    return data.view(dtype).reshape(tuple(shape))


def nan_like(tensor: torch.Tensor) -> torch.Tensor:
    """``poisoned`` in the shape, dtype and place of ``tensor``."""
    return poisoned(tensor.shape, tensor.dtype, tensor.device)


def _is_wider(dtype: torch.dtype, than: torch.dtype) -> bool:
    """Whether every value of floating-point ``than`` is one of ``dtype``: what a reference may be computed in."""
    return than.is_floating_point and dtype in (torch.float32, torch.float64) and dtype.itemsize > than.itemsize


def _smallest(dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps


def _assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, prefix: str) -> None:
    differs = actual.contiguous() != expected.contiguous()
    if actual.dtype.is_floating_point:
        differs = _bits(actual) != _bits(expected)
    if (num_wrong := int(differs.sum())) > 0:
        index = _position(int(differs.reshape(-1).to(torch.uint8).argmax()), actual.shape)
        raise AssertionError(
            f"{prefix}{num_wrong} of {actual.numel()} elements differ, and every bit should agree; the first, at "
            f"{index}, is {actual[index].item()} instead of {expected[index].item()}"
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(words[tensor.dtype.itemsize])


def _assert_within(
    actual: torch.Tensor, expected: torch.Tensor, bound: Tolerance, smallest: float, basis: str, prefix: str
) -> None:
    special = ~(actual.isfinite() & expected.isfinite())
    wrong = special & (actual != expected) & ~(actual.isnan() & expected.isnan())
    if (num_wrong := int(wrong.sum())) > 0:
        index = _position(int(wrong.reshape(-1).to(torch.uint8).argmax()), actual.shape)
        raise AssertionError(
            f"{prefix}{num_wrong} of {actual.numel()} elements are NaN or infinite and not the same; the first, at "
            f"{index}, is {actual[index].item()} instead of {expected[index].item()}"
        )
    num_finite = max(1, actual.numel() - int(special.sum()))
    actual, expected = actual.masked_fill(special, 0.0), expected.masked_fill(special, 0.0)
    error = (actual - expected).abs()
    norm = float(expected.norm())
    scale = norm / math.sqrt(num_finite)
    limit = bound.element * expected.abs().clamp_min(scale) + smallest
    excess = (error / limit).reshape(-1)
    worst = _position(int(excess.argmax()), actual.shape)
    norm_error, norm_limit = float(error.norm()), bound.norm * norm + smallest * math.sqrt(num_finite)
    if norm_error <= norm_limit and float(error[worst]) <= float(limit[worst]):
        return
    raise AssertionError(
        f"{prefix}off by more than rounding explains ({basis}). Relative norm of the error: "
        f"{norm_error / norm if norm else math.inf:.3g}, allowed {bound.norm:.3g}. Worst element, at {worst}: "
        f"{actual[worst].item():.6g} instead of {expected[worst].item():.6g}, error {float(error[worst]):.3g}, "
        f"allowed {float(limit[worst]):.3g}. Elements out of bounds: {int((excess > 1).sum())} of {actual.numel()}"
    )


def _position(flat: int, shape: torch.Size) -> tuple[int, ...]:
    """The index of an element from its place in row-major order."""
    index = []
    for size in reversed(shape):
        flat, here = divmod(flat, size)
        index.append(here)
    return tuple(reversed(index))
