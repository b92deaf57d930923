"""From what ranks recorded to one timeline per strategy: times from the first event on, transfers of all ranks."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from tileflux import env
from tileflux.kernels.recording import Launch
from tileflux.perf.timeline import TileSpan, Timeline, Transfer
from tileflux.testing import profile as module
from tileflux.testing import run_ranks
from tileflux.testing.bench import BenchCase, RankTimes
from tileflux.testing.profile import CallRecord, RankProfile, merge, profile

CASE = BenchCase("ag_gemm", 64, 48, 32, "float32", ("sequential", "fused"), 2)
TIMES = RankTimes("", {}, {}, "fused")


def tile(owner: int, begin: int, row: int = 0, column: int = 0) -> TileSpan:
    return TileSpan(3, 2, owner, 1, row, column, 0, begin, begin + 1000, begin + 3000, begin + 6000)


def record(strategy: str, rank: int, begin: int) -> CallRecord:
    """As nanoseconds of a machine that has been up for long."""
    transfer = Transfer(rank, 1 - rank, 0, begin + 500, begin + 2500, 4096)
    return CallRecord(strategy, begin, begin + 9000, (tile(1 - rank, begin + 100),), (transfer,), 0.01)


def profiles(begins: list[list[int]]) -> list[RankProfile]:
    """By rank the begin of each call."""
    return [
        RankProfile(
            rank, 132 + rank, f"GPU {rank}", TIMES,
            tuple(record(name, rank, begin) for name, begin in zip(("fused", "sequential"), times, strict=False)),
        )
        for rank, times in enumerate(begins)
    ]  # fmt: skip


DAY = 10**9 * 3600 * 24


def test_one_timeline_per_strategy_from_the_first_ranks_begin() -> None:
    fused, sequential = merge(CASE, "2 processes", profiles([[DAY + 7000, 2 * DAY], [DAY, 2 * DAY + 3000]]), 2)
    assert (fused.strategy, sequential.strategy) == ("fused", "sequential")
    assert (fused.op, fused.m, fused.n, fused.k, fused.world_size, fused.dtype) == ("ag_gemm", 64, 48, 32, 2, "float32")
    assert (fused.where, fused.device_name) == ("2 processes", "GPU 0")
    first, second = fused.ranks
    assert (first.rank, first.num_units, second.rank, second.num_units) == (0, 132, 1, 133)
    assert (first.end, second.end) == (16.0, 9.0), "microseconds, of one clock"
    (late,), (early,) = first.tiles, second.tiles
    assert (late.begin, late.ready, late.computed, late.finished) == pytest.approx((7.1, 8.1, 10.1, 13.1))
    assert (early.begin, early.finished) == pytest.approx((0.1, 6.1))
    untimed = dict.fromkeys(("begin", "ready", "computed", "finished"), 0.0)
    assert dataclasses.replace(late, **untimed) == dataclasses.replace(tile(1, 0), **untimed)
    assert [rank.end for rank in sequential.ranks] == [9.0, 12.0], "each strategy begins at its own first rank"


def test_transfers_of_all_ranks_come_together() -> None:
    fused, _ = merge(CASE, "here", profiles([[DAY + 7000, 0], [DAY, 0]]), 2)
    assert fused.transfers == (Transfer(0, 1, 0, 7.5, 9.5, 4096), Transfer(1, 0, 0, 0.5, 2.5, 4096))
    assert [each.source for each in fused.arrivals(0)] == [1] and [each.target for each in fused.departures(0)] == [1]


def test_what_recorded_nothing_gives_nothing() -> None:
    assert merge(CASE, "here", profiles([[], []]), 2) == []
    (alone,) = merge(CASE, "ghost world", profiles([[DAY]]), 8)
    assert alone.world_size == 8 and len(alone.ranks) == 1, "a ghost world has one rank to tell"


@pytest.mark.parametrize(
    ("num_rows", "tile_rows", "world_size", "owners"),
    [
        (64, 16, 2, [0, 0, 1, 1]),
        (64, 16, 4, [0, 1, 2, 3]),
        (65, 16, 3, [0, 0, 1, 2, 2]),
        (300, 128, 4, [0, 1, 3]),
        (10, 16, 4, [0]),
        (2, 1, 4, [0, 1]),
    ],
)
def test_whose_rows_a_plain_product_multiplies(
    num_rows: int, tile_rows: int, world_size: int, owners: list[int]
) -> None:
    case = dataclasses.replace(CASE, m=num_rows)
    launch = Launch("gemm", tuple(tile(0, 0, row, column) for row in range(len(owners)) for column in range(2)), ())
    found = module._tiles([launch], case, world_size, tile_rows)
    assert [each.owner for each in found] == [owner for owner in owners for _ in range(2)]
    own = Launch("ag_gemm", (tile(1, 0, len(owners) - 1),), ())
    assert module._tiles([own], case, world_size, tile_rows) == own.tiles, "a fused one knows"


def test_rows_that_a_collective_brought_are_there_when_the_product_begins() -> None:
    group = SimpleNamespace(rank=1, world_size=3)
    case = dataclasses.replace(CASE, m=65, dtype="bfloat16")
    found = module._gathered_before(group, case, 10.0, 20.0)  # type: ignore[arg-type]
    assert found == [Transfer(0, 1, 0, 10.0, 20.0, 22 * 32 * 2), Transfer(2, 1, 0, 10.0, 20.0, 21 * 32 * 2)]


def test_a_ghosts_stamp_is_put_on_the_gpus_clock() -> None:
    class Event:
        def __init__(self, time_ms: float) -> None:
            self.time_ms = time_ms

        def elapsed_time(self, end: Event) -> float:
            return end.time_ms - self.time_ms

    stamp = module.Stamp(3, 1, 4096, Event(5.25), Event(5.5))  # type: ignore[arg-type]
    found = module._of_ghost(stamp, Event(5.0), float(DAY), 0)  # type: ignore[arg-type]
    assert found == Transfer(3, 0, 1, DAY + 250_000.0, DAY + 500_000.0, 4096)


def check_timeline(timeline: Timeline, case: BenchCase, world_size: int) -> None:
    """What any recorded call looks like."""
    assert timeline.strategy in ("fused", "sequential") and len(timeline.ranks) == world_size
    for rank in timeline.ranks:
        assert rank.tiles and rank.num_units == 1
        for each in rank.tiles:
            assert 0 <= each.begin <= each.ready <= each.computed <= each.finished <= rank.end
        assert {each.owner for each in rank.tiles} == set(range(world_size))
    pairs = {(each.source, each.target) for each in timeline.transfers}
    if case.op == "ag_gemm":
        assert pairs == {(a, b) for a in range(world_size) for b in range(world_size) if a != b}
        nbytes = case.m * case.k * getattr(torch, case.dtype).itemsize
        assert sum(each.nbytes for each in timeline.transfers) == (world_size - 1) * nbytes


@pytest.mark.parametrize("link", ["", "200MB/s,100us"])
@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
def test_ranks_on_the_cpu(op: str, link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_NUM_COST_ROUNDS", 2)
    case = dataclasses.replace(CASE, op=op, m=1800, n=1100)
    with env.scoped({"TILEFLUX_LINK": link} if link else {}):
        found = run_ranks(profile, 3, args=(case, ("fused", "sequential")))
    for rank, each in enumerate(found):
        assert (each.rank, each.device_name, each.times.problem) == (rank, "CPU", "")
        assert [call.strategy for call in each.calls] == ["fused", "sequential"]
        assert all(call.begin < call.end and call.cost > -1 for call in each.calls)
        assert [call.sums_tiles for call in each.calls] == [op == "gemm_rs", False]
    for timeline in merge(case, "3 processes", found, 3):
        assert timeline.sums_tiles == (op == "gemm_rs" and timeline.strategy == "fused")
        if (op, timeline.strategy) != ("gemm_rs", "sequential"):
            check_timeline(timeline, case, 3)


def test_a_wrong_result_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = RankTimes("ours fused: wrong", {}, {}, "fused")
    monkeypatch.setattr(module, "measure", lambda group, cases, ticks: [wrong])
    found = run_ranks(profile, 2, args=(CASE, ("fused",)))
    assert [(each.calls, each.times.problem) for each in found] == [((), "ours fused: wrong")] * 2
