"""Repairs Triton's interpreter, in this process, until kernels that talk to each other run in it as on a GPU.

Stock Triton 3.6 (later versions alike where not said) under ``TRITON_INTERPRET=1``:

- computes with the raw bits of bf16 in ``tl.dot``, in arithmetic and in sums: garbage, and no error;
- truncates fp32 to bf16 and rounds fp8 half away from zero, where the GPU rounds both to nearest even;
- makes loop variables Python ints, where compiled ones are tensors with a type and methods;
- refuses inline asm and bf16 atomics, and with numpy >= 2.4 every loop over a kernel argument (3.6 only);
- keeps the grid position in one global and patches ``tl`` around each launch, so two threads that launch at once get
  each other's program ids, or an error, or a wrong result;
- runs the programs of a launch one after another, so one that waits for a later one never ends;
- copies CPU arguments onto themselves after a launch, under the hands of a peer that may be writing there.

``install()`` mends all of these: the arithmetic in ``_interpreter_builder.py``, the rest in ``_interpreter_launch.py``.
Device functions can be intercepted by ``register_call``, inline asm is given a meaning by ``register_asm``, and a
``Conductor`` (the simulator) can take over the launches of a thread. All this uses private names of Triton.
"""

from __future__ import annotations

import ast
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as stock

from tileflux import env
from tileflux.kernels import launch
from tileflux.lang import signal as lang_signal
from tileflux.testing import _interpreter_launch as launching
from tileflux.testing._interpreter_builder import (
    Array,
    AsmFunction,
    Conductor,
    RepairedBuilder,
    asm_functions,
    thread,
)
from tileflux.testing._interpreter_launch import scalar
from tileflux.testing._interpreter_speed import np_dtype

__all__ = ["Conductor", "concurrent_programs", "conducted", "conductor", "install", "register_asm", "register_call"]

_POLL_PAUSE_S = 50e-6  # an unsatisfied poll gives the core away: four ranks share two cores in CI
_LOOP_RANGE = "tileflux_loop_range"

_installed = False
_rewrite_lock = threading.Lock()


def install(concurrent_programs: int | None = None) -> None:
    """Repair the interpreter of this process. Calling again can only change ``concurrent_programs``.

    With ``concurrent_programs=k`` the first ``k`` programs of a launch start together, on threads, and each that ends
    makes room for the next; 0, as at first, runs them one after another: faster where none waits for a later one.
    """
    global _installed
    _check_interpreting()
    if concurrent_programs is not None:
        if concurrent_programs < 0:
            raise ValueError(f"concurrent_programs={concurrent_programs} should be 0 (one after another) or more")
        launching.settings.num_concurrent = concurrent_programs
    if _installed:
        return
    # The builder is changed in place: rewritten kernels and semantics made earlier hold on to it.
    stock.interpreter_builder.__class__ = RepairedBuilder
    stock.interpreter_builder.options = RepairedBuilder().options
    stock.InterpreterBuilder = RepairedBuilder
    stock._get_np_dtype = np_dtype
    stock.ReduceScanOpInterface.apply = _apply_decoded(stock.ReduceScanOpInterface.apply)
    stock.ASTTransformer.visit_For = _visit_for
    setattr(stock, _LOOP_RANGE, launching.loop_range)  # the rewriter hands this module's names to every kernel
    stock.InterpretedFunction.rewritten_fn.clear()
    stock.InterpretedFunction.rewrite = _rewrite_once(stock.InterpretedFunction.rewrite)
    stock.InterpretedFunction.__call__ = launching.call_device_function
    stock.GridExecutor.__call__ = launching.launch
    register_asm(lang_signal.STORE_RELEASE.value, _store_release)
    register_asm(lang_signal.STORE_RELEASE_CHOSEN.value, _store_release_chosen)
    register_asm(lang_signal.LOAD_ACQUIRE_CHOSEN.value, _load_acquire_chosen)
    register_asm(lang_signal.GLOBALTIMER.value, _globaltimer)
    register_asm(lang_signal.SMID.value, np.zeros_like)
    register_call(lang_signal.poll, _poll)
    register_call(lang_signal.poll_all, _poll_all)
    launch.allow_interpreter()
    _installed = True


@contextmanager
def concurrent_programs(count: int) -> Iterator[None]:
    """Keep ``count`` programs of every launch running side by side within the ``with`` block."""
    before = launching.settings.num_concurrent
    install(count)
    try:
        yield
    finally:
        install(before)


def register_asm(text: str, function: AsmFunction) -> None:
    """Let ``function`` stand in for inline asm with exactly this text.

    It gets one numpy array per operand and returns one per result: an array, a list of them, or None for zeroes.
    """
    asm_functions[text] = function


def register_call(device_function: Any, hook: Callable[..., Any]) -> None:
    """Have calls of a ``@triton.jit`` function go to ``hook(body, *args)``; ``body(*args)`` makes the call itself."""
    if not isinstance(device_function, stock.InterpretedFunction):
        raise ValueError(f"{device_function!r} is not an interpreted @triton.jit function")
    launching.call_hooks[device_function.fn] = hook


