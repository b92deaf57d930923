"""The figures of a measurement: how much of the communication an op hides, and who is quicker by how much.

T_gemm is the library's GEMM of the same shape alone, T_comm the same bytes moved alone. ECT, the exposed communication
time, is what an op takes beyond T_gemm; hidden is the share of T_comm that is not exposed (Flux's overlap efficiency).
The limit is the longer of the two: no schedule ends before it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "BASELINES",
    "OURS",
    "CaseResult",
    "Duel",
    "Timing",
    "Verdict",
    "baseline_of",
    "ect",
    "hidden",
    "judge",
    "limit",
    "summarize",
]

BASELINES = ("sequential", "pipelined", "torch")
"""What ours is compared with, in the order of tables."""
OURS = "ours"
"""How the names of our own contenders begin."""


def baseline_of(name: str) -> str | None:
    """Which of ``BASELINES`` a contender counts as; None for ours. There may be several ways to one: ``torch one-shot``
    and ``torch two-shot`` are both ``torch``."""
    return next((each for each in BASELINES if name == each or name.startswith(f"{each} ")), None)


@dataclass(frozen=True)
class Timing:
    """Of one thing that was timed: the median over rounds of the slowest rank's seconds, and how far rounds differ."""

    name: str
    seconds: float
    spread: float
    """Half the distance between the quartiles, over the median."""

    @property
    def is_ours(self) -> bool:
        """Whether it is one of ours, rather than a baseline."""
        return self.name == OURS or self.name.startswith(f"{OURS} ")


def summarize(name: str, rounds: Sequence[Sequence[float]]) -> Timing:
    """``rounds`` has a list of seconds per rank, one entry per round: in each round the slowest rank counts."""
    slowest = [max(times) for times in zip(*rounds, strict=True)]
    if not slowest:
        raise ValueError(f"{name} was not timed in any round")
    if min(slowest) <= 0:
        raise ValueError(f"{name} took {min(slowest)} s in a round: it was not timed")
    median = statistics.median(slowest)
    low, _, high = statistics.quantiles(slowest, n=4, method="inclusive") if len(slowest) > 1 else (median,) * 3
    return Timing(name, median, (high - low) / 2 / median)


def ect(total: float, gemm: float) -> float:
    """Exposed communication: what an op takes beyond the product alone. Negative if it beats the library's product."""
    return total - gemm


def hidden(total: float, gemm: float, comm: float) -> float | None:
    """The share of the communication that does not show: 1 for all, below 0 where overlap costs more than it hides."""
    return None if comm <= 0 else 1.0 - ect(total, gemm) / comm


def limit(gemm: float, comm: float) -> float:
    """What no schedule can beat."""
    return max(gemm, comm)


