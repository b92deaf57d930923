"""Repairs Triton's interpreter, in this process, until kernels that talk to each other run in it as on a GPU.

Stock Triton 3.6 (later versions alike where not said) under ``TRITON_INTERPRET=1``:

- computes with the raw bits of bf16 in ``tl.dot``, in arithmetic and in sums: garbage, and no error;
- truncates fp32 to bf16 and rounds fp8 half away from zero, where the GPU rounds both to nearest even;
- checks integer arithmetic for overflow, where compiled kernels wrap (flags rely on it);
- makes loop variables Python ints, where compiled ones are tensors with a type and methods;
- refuses inline asm and bf16 atomics, and with numpy >= 2.4 every loop over a kernel argument (3.6 only);
- keeps the grid position in one global and patches ``tl`` around each launch, so two threads that launch at once get
  each other's program ids, or an error, or a wrong result;
- runs the programs of a launch one after another, so one that waits for a later one never ends;
- copies CPU arguments onto themselves after a launch, under the hands of a peer that may be writing there.

``install()`` mends all of these; the arithmetic is in ``testing/_interpreter_builder.py``. Device functions can be
intercepted by ``register_call``, inline asm is given a meaning by ``register_asm``, and a ``Conductor`` (the simulator) can take
over the launches of a thread. Uses private names of Triton throughout: a new Triton version is tried here first.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.errors import InterpreterError

from tileflux import env
from tileflux.errors import TilefluxError
from tileflux.lang import signal as lang_signal
from tileflux.testing._interpreter_builder import (
    Array,
    AsmFunction,
    Conductor,
    RepairedBuilder,
    asm_functions,
    thread,
)
from tileflux.testing._interpreter_speed import np_dtype, shortcuts

__all__ = ["Conductor", "concurrent_programs", "conducted", "conductor", "install", "register_asm", "register_call", "scalar"]

_POLL_PAUSE_S = 50e-6  # an unsatisfied poll gives the core away: four ranks share two cores in CI

CallHook = Callable[..., Any]
_call_hooks: dict[Callable[..., Any], CallHook] = {}
_num_concurrent = 0
_installed = False
_rewrite_lock = threading.Lock()


def install(concurrent_programs: int = 0) -> None:
    """Repair the interpreter of this process. Calling again only changes ``concurrent_programs``.

    With ``concurrent_programs=k`` the first ``k`` programs of a launch start together, on threads, and each that ends
    makes room for the next; 0 runs them one after another, which is faster where none waits for a later one.
    """
    global _installed, _num_concurrent
    if concurrent_programs < 0:
        raise ValueError(f"concurrent_programs={concurrent_programs} should be 0 (one after another) or more")
    _check_interpreting()
    _num_concurrent = concurrent_programs
    if _installed:
        return
    # The builder is changed in place: rewritten kernels and semantics made earlier hold on to it.
    stock.interpreter_builder.__class__ = RepairedBuilder
    stock.InterpreterBuilder = RepairedBuilder
    stock.interpreter_builder.options = RepairedBuilder().options
    stock._get_np_dtype = np_dtype
    stock.ReduceScanOpInterface.apply = _apply_reduction(stock.ReduceScanOpInterface.apply)
    stock.ASTTransformer.visit_For = _visit_for
    stock.tileflux_loop_range = _loop_range  # the rewriter hands this module's names to every kernel
    stock.InterpretedFunction.rewritten_fn.clear()
    stock.InterpretedFunction.__call__ = _call_device_function
    stock.InterpretedFunction.rewrite = _rewrite(stock.InterpretedFunction.rewrite)
    stock.GridExecutor.__call__ = _launch
    register_asm(lang_signal.STORE_RELEASE.value, _store_release)
    register_asm(lang_signal.GLOBALTIMER.value, _globaltimer)
    register_call(lang_signal.poll, _poll)
    _installed = True


@contextmanager
def concurrent_programs(count: int) -> Iterator[None]:
    """Keep ``count`` programs of every launch running side by side within the ``with`` block."""
    before = _num_concurrent
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


def register_call(device_function: Any, hook: CallHook) -> None:
    """Have calls of a ``@triton.jit`` function from a kernel go to ``hook(body, *args)``; ``body(*args)`` is the call."""
    if not isinstance(device_function, stock.InterpretedFunction):
        raise ValueError(f"{device_function!r} is not an interpreted @triton.jit function")
    _call_hooks[device_function.fn] = hook


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


def scalar(value: Any) -> int:
    """The number in a kernel's scalar, whether a tensor, a constexpr or a plain int."""
    if isinstance(value, tl.tensor):
        return int(value.handle.data.reshape(-1)[0])
    return int(getattr(value, "value", value))


def _check_interpreting() -> None:
    interpreted = (tl.sum, lang_signal.poll)
    if not env.interpreting() or not all(isinstance(function, stock.InterpretedFunction) for function in interpreted):
        raise ValueError(
            "kernels of this process were made to be compiled: set TRITON_INTERPRET=1 before triton or tileflux "
            "is first imported, since @triton.jit reads it when a kernel is defined"
        )


