"""What a simulated rank's host code does instead of blocking its thread.

A coroutine that waited in any way the scheduler does not see would keep the baton, and nobody could set it free. So
for the length of a simulation everything by which the host side of a virtual group waits for others, or lets others go
on, is put into the simulator's hands; and every region the group makes is declared shared memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from tileflux.symm.base import Copy, FlagWrite
from tileflux.symm.host_signal import HostWords
from tileflux.symm.local import LocalTransport
from tileflux.symm.workspace import Region, Workspace

if TYPE_CHECKING:
    from tileflux.testing.coroutines import Coroutine
    from tileflux.testing.simulator import Simulator

__all__ = ["simulated_host"]


@contextmanager
def simulated_host(simulator: Simulator) -> Iterator[None]:
    """Have ``simulator`` decide, within the ``with`` block, when host code of its coroutines waits."""
    words, meetings, copiers = _Words(simulator), _Meetings(simulator), _Copiers(simulator)
    replacements: list[tuple[type, str, Callable[..., Any]]] = [
        (LocalTransport, "barrier", meetings.barrier),
        (LocalTransport, "copy_async", copiers.copy_async),
        (HostWords, "load", words.load),
        (HostWords, "store", words.store),
        (HostWords, "wait", words.wait),
    ]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Workspace, "region", _sharing(simulator)))
        for owner, name, replacement in replacements:
            stack.enter_context(mock.patch.object(owner, name, _in_coroutines(simulator, owner, name, replacement)))
        yield


def _in_coroutines(simulator: Simulator, owner: type, name: str, replacement: Callable[..., Any]) -> Callable[..., Any]:
    original = getattr(owner, name)

    @wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (replacement if simulator.here else original)(self, *args, **kwargs)

    return method


def _sharing(simulator: Simulator) -> Callable[..., Region]:
    original = Workspace.region
    known: set[int] = set()

    @wraps(original)
    def region(self: Workspace, *args: Any, **kwargs: Any) -> Region:
        made = original(self, *args, **kwargs)
        # All ranks' copies at once: a peer may write before the owner has asked for the region.
        for rank in range(len(made.segment.views)):
            if made.address(rank) not in known:
                known.add(made.address(rank))
                simulator.share_range(made.address(rank), made.nbytes, f"rank {rank} {made.name}", made.describe)
        return made

    return region


_load, _store = HostWords.load, HostWords.store


class _Words:
    """Flags, as host code uses them."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator

    def load(self, words: HostWords, index: int) -> int:
        self._simulator.acquire(words.address + 4 * index)
        return _load(words, index)

    def store(self, words: HostWords, index: int, value: int) -> None:
        self._simulator.release(words.address + 4 * index)
        _store(words, index, value)

    def wait(self, words: HostWords, index: int, wanted: int, give_up: object) -> None:
        self._simulator.poll(words.address + 4 * index, wanted)


class _Meetings:
    """Host barriers."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._arrivals: dict[int, list[int]] = {}

    def barrier(self, transport: LocalTransport, timeout_s: float) -> Sequence[int]:
        world = id(transport._world)
        arrivals = self._arrivals.setdefault(world, [0] * transport.world_size)
        self._simulator.release(("barrier", world, transport.rank, arrivals[transport.rank]))
        meeting = arrivals[transport.rank]
        arrivals[transport.rank] += 1
        self._simulator.block_until(lambda: min(arrivals) > meeting, f"all ranks to come to host barrier {meeting}")
        for rank in range(transport.world_size):
            self._simulator.acquire(("barrier", world, rank, meeting))
        return []


class _Copiers:
    """``copy_async``: one coroutine per rank copies in the order of the calls, like the thread it stands for."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._queues: dict[LocalTransport, deque[_SimulatedCopy]] = {}
        self._workers: dict[LocalTransport, Coroutine] = {}

    def copy_async(
        self, transport: LocalTransport, dst: torch.Tensor, src: torch.Tensor, signal: FlagWrite | None
    ) -> Copy:
        copy = _SimulatedCopy(self._simulator, dst, src, signal)
        self._simulator.release(("asked", copy))
        queue = self._queues.setdefault(transport, deque())
        queue.append(copy)
        worker = self._workers.get(transport)
        if worker is None or worker.done:
            name = f"copier of rank {transport.rank}"
            self._workers[transport] = self._simulator.go_on_as(name, lambda: self._work(queue))
        return copy

    def _work(self, queue: deque[_SimulatedCopy]) -> None:
        while queue:
            queue[0].run()
            queue.popleft()


class _SimulatedCopy(Copy):
    def __init__(self, simulator: Simulator, dst: torch.Tensor, src: torch.Tensor, signal: FlagWrite | None) -> None:
        self._simulator, self._dst, self._src, self._signal = simulator, dst, src, signal
        self._done = False

    def run(self) -> None:
        """Called by the copier's coroutine."""
        self._simulator.acquire(("asked", self))
        self._simulator.touch("load", self._src)
        self._simulator.touch("store", self._dst)
        self._dst.copy_(self._src)
        if self._signal is not None:
            value = self._signal.value
            HostWords(self._signal.word).store(0, value if isinstance(value, int) else int(value.item()))
        self._simulator.release(("done", self))
        self._done = True

    def wait(self) -> None:
        self._simulator.block_until(lambda: self._done, "a copy to end")
        self._simulator.acquire(("done", self))