@contextmanager
def conducted(conductor: Conductor) -> Iterator[None]:
    """Put the launches and accesses of this thread in the hands of ``conductor``."""
    before, thread.conductor = thread.conductor, conductor
    try:
        yield
    finally:
        thread.conductor = before


def conductor() -> Conductor | None:
    """Who conducts this thread, if anybody."""
    return thread.conductor


def _check_interpreting() -> None:
    interpreted = (tl.sum, lang_signal.poll)
    if not env.interpreting() or not all(isinstance(function, stock.InterpretedFunction) for function in interpreted):
        raise ValueError(
            "kernels of this process were made to be compiled: set TRITON_INTERPRET=1 before triton or tileflux "
            "is first imported, since @triton.jit reads it when a kernel is defined"
        )


def _apply_decoded(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Reductions and scans of bf16 in fp32; the result is rounded once."""

    def apply_decoded(self: Any, operands: Any) -> Any:
        if not isinstance(operands, tuple):
            return apply_decoded(self, (operands,))[0]
        coded = [operand.dtype == tl.bfloat16 for operand in operands]
        cast = stock.interpreter_semantic.cast
        decoded = (cast(x, tl.float32) if is_bf16 else x for x, is_bf16 in zip(operands, coded, strict=True))
        results = apply(self, tuple(decoded))
        return tuple(cast(x, tl.bfloat16) if is_bf16 else x for x, is_bf16 in zip(results, coded, strict=False))

    return apply_decoded


def _visit_for(self: Any, node: ast.For) -> ast.For:
    """Have a kernel's ``for i in range(...)`` loop over tensors; host code of its module keeps its ``range``."""
    self.generic_visit(node)
    call = node.iter
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "range":
        call.func.id = _LOOP_RANGE
    return node


def _rewrite_once(rewrite: Callable[..., Any]) -> Callable[..., Any]:
    def rewrite_once(self: Any) -> Any:
        known = self.rewritten_fn.get(self.fn)
        if known is not None:
            return known
        with _rewrite_lock:
            return rewrite(self)

    return rewrite_once


def _store_release(addresses: Array, values: Array, _mask: Array) -> None:
    mask = np.ones(addresses.shape, np.bool_)
    if thread.conductor is not None:
        thread.conductor.access("store", addresses, mask, 4, "release")
    atomics = stock._interpreter
    values = np.broadcast_to(values.astype(np.int32, copy=False), addresses.shape)
    atomics.atomic_rmw(atomics.RMW_OP.XCHG, addresses, values, mask, atomics.MEM_SEMANTIC.RELEASE)


def _store_release_chosen(addresses: Array, values: Array, chosen: Array) -> None:
    """One after the other, so that a simulated peer may find some raised and others not."""
    chosen = np.broadcast_to(chosen, addresses.shape)
    values = np.broadcast_to(values, addresses.shape)
    for index in np.flatnonzero(chosen):
        _store_release(addresses[index : index + 1], values[index : index + 1], chosen)


def _load_acquire_chosen(addresses: Array, chosen: Array) -> Array:
    """Without a conductor, who hears of polls before they come here."""
    atomics, mask = stock._interpreter, np.broadcast_to(chosen, addresses.shape) != 0
    nothing = np.zeros(addresses.shape, np.int32)
    found = atomics.atomic_rmw(atomics.RMW_OP.ADD, addresses, nothing, mask, atomics.MEM_SEMANTIC.ACQUIRE)
    return np.where(mask, found, 0)


def _globaltimer(lanes: Array) -> Array:
    now = time.perf_counter_ns() if thread.conductor is None else thread.conductor.now_ns()
    return np.full(lanes.shape, now, np.int64)


def _poll(body: Callable[..., Any], flag: Any, wanted: Any) -> Any:
    if thread.conductor is not None:
        seen = thread.conductor.poll(scalar(flag), scalar(wanted))
        return tl.tensor(stock.TensorHandle(np.array([seen], np.int32), tl.int32), tl.int32)
    value = body(flag, wanted)
    if (scalar(value) - scalar(wanted)) & 0x80000000:
        if launching.launch_failed():
            raise launching.Abandoned
        time.sleep(_POLL_PAUSE_S)
    return value


def _poll_all(body: Callable[..., Any], flags: Any, chosen: Any, wanted: Any) -> Any:
    limit, is_chosen = scalar(wanted), chosen.handle.data
    conductor = thread.conductor
    if conductor is not None:
        seen = np.zeros(is_chosen.shape, np.int32)
        for index in np.flatnonzero(is_chosen):
            seen[index] = conductor.poll(int(flags.handle.data[index]), limit)
        return tl.tensor(stock.TensorHandle(seen, tl.int32), tl.block_type(tl.int32, list(seen.shape)))
    values = body(flags, chosen, wanted)
    if np.any((values.handle.data - np.int32(limit) < 0) & is_chosen):
        if launching.launch_failed():
            raise launching.Abandoned
        time.sleep(_POLL_PAUSE_S)
    return values
