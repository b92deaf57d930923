"""What one interpreted operation computes: Triton's interpreter builder, repaired.

``interpreter.py`` installs it and says what is repaired and why. Triton keeps bf16 as raw uint16 and fp8 as raw
uint8; the stock builder computes with those bit patterns nearly everywhere. Here a value is decoded to fp32, computed
with, and encoded again, rounding to nearest even as the GPU does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from triton.runtime import interpreter as stock

__all__ = [
    "AccessKind",
    "Array",
    "AsmFunction",
    "Conductor",
    "Order",
    "Program",
    "RepairedBuilder",
    "asm_functions",
    "thread",
]

Array = npt.NDArray[Any]
AsmFunction = Callable[..., "Array | Sequence[Array | None] | None"]
Program = tuple[tuple[int, int, int], Callable[[], None]]
"""Grid position and body of one program of a launch."""
AccessKind = Literal["load", "store", "atomic"]
Order = Literal["", "relaxed", "acquire", "release", "acq_rel"]

asm_functions: dict[str, AsmFunction] = {}
"""What stands in for an inline asm text. Filled by ``interpreter.register_asm``."""

_atomics = stock._interpreter
_ir = stock._ir
_ORDERS: dict[Any, Order] = {
    _ir.MEM_SEMANTIC.RELAXED: "relaxed",
    _ir.MEM_SEMANTIC.ACQUIRE: "acquire",
    _ir.MEM_SEMANTIC.RELEASE: "release",
    _ir.MEM_SEMANTIC.ACQUIRE_RELEASE: "acq_rel",
}
_FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
_UINT8, _UINT16 = np.dtype(np.uint8), np.dtype(np.uint16)


class Conductor(Protocol):
    """Takes charge of the kernels launched on a thread: when their programs run, and what they may see of memory."""

    def launch(self, kernel: str, programs: Sequence[Program]) -> None:
        """Run every program and return when all have ended."""

    def access(self, kind: AccessKind, addresses: Array, mask: Array, itemsize: int, order: Order) -> None:
        """Called before an access of ``itemsize`` bytes at each address whose mask is true."""

    def poll(self, address: int, wanted: int) -> int:
        """Return the flag's value once it has reached ``wanted``."""

    def now_ns(self) -> int:
        """The clock that kernels read."""


class _ThreadState(threading.local):
    grid_idx: tuple[int, int, int] | None = None
    grid_dim: tuple[int, int, int] | None = None
    conductor: Conductor | None = None


thread = _ThreadState()
"""Where this thread is in a launch. The stock interpreter keeps it in one global, so threads mix up their programs."""


