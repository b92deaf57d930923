"""The search: all ranks time the same in the same order, take the same winner, and end when the time is over."""

from __future__ import annotations

import dataclasses
import math
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tileflux.config import GemmConfig, GemmProblem
from tileflux.kernels.gemm_hopper_launch import why_not_hopper
from tileflux.kernels.operands import Operands
from tileflux.kernels.roles import ARRIVING
from tileflux.tune import search as search_module
from tileflux.tune.lookup import ITEMSIZE, rule
from tileflux.tune.search import Candidate, Outcome, as_candidate, candidates, refinements, search

from .entries import H200

KIB = 1024


def make(num: int, strategy: str = "fused") -> Candidate:
    return Candidate(strategy, "", GemmConfig(group_m=num + 1))


FUSED = [make(num) for num in range(12)]
ALL = [make(0, "sequential"), make(0, "pipelined"), *FUSED]


class Bench:
    """Times that are known, and a clock that they move on."""

    def __init__(self, seconds: dict[Candidate, float], noise: float = 0.0, compile_s: float = 0.0) -> None:
        self.seconds, self.noise, self.compile_s, self.now = seconds, noise, compile_s, 0.0
        self.order: list[Candidate] = []
        self.random = random.Random(1)

    def time_once(self, candidate: Candidate) -> float:
        if candidate not in self.order:
            self.now += self.compile_s
        self.order.append(candidate)
        took = self.seconds[candidate]
        self.now += took if took < math.inf else 0.0
        return took * (1 + self.noise * self.random.random())

    def search(self, tried: Sequence[Candidate], budget_s: float = 1e9, **options: object) -> Outcome | None:
        return search(tried, self.time_once, list, budget_s=budget_s, clock=lambda: self.now, **options)  # type: ignore[arg-type]


problems = st.builds(
    lambda op, m, n, k, world_size, dtype, is_heavy, gpu: GemmProblem(
        op, m, n, k, 1 if op == "gemm" else world_size, dtype, is_heavy, **gpu
    ),
    st.sampled_from(["gemm", "ag_gemm", "gemm_rs", "gemm_ar"]),
    st.integers(1, 20_000),
    st.integers(1, 20_000),
    st.integers(1, 20_000),
    st.sampled_from([2, 3, 8]),
    st.sampled_from(list(ITEMSIZE)),
    st.booleans(),
    st.sampled_from([{}, *({"arch": arch, "num_sms": 100} for arch in (80, 89, 90, 100, 999))]),
)


@given(problems)
def test_candidates_are_worth_a_try(problem: GemmProblem) -> None:
    found = candidates(problem)
    assert found[0] == as_candidate(rule(problem)) or problem.op == "gemm"
    assert len(set(found)) == len(found) <= 140
    assert {each.strategy for each in found} == (
        {"sequential"} if problem.op == "gemm" else {"sequential", "pipelined", "fused"}
    )
    limit = {80: 163, 89: 99, 90: 227, 100: 227}.get(problem.arch, 99) * KIB
    for each in found:
        algorithms = {"gemm_ar": ("one_shot", "two_shot") if each.strategy != "pipelined" else ("two_shot",)}
        assert each.algorithm in algorithms.get(problem.op, ("",))
        config = each.config
        if problem.arch and config != rule(problem).config:
            num_weights = 2 if problem.is_heavy else 1
            stage = (config.block_m + num_weights * config.block_n) * config.block_k * ITEMSIZE[problem.dtype]
            assert stage * config.num_stages <= limit
            assert num_weights * config.block_m * config.block_n <= 128 * 32 * config.num_warps
    assert candidates(dataclasses.replace(problem)) == found


def test_there_are_other_tiles_to_try() -> None:
    tiles = {(each.config.block_m, each.config.block_n) for each in candidates(H200)}
    assert {(128, 256), (128, 128), (256, 128), (64, 256)} <= tiles
    assert len(candidates(dataclasses.replace(H200, arch=100))) > 50


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_hoppers_own_loop_is_tried_with_tiles_that_it_takes(dtype: str) -> None:
    problem = dataclasses.replace(H200, dtype=dtype)
    found = [each.config for each in candidates(problem) if each.config.hopper]
    kind = getattr(torch, dtype)
    x, weight = torch.empty(512, 256, dtype=kind), torch.empty(512, 256, dtype=kind)
    operands = Operands(x, weight, torch.empty(512, 512, dtype=torch.bfloat16))
    assert len(found) >= 3 and all(why_not_hopper(operands, ARRIVING, config) is None for config in found)
    others = [each.config for each in candidates(problem) if not each.config.hopper and each.strategy == "fused"]
    assert len(others) >= 3, "and Triton's loop"