class _Language:
    """``triton.language`` with its builtins bound to the interpreter, while at least one launch is under way.

    Counted, since a launch that ends must not take the builtins away from one still running on another thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._changes: list[tuple[Any, str, Any, Any]] = []  # owner, name, stock value, ours

    def __enter__(self) -> None:
        with self._lock:
            if self._num_users == 0:
                self._changes = self._changes or _language_changes()
                for owner, name, _, ours in self._changes:
                    setattr(owner, name, ours)
            self._num_users += 1

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                for owner, name, original, _ in self._changes:
                    if original is stock._MISSING:
                        delattr(owner, name)
                    else:
                        setattr(owner, name, original)


_language = _Language()


def _language_changes() -> list[tuple[Any, str, Any, Any]]:
    """Every attribute a launch replaces, with its value before and during it. Found once: looking costs 1 ms."""
    scope = stock._LangPatchScope()
    semantic = stock.interpreter_semantic
    for owner in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
        for name, member in inspect.getmembers(owner):
            if tl.core.is_builtin(member):
                scope.set_attr(owner, name, _bound(member, semantic))
    stock._patch_lang_tensor(tl.tensor, scope)
    for language in (tl, tl.core):
        stock._patch_lang_core(language, scope)
        scope.set_attr(language, "range", _loop_range)
    # numpy >= 2.4 no longer makes a number of a one-element array.
    scope.set_attr(tl.tensor, "__index__", scalar)
    scope.set_attr(tl.tensor, "__bool__", _truth)
    for name, method in shortcuts(vars(tl.tensor)).items():
        scope.set_attr(tl.tensor, name, method)
    # An attribute set twice has its stock value in the first record, and ours in the owner.
    first: dict[tuple[int, str], tuple[Any, str, Any]] = {}
    for owner, name, original in scope._changes:
        first.setdefault((id(owner), name), (owner, name, original))
    changes = [(owner, name, original, getattr(owner, name)) for owner, name, original in first.values()]
    scope.restore()
    return changes


def _bound(builtin: Any, semantic: Any) -> Callable[..., Any]:
    function = inspect.unwrap(builtin, stop=lambda f: not tl.core.is_builtin(f))

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    return call


def _truth(value: Any) -> bool:
    data = value.handle.data
    # Blocks are never asked for their truth by a kernel, only by `if x:` in Triton's own host code.
    return bool(data.reshape(-1)[0]) if data.size == 1 else True


def _apply_reduction(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Reductions and scans of bf16 in fp32; the result is rounded once."""

    def apply_decoded(self: Any, operands: Any) -> Any:
        if not isinstance(operands, tuple):
            return apply_decoded(self, (operands,))[0]
        types = [operand.dtype for operand in operands]
        semantic = stock.interpreter_semantic
        results = apply(self, tuple(semantic.cast(x, tl.float32) if x.dtype == tl.bfloat16 else x for x in operands))
        return tuple(
            semantic.cast(x, tl.bfloat16) if type_ == tl.bfloat16 else x
            for x, type_ in zip(results, types, strict=False)
        )

    return apply_decoded


def _visit_for(self: Any, node: ast.For) -> ast.For:
    """Have ``for i in range(...)`` of a kernel loop over tensors, without touching ``range`` for its module's host code."""
    self.generic_visit(node)
    call = node.iter
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "range":
        call.func.id = "tileflux_loop_range"
    return node


def _loop_range(begin: Any, end: Any = None, step: Any = 1, **hints: Any) -> Iterator[Any]:
    """``range`` and ``tl.range`` as compiled: int64 variables if a bound is, else int32."""
    begin, end = (0, begin) if end is None else (begin, end)
    bounds = [bound for bound in (begin, end, step) if isinstance(bound, tl.tensor)]
    wide = any(bound.dtype.primitive_bitwidth == 64 for bound in bounds)
    dtype, np_dtype = (tl.int64, np.int64) if wide else (tl.int32, np.int32)
    for value in range(scalar(begin), scalar(end), scalar(step)):
        yield tl.tensor(stock.TensorHandle(np.array([value], np_dtype), dtype), dtype)


def _rewrite(rewrite: Callable[..., Any]) -> Callable[..., Any]:
    def rewrite_once(self: Any) -> Any:
        known = self.rewritten_fn.get(self.fn)
        if known is not None:
            return known
        with _rewrite_lock:
            return rewrite(self)

    return rewrite_once


def _call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    hook = _call_hooks.get(self.fn)
    body = self.rewrite()
    with _language:
        try:
            return body(*args, **kwargs) if hook is None else hook(body, *args, **kwargs)
        except (InterpreterError, TilefluxError):
            raise
        except Exception as error:
            raise InterpreterError(f"{self.__name__}: {error!r}") from error


