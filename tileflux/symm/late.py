"""Numbers that a GPU brings to the host when it gets there, and that are errors unless they are 0.

The host goes on meanwhile, so whoever asked for the number may be done before it comes. The group looks at all that
are on their way whenever a call begins, and when it is synchronised: nothing is lost because nobody asked again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

__all__ = ["LateNumbers"]

_PAGE = 1024

Error = Callable[[int], Exception]


class _Late(NamedTuple):
    number: torch.Tensor
    came: torch.cuda.Event
    error: Error


class _Page:
    """Pinned memory for numbers of captured calls, which replays write again as long as there is the graph.

    It is looked at with one call for all of them, and never given back.
    """

    def __init__(self) -> None:
        self.numbers = torch.zeros(_PAGE, dtype=torch.int64, pin_memory=True)
        self.errors: list[Error] = []

    def find(self) -> Exception | None:
        if not self.numbers.any():
            return None
        index = int(self.numbers.nonzero()[0])
        return self.errors[index](int(self.numbers[index]))


class LateNumbers:
    """Those of one group."""

    def __init__(self) -> None:
        self._coming: list[_Late] = []
        self._pages: list[_Page] = []

    def bring(self, number: torch.Tensor, error: Error) -> torch.Tensor:
        """A pinned copy of ``number``, int64, which reads 0 until the current stream of its GPU has come to it;
        ``error`` makes the exception of what it then reads."""
        with torch.cuda.device(number.device):
            is_capturing = torch.cuda.is_current_stream_capturing()
            self._make_room(0 if is_capturing else _PAGE // 2)
            if is_capturing:
                page = self._pages[-1]
                pinned = page.numbers[len(page.errors)]
                page.errors.append(error)
                return pinned.copy_(number, non_blocking=True)
            pinned = torch.zeros((), dtype=torch.int64, pin_memory=True)
            pinned.copy_(number, non_blocking=True)
            came = torch.cuda.Event()
            came.record(torch.cuda.current_stream())
            self._coming.append(_Late(pinned, came, error))
            return pinned

    def _make_room(self, num_more: int) -> None:
        """For a captured number, and so many more: in a capture memory may not be pinned, depending on torch, but calls
        are made once before they are captured."""
        if not self._pages or len(self._pages[-1].errors) + num_more >= _PAGE:
            self._pages.append(_Page())

    def find(self) -> Exception | None:
        """The first error that is known by now. Numbers that have come and are 0 are forgotten."""
        if not self._coming and not self._pages:
            return None
        if torch.cuda.is_current_stream_capturing():
            return None  # an event that is asked now would end the capture
        for page in self._pages:
            if page.errors and (error := page.find()) is not None:
                return error
        still_coming: list[_Late] = []
        for late in self._coming:
            # Behind one that has not come events are not asked, which takes longer than to read a number. The event
            # first: a number that comes in between is looked at the next time.
            has_come = not still_coming and late.came.query()
            if int(late.number):
                return late.error(int(late.number))
            if not has_come:
                still_coming.append(late)
        self._coming = still_coming
        return None