def test_ranks_that_share_a_gpu_try_programs_of_which_two_fit_on_an_sm() -> None:
    assert not any(each.config.fetches for each in candidates(H200))
    shared = [each for each in candidates(dataclasses.replace(H200, link="same GPU")) if each.config.fetches]
    assert {(each.config.block_m, each.config.block_n) for each in shared} >= {(128, 128), (64, 128)}
    for each in shared:
        config = each.config
        assert 2 * config.num_stages * 2 * config.block_k * (config.block_m + config.block_n) <= 227 * 1024
        assert 2 * 255 * 32 * config.num_warps <= 65536, "registers"
        assert str(each).endswith(", fetched")


@pytest.mark.parametrize("changes", [{"arch": 100}, {"dtype": "float32"}, {"dtype": "int8"}, {"is_heavy": True}])
def test_others_have_no_loop_of_hoppers(changes: dict[str, Any]) -> None:
    assert not any(each.config.hopper for each in candidates(dataclasses.replace(H200, **changes)))


def test_refinements() -> None:
    best = Candidate("fused", "", rule(H200).config)
    chunks = {each.config.num_chunks for each in refinements(H200, best)}
    assert chunks == {1, 2}, "512 rows a rank are two chunks of 256"
    assert {each.config.num_feeders for each in refinements(H200, best)} == {best.config.num_feeders}
    departing = dataclasses.replace(H200, op="gemm_rs", n=1024, link="PCIe")
    assert {each.config.num_chunks for each in refinements(departing, best)} == {1, 2, 4}, "slabs of a tile each"
    shared = refinements(dataclasses.replace(H200, link="same GPU"), best)
    assert {each.config.num_feeders for each in shared} == {2, 4, 8, 16, 32}
    assert best not in shared and len(set(shared)) == len(shared)
    assert refinements(H200, dataclasses.replace(best, strategy="sequential")) == []
    assert refinements(
        dataclasses.replace(H200, op="gemm", world_size=1), dataclasses.replace(best, strategy="sequential")
    )
    on_cpu = GemmProblem("gemm_rs", 4096, 64, 64, 2, "float32")
    assert refinements(on_cpu, Candidate("fused", "", rule(on_cpu).config)) == []


@pytest.mark.parametrize("quickest", ALL, ids=str)
def test_the_quickest_wins_whatever_the_noise(quickest: Candidate) -> None:
    seconds = {candidate: 1.0 + 0.1 * index for index, candidate in enumerate(ALL)} | {quickest: 0.8}
    outcome = Bench(seconds, noise=0.1).search(ALL, keep=(ALL[3],))
    assert outcome is not None and outcome.winner == quickest
    assert (outcome.num_tried, outcome.num_left_out) == (len(ALL), 0)
    assert {"sequential", "pipelined", "fused"} == set(outcome.best()) and ALL[3] in outcome.seconds
    assert len(outcome.seconds) < 7, "most are dropped on the way"
    assert outcome.best()[quickest.strategy] == outcome.seconds[quickest]


def test_of_those_that_are_level_the_first_wins() -> None:
    seconds = {candidate: 1.0 for candidate in ALL}
    assert Bench(seconds).search(ALL).winner == ALL[0]  # type: ignore[union-attr]
    assert Bench(seconds).search(ALL, keep=(FUSED[7],)).winner == FUSED[7]  # type: ignore[union-attr]
    quicker = Bench(seconds | {FUSED[2]: 0.995}).search(ALL, keep=(FUSED[7],))
    assert quicker is not None and quicker.winner == FUSED[7], "by less than rounds differ"
    assert Bench(seconds | {FUSED[2]: 0.98}).search(ALL, keep=(FUSED[7],)).winner == FUSED[2]  # type: ignore[union-attr]


