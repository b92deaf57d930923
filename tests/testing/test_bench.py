"""Checked, then timed: what comes back from every rank, in which order, and what happens to a wrong result."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tileflux
from tileflux import ops
from tileflux.symm.group import Group
from tileflux.testing import bench, run_ranks
from tileflux.testing.bench import BenchCase, RankTimes, check_suite, make_suite, measure
from tileflux.testing.contenders import Contender, Suite
from tileflux.testing.timing import WARM_UP_S
from tileflux.tune.lookup import STRATEGIES

PARTS = ["gemm", "comm", "beside"]
OURS = ["ours auto", "ours sequential", "ours fused"]
COMPARED = {op: ["sequential", "pipelined", *OURS] for op in ("ag_gemm", "gemm_rs", "gemm_ar")} | {
    "gemm": ["torch", "ours"]
}


def make_case(op: str, shape: tuple[int, int, int], dtype: str = "float32", num_rounds: int = 2) -> BenchCase:
    return BenchCase(op, *shape, dtype, STRATEGIES, num_rounds)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_op_is_checked_and_timed_on_every_rank(world_size: int, tmp_path: Path) -> None:
    """With three ranks none of the sizes divides."""
    cases = [make_case(op, (65, 50, 35), dtype) for op in COMPARED for dtype in ("float32", "bfloat16")]
    ticks = tmp_path / "ticks"
    found = run_ranks(measure, world_size, args=(cases, ticks))
    assert ticks.read_bytes() == b"..\n" * len(cases), "a dot for every round, of one rank"
    for times in (each for rank in found for each in rank):
        assert times.problem == ""
    for rank in found:
        for case, times in zip(cases, rank, strict=True):
            assert sorted(times.rounds) == sorted([*PARTS, *COMPARED[case.op]])
            for name, seconds in times.rounds.items():
                assert len(seconds) == 2
                assert min(seconds) > 0 or (case.op == "gemm" and name in ("comm", "beside") and not any(seconds))
            assert (times.auto in STRATEGIES[1:]) if case.op != "gemm" else times.auto == ""
            assert list(times.skipped) == ([] if case.op == "gemm" else ["torch"])
            assert all(times.skipped.values())
    assert [each.auto for each in found[0]] == [each.auto for each in found[-1]]


def _measure_in_order(group: Group, cases: list[BenchCase]) -> tuple[list[int], list[RankTimes]]:
    order: list[int] = []
    make = bench.make_suite

    def noted(group: Group, case: BenchCase) -> object:
        order.append(case.m)
        return make(group, case)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "make_suite", noted)
        return order, measure(group, cases, None)


def test_the_largest_comes_first_and_results_in_the_order_asked_for() -> None:
    sizes = {16: 1, 64: 3, 8: 5, 32: 2}
    cases = [make_case("gemm_rs", (m, 16, 16), num_rounds=rounds) for m, rounds in sizes.items()]
    for order, times in run_ranks(_measure_in_order, 2, args=(cases,)):
        assert order == [64, 32, 16, 8]
        assert [len(each.rounds["sequential"]) for each in times] == [1, 3, 5, 2]


def _measure_broken(group: Group, op: str, break_it: Callable[..., None], at: int) -> RankTimes:
    right = getattr(ops, op)

    def wrong(*arguments: Any, out: torch.Tensor, **named: Any) -> None:
        right(*arguments, out=out, **named)
        if group.rank == at and named.get("strategy") == "fused":
            break_it(out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, op, wrong)
        return measure(group, [make_case(op, (64, 48, 32))], None)[0]


BREAK: dict[str, Callable[[torch.Tensor], object]] = {
    "all of it": lambda out: out.add_(1.0),
    "one element": lambda out: out[0, 0].add_(1.0),
    "one left out": lambda out: out[-1, -1].fill_(torch.nan),
}


@pytest.mark.parametrize("how", BREAK)
@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs", "gemm_ar"])
def test_a_wrong_result_is_told_by_the_rank_that_has_it(op: str, how: str) -> None:
    """All ranks go on to the end: one that stopped alone would keep the others waiting."""
    right, wrong = run_ranks(_measure_broken, 2, args=(op, BREAK[how], 1))
    assert right.problem == ""
    assert wrong.problem.startswith("ours fused: rank 1: ")
    assert len(wrong.rounds["ours fused"]) == 2


def _broken_peer(group: Group) -> RankTimes:
    """Rank 1 puts wrong rows on their way; what it computes itself is right."""
    case = make_case("ag_gemm", (64, 48, 32))
    suite = make_suite(group, case)
    (fused,) = (each for each in suite.contenders if each.name == "ours fused")
    task_x = fused.check.__self__.x  # type: ignore[attr-defined]

    def run() -> None:
        if group.rank == 1:
            task_x.add_(1.0)
        fused.run()
        if group.rank == 1:
            task_x.sub_(1.0)

    suite.contenders[suite.contenders.index(fused)] = dataclasses.replace(fused, run=run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "make_suite", lambda group, case: suite)
        return measure(group, [case], None)[0]


def test_what_a_peer_sent_wrong_is_told_by_who_got_it() -> None:
    first, second = run_ranks(_broken_peer, 2)
    assert first.problem.startswith("ours fused: rank 0: ") and second.problem.startswith("ours fused: rank 1: ")


def _parts_in_order(group: Group) -> list[str]:
    """What a rank does when it has checked all contenders: parts, and when it has met the others."""
    seen: list[str] = []
    meet = group.barrier

    def noted() -> None:
        meet()
        seen.append("met")

    suite = Suite({name: lambda name=name: seen.append(name) for name in ("gemm", "comm")}, [], lambda: None, "fused")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "barrier", noted)
        assert check_suite(group, suite) == ""
    return seen


def test_ranks_meet_behind_each_part() -> None:
    """What one of them loads for the first must not be loaded while another waits for it in the second."""
    assert run_ranks(_parts_in_order, 2) == [["gemm", "met", "comm", "met"]] * 2


class Unavailable(RuntimeError):
    """As torch raises where it cannot run."""


def _with_torch(group: Group, name: str) -> tuple[RankTimes | str, list[str]]:
    """A contender that refuses to run."""
    case = make_case("gemm_rs", (16, 16, 16))
    suite = make_suite(group, case)
    ran: list[str] = []

    def refuse() -> None:
        ran.append(name)
        raise Unavailable("symmetric memory: not here\nand a second line")

    suite.contenders.insert(1, Contender(name, refuse, lambda: pytest.fail("checked")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "make_suite", lambda group, case: suite)
        try:
            return measure(group, [case], None)[0], ran
        except Unavailable as error:
            return str(error), ran


@pytest.mark.parametrize("name", ["torch", "torch two-shot"])
def test_torch_may_refuse_and_is_left_out(name: str) -> None:
    for times, ran in run_ranks(_with_torch, 2, args=(name,)):
        assert isinstance(times, RankTimes) and times.problem == ""
        assert times.skipped.pop(name) == "symmetric memory: not here"
        assert list(times.skipped) == ([] if name == "torch" else ["torch"])
        assert name not in times.rounds and ran == [name], "it was timed although it cannot run"


def test_ours_may_not() -> None:
    for error, _ in run_ranks(_with_torch, 2, args=("ours made up",)):
        assert isinstance(error, str) and error.startswith("symmetric memory: not here")


def test_one_rank_alone() -> None:
    (times,) = run_ranks(measure, 1, args=([make_case("gemm", (20, 30, 40), "bfloat16", 3)], None))[0]
    assert times.problem == "" and len(times.rounds["ours"]) == 3


def _rounds_until_steady(
    group: Group, noise: tuple[float, float], op: str, num_rounds: int | None = None
) -> dict[str, list[float]]:
    """Made-up times around 1 ms, with so much noise on even and on odd ranks."""
    drawn = random.Random(7 + group.rank)

    class Watch:
        def __init__(self, *arguments: object) -> None:
            pass

        def seconds(self, call: Callable[[], object]) -> float:
            call()
            return 1e-3 * (1 + noise[group.rank % 2] * drawn.uniform(-1, 1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "Stopwatch", Watch)
        case = dataclasses.replace(make_case(op, (16, 16, 16)), num_rounds=num_rounds)
        return measure(group, [case], None)[0].rounds


@pytest.mark.parametrize(
    ("noise", "least", "most"),
    [
        ((0.0, 0.0), 20, 20),
        ((0.01, 0.02), 20, 20),
        ((0.02, 0.13), 25, 95),
        ((0.5, 0.0), 100, 100),
        ((0.0, 0.5), 100, 100),
    ],
)
def test_rounds_go_on_until_the_slowest_rank_is_steady(noise: tuple[float, float], least: int, most: int) -> None:
    """Ranks stop at the same round, whichever of them sees the noise."""
    found = run_ranks(_rounds_until_steady, 2, args=(noise, "gemm_rs"))
    counts = {len(seconds) for rank in found for seconds in rank.values()}
    assert len(counts) == 1 and least <= counts.pop() <= most


def test_as_many_rounds_as_are_asked_for_steady_or_not() -> None:
    for rank in run_ranks(_rounds_until_steady, 2, args=((0.0, 0.0), "gemm_rs", 27)):
        assert {len(seconds) for seconds in rank.values()} == {27}


def test_one_rank_alone_decides_alone() -> None:
    (found,) = run_ranks(_rounds_until_steady, 1, args=((0.5, 0.0), "gemm"))
    assert {len(seconds) for seconds in found.values()} == {100}


def test_what_is_steady() -> None:
    alone: Any = SimpleNamespace(world_size=1, transport="local")
    ghost: Any = SimpleNamespace(world_size=8, transport="ghost")
    steady, noisy = [1.0, 1.01] * 20, [1.0, 1.2] * 20
    for group in (alone, ghost):
        assert bench.are_steady(group, {"a": steady, "b": steady[::-1]})
        assert not bench.are_steady(group, {"a": steady, "b": noisy})
        assert not bench.are_steady(group, {"a": [1.0] * 19}) and bench.are_steady(group, {"a": [1.0] * 20})
        assert not bench.are_steady(group, {"a": [1.0] * 21}), "not asked after every round"
        assert not bench.are_steady(group, {"a": [1.03] * 10 + [1.0] * 10}), "each half is sure of something else"
        assert bench.are_steady(group, {"a": [1.01] * 10 + [1.0] * 10})


def test_a_gpu_is_warm_when_the_rank_that_began_first_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    others = 0.2
    monkeypatch.setattr(bench, "agree_max", lambda group, values: [max(value, others) for value in values])
    group: Any = SimpleNamespace(device=torch.device("cuda"))
    assert not bench.is_warm(group, 0.5 * WARM_UP_S) and bench.is_warm(group, 1.1 * WARM_UP_S)
    others = 1.1 * WARM_UP_S
    assert bench.is_warm(group, 0.0), "or some ranks would go on without the others"
    others = 0.0
    assert bench.is_warm(SimpleNamespace(device=torch.device("cpu")), 0.0), "a CPU has nothing to wake"  # type: ignore[arg-type]


def test_rounds_wait_until_it_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def after_three(group: object, elapsed_s: float) -> bool:
        asked.append(elapsed_s)
        return len(asked) > 3

    monkeypatch.setattr(bench, "is_warm", after_three)
    (group,) = tileflux.local_groups(1)
    with group:
        (found,) = bench.measure(group, [BenchCase("gemm", 8, 8, 8, "float32", (), 2)], None)
    assert len(asked) == 4 and asked == sorted(asked) and not found.problem
    assert all(len(rounds) == 2 for rounds in found.rounds.values())