def _launch(self: Any, *args: Any, **kwargs: Any) -> None:
    """One kernel launch: ``GridExecutor.__call__``."""
    parameters = inspect.signature(self.fn).parameters
    kwargs = {name: value for name, value in kwargs.items() if name in parameters}
    host_args, host_kwargs = args, kwargs
    on_host = _on_host(args) and _on_host(tuple(kwargs.values()))
    if not on_host:
        host_args, host_kwargs = self._init_args_hst(args, kwargs)
    for hook in self.pre_run_hooks:
        hook(*host_args, **host_kwargs)
    with _language:
        bound = inspect.getcallargs(self.fn, *host_args, **host_kwargs)
        bound = {name: x if name in self.constexprs else stock._implicit_cvt(x) for name, x in bound.items()}
        grid = self.grid(bound) if callable(self.grid) else self.grid
        assert len(grid) <= 3, f"a grid has at most 3 dimensions, not {grid}"
        _run_grid(self.fn, bound, tuple(map(int, grid)) + (1,) * (3 - len(grid)))
    if not on_host:
        self._restore_args_dev(args, host_args, kwargs, host_kwargs)


def _on_host(args: Sequence[Any]) -> bool:
    """Whether no argument has to be copied to the CPU and back; what is there already must not be written back."""
    for arg in args:
        if isinstance(arg, tuple):
            if not _on_host(arg):
                return False
        elif isinstance(arg, torch.Tensor):
            if arg.device.type != "cpu":
                return False
        elif hasattr(arg, "base") and not _on_host((arg.base,)):  # TensorDescriptor, TensorWrapper
            return False
    return True


Program = tuple[tuple[int, int, int], Callable[[], None]]


def _run_grid(kernel: Callable[..., Any], args: dict[str, Any], grid: tuple[int, ...]) -> None:
    assert len(grid) == 3
    programs = [
        (position, _program(kernel, args, grid, position)) for position in itertools.product(*(range(n) for n in grid))
    ]
    if thread.conductor is not None:
        thread.conductor.launch(kernel.__name__, programs)
    elif _num_concurrent > 1 and len(programs) > 1:
        _run_side_by_side(programs, _num_concurrent)
    else:
        for _, run in programs:
            run()


def _program(
    kernel: Callable[..., Any], args: dict[str, Any], grid: tuple[int, int, int], position: tuple[int, int, int]
) -> Callable[[], None]:
    def run() -> None:
        thread.grid_dim, thread.grid_idx = grid, position
        try:
            # A GPU does not warn of overflow, nor of NaN.
            with np.errstate(all="ignore"):
                kernel(**args)
        except (InterpreterError, TilefluxError):
            raise
        except Exception as error:
            raise InterpreterError(f"{kernel.__name__}{position}: {error!r}") from error

    return run


class _Abandoned(BaseException):
    """Another program of the launch failed: stop waiting."""


class _SideBySide:
    """The programs of one launch, handed out to threads."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self._lock = threading.Lock()
        self._waiting = iter(programs)
        self.error: BaseException | None = None

    def work(self) -> None:
        side_by_side.launch = self
        while self.error is None:
            with self._lock:
                program = next(self._waiting, None)
            if program is None:
                return
            try:
                program[1]()
            except _Abandoned:
                return
            except BaseException as error:
                with self._lock:
                    self.error = self.error or error


class _SideBySideState(threading.local):
    launch: _SideBySide | None = None


side_by_side = _SideBySideState()


def _run_side_by_side(programs: Sequence[Program], count: int) -> None:
    launch = _SideBySide(programs)
    workers = [
        threading.Thread(target=launch.work, name=f"program-{i}", daemon=True) for i in range(min(count, len(programs)))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if launch.error is not None:
        raise launch.error


def _store_release(addresses: Array, values: Array) -> None:
    mask = np.ones(addresses.shape, np.bool_)
    if thread.conductor is not None:
        thread.conductor.access("store", addresses, mask, 4, "release")
    atomics = stock._interpreter
    values = np.broadcast_to(values.astype(np.int32, copy=False), addresses.shape)
    atomics.atomic_rmw(atomics.RMW_OP.XCHG, addresses, values, mask, atomics.MEM_SEMANTIC.RELEASE)


def _globaltimer(lanes: Array) -> Array:
    now = time.perf_counter_ns() if thread.conductor is None else thread.conductor.now_ns()
    return np.full(lanes.shape, now, np.int64)


def _poll(body: Callable[..., Any], flag: Any, wanted: Any) -> Any:
    if thread.conductor is not None:
        seen = thread.conductor.poll(scalar(flag), scalar(wanted))
        return tl.tensor(stock.TensorHandle(np.array([seen], np.int32), tl.int32), tl.int32)
    value = body(flag, wanted)
    if (scalar(value) - scalar(wanted)) & 0x80000000:
        if side_by_side.launch is not None and side_by_side.launch.error is not None:
            raise _Abandoned
        time.sleep(_POLL_PAUSE_S)
    return value
