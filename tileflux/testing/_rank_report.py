"""What a rank tells whoever started it, and the error made of it when ranks fail."""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tileflux.errors import RankFailed

__all__ = ["Failure", "Report", "failed", "rank_list", "timed_out"]

_SUMMARY_CHARS = 300


@dataclass(frozen=True)
class Report:
    """The end of one rank's function. Made in the rank; sent between processes as bytes."""

    rank: int
    time: float
    """``time.monotonic()``, which all processes of a machine share: tells which rank failed first."""
    value: Any = None
    error: BaseException | None = None
    summary: str = ""
    """The error in one line; empty for a rank that returned."""
    traceback: str = ""

    @classmethod
    def of_error(cls, rank: int, error: BaseException) -> Report:
        """To be made where the error is caught."""
        now = time.monotonic()
        message = str(error).strip().splitlines()
        summary = type(error).__name__ + (f": {message[0][:_SUMMARY_CHARS]}" if message else "")
        return cls(rank, now, None, error, summary, "".join(traceback.format_exception(error)))

    def to_bytes(self) -> bytes:
        """Pickled. A result that cannot be pickled becomes its ``repr``, an error that cannot be becomes None."""
        value = _dumps(self.value)
        if value is None:
            value = pickle.dumps(repr(self.value))
        error = None if self.error is None else _dumps(self.error)
        return pickle.dumps((self.rank, self.time, value, error, self.summary, self.traceback))

    @classmethod
    def from_bytes(cls, data: bytes) -> Report:
        """The inverse of ``to_bytes``."""
        rank, stamp, value, error, summary, text = pickle.loads(data)
        return cls(rank, stamp, pickle.loads(value), None if error is None else pickle.loads(error), summary, text)


@dataclass(frozen=True)
class Failure:
    """Why one rank counts as failed."""

    rank: int
    time: float
    summary: str
    traceback: str = ""
    error: BaseException | None = None

    @classmethod
    def of_report(cls, report: Report) -> Failure:
        """From the report of a rank that raised."""
        return cls(report.rank, report.time, report.summary, report.traceback, report.error)


def failed(world_size: int, failures: Sequence[Failure], others: Mapping[int, str]) -> RankFailed:
    """The error for failed ranks: the first in time with its traceback, one line for each of the rest."""
    first, *rest = sorted(failures, key=lambda failure: failure.time)
    message = f"rank {first.rank} of {world_size} failed first: {first.summary}"
    if first.traceback:
        message += f"\n\n{first.traceback.rstrip()}\n"
    lines = dict(others) | {failure.rank: failure.summary for failure in rest}
    return _with_cause(message + _lines("The other ranks", lines), first.rank, first.error)


def timed_out(world_size: int, seconds: float, stacks: Mapping[int, str], others: Mapping[int, str]) -> RankFailed:
    """The error for ranks that outlasted the deadline, given by their stacks."""
    message = f"{rank_list(list(stacks))} of {world_size} did not finish within {seconds:g} s"
    for rank, stack in stacks.items():
        message += f"\n\nrank {rank} was at:\n{stack.rstrip()}"
    return _with_cause(message + _lines("\nThe other ranks", others), min(stacks), None)


def rank_list(ranks: Sequence[int]) -> str:
    """``rank 1`` or ``ranks 1, 3``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _lines(title: str, lines: Mapping[int, str]) -> str:
    if not lines:
        return ""
    return f"\n{title}:" + "".join(f"\n  rank {rank}: {text}" for rank, text in sorted(lines.items()))


def _with_cause(message: str, rank: int, error: BaseException | None) -> RankFailed:
    raised = RankFailed(message, rank, error)
    raised.__cause__ = error
    return raised


def _dumps(value: object) -> bytes | None:
    """Plain pickle, not multiprocessing's: that one shares tensors by handles which die with their process."""
    try:
        data = pickle.dumps(value)
        pickle.loads(data)  # exceptions with keyword-only arguments pickle well and unpickle badly
    except Exception:
        return None
    return data