class RepairedBuilder(stock.InterpreterBuilder):  # type: ignore[misc]
    """See the module's docstring; methods that are not here are stock."""

    def __init__(self) -> None:
        super().__init__()
        # Else every integer operation is done again in int64 for an assertion that only debug builds look at.
        self.options = stock.InterpreterOptions(sanitize_overflow=False)

    grid_idx = property(lambda self: thread.grid_idx, lambda self, value: setattr(thread, "grid_idx", value))
    grid_dim = property(lambda self: thread.grid_dim, lambda self, value: setattr(thread, "grid_dim", value))

    # Memory: whoever conducts this thread hears of an access before it happens.

    def create_masked_load(
        self, ptrs: Any, mask: Any, other: Any, cache_modifier: Any, eviction_policy: Any, is_volatile: Any
    ) -> Any:
        if thread.conductor is not None:
            _announce("load", ptrs, mask, "")
        return super().create_masked_load(ptrs, mask, other, cache_modifier, eviction_policy, is_volatile)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, cache_modifier: Any, eviction_policy: Any) -> Any:
        if thread.conductor is not None:
            _announce("store", ptrs, mask, "")
        return super().create_masked_store(ptrs, value, mask, cache_modifier, eviction_policy)

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        if thread.conductor is not None:
            _announce("atomic", ptr, np.ones_like(ptr.data, dtype=np.bool_), _ORDERS[sem])
        return super().create_atomic_cas(ptr, cmp, val, sem, scope)

    def create_atomic_rmw(self, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        if thread.conductor is not None:
            _announce("atomic", ptr, mask, _ORDERS[sem])
        if val.dtype.scalar == tl.bfloat16 and op == _ir.ATOMIC_OP.FADD:
            return stock.TensorHandle(_atomic_add_bf16(ptr.data, val.data, mask.data), tl.bfloat16)
        return super().create_atomic_rmw(op, ptr, val, mask, sem, scope)

    # Numbers.

    def get_bf16(self, value: float) -> Any:
        return stock.TensorHandle(_encode(np.array([value], dtype=np.float32), tl.bfloat16), tl.bfloat16)

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        if not _is_coded(lhs):
            return super().binary_op(lhs, rhs, op)
        out = op(_decode(lhs), _decode(rhs))
        return stock.TensorHandle(out if out.dtype == np.bool_ else _encode(out, lhs.dtype.scalar), lhs.dtype.scalar)

    def unary_op(self, arg: Any, op: Any) -> Any:
        if not _is_coded(arg):
            return super().unary_op(arg, op)
        return stock.TensorHandle(_encode(op(_decode(arg)), arg.dtype.scalar), arg.dtype.scalar)

    def ternary_op(self, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
        if op is np.where or not _is_coded(other):
            return super().ternary_op(lhs, rhs, other, op)
        out = op(_decode(lhs), _decode(rhs), _decode(other))
        return stock.TensorHandle(_encode(out, other.dtype.scalar), other.dtype.scalar)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        if not _is_coded(z):
            return super().create_fma(x, y, z)
        return stock.TensorHandle(_encode(_decode(x) * _decode(y) + _decode(z), z.dtype.scalar), z.dtype.scalar)

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        if not (_is_coded(a) or _is_coded(b)):
            return super().create_dot(a, b, d, input_precision, max_num_imprecise_acc)
        out = np.matmul(_decode(a), _decode(b)) + _decode(d)
        return stock.TensorHandle(_encode(out, d.dtype.scalar), d.dtype.scalar)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        if not (_is_coded(src) or _codes(dst_type.scalar)):
            return super().cast_impl(src, dst_type)
        return stock.TensorHandle(_encode(_decode(src), dst_type.scalar), dst_type.scalar)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        toward_zero = rounding_mode == _ir.ROUNDING_MODE.RTZ
        if toward_zero or not (_is_coded(src) or _codes(dst_type.scalar)):
            return super().create_fp_to_fp(src, dst_type, rounding_mode)
        return self.cast_impl(src, dst_type)

    # Inline asm: looked up by its text.

    def create_inline_asm(
        self, asm: str, constraints: str, values: Sequence[Any], types: Sequence[Any], is_pure: bool, pack: int
    ) -> Any:
        function = asm_functions.get(asm)
        if function is None:
            raise NotImplementedError(f"nothing registered for inline asm {asm!r}; see interpreter.register_asm")
        shape = np.broadcast_shapes((1,), *(value.data.shape for value in values))
        out = function(*(value.data for value in values))
        outs = out if isinstance(out, (list, tuple)) else [out]
        return _AsmResults([_as_handle(array, type_, shape) for array, type_ in zip(outs, types, strict=True)])


class _AsmResults:
    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def get_result(self, index: int) -> Any:
        return self._handles[index]


def _as_handle(array: Any, type_: Any, shape: tuple[int, ...]) -> Any:
    """What asm gave back, as a block of the type it was declared with; None stands for zeroes nobody looks at."""
    dtype = stock._get_np_dtype(type_)
    data = np.zeros(shape, dtype) if array is None else np.broadcast_to(np.asarray(array).astype(dtype), shape)
    return stock.TensorHandle(data, type_.scalar)


def _announce(kind: AccessKind, ptrs: Any, mask: Any, order: Order) -> None:
    conductor = thread.conductor
    assert conductor is not None
    itemsize = stock._get_np_dtype(ptrs.get_element_ty()).itemsize
    # Descriptor accesses bring a bare array as their mask.
    conductor.access(kind, ptrs.data, mask if isinstance(mask, np.ndarray) else mask.data, itemsize, order)


def _codes(dtype: Any) -> bool:
    """Whether Triton keeps this type as raw bits that numpy takes for an integer."""
    return dtype.name == "bf16" or dtype.name in _FP8


def _is_coded(handle: Any) -> bool:
    dtype = handle.data.dtype
    return dtype in (_UINT16, _UINT8) and _codes(handle.dtype.scalar)


def _decode(handle: Any) -> Array:
    """The handle's values as numbers numpy can compute with."""
    if not _is_coded(handle):
        return np.asarray(handle.data)
    if handle.dtype.scalar.name == "bf16":
        bits: npt.NDArray[np.uint32] = handle.data.astype(np.uint32, order="C") << 16
        return bits.view(np.float32)
    return _as_torch(handle.data, np.uint8).view(_FP8[handle.dtype.scalar.name]).float().numpy()


def _encode(values: Array, dtype: Any) -> Array:
    """Numbers as ``dtype`` keeps them. fp8 saturates, like the GPU's conversion from fp32."""
    if not _codes(dtype):
        return values.astype(stock._get_np_dtype(dtype), copy=False)
    tensor = _as_torch(values, np.float32)
    if dtype.name == "bf16":
        return tensor.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    fp8 = _FP8[dtype.name]
    largest = torch.finfo(fp8).max
    return tensor.clamp(-largest, largest).to(fp8).view(torch.uint8).numpy()


def _as_torch(array: Array, dtype: Any) -> torch.Tensor:
    array = array.astype(dtype, order="C", copy=False)
    # A block that was broadcast is read-only, which torch warns of.
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _atomic_add_bf16(addresses: Array, values: Array, mask: Array) -> Array:
    """Add one by one with compare-and-swap on the 32-bit word around each, so that other processes may add too."""
    shape = np.broadcast_shapes(addresses.shape, values.shape)
    flat_addresses, flat_values, flat_mask = (np.broadcast_to(x, shape).ravel() for x in (addresses, values, mask))
    before = np.zeros(flat_addresses.size, np.uint16)
    for i in np.flatnonzero(flat_mask):
        word = np.array([int(flat_addresses[i]) & ~3], np.uint64)
        shift = 16 if int(flat_addresses[i]) & 2 else 0
        addend = (np.uint32(flat_values[i]) << np.uint32(16)).view(np.float32)
        seen = np.zeros(1, np.uint32)
        while True:
            bits = (int(seen[0]) >> shift) & 0xFFFF
            total = np.array([bits << 16], np.uint32).view(np.float32) + addend
            new = (int(seen[0]) & ~(0xFFFF << shift)) | (int(_encode(total, tl.bfloat16)[0]) << shift)
            swap = np.array([new], np.uint32)
            found = _atomics.atomic_cas(word, seen, swap, _atomics.MEM_SEMANTIC.ACQUIRE_RELEASE)
            if found[0] == seen[0]:
                before[i] = bits
                break
            seen = found
    return before.reshape(shape)
