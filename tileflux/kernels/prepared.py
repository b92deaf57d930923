"""Launching a kernel again without asking Triton what it has asked before.

A launch through Triton looks at every argument to find the variant it needs, and builds texts to look it up by: some 50
us. Our kernels take plain numbers, and what makes a variant is known before; so the compiled kernel that the
first launch returns is kept, and later launches hand their arguments straight to its launcher. The launcher's interface
is Triton's own affair and changes between versions: everything that knows it is in this file, and where the version is
another one, or programs are interpreted, or somebody listens to launches, launches go through Triton.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Generic, TypeVar

import torch
import triton
from triton import knobs
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import JITFunction

__all__ = ["Kept", "Launcher", "Tile", "launch_step", "relaunchable"]

_KNOWS_LAUNCHER = triton.__version__.startswith("3.6.")
_MAX_KEPT = 1024

Value = TypeVar("Value")


class Kept(dict[Hashable, Value], Generic[Value]):
    """A dictionary that starts anew when it is full: the hot path looks things up, and must not grow for ever."""

    def find(self, key: object) -> Value | None:
        """What is kept by ``key``; nothing by what cannot be a key, such as an argument that will be refused."""
        try:
            return self.get(key)
        except TypeError:
            return None

    def keep(self, key: Hashable, value: Value) -> None:
        """Have it found by ``key`` from now on."""
        if len(self) >= _MAX_KEPT:
            self.clear()
        self[key] = value


class Launcher:
    """A compiled and loaded kernel on one GPU, with the constants it was compiled for."""

    __slots__ = ("_constants", "_device", "_function", "_metadata", "_run")

    def __init__(self, compiled: Any, device: int, constants: tuple[Any, ...]) -> None:
        self._run, self._function, self._metadata = compiled.run, compiled.function, compiled.packed_metadata
        self._device, self._constants = device, constants

    def launch(self, grid: int, *arguments: object) -> None:
        """Queue ``grid`` programs on the current stream."""
        self._run(
            grid, 1, 1, raw_stream(self._device), self._function, self._metadata, None, None, None,
            *arguments, *self._constants,
        )  # fmt: skip


class Tile:
    """What the launcher reads of a ``TensorDescriptor``, without the tensor and the checks of one."""

    __slots__ = ("_address", "shape", "strides")

    padding = "zero"

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self._address, self.shape, self.strides = address, shape, strides

    @property
    def base(self) -> Tile:
        """Who knows the address."""
        return self

    def data_ptr(self) -> int:
        """Where it begins."""
        return self._address


def relaunchable(kernel: Any) -> bool:
    """Whether launches of ``kernel`` may pass Triton by: looked at before each, since hooks come and go."""
    if not _KNOWS_LAUNCHER or type(kernel) not in (JITFunction, GluonJITFunction) or kernel.pre_run_hooks:
        return False
    return not (_has_calls(knobs.runtime.launch_enter_hook) or _has_calls(knobs.runtime.launch_exit_hook))


def launch_step(
    kernel: Any, grid: int, arguments: tuple[Any, ...], constants: tuple[Any, ...], num_warps: int, **options: int
) -> None:
    """Launch a kernel of which nothing but constants makes a variant: arguments first, the last of them its table.

    ``options`` for the compiler are always the same for a kernel.
    """
    table: torch.Tensor = arguments[-1]
    key = (id(kernel), table.device, constants)
    known = _steps.get(key)
    if known is not None and relaunchable(kernel):
        known.launch(grid, *arguments)
        return
    compiled = kernel[(grid,)](*arguments, *constants, num_warps=num_warps, **options)
    if relaunchable(kernel):
        _steps.keep(key, Launcher(compiled, table.device.index or 0, constants))


_steps: Kept[Launcher] = Kept()


def _has_calls(hook: Any) -> bool:
    return bool(getattr(hook, "calls", hook))


def raw_stream(device: int) -> int:
    """The current stream, as the driver knows it."""
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream
