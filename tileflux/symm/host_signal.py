"""Flags as the CPU sees them: the host's ``signal`` and ``wait`` (the device's are in ``lang/signal.py``).

Same words, same epochs, same wrapped comparison. On x86 an aligned load is an acquire and a store a release, and
CPython performs both as single instructions on a memoryview; elsewhere they go through Triton's C++ atomics.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable

import numpy as np
import torch

from tileflux.config import MAX_AHEAD

__all__ = ["HostWords", "reached", "wrap"]

_STRONGLY_ORDERED = platform.machine() in ("x86_64", "AMD64")
_YIELDS = 200  # about 0.1 ms of giving the core away before the first sleep
_SHORTEST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 500e-6
_CHECK_EVERY_S = 0.05


def wrap(value: int) -> int:
    """``value`` as the 32-bit word that holds it."""
    return ((value + 0x80000000) & 0xFFFFFFFF) - 0x80000000


def reached(seen: int, wanted: int) -> bool:
    """Whether a flag that reads ``seen`` has reached ``wanted``, across the wrap at 2**31; see ``MAX_AHEAD``."""
    return 0 <= wrap(seen - wanted) < MAX_AHEAD


class HostWords:
    """A tensor of bytes on the CPU, read and written as 32-bit flags."""

    def __init__(self, memory: torch.Tensor) -> None:
        flat = memory.view(torch.uint8).reshape(-1)
        flat = flat[: flat.numel() // 4 * 4]
        self.address = flat.data_ptr()
        self._words = memoryview(flat.view(torch.int32).numpy())

    def load(self, index: int) -> int:
        """Read with acquire."""
        if _STRONGLY_ORDERED:
            return int(self._words[index])
        return _atomic_load(self.address + 4 * index)

    def store(self, index: int, value: int) -> None:
        """Write with release."""
        if _STRONGLY_ORDERED:
            self._words[index] = wrap(value)
        else:
            _atomic_store(self.address + 4 * index, wrap(value))

    def wait(self, index: int, wanted: int, give_up: Callable[[int, float], bool]) -> None:
        """Return once word ``index`` has reached ``wanted``, or ``give_up(seen, seconds)`` says so."""
        if reached(self.load(index), wanted):
            return
        for _ in range(_YIELDS):
            os.sched_yield()
            if reached(self.load(index), wanted):
                return
        start = last_check = time.monotonic()
        pause = _SHORTEST_SLEEP_S
        while True:
            time.sleep(pause)
            seen = self.load(index)
            if reached(seen, wanted):
                return
            pause = min(pause * 1.5, _LONGEST_SLEEP_S)
            now = time.monotonic()
            if now - last_check >= _CHECK_EVERY_S:
                last_check = now
                if give_up(seen, now - start):
                    return


def _atomic_load(address: int) -> int:
    from triton._C.libtriton import interpreter as atomics

    old = atomics.atomic_rmw(
        atomics.RMW_OP.ADD,
        np.array([address], np.uint64),
        np.zeros(1, np.int32),
        np.ones(1, np.bool_),
        atomics.MEM_SEMANTIC.ACQUIRE,
    )
    return int(old[0])


def _atomic_store(address: int, value: int) -> None:
    from triton._C.libtriton import interpreter as atomics

    atomics.atomic_rmw(
        atomics.RMW_OP.XCHG,
        np.array([address], np.uint64),
        np.array([value], np.int32),
        np.ones(1, np.bool_),
        atomics.MEM_SEMANTIC.RELEASE,
    )
