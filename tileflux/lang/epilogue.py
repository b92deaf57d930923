"""What happens to an accumulated tile before it is finished: scales, bias, activation, in fp32, in this order."""

import triton
import triton.language as tl

from tileflux.lang.remote import typed

__all__ = ["activate", "scaled"]


@triton.jit
def scaled(total, rows, row_mask, columns, column_mask, scale_a, scale_b, bias, SPEC: tl.constexpr):
    """``total`` as fp32, times the scales of its rows and columns, plus the bias of its columns.

    Of SPEC it reads ``scale_a`` and ``scale_b`` ("none", "tensor" or "channel"), ``has_bias`` and ``bias_type``.
    """
    value = total.to(tl.float32)
    if SPEC.scale_a == "tensor":
        value = value * tl.load(typed(scale_a, tl.float32, False))
    elif SPEC.scale_a == "channel":
        value = value * tl.load(typed(scale_a, tl.float32, False) + rows, mask=row_mask, other=0.0)[:, None]
    if SPEC.scale_b == "tensor":
        value = value * tl.load(typed(scale_b, tl.float32, False))
    elif SPEC.scale_b == "channel":
        value = value * tl.load(typed(scale_b, tl.float32, False) + columns, mask=column_mask, other=0.0)[None, :]
    if SPEC.has_bias:
        # Address 0: another rank adds it. A branch here, not a variant: virtual ranks must all run the same one.
        added = tl.load(typed(bias, SPEC.bias_type, False) + columns, mask=column_mask & (bias != 0), other=0.0)
        value = value + added.to(tl.float32)[None, :]
    return value


@triton.jit
def activate(value, gate, SPEC: tl.constexpr):
    """The activation of ``value``; for "swiglu", ``silu(gate) * value``."""
    if SPEC.activation == "relu":
        value = tl.maximum(value, 0.0)
    elif SPEC.activation == "gelu":
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif SPEC.activation == "silu":
        value = _silu(value)
    elif SPEC.activation == "swiglu":
        value = _silu(gate) * value
    return value


@triton.jit
def _silu(value):
    return value / (1.0 + tl.exp(-value))
