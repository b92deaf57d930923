"""A timeline as one page of HTML that needs nothing else: to look at, to zoom into, to show.

Numbers are written here; pictures are drawn in the browser by the ``page_*.js`` beside this file, from the data that
the page carries. Nothing is loaded from anywhere: a page opens from a file, without a network, years from now.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources
from string import Template
from typing import Any

from tileflux.perf.figures import OURS, CaseResult, Timing
from tileflux.perf.timeline import RankTimeline, Shares, Timeline

__all__ = ["ASSETS", "render"]

ASSETS = ("page.html", "page.css", "page_model.js", "page_stage.js", "page_pointer.js", "page_charts.js")
"""Files of this package that a page is made of; scripts in the order in which they run."""

_NUM_BINS = 240


def render(timeline: Timeline, result: CaseResult | None = None, others: Sequence[Timeline] = ()) -> str:
    """The page of ``timeline``, with the measurement of the same problem where there is one.

    ``others`` are timelines of the same problem, say of another strategy. They are drawn above on the same time axis.
    """
    assets = {name: resources.files("tileflux.perf").joinpath(name).read_text("utf-8") for name in ASSETS}
    script = "\n".join(text for name, text in assets.items() if name.endswith(".js"))
    shape = f"{timeline.m} × {timeline.n} × {timeline.k}"
    return Template(assets["page.html"]).substitute(
        title=_escape(f"{timeline.op} {shape}, {timeline.strategy}"),
        op=_escape(timeline.op),
        shape=_escape(shape),
        label=_escape(f"Tiles of {timeline.op} over time: {_time(timeline.end)} in all"),
        facts=_facts(timeline),
        verdict=_verdict(timeline, result, others),
        cards="\n".join(_cards(timeline, result, others)),
        bench=_bench(timeline, result),
        footer=_footer(result),
        style=assets["page.css"],
        data=_data(timeline, result, others),
        script=f'(() => {{\n"use strict";\n{script}\n}})();',
    )


def _escape(text: object) -> str:
    return html.escape(str(text))


def _time(microseconds: float) -> str:
    """A time with three digits or so and its unit."""
    size = abs(microseconds)
    if size >= 1e6:
        text = f"{microseconds / 1e6:.3g} s"
    elif size >= 1e3:
        text = f"{microseconds / 1e3:.{0 if size >= 1e5 else 1 if size >= 1e4 else 2}f} ms"
    else:
        text = f"{microseconds:.{0 if size >= 100 else 1}f} µs"
    return text.replace("-", "−")


def _percent(share: float) -> str:
    return f"{100 * share:.{1 if abs(share) < 0.0995 else 0}f} %".replace("-", "−")


def _facts(timeline: Timeline) -> str:
    facts = [
        f"M × N × K, <b>{_escape(timeline.dtype)}</b>",
        f"<b>{timeline.world_size}</b> ranks" if timeline.world_size != 1 else "<b>1</b> rank",
        f"<b>{_escape(timeline.strategy)}</b>",
        f"<b>{_escape(timeline.device_name)}</b>",
        _escape(timeline.where),
    ]
    return "<i>·</i>".join(facts)


def _ours(timeline: Timeline, result: CaseResult | None) -> Timing | None:
    """What the bench says of the strategy that was recorded."""
    if result is None:
        return None
    return result.find(f"{OURS} {timeline.strategy}") or result.find(timeline.strategy)


def _verdict(timeline: Timeline, result: CaseResult | None, others: Sequence[Timeline]) -> str:
    """The page in a sentence or two."""
    said = []
    ours = _ours(timeline, result)
    hidden = result.hidden(ours) if result and ours else None
    if result and ours and hidden is not None:
        beyond = result.ect(ours)
        more = f"{_time(beyond * 1e6)} more than" if beyond >= 0 else f"{_time(-beyond * 1e6)} less than"
        said.append(f"<b>{_percent(hidden)} of the communication is hidden</b>: {more} the product alone.")
    elif any(rank.tiles for rank in timeline.ranks):
        shares = timeline.shares()
        said.append(f"The {timeline.unit_word}s compute <b>{_percent(shares.computing)}</b> of the time.")
    slowest = max(others, key=lambda other: other.end, default=timeline)
    if timeline.end and slowest.end > timeline.end:
        said.append(f"<b>{slowest.end / timeline.end:.2f}×</b> as fast as {_escape(slowest.strategy)}.")
    return " ".join(said) or "Nothing was recorded."


def _card(name: str, value: str, note: str = "", *, main: bool = False, meter: float | None = None) -> str:
    number, _, unit = value.partition(" ")
    width = 100 * min(max(meter or 0.0, 0.0), 1.0)
    bar = "" if meter is None else f'<div class="meter"><i style="width:{width:.1f}%"></i></div>'
    return (
        f'<div class="card{" main" if main else ""}"><div class="name">{_escape(name)}</div>'
        f'<div class="value">{_escape(number)}<small>{_escape(unit)}</small></div>{bar}'
        f'<div class="note">{_escape(note)}</div></div>'
    )


def _cards(timeline: Timeline, result: CaseResult | None, others: Sequence[Timeline]) -> list[str]:
    ours = _ours(timeline, result)
    if ours:
        cards = [_card("Total", _time(ours.seconds * 1e6), f"median; recorded {_time(timeline.end)}")]
    else:
        cards = [_card("Total", _time(timeline.end), "this recording")]
    if result:
        cards += _parts_cards(result, ours)
    for other in others if timeline.end else ():
        factor = f"{other.end / timeline.end:.2f} ×"
        cards.append(_card(f"Against {other.strategy}", factor, f"it takes {_time(other.end)}", main=True))
    shares = timeline.shares()
    name = f"{timeline.unit_word[0].upper()}{timeline.unit_word[1:]} utilisation"
    cards.append(_card(name, _percent(shares.computing), f"waiting {_percent(shares.waiting)}", meter=shares.computing))
    if not result:
        cards += _recorded_cards(timeline)
    return cards


def _parts_cards(result: CaseResult, ours: Timing | None) -> list[str]:
    """What the bench measured beside the op itself."""
    cards = [_card("GEMM alone", _time(result.gemm.seconds * 1e6), "the library's product")]
    if result.comm:
        cards.append(_card("Communication alone", _time(result.comm.seconds * 1e6), "the same bytes"))
    if ours:
        hidden = result.hidden(ours)
        if hidden is not None:
            exposed = f"exposed {_time(result.ect(ours) * 1e6)}"
            cards.append(_card("Communication hidden", _percent(hidden), exposed, main=True, meter=hidden))
        share = result.limit / ours.seconds
        cards.append(_card("Limit / total", _percent(share), f"limit {_time(result.limit * 1e6)}", meter=share))
    return cards


def _recorded_cards(timeline: Timeline) -> list[str]:
    """What the recording alone can tell."""
    first = min((rank.first_tile for rank in timeline.ranks if rank.first_tile is not None), default=None)
    cards = [] if first is None else [_card("First tile", _time(first), "until a product began")]
    recorded = {rank.rank for rank in timeline.ranks}
    arrived = [transfer.end for transfer in timeline.transfers if transfer.target in recorded]
    if arrived:
        cards.append(_card("Last arrival", _time(max(arrived)), f"of {len(arrived)} transfers"))
    tiles = sum(len(rank.tiles) for rank in timeline.ranks)
    units = sum(len(rank.units) for rank in timeline.ranks)
    return [*cards, _card("Tiles", f"{tiles}", f"on {units} {timeline.unit_word}s")]


def _bench(timeline: Timeline, result: CaseResult | None) -> str:
    """The table of everything that was timed."""
    if not result:
        return ""
    parts = {"GEMM alone": result.gemm, "communication alone": result.comm, "both, side by side": result.beside}
    timed = {name: timing for name, timing in parts.items() if timing}
    most = max(timing.seconds for timing in (*timed.values(), *result.contenders))
    rows = [_row(name, timing, "part", result, most) for name, timing in timed.items()]
    ours = _ours(timeline, result)
    for timing in result.contenders:
        kind = "ours" if timing.is_ours else "theirs"
        rows.append(_row(timing.name, timing, f"{kind} shown" if timing is ours else kind, result, most))
    skipped = "".join(f'<p class="skipped"><b>{_escape(n)}</b> not timed: {_escape(w)}</p>' for n, w in result.skipped)
    heads = "".join(f"<th>{head}</th>" for head in ("", "time", "±", "exposed", "hidden", "limit / time", ""))
    return (
        '<div class="panel"><h2>Measured <small>medians; '
        f'<span class="key">dashed: the limit, {_time(result.limit * 1e6)}</span></small></h2>'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>{skipped}</div>"
    )


def _row(name: str, timing: Timing, kind: str, result: CaseResult, most: float) -> str:
    exposed = hidden = of_limit = ""
    if kind != "part":
        exposed = _time(result.ect(timing) * 1e6)
        share = result.hidden(timing)
        hidden = "" if share is None else _percent(share)
        of_limit = _percent(result.limit / timing.seconds)
    cells = (_escape(name), _time(timing.seconds * 1e6), f"{100 * timing.spread:.1f} %", exposed, hidden, of_limit)
    width, at = (f"{100 * seconds / most:.2f}%" for seconds in (timing.seconds, result.limit))
    track = f'<td class="track"><div><i style="width:{width}"></i><u style="left:{at}"></u></div></td>'
    return f'<tr class="{kind}">{"".join(f"<td>{cell}</td>" for cell in cells)}{track}</tr>'


def _footer(result: CaseResult | None) -> str:
    text = "Recorded tile by tile, by the kernels themselves, in one call of tileflux profile."
    if result:
        text += (
            " Exposed: what a call takes beyond the GEMM alone. Hidden: the share of the communication that is not"
            " exposed. Limit: the longer of GEMM and communication, which no schedule beats."
        )
    return _escape(text)


def _data(timeline: Timeline, result: CaseResult | None, others: Sequence[Timeline]) -> str:
    """What the scripts draw. The timeline that the page is about is the last one."""
    marks = []
    if result:
        parts = (("GEMM alone", result.gemm), ("communication alone", result.comm))
        marks = [{"name": name, "at": round(timing.seconds * 1e6, 3)} for name, timing in parts if timing]
    drawn = [_drawn(one) for one in (*others, timeline)]
    text = json.dumps({"timelines": drawn, "marks": marks}, separators=(",", ":"))
    # Inside a script element "</script" and "<!--" would end or change it, whatever stands around them.
    return text.replace("<", "\\u003c")


def _drawn(timeline: Timeline) -> dict[str, Any]:
    return {
        "label": timeline.strategy,
        "op": timeline.op,
        "world": timeline.world_size,
        "end": timeline.end,
        "unitWord": timeline.unit_word,
        "sendsTiles": timeline.sends_tiles,
        "sumsTiles": timeline.sums_tiles,
        "ranks": [_drawn_rank(rank, timeline.end) for rank in timeline.ranks],
        "transfers": [
            [t.source, t.target, t.chunk, _nanoseconds(t.begin), _nanoseconds(t.end), t.nbytes]
            for t in timeline.transfers
        ],
    }


def _drawn_rank(rank: RankTimeline, end: float) -> dict[str, Any]:
    """A rank as columns of whole numbers: tens of thousands of tiles must fit into a page that opens at once."""
    places = [*zip((tile.unit for tile in rank.tiles), rank.lanes(), strict=True)]
    rows = sorted({*places, *((unit, 0) for unit in rank.units)})
    row_of = {place: row for row, place in enumerate(rows)}
    columns: dict[str, list[int]] = {"row": [row_of[place] for place in places]}
    names = {"owner": "owner", "chunk": "chunk", "m": "row", "n": "column", "turn": "turn", "program": "program"}
    columns |= {short: [getattr(tile, name) for tile in rank.tiles] for short, name in names.items()}
    passed = ("begin", "ready", "computed", "finished")
    edges = [[_nanoseconds(getattr(tile, name)) for tile in rank.tiles] for name in passed]
    columns["begin"] = edges[0]
    for name, before, after in zip(("wait", "compute", "finish"), edges, edges[1:], strict=False):
        columns[name] = [max(0, late - early) for early, late in zip(before, after, strict=True)]
    shares = rank.shares_over_time(_NUM_BINS, end)
    return {
        "rank": rank.rank,
        "units": len(rank.units),
        "rows": [unit for unit, _ in rows],
        "tiles": columns,
        "shares": [[round(1000 * share) for share in column] for column in zip(*map(_states, shares), strict=True)],
        "total": [round(share, 5) for share in _states(rank.shares_over_time(1, end)[0])],
        "waits": [[owner, chunk, round(waited, 3)] for (owner, chunk), waited in sorted(rank.waits().items())],
    }


def _states(shares: Shares) -> tuple[float, float, float]:
    return shares.computing, shares.finishing, shares.waiting


def _nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)
