"""``copy_async`` on the CPU: one worker thread per rank moves bytes while the rank computes."""

from __future__ import annotations

import queue
import threading

import torch

from tileflux.symm.base import Copy, FlagWrite
from tileflux.symm.host_signal import HostWords

__all__ = ["HostCopier"]


class _HostCopy(Copy):
    def __init__(self, dst: torch.Tensor, src: torch.Tensor, signal: FlagWrite | None) -> None:
        self._dst, self._src, self._signal = dst, src, signal
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._dst.copy_(self._src)
            if self._signal is not None:
                value = self._signal.value
                HostWords(self._signal.word).store(0, int(value) if isinstance(value, int) else int(value.item()))
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


class HostCopier:
    """Runs copies in the order they were asked for, on a thread that starts with the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_HostCopy | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def copy(self, dst: torch.Tensor, src: torch.Tensor, signal: FlagWrite | None) -> Copy:
        """Queue a copy."""
        if self._thread is None or not self._thread.is_alive():  # a forked child inherits the object, not the thread
            self._thread = threading.Thread(target=self._work, name=f"tileflux-copy-{self._name}", daemon=True)
            self._thread.start()
        job = _HostCopy(dst, src, signal)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout=5.0)
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