def test_what_cannot_run_does_not_win() -> None:
    seconds = {candidate: math.inf for candidate in ALL} | {FUSED[5]: 2.0}
    bench = Bench(seconds)
    outcome = bench.search(ALL, keep=(ALL[0],))
    assert outcome is not None and outcome.winner == FUSED[5] and set(outcome.seconds) == {FUSED[5]}
    assert Bench({candidate: math.inf for candidate in ALL}).search(ALL) is None


@pytest.mark.parametrize("num_rounds", [0, 4, 5, 10, 24])
def test_what_ran_before_all_failed_wins_over_what_never_ran(num_rounds: int) -> None:
    """After so many rounds of the stages nothing runs any more. They have 5, 5 and 15."""
    tried = [FUSED[0], *ALL[:2], FUSED[1]]
    bench = Bench({FUSED[0]: math.inf, ALL[0]: 1.0, ALL[1]: 2.0, FUSED[1]: 1.5})
    num_first = 3 * len(tried)

    def time_once(candidate: Candidate) -> float:
        took = bench.time_once(candidate)
        return math.inf if len(bench.order) > num_first + 3 * num_rounds else took

    outcome = search(tried, time_once, list, budget_s=1e9, clock=lambda: bench.now, keep=(FUSED[0],))
    assert outcome is not None and outcome.winner == ALL[0]
    assert outcome.seconds == {ALL[0]: 1.0, ALL[1]: 2.0, FUSED[1]: 1.5}


def test_a_strategy_that_fails_late_has_no_time() -> None:
    """What is kept of a search must not have a time that is infinite."""
    bench = Bench({ALL[0]: 1.0, FUSED[0]: 0.5})

    def time_once(candidate: Candidate) -> float:
        took = bench.time_once(candidate)
        return math.inf if candidate == FUSED[0] and len(bench.order) > 20 else took

    outcome = search([ALL[0], FUSED[0]], time_once, list, budget_s=1e9, clock=lambda: bench.now)
    assert outcome is not None and outcome.winner == ALL[0]
    assert outcome.best() == {"sequential": 1.0}


def test_the_best_of_each_strategy_is_refined() -> None:
    asked: list[Candidate] = []
    better = make(99)

    def refine(best: Candidate) -> list[Candidate]:
        asked.append(best)
        return [better] if best.strategy == "fused" else []

    seconds = {candidate: 1.0 + 0.1 * index for index, candidate in enumerate(ALL)} | {better: 0.5}
    outcome = Bench(seconds).search(ALL, refine=refine)
    assert outcome is not None and outcome.winner == better
    assert asked == ALL[:3]


@pytest.mark.parametrize("budget_s", [0.0, 30.0, 60.0])
def test_a_budget_is_kept_but_each_strategy_is_tried(budget_s: float) -> None:
    """Compiling takes 5 s a candidate, running nothing to speak of."""
    tried = [*FUSED, *ALL[:2]]
    bench = Bench({candidate: 1e-3 for candidate in tried}, compile_s=5.0)
    outcome = bench.search(tried, budget_s, keep=(FUSED[-1],), refine=lambda best: [make(50)])
    assert outcome is not None
    assert {FUSED[-1], *ALL[:2]} <= set(bench.order) and make(50) not in bench.order
    assert outcome.num_tried == len(set(bench.order)) == {0.0: 3, 30.0: 6, 60.0: 10}[budget_s]
    assert outcome.num_tried + outcome.num_left_out == len(tried) + 1
    assert bench.now <= max(budget_s, 15) + 1


def test_long_runs_end_after_the_rounds_in_which_the_budget_ends() -> None:
    outcome = (bench := Bench({candidate: 1.0 for candidate in ALL})).search(ALL, 60.0)
    assert outcome is not None and outcome.num_left_out > 0
    assert 36 < bench.now < 100, "trying, and one stage"
    assert len(outcome.seconds) >= 8


def test_rounds_go_forwards_and_backwards_and_come_back_in_order() -> None:
    seconds = {candidate: float(index) for index, candidate in enumerate(ALL[:3])}
    bench = Bench(seconds)
    assert search_module._take_turns(ALL[:3], bench.time_once, 3) == [0.0, 1.0, 2.0] * 3
    assert bench.order == [*ALL[:3], *reversed(ALL[:3]), *ALL[:3]]


