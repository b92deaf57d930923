"""A call made again: what it launched the last time, with the addresses of now.

A call whose tensors are like an earlier one's, in types, shapes and strides, launches what that one launched. What may
differ all the same is looked at before each: how addresses are aligned, whether the turn and its table are still in
their places, who listens, records or captures, and how fp32 is to be multiplied. Wherever anything differs, the call
goes the long way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tileflux.kernels.gemm_launch import PreparedGemm, relaunches_gemm
from tileflux.kernels.gemm_shared import address, table_of
from tileflux.kernels.loading import launching
from tileflux.kernels.operands import Operands
from tileflux.kernels.turns import Turn, is_in_place
from tileflux.symm.group import Group

__all__ = ["Again", "Launched", "make_again"]

_ALIGNED = 16  # bytes: what TMA and the widest accesses want; launches of anything else are not kept here

Step = Callable[[Any, Any, torch.Tensor, torch.Tensor | None, torch.Tensor], None]
"""What is queued before or after the GEMM, given the group, the turn, x, the scales of its rows, and out."""

Product = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], object]
"""The library's GEMM, given the turn, x, the weight and out; one of the last three is in the turn's memory instead."""


class Launched(NamedTuple):
    """What a call has launched, where it can be launched again: one GEMM, ours or the library's, and steps around."""

    gemm: PreparedGemm | None
    turn: Turn | None = None
    before: Sequence[Step | None] = ()
    """In the order in which they are queued; None for one that cannot be repeated."""
    after: Sequence[Step | None] = ()
    product: Product | None = None


def make_again(
    launched: Launched | None, group: Group | None, given: Sequence[Any], operands: Operands
) -> Again | None:
    """What makes such a call again, if anything does.

    ``given`` is what the caller passed for x, the weight, the bias and the scales: it must have come to the kernel as
    it is. Whether it does depends on its types, shapes and strides.
    """
    if launched is None or None in (*launched.before, *launched.after):
        return None
    if (operands.x.data_ptr() | operands.weight.data_ptr() | operands.out.data_ptr()) % _ALIGNED:
        return None
    used = (operands.x, operands.weight, operands.bias, operands.scale_x, operands.scale_weight)
    for mine, theirs in zip(used, given, strict=True):
        if mine is not None and (not isinstance(theirs, torch.Tensor) or mine.data_ptr() != theirs.data_ptr()):
            return None
    return Again(launched, group, operands)


class Again:
    """Kept by whoever keeps the call's signature, which may outlive the group: it holds neither it nor its memory."""

    __slots__ = (
        "_adds_bias",
        "_after",
        "_before",
        "_device",
        "_gemm",
        "_index",
        "_launching",
        "_precision",
        "_product",
        "_turn",
        "dtype",
        "shape",
    )

    def __init__(self, launched: Launched, group: Group | None, operands: Operands) -> None:
        self._gemm, self._product, here = launched.gemm, launched.product, launched.turn
        self._turn = None if here is None else weakref.ref(here)
        self._before, self._after = _all_of(launched.before), _all_of(launched.after)
        self._launching = launching(group)
        self._device, self._adds_bias = operands.x.device, operands.adds_bias
        self._index = self._device.index if self._device.type == "cuda" else None
        self._precision = _precision() if operands.x.dtype is torch.float32 else None
        self.shape, self.dtype = tuple(operands.out.shape), operands.out.dtype

    def fits(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None) -> bool:
        """Whether everything is as it was, for a call whose signature is the same."""
        if out is not None and type(out) is not torch.Tensor:
            return False
        if self._turn is not None:
            here = self._turn()
            if here is None or not is_in_place(here):
                return False
        addresses = x.data_ptr() | weight.data_ptr() | (0 if out is None else out.data_ptr())
        return (
            addresses % _ALIGNED == 0
            and relaunches_gemm()
            and (self._precision is None or self._precision == _precision())
            and (self._index is None or self._index == torch.cuda.current_device())
        )

    def launch(self, group: Group | None, tensors: tuple[Any, ...], out: torch.Tensor) -> None:
        """Queue it all, right after it was found to fit. ``tensors`` are x, the weight, the bias and both scales."""
        x, weight, bias, scale_x, scale_weight = tensors
        here = None if self._turn is None else self._turn()
        with self._launching:
            for step in self._before:
                step(group, here, x, scale_x, out)
            if self._product is not None:
                self._product(here, x, weight, out)
            elif self._gemm is not None:
                bias_at = address(bias) if self._adds_bias else 0
                at = (
                    x.data_ptr(), weight.data_ptr(), out.data_ptr(), bias_at,
                    address(scale_x), address(scale_weight), 0,
                )  # fmt: skip
                self._gemm.launch(at, table_of(here, self._device).data_ptr())
            for step in self._after:
                step(group, here, x, scale_x, out)


def _all_of(steps: Sequence[Step | None]) -> tuple[Step, ...]:
    return tuple(step for step in steps if step is not None)


def _precision() -> str:
    return torch.backends.cuda.matmul.fp32_precision  # type: ignore[no-any-return]
