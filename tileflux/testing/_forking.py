"""Forking a process that has, or has just had, other threads.

A lock that another thread holds at the moment of the fork is held for ever in the child. A thread that was joined may
hold one: ``join`` returns before the thread has given back what libraries keep for it. MKL does that under spin locks,
which is why a child that then multiplies may spin for ever in ``mm_account_ptr_by_tid``: one fork in some hundred did,
straight after threads had multiplied.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

__all__ = ["wait_for_rest"]

_TASKS = Path("/proc/self/task")
_LOOK_S = 0.0002
_RESTS = "SIZX"
"""States, as Linux writes them, of threads that hold no spin lock: asleep until woken, idle, ended."""


def wait_for_rest(timeout_s: float) -> list[int]:
    """Wait until no other thread of this process works; the ids of those that still do after ``timeout_s``.

    The caller keeps Python's lock from the last look on, so no Python thread gets far even if it is woken. Where there
    is no ``/proc`` nobody can be seen to work, and it returns at once.
    """
    deadline = time.monotonic() + timeout_s
    while (working := _working()) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return working


def _working() -> list[int]:
    own = threading.get_native_id()
    try:
        others = [int(task.name) for task in _TASKS.iterdir() if int(task.name) != own]
    except OSError:
        return []
    return [thread for thread in others if _state(thread) not in _RESTS]


def _state(thread: int) -> str:
    try:
        # The name stands in brackets before the state, and may hold spaces and brackets itself.
        return (_TASKS / str(thread) / "stat").read_text().rpartition(") ")[2][:1]
    except OSError:  # it has ended since
        return "X"
