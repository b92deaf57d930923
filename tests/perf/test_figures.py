"""The figures by hand-made numbers: medians of the slowest rank, exposed time, who won and who only seems to have."""

from __future__ import annotations

import dataclasses
import random
import statistics
from typing import Any

import pytest

from tileflux.perf.figures import BASELINES, CaseResult, Duel, Timing, baseline_of, ect, hidden, judge, limit, summarize


def case(m: int = 512, /, spread: float = 0.0, **seconds: float) -> CaseResult:
    """T_gemm 10, T_comm 4, and contenders by name; ``ours_fused`` stands for ``ours fused``."""
    timings = (Timing(name.replace("_", " "), value, spread) for name, value in seconds.items())
    gemm, comm, beside = Timing("gemm", 10.0, 0.0), Timing("comm", 4.0, 0.0), Timing("beside", 11.0, 0.0)
    return CaseResult("ag_gemm", m, 64, 32, 4, "float32", gemm, comm, beside, tuple(timings), (), "fused")


def test_of_each_round_the_slowest_rank_counts() -> None:
    # The slowest of rounds: 3, 5, 4. No rank's own median is 4.
    assert summarize("x", [[3.0, 1.0, 4.0], [1.0, 5.0, 2.0]]) == Timing("x", 4.0, 0.5 / 4.0)


def test_the_spread_is_half_the_distance_of_the_quartiles() -> None:
    times = [float(value) for value in range(1, 10)]
    random.shuffle(times)
    assert summarize("x", [times]) == Timing("x", 5.0, (7 - 3) / 2 / 5)
    assert summarize("x", [[2.0]]) == Timing("x", 2.0, 0.0)
    assert summarize("x", [[3.0] * 7]).spread == 0.0


def test_one_slow_round_changes_neither_much() -> None:
    calm = [1.0 + random.random() / 100 for _ in range(19)]
    assert summarize("x", [[*calm, 100.0]]).seconds < 1.01
    assert summarize("x", [[*calm, 100.0]]).spread < 0.01


@pytest.mark.parametrize(
    ("rounds", "words"),
    [([[]], "not timed in any round"), ([], "not timed in any round"), ([[1.0, 0.0]], "took 0.0 s in a round")],
)
def test_what_was_not_timed_has_no_figure(rounds: list[list[float]], words: str) -> None:
    with pytest.raises(ValueError, match=f"^mine .*{words}"):
        summarize("mine", rounds)


def test_ranks_with_different_rounds_are_a_defect() -> None:
    with pytest.raises(ValueError, match="shorter"):
        summarize("x", [[1.0, 2.0], [1.0]])


def test_exposed_and_hidden() -> None:
    assert ect(12.0, 10.0) == 2.0 and ect(9.0, 10.0) == -1.0
    assert hidden(12.0, 10.0, 4.0) == 0.5
    assert hidden(14.0, 10.0, 4.0) == 0.0  # one after the other
    assert hidden(10.0, 10.0, 4.0) == 1.0
    assert hidden(18.0, 10.0, 4.0) == -1.0  # overlap costs more than it hides
    assert hidden(12.0, 10.0, 0.0) is None
    assert limit(10.0, 4.0) == limit(4.0, 10.0) == 10.0


def test_a_published_case() -> None:
    """Flux's README, all-gather on A800: torch takes 2.438 + 0.662 ms, Flux 2.469 in all."""
    assert hidden(2.469, 2.438, 0.662) == pytest.approx(0.953, abs=1e-3)


def test_a_case_asks_the_same() -> None:
    result = case(sequential=14.0, pipelined=12.5, ours_fused=11.0)
    fused = result.find("ours fused")
    assert fused is not None and fused.is_ours and result.find("fused") is None
    assert (result.limit, result.ect(fused), result.hidden(fused)) == (10.0, 1.0, 0.75)
    assert result.over("sequential", fused) == 14.0 / 11.0 and result.over("torch", fused) is None
    assert result.rival == result.find("pipelined")
    assert case(ours_fused=1.0).rival is None


def test_a_baseline_is_the_quickest_of_all_ways_to_it() -> None:
    kinds = ("sequential", "pipelined", "torch", "torch one-shot", "torch two-shot", "ours sequential", "torchlike")
    assert [baseline_of(name) for name in kinds] == ["sequential", "pipelined", *["torch"] * 3, None, None]
    for seconds in ({"torch_one": 12.0, "torch_two": 13.0}, {"torch_one": 13.0, "torch_two": 12.0}):
        result = case(sequential=14.0, ours_fused=6.0, **seconds)
        _, ours, *ways = result.contenders
        quick, slow = sorted(ways, key=lambda timing: timing.seconds)
        assert result.best("torch") is quick is result.rival and result.best("pipelined") is None
        assert result.over("torch", ours) == 2.0 and result.over("torch", slow) == 12.0 / 13.0
        verdict = judge([result])
        assert verdict is not None and verdict.over("torch") == (2.0,)


