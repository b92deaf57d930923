"""``copy_async`` on the CPU: one worker thread per rank moves bytes while the rank computes.

With a ``Link`` the thread also plays the wire, so that overlap can be seen where there is none: copies go out one after
the other, each for as long as its bytes take at the link's bandwidth, and land a latency after their last byte has
left. Meanwhile the thread sleeps, and the core is free for the rank's own work. Only payload is emulated: flags and
acks that carry no bytes, and the host's barrier, are as quick as ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time

import torch

from tileflux.errors import GroupClosed
from tileflux.link import Link
from tileflux.symm.base import Copy, FlagWrite
from tileflux.symm.host_signal import HostWords

__all__ = ["HostCopier"]

_PR_SET_TIMERSLACK = 29
_LONGEST_SLEEP_S = 60.0


class _HostCopy(Copy):
    def __init__(self, dst: torch.Tensor, src: torch.Tensor, signal: FlagWrite | None) -> None:
        self._dst, self._src, self._signal = dst, src, signal
        self.nbytes, self.asked = src.nbytes, time.monotonic()
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Deliver it."""
        try:
            self._dst.copy_(self._src)
            if self._signal is not None:
                value = self._signal.value
                HostWords(self._signal.word).store(0, int(value) if isinstance(value, int) else int(value.item()))
            self.landed_ns = time.perf_counter_ns()
        except BaseException as error:
            self._error = error
        finally:
            self._end()

    def give_up(self) -> None:
        """Do not deliver it."""
        self._error = GroupClosed("the group was closed before this copy had landed")
        self._end()

    def _end(self) -> None:
        del self._dst, self._src  # an op keeps its copies to the end, and may have made a source for each
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


class HostCopier:
    """Runs copies in the order they were asked for, on a thread that starts with the first."""

    def __init__(self, name: str, link: Link | None = None) -> None:
        self._name, self._link = name, link
        self._jobs: queue.SimpleQueue[_HostCopy | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._gives_up = False

    def copy(self, dst: torch.Tensor, src: torch.Tensor, signal: FlagWrite | None) -> Copy:
        """Queue a copy."""
        if self._thread is None or not self._thread.is_alive():  # a forked child inherits the object, not the thread
            self._closing.clear()
            self._gives_up = False
            self._thread = threading.Thread(target=self._work, name=f"tileflux-copy-{self._name}", daemon=True)
            self._thread.start()
        job = _HostCopy(dst, src, signal)
        self._jobs.put(job)
        return job

    def close(self, *, orderly: bool = True) -> None:
        """Finish what is queued and end the thread.

        What a link would still carry lands at once. If the group is closed because of an error it never does: a peer
        would take it for good, while the caller, whom nothing keeps waiting, may have changed the source.
        """
        if self._thread is not None:
            self._gives_up = not orderly
            self._closing.set()
            self._jobs.put(None)
            self._thread.join(timeout=5.0)
            self._thread = None

    def _work(self) -> None:
        wire = None if self._link is None else _Wire(self._link, self._closing)
        while (job := self._jobs.get()) is not None:
            if wire is None or wire.carry(job.asked, job.nbytes) or not self._gives_up:
                job.run()
            else:
                job.give_up()


class _Wire:
    """When copies land. What left is counted from what left before it, so that a sleep that ends late delays nothing
    after it, and the rate is right in the mean."""

    def __init__(self, link: Link, closing: threading.Event) -> None:
        self._link, self._closing = link, closing
        self._free = 0.0
        with contextlib.suppress(OSError, AttributeError):  # Linux only: let this thread's sleeps end on time
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)

    def carry(self, asked: float, nbytes: int) -> bool:
        """Sleep until a copy that was asked for then has landed; False if the copier is closed before."""
        if nbytes == 0:
            return not self._closing.is_set()
        self._free = max(asked, self._free) + nbytes / self._link.bytes_per_s
        lands = self._free + self._link.latency_s
        while (left := lands - time.monotonic()) > 0:
            if self._closing.wait(min(left, _LONGEST_SLEEP_S)):
                return False
        return True
