"""Numbers that a GPU brings to the host when it gets there, and that are errors unless they are 0.

The host goes on meanwhile, so whoever asked for the number may be done before it comes. The group looks at all that
are on their way whenever a call begins, and when it is synchronised: nothing is lost because nobody asked again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

__all__ = ["LateNumbers"]


class _Late(NamedTuple):
    number: torch.Tensor
    came: torch.cuda.Event
    error: Callable[[int], Exception]


class LateNumbers:
    """Those of one group, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._coming: deque[_Late] = deque()
        self._replayed: list[tuple[torch.Tensor, Callable[[int], Exception]]] = []

    def bring(self, number: torch.Tensor, error: Callable[[int], Exception]) -> torch.Tensor:
        """A pinned copy of ``number``, which reads 0 until the current stream has come to it; ``error`` makes the
        exception of what it then reads."""
        pinned = torch.zeros((), dtype=number.dtype, pin_memory=True)
        pinned.copy_(number, non_blocking=True)
        if torch.cuda.is_current_stream_capturing():
            # Replays write it again, as long as there is the graph: it must neither be forgotten nor given away.
            self._replayed.append((pinned, error))
        else:
            came = torch.cuda.Event()
            came.record()
            self._coming.append(_Late(pinned, came, error))
        return pinned

    def find(self) -> Exception | None:
        """The first error that is known by now. Numbers that have come and are 0 are forgotten."""
        if not self._coming and not self._replayed:
            return None
        if torch.cuda.is_current_stream_capturing():
            return None  # an event that is asked now would end the capture
        for number, error in self._replayed:
            if int(number):
                return error(int(number))
        while self._coming:
            number, came, error = self._coming[0]
            has_come = came.query()  # asked first: one that comes in between is looked at the next time
            if int(number):
                return error(int(number))
            if not has_come:
                return None
            self._coming.popleft()
        return None