@dataclass(frozen=True)
class CaseResult:
    """One op at one shape in one world: the parts, and everything that was compared."""

    op: str
    m: int
    n: int
    k: int
    world_size: int
    dtype: str
    gemm: Timing
    """Of 0 s where nothing is multiplied: of an exchange."""
    comm: Timing | None
    """None where nothing is moved: of a plain product."""
    beside: Timing | None
    """The library's product beside the same transfers, neither waiting: the interference no schedule avoids."""
    contenders: tuple[Timing, ...]
    """Baselines by the names of ``BASELINES`` (see ``baseline_of``), then ours as ``ours fused`` and so on."""
    skipped: tuple[tuple[str, str], ...]
    """Contenders that could not run here, and why."""
    auto: str
    """The strategy that ``auto`` took."""
    variant: str = ""
    """What else tells the case from others of its shape: of ops of experts, how many there are and who has them."""
    route: Timing | None = None
    """Of ops of experts: making the routing, which is in no contender's time, since both products of a layer share it.
    """

    @property
    def multiplies(self) -> bool:
        """Whether it is a product, of whatever kind, and not an exchange."""
        return self.gemm.seconds > 0

    @property
    def limit(self) -> float:
        """Seconds that no schedule of this case can beat."""
        return limit(self.gemm.seconds, 0.0 if self.comm is None else self.comm.seconds)

    @property
    def rival(self) -> Timing | None:
        """The quickest baseline. None if none ran."""
        others = (timing for timing in self.contenders if not timing.is_ours)
        return min(others, key=lambda timing: timing.seconds, default=None)

    def find(self, name: str) -> Timing | None:
        """A contender by name."""
        return next((timing for timing in self.contenders if timing.name == name), None)

    def best(self, baseline: str) -> Timing | None:
        """The quickest of the contenders that count as ``baseline``. None if none ran."""
        same = (timing for timing in self.contenders if baseline_of(timing.name) == baseline)
        return min(same, key=lambda timing: timing.seconds, default=None)

    def ect(self, timing: Timing) -> float:
        """The communication that a contender exposes, in seconds."""
        return ect(timing.seconds, self.gemm.seconds)

    def hidden(self, timing: Timing) -> float | None:
        """The share of communication that a contender hides."""
        return None if self.comm is None else hidden(timing.seconds, self.gemm.seconds, self.comm.seconds)

    def over(self, baseline: str, timing: Timing) -> float | None:
        """How many times as quick as the quickest of a baseline a contender is; None if that did not run."""
        other = self.best(baseline)
        return None if other is None else other.seconds / timing.seconds


@dataclass(frozen=True)
class Duel:
    """One of ours against the quickest baseline, at one shape."""

    case: CaseResult
    ours: Timing
    rival: Timing

    @property
    def speedup(self) -> float:
        """Above 1 if ours is quicker."""
        return self.rival.seconds / self.ours.seconds

    @property
    def is_level(self) -> bool:
        """Whether the two differ by less than rounds of either do."""
        noise = max(self.ours.spread * self.ours.seconds, self.rival.spread * self.rival.seconds)
        return abs(self.rival.seconds - self.ours.seconds) <= noise

    @property
    def is_won(self) -> bool:
        """Whether ours is quicker by more than rounds differ."""
        return self.speedup > 1 and not self.is_level

    @property
    def is_lost(self) -> bool:
        """Whether the baseline is quicker by more than rounds differ."""
        return self.speedup < 1 and not self.is_level


@dataclass(frozen=True)
class Verdict:
    """The best of ours over all shapes, and how it fared at each."""

    name: str
    duels: tuple[Duel, ...]

    def over(self, baseline: str) -> tuple[float, ...]:
        """Speed-ups over one baseline, at the shapes where it ran."""
        found = (duel.case.over(baseline, duel.ours) for duel in self.duels)
        return tuple(speedup for speedup in found if speedup is not None)


def judge(results: Sequence[CaseResult]) -> Verdict | None:
    """Which of ours did best over all shapes: the most shapes, then the geometric mean against the quickest baseline.

    One contender, not the quickest at each shape: users pick one strategy, and the best of several noisy numbers always
    looks better than it is. For the same reason ``auto`` does not count beside the one strategy that it takes at all
    shapes: it would be the same thing drawn twice. None if nothing of ours, or no baseline, ran.
    """
    names = dict.fromkeys(timing.name for case in results for timing in case.contenders if timing.is_ours)
    taken = {f"{OURS} {case.auto}" for case in results}
    if len(taken) == 1 and taken <= set(names):
        names.pop(f"{OURS} auto", None)
    verdicts = []
    for name in names:
        pairs = [(case, case.find(name), case.rival) for case in results]
        verdicts.append(Verdict(name, tuple(Duel(case, ours, rival) for case, ours, rival in pairs if ours and rival)))
    return max((verdict for verdict in verdicts if verdict.duels), key=_merit, default=None)


def _merit(verdict: Verdict) -> tuple[int, float]:
    return len(verdict.duels), statistics.geometric_mean(duel.speedup for duel in verdict.duels)