class World:
    """Ranks as threads that agree at a barrier."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=10)
        self.values: list[Sequence[float]] = [()] * size

    def agree_max(self, rank: int) -> Callable[[Sequence[float]], list[float]]:
        def agree(values: Sequence[float]) -> list[float]:
            self.values[rank] = values
            self.barrier.wait()
            found = [max(each) for each in zip(*self.values, strict=True)]
            self.barrier.wait()
            return found

        return agree


def test_ranks_try_the_same_and_take_the_same() -> None:
    """Each rank finds another candidate quickest; by the slowest rank a third one is. Their clocks differ too."""
    size, rng = 3, random.Random(7)
    seconds = [{candidate: rng.uniform(1.0, 3.0) for candidate in ALL} for _ in range(size)]
    for rank, times in enumerate(seconds):
        times |= {FUSED[rank]: 0.1, FUSED[9]: 0.5}
    world = World(size)
    benches = [Bench(times, compile_s=rank) for rank, times in enumerate(seconds)]
    outcomes: list[Outcome | None] = [None] * size

    def run(rank: int) -> None:
        bench = benches[rank]
        outcomes[rank] = search(
            ALL, bench.time_once, world.agree_max(rank), budget_s=400.0, clock=lambda: bench.now,
            refine=lambda best: [dataclasses.replace(best, config=dataclasses.replace(best.config, num_stages=9))],
        )  # fmt: skip

    for times in seconds:
        for candidate in ALL:
            times[dataclasses.replace(candidate, config=dataclasses.replace(candidate.config, num_stages=9))] = 4.0
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert outcomes[0] is not None and outcomes[0].winner == FUSED[9]
    assert outcomes[1] == outcomes[2] == outcomes[0]
    assert benches[1].order == benches[2].order == benches[0].order


def test_candidates_say_what_they_are() -> None:
    config = GemmConfig(128, 256, 64)
    assert str(Candidate("fused", "", config)) == "fused 128x256x64"
    assert str(Candidate("fused", "", dataclasses.replace(config, hopper=True))) == "fused 128x256x64, hopper"
    assert str(Candidate("fused", "one_shot", dataclasses.replace(config, num_chunks=2))) == (
        "fused, one_shot 128x256x64, 2 chunks"
    )
    assert str(Candidate("pipelined", "", dataclasses.replace(config, num_chunks=4))) == "pipelined, 4 chunks"
    assert str(Candidate("sequential", "two_shot", config)) == "sequential, two_shot"


def test_chunks_that_go_alone_are_tried_where_there_are_others_to_go_together() -> None:
    best = Candidate("fused", "", GemmConfig())
    assert {each.config.alone for each in refinements(H200, best)} == {-1, 0, 1, 3}
    three_ranks = dataclasses.replace(H200, world_size=3)
    assert {each.config.alone for each in refinements(three_ranks, best)} == {-1, 0}
    sums = dataclasses.replace(H200, op="gemm_rs")
    assert {each.config.alone for each in refinements(sums, best)} == {0, 1, 3}


def test_other_spans_are_tried_where_there_are_others_chunks() -> None:
    best = Candidate("fused", "", dataclasses.replace(rule(H200).config, span=2))
    assert {each.config.span for each in refinements(H200, best)} == {1, 2, 4}
    two_ranks = dataclasses.replace(H200, world_size=2)
    assert {each.config.span for each in refinements(two_ranks, dataclasses.replace(best, config=GemmConfig()))} == {1}


def test_ranks_that_share_a_gpu_try_fewer_programs_than_their_share() -> None:
    best = Candidate("fused", "", rule(H200).config)
    shared = dataclasses.replace(H200, link="same GPU", num_sms=33)
    assert {each.config.num_sms for each in refinements(shared, best)} == {None, 31, 29, 25}
    assert {each.config.num_sms for each in refinements(H200, best)} == {None}
    few = dataclasses.replace(shared, num_sms=9)
    assert {each.config.num_sms for each in refinements(few, best)} == {None}, "too few are left"
