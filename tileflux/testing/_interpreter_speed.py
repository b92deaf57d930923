"""Shortcuts through Triton's interpreter for what kernels that pass messages do most: arithmetic on scalar integers.

Each takes the same operands to the same result as the way round, and what is not plainly such a case goes the way
round. Together they make a simulated collective about twice as fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as stock

from tileflux.testing._interpreter_builder import Array

__all__ = ["np_dtype", "shortcuts"]

_NP_DTYPES = {
    "int1": np.dtype(np.bool_),
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
    "bf16": np.dtype(np.uint16),
    **{f"{sign}int{bits}": np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{name: np.dtype(np.uint8) for name in ("fp8e5", "fp8e5b16", "fp8e4nv", "fp8e4b8", "fp8e4b15")},
}
_UINT64 = np.dtype(np.uint64)
_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}


def np_dtype(dtype: Any) -> Any:
    """``interpreter._get_np_dtype``, which makes a table of all types on every call."""
    scalar = dtype.scalar
    return _UINT64 if isinstance(scalar, tl.pointer_type) else _NP_DTYPES[scalar.name]


def shortcuts(methods: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Replacements for methods of ``tl.tensor``, given those bound to the interpreter."""
    replacements = {name: _scalar_method(way, methods[name]) for name, way in _WAYS.items()}
    replacements["__add__"] = _add_method(replacements["__add__"])
    return {"__init__": _init_tensor, "to": _to_method(methods["to"]), **replacements}


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    """``tensor.__init__`` with one shape object for all tensors of a shape; nothing writes to it."""
    shape = tuple(type.shape) if type.is_block() else ()
    known = _shapes.get(shape)
    if known is None:
        known = tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])
        _shapes[shape] = known
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.numel, self.shape = known


def _is_int(type_: Any) -> bool:
    """Whether this is the type of an ordinary scalar integer, rather than of a block, a pointer or a rarer number."""
    return type_ is tl.int32 or type_ is tl.int64


def _divide(a: Array, b: Any) -> Array:
    return np.asarray((a - np.fmod(a, b)) // b)  # towards zero


_ARITHMETIC: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "floordiv": _divide,
    "mod": np.fmod,
    "and": np.bitwise_and,
}
_COMPARISONS: dict[str, Callable[..., Array]] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
_WAYS = {f"__{name}__": (op, False) for name, op in _ARITHMETIC.items()} | {
    f"__{name}__": (op, True) for name, op in _COMPARISONS.items()
}


def _scalar_method(way: tuple[Callable[..., Array], bool], way_round: Callable[..., Any]) -> Callable[..., Any]:
    op, compares = way

    def method(self: Any, other: Any, **kwargs: Any) -> Any:
        type_ = self.type
        if _is_int(type_):
            if type(other) is int and -0x80000000 <= other < 0x80000000:
                data = op(self.handle.data, other)
            elif isinstance(other, tl.tensor) and other.type is type_:
                data = op(self.handle.data, other.handle.data)
            else:
                return way_round(self, other, **kwargs)
            return tl.tensor(stock.TensorHandle(data, type_), tl.int1 if compares else type_)
        return way_round(self, other, **kwargs)

    return method


def _add_method(way_round: Callable[..., Any]) -> Callable[..., Any]:
    """Pointer plus offset, both scalars."""

    def method(self: Any, other: Any, **kwargs: Any) -> Any:
        if isinstance(self.type, tl.pointer_type) and isinstance(other, tl.tensor) and _is_int(other.type):
            itemsize = max(1, self.type.element_ty.primitive_bitwidth // 8)
            data = self.handle.data + itemsize * other.handle.data.astype(np.uint64)
            return tl.tensor(stock.TensorHandle(data, self.handle.dtype), self.type)
        return way_round(self, other, **kwargs)

    return method


def _to_method(way_round: Callable[..., Any]) -> Callable[..., Any]:
    """From int32 to int64, and back."""

    def method(self: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs and _is_int(self.type) and _is_int(dtype):
            return tl.tensor(stock.TensorHandle(self.handle.data.astype(_NP_DTYPES[dtype.name]), dtype), dtype)
        return way_round(self, dtype, *args, **kwargs)

    return method
