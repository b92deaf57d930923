"""A GPU's streams under the simulator: what sends by the copy engine, in schedules that a seed determines.

Each rank gets four streams: the caller's, and the three of ``kernels/beside.py``. What is launched, and what is copied
beside, is queued, and a coroutine per stream does it in order; so the copies of a call run beside its kernels, and
beside the next call of a rank that is ahead. Nothing of the ops is changed but who does what they queue.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import torch

from tileflux.kernels import combine, dense, scatter, slabs, steps, turns
from tileflux.kernels.beside import ANNOUNCING, CLOSING, SENDING
from tileflux.kernels.turns import Turn
from tileflux.symm.group import Group
from tileflux.symm.host_signal import HostWords
from tileflux.testing import interpreter

if TYPE_CHECKING:
    from tileflux.testing.coroutines import Coroutine
    from tileflux.testing.simulator import Simulator

__all__ = ["on_streams", "simulated_streams"]

_STEPS = ("launch_open", "launch_close", "launch_sum", "launch_sum_slabs", "launch_release")
_here = threading.local()
_copy = torch.Tensor.copy_


class _Event:
    """Something that is queued, and whether it is done."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.run, self.is_done = run, False


class _Stream:
    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: deque[_Event] = deque()
        self._worker: Coroutine | None = None
        self._last: _Event | None = None

    def queue(self, run: Callable[[], object]) -> None:
        """Have it done after what is there already."""
        simulator = _simulator()
        self._last = event = _Event(run)
        simulator.release(("queued", event))
        self._queue.append(event)
        if self._worker is None or self._worker.done:
            self._worker = simulator.go_on_as(self._name, self._work)

    def record_event(self) -> _Event | None:
        """What comes last so far."""
        return self._last

    def wait_event(self, event: _Event | None) -> None:
        """Go on after it."""
        if event is not None:
            self.queue(partial(_await, event))

    def _work(self) -> None:
        simulator = _simulator()
        while self._queue:
            event = self._queue[0]
            simulator.acquire(("queued", event))
            event.run()
            simulator.release(("done", event))
            event.is_done = True
            self._queue.popleft()


class _Streams:
    """Those of a rank."""

    def __init__(self, rank: int) -> None:
        kinds = ("main", SENDING, CLOSING, ANNOUNCING)
        self.by_kind = {kind: _Stream(f"{kind} stream of rank {rank}") for kind in kinds}
        self.main = self.current = self.by_kind["main"]


@contextmanager
def simulated_streams() -> Iterator[None]:
    """Within the ``with`` block ranks send by copies, as where these need no SM, and queue what they launch."""
    replaced: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_stream", lambda device=None: _streams().current),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.Tensor, "copy_", _queued_copy),
        (turns, "write_flag", _queued_flag),
        (dense, "beside", _beside),
        (scatter, "beside", _beside),
        (combine, "beside", _beside),
        (Group, "synchronize", _synchronize),
        (Turn, "__init__", _sharing(Turn.__init__)),
        *((steps, name, _queued(getattr(steps, name))) for name in _STEPS),
        *((slabs, name, _queued(getattr(slabs, name))) for name in ("launch_spaced", "launch_sums")),
    ]
    for module in (dense, scatter, combine):
        names: dict[str, Any] = {
            "sends_by_copies": lambda group: True, "join": _join, "launch_gemm": _queued(vars(module)["launch_gemm"]),
        }  # fmt: skip
        replaced += [(module, name, value) for name, value in names.items()]
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


@contextmanager
def on_streams(group: Group) -> Iterator[None]:
    """Give the calling rank its streams."""
    _here.streams = _Streams(group.rank)
    try:
        yield
    finally:
        del _here.streams


def _synchronize(group: Group) -> None:
    event = _streams().main.record_event()
    if event is not None:
        _await(event)


def _streams() -> _Streams:
    return cast(_Streams, _here.streams)


def _simulator() -> Simulator:
    return cast("Simulator", interpreter.conductor())


def _await(event: _Event) -> None:
    simulator = _simulator()
    simulator.block_until(lambda: event.is_done, "another stream")
    simulator.acquire(("done", event))


def _queued(launch: Callable[..., object]) -> Callable[..., None]:
    def queue(*arguments: Any, **options: Any) -> None:
        run = partial(launch, *arguments, **options)
        if hasattr(_here, "streams"):
            _streams().current.queue(run)
        else:
            run()  # by a stream itself

    return queue


@contextmanager
def _beside(group: Group, *used: torch.Tensor, after: _Event | None = None, on: str = SENDING) -> Iterator[None]:
    streams = _streams()
    before = streams.current
    streams.current = streams.by_kind[on]
    streams.current.wait_event(before.record_event() if after is None else after)
    try:
        yield
    finally:
        streams.current = before


def _join(group: Group, *, on: str = SENDING) -> None:
    streams = _streams()
    streams.main.wait_event(streams.by_kind[on].record_event())


def _queued_copy(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """The copy engine's, if it is told to on a stream beside; else torch's own."""
    streams = getattr(_here, "streams", None)
    if streams is None or streams.current is streams.main:
        return _copy(to, source, non_blocking)
    streams.current.queue(partial(_copy_by_engine, to, source))
    return to


def _queued_flag(word: torch.Tensor, value: int) -> None:
    _streams().current.queue(lambda: HostWords(word).store(0, value))


def _copy_by_engine(to: torch.Tensor, source: torch.Tensor) -> None:
    simulator = _simulator()
    for kind, memory in (("load", source), ("store", to)):
        simulator.touch(kind, memory)  # type: ignore[arg-type]
    _copy(to, source)


def _sharing(init: Callable[..., None]) -> Callable[..., None]:
    """Memory of a rank's own is shared by its streams."""

    def made(self: Turn, group: Group, *arguments: Any) -> None:
        init(self, group, *arguments)
        known = _streams().__dict__.setdefault("own", set())
        if self.own.numel() and self.own.data_ptr() not in known:
            known.add(self.own.data_ptr())
            _simulator().share(self.own, f"rank {group.rank} own")

    return made
