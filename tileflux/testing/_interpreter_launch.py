"""How interpreted kernels are launched: threads may launch at once, and programs of one launch may run side by side.

Stands in for ``GridExecutor.__call__``, ``InterpretedFunction.__call__`` and the patching of ``triton.language`` around
both.
"""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.errors import InterpreterError

from tileflux.errors import TilefluxError
from tileflux.testing._interpreter_builder import Program, thread
from tileflux.testing._interpreter_speed import shortcuts

__all__ = ["call_device_function", "call_hooks", "launch", "launch_failed", "loop_range", "scalar", "settings"]


class Settings:
    """What ``interpreter.install`` sets."""

    num_concurrent = 0


settings = Settings()
call_hooks: dict[Callable[..., Any], Callable[..., Any]] = {}
"""Device functions whose calls are intercepted. Filled by ``interpreter.register_call``."""


def scalar(value: Any) -> int:
    """The number in a kernel's scalar, whether a tensor, a constexpr or a plain int."""
    if isinstance(value, tl.tensor):
        return int(value.handle.data.reshape(-1)[0])
    return int(getattr(value, "value", value))


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
    for owner in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
        for name, member in inspect.getmembers(owner):
            if tl.core.is_builtin(member):
                scope.set_attr(owner, name, _bound(member, stock.interpreter_semantic))
    stock._patch_lang_tensor(tl.tensor, scope)
    for language in (tl, tl.core):
        stock._patch_lang_core(language, scope)
        scope.set_attr(language, "range", loop_range)
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
    # Kernels ask only scalars for their truth; Triton's own host code asks whether there is a tensor at all.
    return bool(data.reshape(-1)[0]) if data.size == 1 else True


def loop_range(begin: Any, end: Any = None, step: Any = 1, **hints: Any) -> Iterator[Any]:
    """``range`` and ``tl.range`` as compiled: the variable is a tensor, int64 if a bound is, else int32."""
    begin, end = (0, begin) if end is None else (begin, end)
    bounds = [bound for bound in (begin, end, step) if isinstance(bound, tl.tensor)]
    wide = any(bound.dtype.primitive_bitwidth == 64 for bound in bounds)
    dtype, np_dtype = (tl.int64, np.int64) if wide else (tl.int32, np.int32)
    for value in range(scalar(begin), scalar(end), scalar(step)):
        yield tl.tensor(stock.TensorHandle(np.array([value], np_dtype), dtype), dtype)


def call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A kernel, or host code, calls a ``@triton.jit`` function: ``InterpretedFunction.__call__``."""
    hook = call_hooks.get(self.fn)
    body = self.rewrite()
    with _language:
        try:
            return body(*args, **kwargs) if hook is None else hook(body, *args, **kwargs)
        except (InterpreterError, TilefluxError):
            raise
        except Exception as error:
            raise InterpreterError(f"{self.__name__}: {error!r}") from error


def launch(self: Any, *args: Any, **kwargs: Any) -> None:
    """A kernel is launched: ``GridExecutor.__call__``."""
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
        if len(grid) > 3:
            raise ValueError(f"grid={grid} should have at most 3 dimensions")
        x, y, z = (*map(int, grid), 1, 1)[:3]
        _run_grid(self.fn, bound, (x, y, z))
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


def _run_grid(kernel: Callable[..., Any], args: dict[str, Any], grid: tuple[int, int, int]) -> None:
    programs: list[Program] = []
    for position in itertools.product(range(grid[0]), range(grid[1]), range(grid[2])):
        programs.append((position, _program(kernel, args, grid, position)))
    if thread.conductor is not None:
        thread.conductor.launch(kernel.__name__, programs)
    elif settings.num_concurrent > 1 and len(programs) > 1:
        _run_side_by_side(programs, settings.num_concurrent)
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


class Abandoned(BaseException):
    """Another program of the launch failed: stop waiting. Not an ``Exception``, so that handlers let it pass."""


class _SideBySide(threading.local):
    launch: _Launch | None = None


_side_by_side = _SideBySide()


class _Launch:
    """The programs of one launch, handed out to threads."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self._lock = threading.Lock()
        self._waiting = iter(programs)
        self.error: BaseException | None = None

    def work(self) -> None:
        _side_by_side.launch = self
        while self.error is None:
            with self._lock:
                program = next(self._waiting, None)
            if program is None:
                return
            try:
                program[1]()
            except Abandoned:
                return
            except BaseException as error:
                with self._lock:
                    self.error = self.error or error


def launch_failed() -> bool:
    """Whether another program of the launch this thread works on has failed."""
    return _side_by_side.launch is not None and _side_by_side.launch.error is not None


def _run_side_by_side(programs: Sequence[Program], count: int) -> None:
    shared = _Launch(programs)
    num_workers = min(count, len(programs))
    workers = [threading.Thread(target=shared.work, name=f"program-{i}", daemon=True) for i in range(num_workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if shared.error is not None:
        raise shared.error
