"""Figures of a timeline, against counting by hand and against a plain sum over small steps of time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tileflux.perf.timeline import RankTimeline, Shares, TileSpan, Timeline, Transfer, place

from .timelines import gathered, on_cpu, scattered, silent, without_tiles


def tile(unit: int, *times: float, owner: int = 0, chunk: int = 0, program: int = 0, turn: int = 0) -> TileSpan:
    return TileSpan(unit, program, owner, chunk, 0, 0, turn, *times)


def rounded(shares: Shares) -> list[float]:
    return [round(share, 9) for share in (shares.computing, shares.finishing, shares.waiting, shares.idle)]


TWO_UNITS = RankTimeline(
    3, 2, (tile(0, 0, 10, 40, 50, owner=3), tile(0, 50, 55, 85, 90, owner=1, chunk=2), tile(1, 20, 20, 60, 100)), 100.0
)


def test_shares_of_two_units() -> None:
    assert rounded(TWO_UNITS.shares()) == [0.5, 0.275, 0.075, 0.15]


def test_a_unit_does_the_most_useful_thing_that_one_of_its_programs_does() -> None:
    rank = RankTimeline(0, 1, (tile(0, 0, 60, 80, 100), tile(0, 0, 30, 50, 90, program=1)), 100.0)
    # 0-30 both wait, 30-50 the second computes, 50-60 it finishes, 60-80 the first computes, 80-100 finishes.
    assert rounded(rank.shares()) == [0.4, 0.3, 0.3, 0.0]


@pytest.mark.parametrize("num_bins", [1, 7, 100])
def test_shares_over_time_are_what_a_walk_in_small_steps_sees(num_bins: int) -> None:
    chance = random.Random()
    tiles = []
    for unit in range(3):
        for program in range(2):
            time = chance.randrange(50)
            for _ in range(chance.randrange(6)):
                times = [time, *(time := time + chance.randrange(40) for _ in range(3))]
                tiles.append(tile(unit, *times, program=program))
    rank = RankTimeline(0, 4, tuple(tiles), 700.0)
    steps = 700
    seen = [[0.0, 0.0, 0.0] for _ in range(num_bins)]
    for step in range(steps):
        at = step + 0.5
        for unit in range(3):
            mine = [t for t in tiles if t.unit == unit and t.begin <= at < t.finished]
            states = {0 if t.ready <= at < t.computed else 1 if t.computed <= at else 2 for t in mine}
            if states:
                seen[step * num_bins // steps][min(states)] += num_bins / steps / 4
    bins = rank.shares_over_time(num_bins)
    assert [rounded(each)[:3] for each in bins] == [[round(share, 9) for share in each] for each in seen]


def test_shares_up_to_a_later_end_count_the_rest_as_idle() -> None:
    assert rounded(TWO_UNITS.shares_over_time(1, 200.0)[0]) == [0.25, 0.1375, 0.0375, 0.575]
    assert rounded(TWO_UNITS.shares_over_time(2, 200.0)[1]) == [0, 0, 0, 1]


def test_units_include_those_that_recorded_nothing() -> None:
    assert RankTimeline(0, 4, (tile(2, 0, 0, 1, 1),), 1.0).units == (0, 1, 2, 3)
    assert RankTimeline(0, 2, (tile(130, 0, 0, 1, 1), tile(7, 0, 0, 1, 1)), 1.0).units == (7, 130)
    assert RankTimeline(0, 3, (tile(130, 0, 0, 1, 1), tile(0, 0, 0, 1, 1)), 1.0).units == (0, 1, 130)
    assert RankTimeline(0, 1, (tile(5, 0, 0, 1, 1), tile(6, 0, 0, 1, 1)), 1.0).units == (5, 6)


def test_waits_are_summed_by_chunk() -> None:
    assert TWO_UNITS.waits() == {(3, 0): 10, (1, 2): 5, (0, 0): 0}


def test_the_first_tile_is_the_first_product() -> None:
    assert TWO_UNITS.first_tile == 10
    assert RankTimeline(0, 1, (tile(0, 0, 1, 1, 2, turn=1), tile(0, 2, 4, 5, 6)), 6.0).first_tile == 4


def test_transfers_in_the_order_of_arrival() -> None:
    late, early, out = Transfer(1, 0, 0, 0, 9, 4), Transfer(2, 0, 1, 3, 5, 4), Transfer(0, 1, 0, 0, 1, 4)
    timeline = replace(without_tiles(), transfers=(late, early, out))
    assert timeline.arrivals(0) == (early, late)
    assert timeline.departures(0) == (out,)
    assert timeline.arrivals(5) == ()


def test_shares_of_all_ranks_count_units_and_run_to_the_last_end() -> None:
    short = RankTimeline(0, 1, (tile(0, 0, 0, 50, 50),), 50.0)
    timeline = replace(without_tiles(), ranks=(short, TWO_UNITS))
    assert timeline.end == 100
    assert rounded(timeline.shares()) == [0.5, 0.183333333, 0.05, 0.266666667]


@pytest.mark.parametrize("timeline", [without_tiles(), silent()])
def test_nothing_recorded_is_idle(timeline: Timeline) -> None:
    assert rounded(timeline.shares()) == [0, 0, 0, 1]
    assert timeline.arrivals(0) == ()
    for rank in timeline.ranks:
        assert (rank.first_tile, rank.waits(), rank.lanes()) == (None, {}, [])
        assert [rounded(each) for each in rank.shares_over_time(3)] == [[0, 0, 0, 1]] * 3
        assert rank.units == (0, 1, 2, 3)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(0, 20)), max_size=30))
def test_tiles_of_a_lane_do_not_overlap_and_no_lane_is_needless(spans: list[tuple[int, int, int]]) -> None:
    tiles = tuple(tile(unit, begin, begin, begin + length, begin + length) for unit, begin, length in spans)
    lanes = RankTimeline(0, 4, tiles, 100.0).lanes()
    by_lane: dict[tuple[int, int], list[TileSpan]] = {}
    for one, lane in zip(tiles, lanes, strict=True):
        by_lane.setdefault((one.unit, lane), []).append(one)
    for mine in by_lane.values():
        mine.sort(key=lambda one: (one.begin, one.finished))
        assert all(before.finished <= after.begin for before, after in zip(mine, mine[1:], strict=False))
    for unit in {one.unit for one in tiles}:
        together = max(
            sum(other is one or (other.unit == unit and other.begin <= one.begin < other.finished) for other in tiles)
            for one in tiles
            if one.unit == unit
        )
        assert max(lane for one, lane in zip(tiles, lanes, strict=True) if one.unit == unit) < together


def test_place_takes_the_first_free_lane() -> None:
    ends = [5.0, 2.0]
    assert place(ends, 3, 9) == 1
    assert ends == [5.0, 9]
    assert place(ends, 4, 6) == 2
    assert ends == [5.0, 9, 6]


@pytest.mark.parametrize("timeline", [gathered(), scattered(), on_cpu("fused"), on_cpu("sequential")])
def test_words_and_shares_of_whole_timelines(timeline: Timeline) -> None:
    assert timeline.unit_word == ("SM" if len(timeline.ranks) == 1 else "thread")
    assert timeline.sends_tiles == (timeline.op == "gemm_rs")
    shares = timeline.shares()
    # Without overlaps the shares are plain sums over the tiles.
    whole = timeline.end * sum(rank.num_units for rank in timeline.ranks)
    tiles = [one for rank in timeline.ranks for one in rank.tiles]
    computing = sum(one.computed - one.ready for one in tiles) / whole
    assert shares.computing == pytest.approx(computing)
    assert shares.waiting == pytest.approx(sum(one.waited for one in tiles) / whole)
    for rank in timeline.ranks:
        assert set(rank.lanes()) == {0}
        assert sum(rank.waits().values()) == pytest.approx(sum(one.waited for one in rank.tiles))


def test_a_fused_call_waits_less_than_a_sequential_one() -> None:
    assert on_cpu("fused").shares().waiting < 0.5 * on_cpu("sequential").shares().waiting