def test_a_plain_product_has_nothing_to_hide() -> None:
    timings = Timing("torch", 10.0, 0.0), Timing("ours", 12.0, 0.0)
    result = CaseResult("gemm", 1, 2, 3, 1, "float32", Timing("gemm", 9.0, 0.0), None, None, timings, (), "")
    assert (result.limit, result.hidden(timings[1]), result.rival) == (9.0, None, timings[0])
    assert timings[1].is_ours and not timings[0].is_ours


@pytest.mark.parametrize(
    ("ours", "spread", "kind"),
    [(9.0, 0.05, "is_won"), (11.0, 0.05, "is_lost"), (9.8, 0.05, "is_level"), (10.2, 0.05, "is_level"),
     (10.0, 0.0, "is_level"), (9.99, 0.0, "is_won"), (10.01, 0.0, "is_lost")],
)  # fmt: skip
def test_a_difference_within_the_spread_is_no_win(ours: float, spread: float, kind: str) -> None:
    for spreads in ((spread, 0.0), (0.0, spread)):  # of either side
        duel = Duel(case(), Timing("ours", ours, spreads[0]), Timing("sequential", 10.0, spreads[1]))
        found = [name for name in ("is_won", "is_level", "is_lost") if getattr(duel, name)]
        assert found == [kind]


def test_the_verdict_is_of_one_contender_over_all_shapes() -> None:
    """The best of ours at every shape would be a mixture that nobody can choose."""
    first = case(1, sequential=10.0, ours_fused=5.0, ours_sequential=9.0)
    second = case(2, sequential=10.0, ours_fused=12.0, ours_sequential=9.0)
    verdict = judge([first, second])
    assert verdict is not None and verdict.name == "ours fused"
    assert verdict.over("sequential") == (2.0, 10.0 / 12.0) and verdict.over("torch") == ()
    assert [(duel.is_won, duel.is_lost) for duel in verdict.duels] == [(True, False), (False, True)]


def test_the_rival_is_the_quickest_baseline_of_each_shape() -> None:
    first = case(1, sequential=10.0, pipelined=8.0, ours_fused=9.0)
    second = case(2, sequential=10.0, pipelined=12.0, ours_fused=9.0)
    verdict = judge([first, second])
    assert verdict is not None
    assert [duel.rival.name for duel in verdict.duels] == ["pipelined", "sequential"]
    assert verdict.over("sequential") == (10.0 / 9.0,) * 2


def test_who_ran_everywhere_goes_before_who_ran_somewhere() -> None:
    everywhere = [case(m, sequential=10.0, ours_sequential=9.0) for m in (1, 2)]
    somewhere: dict[str, Any] = {"sequential": 10.0, "ours_sequential": 9.0, "ours_fused": 2.0}
    verdict = judge([everywhere[0], case(2, **somewhere)])
    assert verdict is not None and verdict.name == "ours sequential"


def test_auto_does_not_count_beside_the_one_strategy_it_takes() -> None:
    """It would be the same thing timed twice, and the luckier of the two would win."""
    lucky = [case(m, sequential=10.0, ours_auto=8.0, ours_fused=9.0) for m in (1, 2)]
    verdict = judge(lucky)
    assert verdict is not None and verdict.name == "ours fused"
    for others in (
        [case(1, sequential=10.0, ours_auto=8.0, ours_sequential=9.0)],  # what it takes was not timed by name
        [lucky[0], dataclasses.replace(lucky[1], auto="sequential")],  # it takes one here and another there
    ):
        verdict = judge(others)
        assert verdict is not None and verdict.name == "ours auto"


def test_no_verdict_without_ours_or_without_a_baseline() -> None:
    assert judge([]) is judge([case(sequential=10.0)]) is judge([case(ours_fused=10.0)]) is None


def test_the_verdicts_order_does_not_depend_on_that_of_the_shapes() -> None:
    shapes = [
        case(m, sequential=10.0, ours_fused=5.0 + 10 * random.random(), ours_sequential=5.0 + 10 * random.random())
        for m in range(1, 6)
    ]
    means = {
        name: statistics.geometric_mean(shape.over("sequential", timing) or 0.0 for shape in shapes
                                        if (timing := shape.find(name)))
        for name in ("ours fused", "ours sequential")
    }  # fmt: skip
    for _ in range(3):
        random.shuffle(shapes)
        verdict = judge(shapes)
        assert verdict is not None and verdict.name == max(means, key=lambda name: means[name])


def test_the_names_of_baselines_are_not_ours() -> None:
    assert not any(Timing(name, 1.0, 0.0).is_ours for name in BASELINES)
