"""Launching a kernel again without asking Triton what it has asked before.

A launch through Triton looks at every argument to find the variant it needs, and builds texts to look it up by: some 50
us. Our kernels take plain numbers, and what makes a variant is known before; so the compiled kernel that the
first launch returns is kept, and later launches hand their arguments straight to its launcher. The launcher's interface
is Triton's own affair and changes between versions: everything that knows it is in this file, and where the version is
another one, or programs are interpreted, or somebody listens to launches, launches go through Triton.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch
import triton
from triton import knobs
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import JITFunction

__all__ = ["OUT", "SCALE_X", "X", "Kept", "Launcher", "Repeat", "Tile", "Tiles", "launch_step", "relaunchable"]

_KNOWS_LAUNCHER = triton.__version__.startswith("3.6.")
_MAX_KEPT = 1024

X, SCALE_X, OUT = range(3)
"""Tensors of the caller's, of which a step takes addresses."""

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

    __slots__ = ("_constants", "_device", "_first", "_run", "_tiles")

    def __init__(self, compiled: Any, device: int, constants: tuple[Any, ...]) -> None:
        self._device, self._constants = device, constants
        self._run, self._first, self._tiles = _innermost(compiled)

    def launch(self, grid: int, *arguments: Any) -> None:
        """Queue ``grid`` programs on the current stream."""
        if self._tiles:
            given = list(arguments)
            for place, meta in self._tiles:
                given[place : place + 1] = arguments[place].parts(meta)
            arguments = tuple(given)
        self._run(grid, 1, 1, raw_stream(self._device), *self._first, *arguments, *self._constants)

    def repeat(self, grid: int, arguments: tuple[Any, ...], moving: tuple[tuple[int, int], ...]) -> Repeat:
        """What queues so many programs once more: see ``launch_step``. For a kernel that takes no tiles."""
        first = len(self._first)
        # Not the table: whoever keeps this does not keep its memory, and it may move.
        fixed = [*self._first, *arguments[:-1], 0, *self._constants]
        places = tuple((first + place, which) for place, which in moving)
        return Repeat(self._run, self._device, grid, fixed, first + len(arguments) - 1, places)


class Repeat:
    """A step to be launched again, with where the caller's tensors, and the turn's table, are by then."""

    __slots__ = ("_device", "_fixed", "_grid", "_moving", "_run", "_table")

    def __init__(
        self, run: Any, device: int, grid: int, fixed: list[Any], table: int, moving: tuple[tuple[int, int], ...]
    ) -> None:
        self._run, self._device, self._grid, self._fixed = run, device, grid, fixed
        self._table, self._moving = table, moving

    def __call__(
        self, group: object, here: Any, x: torch.Tensor, scale_x: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """Queue it. Whoever calls has seen that it may pass Triton by, and that the turn's table is in its place."""
        given = self._fixed.copy()
        # As it is now: another call of this turn may have found its row given away, and got it another one.
        given[self._table] = here.table.data_ptr()
        if self._moving:
            tensors = (x, scale_x, out)
            for place, which in self._moving:
                tensor = tensors[which]
                given[place] = 0 if tensor is None else tensor.data_ptr()
        self._run(self._grid, 1, 1, raw_stream(self._device), *given)


def _innermost(compiled: Any) -> tuple[Any, tuple[Any, ...], tuple[tuple[int, Any], ...]]:
    """What launches a compiled kernel, what that takes between stream and arguments, and which arguments are tiles.

    Triton's launcher looks for memory that most kernels do not need, and fills the descriptor of every tile at every
    launch: past it, a tile that has been launched before has its own. Tiles are listed from the last to the first.
    """
    from triton.backends.nvidia.driver import CudaLauncher

    run, function, metadata = compiled.run, compiled.function, (compiled.packed_metadata, None, None, None)
    if type(run) is not CudaLauncher or run.global_scratch_size or run.profile_scratch_size:
        return run, (function, *metadata), ()
    launch = run.launch
    tiles: tuple[tuple[int, Any], ...] = ()
    names = launch.__code__.co_freevars if hasattr(launch, "__code__") else ()
    if "tensordesc_indices" in names:  # as ``wrap_handle_tensordesc`` makes it
        kept = dict(zip(names, (cell.cell_contents for cell in launch.__closure__), strict=True))
        places = sorted(kept["tensordesc_indices"])
        launch, tiles = kept["launcher"], tuple(zip(places, kept["tensordesc_meta"], strict=True))[::-1]
    return launch, (function, run.launch_cooperative_grid, run.launch_pdl, None, None, *metadata), tiles


class Tile:
    """What the launcher reads of a ``TensorDescriptor``, without the tensor and the checks of one.

    It belongs to one argument of one kernel.
    """

    __slots__ = ("_address", "_parts", "shape", "strides")

    padding = "zero"

    def __init__(self, address: int, shape: Sequence[int], strides: Sequence[int]) -> None:
        self._address, self.shape, self.strides = address, shape, strides
        self._parts: list[Any] | None = None

    @property
    def base(self) -> Tile:
        """Who knows the address."""
        return self

    def data_ptr(self) -> int:
        """Where it begins."""
        return self._address

    def parts(self, meta: Any) -> list[Any]:
        """What a kernel takes in its place, made once: ``meta`` is what Triton knows of the argument."""
        if self._parts is None:
            from triton.backends.nvidia.driver import make_tensordesc_arg

            self._parts = make_tensordesc_arg(self, meta)
        return self._parts


class Tiles(dict[int, Tile]):
    """The tiles of one argument of a kernel, by address; those of the same tensors come again and again."""

    def __init__(self, shape: Sequence[int], strides: Sequence[int]) -> None:
        super().__init__()
        self._shape, self._strides = shape, strides

    def __missing__(self, address: int) -> Tile:
        if len(self) >= _MAX_KEPT:
            self.clear()
        made = self[address] = Tile(address, self._shape, self._strides)
        return made


def relaunchable(kernel: Any) -> bool:
    """Whether launches of ``kernel`` may pass Triton by: looked at before each, since hooks come and go."""
    if not _KNOWS_LAUNCHER or type(kernel) not in (JITFunction, GluonJITFunction) or kernel.pre_run_hooks:
        return False
    return not (_has_calls(knobs.runtime.launch_enter_hook) or _has_calls(knobs.runtime.launch_exit_hook))


def launch_step(
    kernel: Any,
    grid: int,
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...],
    num_warps: int,
    moving: tuple[tuple[int, int], ...] | None = None,
    **options: int,
) -> Repeat | None:
    """Launch a kernel of which nothing but constants makes a variant: arguments first, the last of them its table.

    ``options`` for the compiler are always the same for a kernel. With ``moving``, returns what repeats the launch,
    where that is possible: those arguments differ then, given as their places and as whose address each is.
    """
    table: torch.Tensor = arguments[-1]
    key = (id(kernel), table.device, constants)
    known = _steps.get(key)
    if known is not None and relaunchable(kernel):
        known.launch(grid, *arguments)
        return None if moving is None else known.repeat(grid, arguments, moving)
    compiled = kernel[(grid,)](*arguments, *constants, num_warps=num_warps, **options)
    if not relaunchable(kernel):
        return None
    made = Launcher(compiled, table.device.index or 0, constants)
    _steps.keep(key, made)
    return None if moving is None else made.repeat(grid, arguments, moving)


_steps: Kept[Launcher] = Kept()


def _has_calls(hook: Any) -> bool:
    return bool(getattr(hook, "calls", hook))


def raw_stream(device: int) -> int:
    """The current stream, as the driver knows it."""
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream
