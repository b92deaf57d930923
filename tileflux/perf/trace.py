"""A timeline as a trace for chrome://tracing and ui.perfetto.dev: ranks are processes, units threads, links a process.

Arrows lead from a transfer to the first tile that used it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tileflux.perf.timeline import RankTimeline, TileSpan, Timeline, Transfer, place

__all__ = ["chrome_trace", "finish_name", "wait_name", "write_trace"]

Event = dict[str, Any]
Users = dict[tuple[int, int, int], list[tuple[float, float, int]]]
"""By rank, owner and chunk: begin, end and thread of what may use a transfer."""


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The trace as a JSON object, its events in the order of time. Times are microseconds, as the format wants them."""
    named: list[Event] = []
    events: list[Event] = []
    users: Users = defaultdict(list)
    for rank in timeline.ranks:
        named += _process(rank.rank, f"rank {rank.rank}")
        lanes = rank.lanes()
        threads = _threads(rank, lanes)
        for (unit, lane), thread in threads.items():
            named += _thread(rank.rank, thread, _numbered(f"{timeline.unit_word} {unit}", lane))
        for tile, lane in zip(rank.tiles, lanes, strict=True):
            thread = threads[tile.unit, lane]
            events += _tile_events(timeline, rank.rank, thread, tile)
            begin, end = (tile.computed, tile.finished) if timeline.sends_tiles else (tile.ready, tile.computed)
            users[rank.rank, tile.owner, tile.chunk].append((begin, end, thread))
    links = 1 + max([timeline.world_size, *(rank.rank for rank in timeline.ranks)])
    named += _process(links, "links") if timeline.transfers else []
    events += _link_events(timeline, links, users, named)
    events.sort(key=lambda event: event["ts"])
    about = ("op", "m", "n", "k", "world_size", "dtype", "strategy", "where", "device_name")
    return {
        "traceEvents": named + events,
        "displayTimeUnit": "ns",
        "otherData": {name: str(getattr(timeline, name)) for name in about},
    }


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Write the trace to a file that either viewer opens."""
    Path(path).write_text(json.dumps(chrome_trace(timeline), separators=(",", ":")))


def wait_name(timeline: Timeline, tile: TileSpan) -> str:
    """What a tile waits for, in words."""
    if not timeline.sends_tiles:
        return f"wait for rank {tile.owner} chunk {tile.chunk}"
    return "wait for all ranks" if tile.turn else f"wait for a slot of rank {tile.owner}"


def finish_name(timeline: Timeline, rank: int, tile: TileSpan) -> str:
    """What happens to a tile when its product is there, in words."""
    if not timeline.sends_tiles:
        return "store"
    if tile.turn or (timeline.op == "gemm_rs" and tile.owner == rank):
        return "sum" if timeline.sums_tiles else "keep"
    return f"send to rank {tile.owner}" if timeline.op == "gemm_rs" else "send"


def _numbered(name: str, lane: int) -> str:
    return f"{name} ({lane + 1})" if lane else name


def _process(process: int, name: str) -> list[Event]:
    return [
        {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}},
    ]


def _thread(process: int, thread: int, name: str) -> list[Event]:
    return [
        {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": name}},
        {"ph": "M", "pid": process, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}},
    ]


def _threads(rank: RankTimeline, lanes: list[int]) -> dict[tuple[int, int], int]:
    """Thread numbers by (unit, lane): spans of one thread must not overlap, programs on one unit may."""
    used = {(tile.unit, lane) for tile, lane in zip(rank.tiles, lanes, strict=True)}
    return {key: thread for thread, key in enumerate(sorted(used | {(unit, 0) for unit in rank.units}))}


def _span(name: str, kind: str, process: int, thread: int, begin: float, end: float) -> Event:
    return {"ph": "X", "name": name, "cat": kind, "pid": process, "tid": thread, "ts": begin, "dur": end - begin}


def _tile_events(timeline: Timeline, rank: int, thread: int, tile: TileSpan) -> Iterator[Event]:
    """Successive spans of one tile, without the empty ones."""
    about = {name: getattr(tile, name) for name in ("owner", "chunk", "row", "column", "turn", "program")}
    for name, kind, begin, end in (
        (wait_name(timeline, tile), "wait", tile.begin, tile.ready),
        (f"compute rank {tile.owner}", "compute", tile.ready, tile.computed),
        (finish_name(timeline, rank, tile), "finish", tile.computed, tile.finished),
    ):
        if end > begin:
            yield {**_span(name, kind, rank, thread, begin, end), "args": about}


def _link_events(timeline: Timeline, links: int, users: Users, named: list[Event]) -> list[Event]:
    """All transfers and their arrows. A thread per pair of ranks, more where chunks travel side by side."""
    events: list[Event] = []
    ends: dict[tuple[int, int], list[float]] = defaultdict(list)
    threads: dict[tuple[int, int, int], int] = {}
    for transfer in sorted(timeline.transfers, key=lambda t: (t.target, t.source, t.begin, t.end)):
        pair = (transfer.source, transfer.target)
        lane = place(ends[pair], transfer.begin, transfer.end)
        if (*pair, lane) not in threads:
            threads[*pair, lane] = len(threads)
            named += _thread(links, threads[*pair, lane], _numbered(f"link {pair[0]} to {pair[1]}", lane))
        thread = threads[*pair, lane]
        span = _span(f"chunk {transfer.chunk}", "transfer", links, thread, transfer.begin, transfer.end)
        about = {"source": pair[0], "target": pair[1], "chunk": transfer.chunk, "bytes": transfer.nbytes}
        events.append({**span, "args": about})
        owner = transfer.target if timeline.sends_tiles else transfer.source
        waiting = users.get((transfer.target, owner, transfer.chunk), [])
        begun = [(max(begin, transfer.end), end, to) for begin, end, to in waiting if end > max(begin, transfer.end)]
        if begun:
            events += _arrow(len(events), links, thread, transfer, min(begun))
    return events


def _arrow(number: int, links: int, thread: int, transfer: Transfer, user: tuple[float, float, int]) -> list[Event]:
    """From a transfer to what used it first. Viewers bind an end to the span around its time: not to an edge of it."""
    begin, end, to = user
    arrow = {"name": "arrival", "cat": "arrival", "id": number}
    return [
        {**arrow, "ph": "s", "pid": links, "tid": thread, "ts": (transfer.begin + transfer.end) / 2},
        {**arrow, "ph": "f", "bp": "e", "pid": transfer.target, "tid": to, "ts": (begin + end) / 2},
    ]
