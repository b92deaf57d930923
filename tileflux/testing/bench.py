"""What ``tileflux bench`` does on a rank: check everything that is compared, then time it in interleaved rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tileflux.perf.figures import baseline_of, summarize
from tileflux.symm.group import Group
from tileflux.testing.contenders import Contender, Suite, gemm_suite, group_suite
from tileflux.testing.ep_contenders import ep_suite
from tileflux.testing.ghost_contenders import ghost_suite
from tileflux.testing.ghost_moe import ghost_moe_suite
from tileflux.testing.moe_contenders import grouped_suite, moe_suite
from tileflux.testing.shapes import Mixture
from tileflux.testing.timing import (
    MAX_ROUNDS,
    MIN_ROUNDS,
    STEADY,
    WARM_UP_S,
    Stopwatch,
    agree_max,
    median_error,
    meet,
    time_rounds,
)

__all__ = ["BenchCase", "RankTimes", "are_steady", "check_suite", "is_warm", "make_suite", "measure"]

_ROUNDS_BETWEEN = 5  # ranks have to tell each other their times to find out


@dataclass(frozen=True)
class BenchCase:
    """One op at one shape: global sizes, as Flux's tests take them.

    N is divided for ag_gemm and moe_ag_gemm, K for the others; of gemm and grouped_gemm, which one rank does, nothing.
    ``ep``, a round trip of ``ep_dispatch`` and ``ep_combine``, has no N: it is 0.
    """

    op: str
    m: int
    n: int
    k: int
    dtype: str
    strategies: tuple[str, ...]
    """Which of ours to time, of ``tune.lookup.STRATEGIES``."""
    num_rounds: int | None
    """None: as many as it takes until medians are steady, see ``testing/timing.py``."""
    mixture: Mixture | None = None
    """Of ops of experts; M is then the number of tokens, each of which has several rows."""

    @property
    def variant(self) -> str:
        """What else tells it from other cases of its shape."""
        return "" if self.mixture is None else str(self.mixture)


@dataclass(frozen=True)
class RankTimes:
    """One case as one rank saw it."""

    problem: str
    """What is wrong with a result; empty if nothing is. Ranks then still go through the rounds together."""
    rounds: dict[str, list[float]]
    """Seconds per round by name: the parts ``gemm``, ``comm``, ``beside`` and, of ops of experts, ``route``, and the
    contenders of ``perf.figures.CaseResult``."""
    skipped: dict[str, str]
    auto: str


def measure(group: Group, cases: Sequence[BenchCase], ticks: Path | None) -> list[RankTimes]:
    """Check and time every case. Rank 0 adds to the file ``ticks``: a dot for a round, a line for a case."""
    # The largest first: symmetric memory that grows is memory that stays.
    order = sorted(range(len(cases)), key=lambda index: -cases[index].m * (cases[index].n + cases[index].k))
    results = {index: _measure(group, cases[index], ticks) for index in order}
    return [results[index] for index in range(len(cases))]


def _measure(group: Group, case: BenchCase, ticks: Path | None) -> RankTimes:
    suite = make_suite(group, case)
    problem = check_suite(group, suite)

    def tick(mark: bytes) -> None:
        if ticks is not None and group.rank == 0:
            with ticks.open("ab") as file:
                file.write(mark)

    names = [contender.name for contender in suite.contenders]

    def is_steady(seconds: Mapping[str, list[float]]) -> bool:
        return case.num_rounds is None and are_steady(group, {name: seconds[name] for name in names})

    # Ranks go on together even where one of them has a wrong result: who stops alone keeps the others waiting.
    watch = Stopwatch(group.device, lambda: meet(group))
    calls = suite.parts | {contender.name: contender.run for contender in suite.contenders}
    begin = time.monotonic()
    rounds = time_rounds(
        watch, calls, case.num_rounds or MAX_ROUNDS,
        is_warm=lambda: is_warm(group, time.monotonic() - begin), after_round=lambda: tick(b"."), is_enough=is_steady,
    )  # fmt: skip
    group.synchronize()
    tick(b"\n")
    num_rounds = len(next(iter(rounds.values())))
    for part in ("gemm", "comm", "beside"):
        rounds.setdefault(part, [0.0] * num_rounds)
    return RankTimes(problem, rounds, suite.skipped, suite.auto)


def is_warm(group: Group, elapsed_s: float) -> bool:
    """Whether rounds may count, so long after the first one began: by the slowest rank's clock, so all say the same."""
    return group.device.type == "cpu" or agree_max(group, [elapsed_s])[0] > WARM_UP_S


def are_steady(group: Group, seconds: Mapping[str, list[float]]) -> bool:
    """Whether every median is known well enough. Ranks look at the slowest of them, so all say the same."""
    num_rounds = len(next(iter(seconds.values())))
    if num_rounds < MIN_ROUNDS or num_rounds % _ROUNDS_BETWEEN:
        return False
    slowest = agree_max(group, [took for rounds in seconds.values() for took in rounds])
    rows = [slowest[first : first + num_rounds] for first in range(0, len(slowest), num_rounds)]
    return all(_is_steady(row) for row in rows)


def _is_steady(seconds: Sequence[float]) -> bool:
    """Whether the median is known well enough, by the spread of rounds and by what each half of them says.

    Rounds near each other are alike, so that spread alone would believe in one that drifts.
    """
    if median_error(summarize("", [list(seconds)]).spread, len(seconds)) >= STEADY:
        return False
    half = len(seconds) // 2
    early, late = statistics.median(seconds[:half]), statistics.median(seconds[half:])
    return abs(late - early) <= 2 * STEADY * early


def make_suite(group: Group, case: BenchCase) -> Suite:
    """What is compared in this world."""
    if case.op == "gemm":
        return gemm_suite(group.device, case.m, case.n, case.k, case.dtype)
    if case.mixture is not None:
        return _make_moe_suite(group, case, case.mixture)
    make = ghost_suite if group.transport == "ghost" else group_suite
    return make(group, case.op, (case.m, case.n, case.k), case.dtype, case.strategies)


def _make_moe_suite(group: Group, case: BenchCase, mixture: Mixture) -> Suite:
    shape = (case.m, case.n, case.k)
    if case.op == "grouped_gemm":
        return grouped_suite(group, shape, mixture, case.dtype)
    if case.op == "ep":
        return ep_suite(group, shape, mixture, case.dtype, case.strategies)
    make = ghost_moe_suite if group.transport == "ghost" else moe_suite
    return make(group, case.op, shape, mixture, case.dtype, case.strategies)


def check_suite(group: Group, suite: Suite) -> str:
    """The first wrong result, in words. A contender that cannot run at all is moved to the skipped ones."""
    problem = ""
    for contender in list(suite.contenders):
        found = _check_one(group, suite, contender)
        problem = problem or found
    for call in suite.parts.values():
        call()
        group.synchronize()
        group.barrier()  # what the library loads for one of them it must not load while a peer waits in the next
    return problem


def _check_one(group: Group, suite: Suite, contender: Contender) -> str:
    suite.poison()
    group.synchronize()
    group.barrier()
    try:
        contender.run()
        group.synchronize()
    except RuntimeError as error:
        if baseline_of(contender.name) != "torch":
            raise
        # Torch's ops refuse some shapes and machines; all ranks of a call alike.
        suite.contenders.remove(contender)
        suite.skipped[contender.name] = str(error).partition("\n")[0]
        return ""
    try:
        contender.check()
    except AssertionError as error:
        return f"{contender.name}: {error}"
    finally:
        group.barrier()
    return ""
