"""Finding the quickest way for a problem by trying: what is worth a try, and in which order it is tried and dropped.

Knows no op and no clock of a GPU: who asks gives a function that times one call, and one by which ranks agree. All
ranks go through the same candidates in the same order, and see the same times, those of the slowest rank: so all come
to the same winner without telling each other.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tileflux.config import GemmConfig, GemmProblem
from tileflux.tune.lookup import ITEMSIZE, Choice, rule

__all__ = ["Candidate", "Outcome", "as_candidate", "candidates", "refinements", "search"]

_SHARED_MEMORY = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}  # KiB a program
_LEAST_SHARED_MEMORY = 99
_MAX_ACCUMULATORS = 128  # registers a thread, of 255: the rest is for operands and addresses
_MAX_FP32_ACCUMULATORS = 32  # products of fp32 hold their operands in registers too
_CHUNK_ROWS = 256  # what a chunk has at least, see gather_shards
_NUM_TILINGS = 64  # more than these are too far from the rule's to be worth compiling
_NUM_BESIDE_HOPPER = 5  # where Hopper's own loop has most of what could win
_HOPPER_TILES = ((128, 256), (256, 128), (128, 128), (64, 256), (64, 128), (128, 64), (64, 64))
_SHARING_TILES = ((128, 128, 3), (64, 128, 4), (128, 64, 4), (64, 64, 4))  # and stages, so that two fit on an SM
_CPU_TILES = ((512, 1024), (1024, 1024), (256, 1024), (256, 512), (128, 256))

_NUM_FIRST = 3
_STAGES = ((8, 5), (4, 5), (2, 15))  # how many stay, and for how many rounds
_FIRST_SHARE = 0.6  # of the budget, for trying everything; the rest is for those that are left
_TIE = 0.01


@dataclass(frozen=True)
class Candidate:
    """A way to run an op."""

    strategy: str
    algorithm: str
    config: GemmConfig

    def __str__(self) -> str:
        how = f"{self.strategy}, {self.algorithm}" if self.algorithm else self.strategy
        if self.strategy == "sequential":
            return how
        config = self.config
        chunks = f", {config.num_chunks} chunks" if config.num_chunks > 1 else ""
        tile = f" {config.block_m}x{config.block_n}x{config.block_k}" if self.strategy == "fused" else ""
        switches = ", hopper" * config.hopper + ", fetched" * config.fetches + ", summed apart" * config.sums_apart
        return f"{how}{tile}{switches}{chunks}"


@dataclass(frozen=True)
class Outcome:
    """What a search found."""

    winner: Candidate
    seconds: Mapping[Candidate, float]
    """Of those that ran to the end, median of the last rounds in which they took turns; never infinite."""
    num_tried: int
    num_left_out: int
    """For want of time."""

    def best(self) -> dict[str, float]:
        """The best time of each strategy."""
        found: dict[str, float] = {}
        for candidate, took in self.seconds.items():
            found[candidate.strategy] = min(took, found.get(candidate.strategy, math.inf))
        return found


def as_candidate(choice: Choice) -> Candidate:
    """What lookup chose, as something to try."""
    return Candidate(choice.strategy, choice.algorithm, choice.config)


def candidates(problem: GemmProblem) -> list[Candidate]:
    """What is worth a try, each once: first every strategy as the rule would run it, then fused with other tiles."""
    usual = rule(problem)
    if problem.op == "gemm":
        configs = dict.fromkeys([usual.config, *_tilings(problem, usual.config)])
        return [Candidate("sequential", "", config) for config in configs]
    both = ("one_shot", "two_shot") if problem.op == "gemm_ar" else ("",)
    found = [as_candidate(usual)]
    found += [Candidate("sequential", algorithm, usual.config) for algorithm in both]
    found += [Candidate("pipelined", both[-1], usual.config)]
    for config in [usual.config, *_tilings(problem, usual.config)]:
        found += [Candidate("fused", algorithm, config) for algorithm in both]
    return list(dict.fromkeys(found))


def refinements(problem: GemmProblem, best: Candidate) -> list[Candidate]:
    """The best so far with other numbers of what goes beside its tiles."""
    if best.strategy == "sequential" and problem.op != "gemm":
        return []
    chunks, feeders = [best.config.num_chunks], [best.config.num_feeders]
    if problem.op == "ag_gemm":
        chunks += [count for count in (1, 2, 4, 8) if count * _CHUNK_ROWS <= problem.rows_per_rank]
        if problem.link == "same GPU":  # elsewhere the copy engine feeds
            feeders += [count for count in (2, 4, 8, 16, 32) if 2 * count <= problem.num_sms]
    elif problem.op == "gemm_rs" and problem.link != "same GPU" and best.strategy == "fused":
        chunks += [count for count in (1, 2, 4, 8) if count * best.config.block_n <= problem.n]  # slabs
    groups = [best.config.group_m, *((4, 8, 16) if problem.arch and best.strategy != "pipelined" else ())]
    # One number at a time: their best values hardly depend on each other.
    changes: list[tuple[str, Any]] = [("num_chunks", each) for each in chunks]
    changes += [("num_feeders", each) for each in feeders]
    changes += [("group_m", each) for each in groups]
    if best.strategy == "fused" and problem.arch:
        changes += [("span", each) for each in (1, 2, 4) if each < problem.world_size]
        changes += [("alone", each) for each in (0, 1, 3) if each < problem.world_size - 2]
        if problem.op == "ag_gemm" and problem.world_size > 2:
            changes.append(("alone", -1))
    if problem.link == "same GPU":
        if problem.op != "ag_gemm":
            changes.append(("sums_apart", not best.config.sums_apart))
        if not best.config.hopper:
            changes.append(("fetches", not best.config.fetches))
        # Programs that nobody else's SM is wanted for: of as many as a rank's share some may begin late.
        changes += [("num_sms", problem.num_sms - spare) for spare in (2, 4, 8) if problem.num_sms - spare >= 8]
    found = [dataclasses.replace(best, config=dataclasses.replace(best.config, **{name: v})) for name, v in changes]
    return [each for each in dict.fromkeys(found) if each != best]


def _tilings(problem: GemmProblem, usual: GemmConfig) -> Iterator[GemmConfig]:
    """Tiles that fit the problem and the GPU, the nearest to the rule's first."""
    if problem.arch == 0:
        for block_m, block_n in _CPU_TILES:
            yield dataclasses.replace(usual, block_m=block_m, block_n=block_n)
        return
    depth = 128 // ITEMSIZE[problem.dtype]
    sizes = itertools.product(
        (16, 32, 64, 128, 256), (32, 64, 128, 256), (depth // 2, depth, 2 * depth), (4, 8), (3, 4, 5)
    )
    fitting, triton = [], dataclasses.replace(usual, hopper=False, group_m=8)
    for block_m, block_n, block_k, num_warps, num_stages in sizes:
        config = dataclasses.replace(
            triton, block_m=block_m, block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=num_stages
        )
        if _fits(problem, config, usual):
            fitting.append(config)
    fitting.sort(key=lambda config: _distance(config, usual))  # stable: equally near as listed
    yield from _sharing_tilings(problem, usual)
    on_hopper = list(_hopper_tilings(problem, usual))
    yield from on_hopper
    yield from fitting[: _NUM_BESIDE_HOPPER if on_hopper else _NUM_TILINGS]


def _hopper_tilings(problem: GemmProblem, usual: GemmConfig) -> Iterator[GemmConfig]:
    """The same for Hopper's own loop, which finds its stages itself."""
    itemsize = ITEMSIZE[problem.dtype]
    if problem.arch != 90 or itemsize > 2 or problem.dtype == "int8" or problem.is_heavy:
        return
    for block_m, block_n in _HOPPER_TILES:
        num_warps = 4 if block_m == 64 else 8
        if itemsize == 1 and 2 * block_m * block_n > 32 * num_warps * _MAX_ACCUMULATORS:
            continue  # products of fp8 take twice the registers
        if block_m <= max(64, 2 * usual.block_m) and block_n < 2 * max(problem.n, 32):
            yield dataclasses.replace(
                usual, block_m=block_m, block_n=block_n, block_k=128 // itemsize, group_m=16,
                num_warps=num_warps, num_stages=4, hopper=True, fetches=False,
            )  # fmt: skip


def _sharing_tilings(problem: GemmProblem, usual: GemmConfig) -> Iterator[GemmConfig]:
    """Where ranks share a GPU: programs that leave room for another rank's on their SM, and fetch what there is to do.

    A program that fills an SM keeps another rank's from beginning at all until it has ended.
    """
    if problem.link != "same GPU":
        return
    for block_m, block_n, num_stages in _SHARING_TILES:
        config = dataclasses.replace(
            usual, block_m=block_m, block_n=block_n, block_k=128 // ITEMSIZE[problem.dtype],
            num_warps=4, num_stages=num_stages, fetches=True,
        )  # fmt: skip
        if _fits(problem, config, usual):
            yield config


def _fits(problem: GemmProblem, config: GemmConfig, usual: GemmConfig) -> bool:
    """Whether a tile is neither too large for an SM nor far too small to keep it busy. An estimate."""
    itemsize, num_weights = ITEMSIZE[problem.dtype], 2 if problem.is_heavy else 1
    stage = (config.block_m + num_weights * config.block_n) * config.block_k * itemsize
    limit = _SHARED_MEMORY.get(problem.arch, _LEAST_SHARED_MEMORY) * 1024
    accumulators = num_weights * config.block_m * config.block_n // (32 * config.num_warps)
    most = _MAX_FP32_ACCUMULATORS if itemsize == 4 else _MAX_ACCUMULATORS
    return (
        stage * config.num_stages <= limit
        and 8 <= accumulators <= most
        and usual.block_m // 2 <= config.block_m <= 2 * usual.block_m  # the rule's follows the rows
        and config.block_n < 2 * max(problem.n, 32)
    )


def _distance(config: GemmConfig, usual: GemmConfig) -> float:
    names = ("block_m", "block_n", "block_k", "num_warps")
    doublings = sum(abs(math.log2(getattr(config, name) / getattr(usual, name))) for name in names)
    return doublings + abs(config.num_stages - usual.num_stages) / 2


def search(
    tried: Sequence[Candidate],
    time_once: Callable[[Candidate], float],
    agree_max: Callable[[Sequence[float]], Sequence[float]],
    *,
    budget_s: float,
    keep: Sequence[Candidate] = (),
    refine: Callable[[Candidate], Sequence[Candidate]] = lambda best: (),
    clock: Callable[[], float] = time.monotonic,
) -> Outcome | None:
    """Time every candidate a little, then the best of them again in turn, with half as many every time.

    ``time_once`` gives the seconds of one call, infinity for one that cannot run or is wrong; ``agree_max`` the
    greatest over ranks of each number. ``refine`` gives more to try, from the best of a strategy. ``keep``, and the
    best of each strategy, stay to the end. When the budget is spent, what has not been tried is left out; ``keep`` and
    one of each strategy are tried all the same. None if nothing can run.
    """
    start = clock()
    order: dict[Candidate, float] = {}  # the first time of each, in the order in which they were tried
    left_out: set[Candidate] = set()
    elapsed = 0.0

    def try_all(more: Sequence[Candidate]) -> None:
        nonlocal elapsed
        for candidate in more:
            is_due = candidate in keep or candidate.strategy not in {each.strategy for each in order}
            if candidate in order:
                continue
            if elapsed > _FIRST_SHARE * budget_s and not is_due:
                left_out.add(candidate)
                continue
            took = [time_once(candidate) for _ in range(_NUM_FIRST)]
            *took, elapsed = agree_max([*took, clock() - start])
            order[candidate] = statistics.median(took)

    try_all([*keep, *tried])
    for champion in _champions(order):
        try_all(refine(champion))
    seconds = {candidate: took for candidate, took in order.items() if took < math.inf}
    if not seconds:
        return None
    for num_kept, num_rounds in _STAGES:
        staying = _staying(seconds, num_kept, keep)
        rounds = _take_turns(staying, time_once, num_rounds)
        *rounds, elapsed = agree_max([*rounds, clock() - start])
        medians = [statistics.median(rounds[index :: len(staying)]) for index in range(len(staying))]
        ran = {candidate: took for candidate, took in zip(staying, medians, strict=True) if took < math.inf}
        if not ran:
            break  # of what no longer runs at all, the times from when it did are all there is
        seconds = ran
        if elapsed > budget_s:
            break
    best = min(seconds.values())
    # Of those that are level the first tried: what ran before, or the rule's.
    winner = next(candidate for candidate in order if seconds.get(candidate, math.inf) <= best * (1 + _TIE))
    return Outcome(winner, seconds, len(order), len(left_out))


def _champions(seconds: Mapping[Candidate, float]) -> list[Candidate]:
    """The best of each strategy that can run; of equals the first tried."""
    ranked = sorted(seconds, key=lambda candidate: seconds[candidate])
    best = {candidate.strategy: candidate for candidate in reversed(ranked)}
    return [candidate for candidate in seconds if candidate in best.values() and seconds[candidate] < math.inf]


def _staying(seconds: Mapping[Candidate, float], num_kept: int, keep: Sequence[Candidate]) -> list[Candidate]:
    """The quickest, the best of each strategy and those to be kept, in the order in which they were first tried."""
    ranked = sorted(seconds, key=lambda candidate: seconds[candidate])  # stable: the first tried of equals
    wanted = {*ranked[:num_kept], *_champions(seconds), *keep}
    return [candidate for candidate in seconds if candidate in wanted]


def _take_turns(staying: Sequence[Candidate], time_once: Callable[[Candidate], float], num_rounds: int) -> list[float]:
    """Rounds, one after the other, each in the order of ``staying``; every other one is timed backwards."""
    rounds: list[float] = []
    for number in range(num_rounds):
        backwards = number % 2 == 1
        took = [time_once(candidate) for candidate in (reversed(staying) if backwards else staying)]
        rounds += reversed(took) if backwards else took
    return rounds
