"""Traces: what the two viewers demand of them, and that every tile and transfer is there."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tileflux.perf.timeline import RankTimeline, TileSpan, Timeline
from tileflux.perf.trace import chrome_trace, finish_name, wait_name, write_trace

from .timelines import gathered, on_cpu, scattered, silent, without_tiles

TIMELINES = {"gathered": gathered(), "scattered": scattered(), "cpu": on_cpu("fused"), "crowded": gathered(num_sms=40)}


@pytest.fixture(params=TIMELINES)
def timeline(request: pytest.FixtureRequest) -> Timeline:
    return TIMELINES[request.param]


def events_of(timeline: Timeline, kind: str) -> list[dict[str, Any]]:
    return [event for event in chrome_trace(timeline)["traceEvents"] if event["ph"] == kind]


def test_every_event_has_what_its_kind_needs(timeline: Timeline) -> None:
    trace = chrome_trace(timeline)
    needed = {
        "M": {"pid", "name", "args"},
        "X": {"pid", "tid", "name", "cat", "ts", "dur", "args"},
        "s": {"pid", "tid", "name", "cat", "ts", "id"},
        "f": {"pid", "tid", "name", "cat", "ts", "id", "bp"},
    }
    for event in trace["traceEvents"]:
        assert set(event) >= needed[event["ph"]]
        assert event.get("dur", 1) > 0
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert trace["otherData"]["op"] == timeline.op


def test_times_grow_and_are_microseconds(timeline: Timeline) -> None:
    times = [event["ts"] for event in chrome_trace(timeline)["traceEvents"] if event["ph"] != "M"]
    assert times == sorted(times)
    assert max(event["ts"] + event["dur"] for event in events_of(timeline, "X")) <= timeline.end


def test_every_state_of_every_tile_and_every_transfer_is_there_once(timeline: Timeline) -> None:
    spent: dict[str, float] = defaultdict(float)
    for event in events_of(timeline, "X"):
        spent[event["cat"]] += event["dur"]
    tiles = [tile for rank in timeline.ranks for tile in rank.tiles]
    assert spent == pytest.approx(
        {
            "wait": sum(tile.waited for tile in tiles),
            "compute": sum(tile.computed - tile.ready for tile in tiles),
            "finish": sum(tile.finished - tile.computed for tile in tiles),
            "transfer": sum(transfer.end - transfer.begin for transfer in timeline.transfers),
        }
    )
    assert len(events_of(timeline, "X")) == 3 * len(tiles) + len(timeline.transfers)


def test_spans_of_a_thread_do_not_overlap_and_every_thread_has_a_name(timeline: Timeline) -> None:
    crowd = [replace(tile, program=tile.program + 1000, begin=tile.begin + 1) for tile in timeline.ranks[0].tiles]
    rank = timeline.ranks[0]
    doubled = replace(rank, tiles=(*rank.tiles, *crowd))
    timeline = replace(timeline, ranks=(doubled, *timeline.ranks[1:]), transfers=timeline.transfers * 2)
    by_thread: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events_of(timeline, "X"):
        by_thread[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_thread.values():
        spans.sort()
        assert all(before[1] <= after[0] + 1e-6 for before, after in zip(spans, spans[1:], strict=False))
    named = [(e["pid"], e["tid"]) for e in events_of(timeline, "M") if e["name"] == "thread_name"]
    assert set(by_thread) <= set(named)
    assert len(set(named)) == len(named)


def test_names_of_processes_and_threads() -> None:
    names = [e["args"]["name"] for e in events_of(TIMELINES["gathered"], "M") if e["name"].endswith("_name")]
    assert names[:2] == ["rank 0", "SM 0"]
    assert names.count("links") == 1
    assert {f"SM {unit}" for unit in range(132)} | {f"link {peer} to 0" for peer in range(1, 8)} <= set(names)
    names = [e["args"]["name"] for e in events_of(TIMELINES["cpu"], "M") if e["name"] == "process_name"]
    assert names == ["rank 0", "rank 1", "rank 2", "rank 3", "links"]


def test_an_arrow_leads_from_each_transfer_to_a_tile_that_used_it() -> None:
    timeline = TIMELINES["gathered"]
    spans = events_of(timeline, "X")

    def around(arrow: dict[str, Any]) -> dict[str, Any]:
        (span,) = (
            span for span in spans if (span["pid"], span["tid"]) == (arrow["pid"], arrow["tid"])
            and span["ts"] < arrow["ts"] < span["ts"] + span["dur"]
        )  # fmt: skip
        return span

    begins = {arrow["id"]: arrow for arrow in events_of(timeline, "s")}
    ends = {arrow["id"]: arrow for arrow in events_of(timeline, "f")}
    assert len(begins) == len(timeline.transfers)
    assert begins.keys() == ends.keys()
    firsts: dict[tuple[int, int], float] = {}
    for tile in timeline.ranks[0].tiles:
        firsts[tile.owner, tile.chunk] = min(firsts.get((tile.owner, tile.chunk), 1e9), tile.ready)
    for number, arrow in begins.items():
        transfer, user = around(arrow), around(ends[number])
        key = (transfer["args"]["source"], transfer["args"]["chunk"])
        assert (user["args"]["owner"], user["args"]["chunk"]) == key
        assert user["cat"] == "compute"
        assert user["ts"] == firsts[key]


def test_arrows_of_sent_tiles_lead_to_the_sums() -> None:
    timeline = TIMELINES["scattered"]
    ends = events_of(timeline, "f")
    assert ends
    sums = [span for span in events_of(timeline, "X") if span["name"] == "sum"]
    for arrow in ends:
        assert any(
            span["tid"] == arrow["tid"] and span["ts"] <= arrow["ts"] <= span["ts"] + span["dur"] for span in sums
        )


def span(owner: int, turn: int = 0) -> TileSpan:
    return TileSpan(0, 0, owner, 1, 0, 0, turn, 0, 1, 2, 3)


@pytest.mark.parametrize(
    ("op", "tile", "wait", "finish"),
    [
        ("ag_gemm", span(3), "wait for rank 3 chunk 1", "store"),
        ("ag_gemm", span(0), "wait for rank 0 chunk 1", "store"),
        ("gemm_rs", span(3), "wait for a slot of rank 3", "send to rank 3"),
        ("gemm_rs", span(0), "wait for a slot of rank 0", "sum"),
        ("gemm_ar", span(0), "wait for a slot of rank 0", "send"),
        ("gemm_ar", span(0, turn=1), "wait for all ranks", "sum"),
    ],
)
def test_what_a_tile_does_in_words(op: str, tile: TileSpan, wait: str, finish: str) -> None:
    timeline = replace(without_tiles(), op=op, ranks=(RankTimeline(0, 1, (tile,), 3.0),))
    apart = "keep" if finish == "sum" else finish
    assert finish_name(replace(timeline, sums_tiles=False), 0, tile) == apart, "where what is behind the product sums"
    assert (wait_name(timeline, tile), finish_name(timeline, 0, tile)) == (wait, finish)
    assert [event["name"] for event in events_of(timeline, "X")] == [wait, f"compute rank {tile.owner}", finish]


def test_states_that_took_no_time_are_left_out() -> None:
    tile = replace(span(0), ready=0, computed=3)
    timeline = replace(without_tiles(), ranks=(RankTimeline(0, 1, (tile,), 3.0),))
    assert [event["name"] for event in events_of(timeline, "X")] == ["compute rank 0"]


@pytest.mark.parametrize("timeline", [without_tiles(), silent()], ids=["no rank", "no tile"])
def test_nothing_recorded_is_an_empty_trace(timeline: Timeline) -> None:
    assert events_of(timeline, "X") == []


def test_a_written_trace_is_the_trace(tmp_path: Path, timeline: Timeline) -> None:
    write_trace(timeline, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == chrome_trace(timeline)
    write_trace(timeline, str(tmp_path / "again.json"))
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "trace.json").read_bytes()
