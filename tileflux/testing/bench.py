"""What ``tileflux bench`` does on a rank: check everything that is compared, then time it in interleaved rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tileflux.symm.group import Group
from tileflux.testing.contenders import Contender, Suite, gemm_suite, group_suite
from tileflux.testing.ghost_contenders import ghost_suite
from tileflux.testing.timing import Stopwatch, meet, time_rounds

__all__ = ["BenchCase", "RankTimes", "make_suite", "measure"]


@dataclass(frozen=True)
class BenchCase:
    """One op at one shape: global sizes, as Flux's tests take them (N is divided for ag_gemm, K for the others)."""

    op: str
    m: int
    n: int
    k: int
    dtype: str
    strategies: tuple[str, ...]
    """Which of ours to time, of ``tune.lookup.STRATEGIES``."""
    num_rounds: int


@dataclass(frozen=True)
class RankTimes:
    """One case as one rank saw it."""

    problem: str
    """What is wrong with a result; empty if nothing is. Ranks then still go through the rounds together."""
    rounds: dict[str, list[float]]
    """Seconds per round by name: ``gemm``, ``comm``, ``beside``, then the contenders of ``perf.figures.CaseResult``."""
    skipped: dict[str, str]
    auto: str


def measure(group: Group, cases: Sequence[BenchCase], ticks: Path | None) -> list[RankTimes]:
    """Check and time every case. Rank 0 adds a byte to the file ``ticks`` for each round it has timed."""
    # The largest first: symmetric memory that grows is memory that stays.
    order = sorted(range(len(cases)), key=lambda index: -cases[index].m * (cases[index].n + cases[index].k))
    results = {index: _measure(group, cases[index], ticks) for index in order}
    return [results[index] for index in range(len(cases))]


def _measure(group: Group, case: BenchCase, ticks: Path | None) -> RankTimes:
    suite = make_suite(group, case)
    problem = _check(group, suite)

    def tick() -> None:
        if ticks is not None and group.rank == 0:
            with ticks.open("ab") as file:
                file.write(b".")

    # Ranks go on together even where one of them has a wrong result: who stops alone keeps the others waiting.
    watch = Stopwatch(group.device, lambda: meet(group))
    calls = suite.parts | {contender.name: contender.run for contender in suite.contenders}
    rounds = time_rounds(watch, calls, case.num_rounds, after_round=tick)
    group.synchronize()
    for part in ("gemm", "comm", "beside"):
        rounds.setdefault(part, [0.0] * case.num_rounds)
    return RankTimes(problem, rounds, suite.skipped, suite.auto)


def make_suite(group: Group, case: BenchCase) -> Suite:
    """What is compared in this world."""
    if case.op == "gemm":
        return gemm_suite(group.device, case.m, case.n, case.k, case.dtype)
    make = ghost_suite if group.transport == "ghost" else group_suite
    return make(group, case.op, (case.m, case.n, case.k), case.dtype, case.strategies)


def _check(group: Group, suite: Suite) -> str:
    """The first wrong result, in words. A contender that cannot run at all is moved to the skipped ones."""
    problem = ""
    for contender in list(suite.contenders):
        found = _check_one(group, suite, contender)
        problem = problem or found
    for call in suite.parts.values():
        call()
    group.synchronize()
    group.barrier()
    return problem


def _check_one(group: Group, suite: Suite, contender: Contender) -> str:
    suite.poison()
    group.synchronize()
    group.barrier()
    try:
        contender.run()
        group.synchronize()
    except RuntimeError as error:
        if contender.name != "torch":
            raise
        # Torch's fused ops refuse some shapes and machines; all ranks of a call alike.
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
