"""The page: whole in itself, with the numbers it was given, safe to embed, and drawn without an error."""

from __future__ import annotations

import dataclasses
import fnmatch
import html.parser
import json
import re
import shutil
import struct
import subprocess
import tomllib
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tileflux.perf.figures import CaseResult, Timing
from tileflux.perf.page import ASSETS, render
from tileflux.perf.timeline import Timeline

from .timelines import gathered, measured, on_cpu, scattered, silent, without_tiles

ROOT = Path(__file__).parents[2]
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(html.parser.HTMLParser):
    """Tags in the order of the page, the text of each element, and whether every element was closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    @property
    def words(self) -> str:
        """What a reader sees without running scripts."""
        return " ".join(" ".join(text for tag, text in self.texts if tag not in ("script", "style")).split())


def data_of(page: str) -> dict[str, Any]:
    """What the page's scripts draw."""
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


FUSED = gathered()
PAGES = {
    "gathered": render(FUSED, measured(FUSED)),
    "scattered": render(scattered()),
    "apart": render(dataclasses.replace(scattered(), sums_tiles=False)),
    "two": render(on_cpu("fused"), None, [on_cpu("sequential")]),
    "empty": render(without_tiles()),
    "silent": render(silent()),
}


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_a_page_loads_nothing(page: str) -> None:
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|\bimport\b[\s(]|fetch\(|XMLHttpRequest", page)
    parsed = Page(page)
    assert parsed.open == []
    for tag, attributes in parsed.tags:
        assert "src" not in attributes, tag
        assert (attributes.get("href") or "data:,").startswith("data:"), tag
    assert [tag for tag, _ in parsed.tags].count("noscript") == 1
    assert "$" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def test_the_words_of_a_measured_page() -> None:
    result = measured(FUSED)
    words = Page(PAGES["gathered"]).words
    ours = result.find("ours fused")
    assert ours and result.comm
    for expected in (
        "ag_gemm", "8192 × 28672 × 8192", "bfloat16", "8 ranks", "fused", "NVIDIA H200", "ghost world",
        f"Total {1e3 * ours.seconds:.2f} ms", f"recorded {FUSED.end / 1e3:.2f} ms",
        f"GEMM alone {1e3 * result.gemm.seconds:.2f} ms", f"Communication alone {1e3 * result.comm.seconds:.2f} ms",
        "93 % of the communication is hidden", "Communication hidden 93 %", "Limit / total 94 %",
        f"SM utilisation {100 * FUSED.shares().computing:.0f} %", "ours sequential not timed: the rows do not fit",
    ):  # fmt: skip
        assert expected in words


def test_the_table_has_a_row_for_everything_timed() -> None:
    result = measured(FUSED)
    rows = re.findall(r'<tr class="([^"]+)"><td>([^<]+)</td><td>([^<]+)</td>', PAGES["gathered"])
    parts = [("part", "GEMM alone"), ("part", "communication alone"), ("part", "both, side by side")]
    theirs = [("theirs", name) for name in ("sequential", "pipelined", "torch")]
    assert [row[:2] for row in rows] == [*parts, *theirs, ("ours", "ours pipelined"), ("ours shown", "ours fused")]
    assert [row[2] for row in rows[3:]] == [f"{1e3 * timing.seconds:.2f} ms" for timing in result.contenders]
    assert "<td>−3.7 %</td>" in PAGES["gathered"]


def test_a_product_alone_has_neither_communication_nor_hidden() -> None:
    timeline = replace(FUSED, op="gemm", world_size=1, transfers=())
    timing = Timing("ours fused", 2e-3, 0.01)
    result = CaseResult(
        "gemm", 1, 1, 1, 1, "bfloat16", Timing("gemm", 1e-3, 0.01), None, None, (timing,), (), "fused"
    )  # fmt: skip
    words = Page(render(timeline, result)).words
    assert "Limit / total 50 %" in words
    assert "ommunication" not in words.partition("Exposed:")[0]


def test_without_a_measurement_the_recording_speaks() -> None:
    words = Page(PAGES["scattered"]).words
    assert "The SMs compute" in words
    assert "2048 on 132 SMs" in words
    assert "Measured" not in words
    assert "Nothing was recorded." in Page(PAGES["empty"]).words


def test_others_are_compared_and_drawn_above() -> None:
    fused, sequential = on_cpu("fused"), on_cpu("sequential")
    page = render(fused, None, [sequential])
    factor = f"{sequential.end / fused.end:.2f}"
    assert f"Against sequential {factor} ×" in Page(page).words
    assert f"{factor}× as fast as sequential" in Page(page).words
    assert [one["label"] for one in data_of(page)["timelines"]] == ["sequential", "fused"]
    assert "as fast as" not in Page(render(sequential, None, [fused])).words


@pytest.mark.parametrize("timeline", [FUSED, scattered(), on_cpu("fused")])
def test_the_data_are_the_timeline(timeline: Timeline) -> None:
    (drawn,) = data_of(render(timeline))["timelines"]
    assert drawn["transfers"] == [
        [t.source, t.target, t.chunk, round(1000 * t.begin), round(1000 * t.end), t.nbytes] for t in timeline.transfers
    ]
    assert len(drawn["ranks"]) == len(timeline.ranks)
    for rank, got in zip(timeline.ranks, drawn["ranks"], strict=True):
        columns = got["tiles"]
        assert [got["rows"][row] for row in columns["row"]] == [tile.unit for tile in rank.tiles]
        for name, wanted in (("m", "row"), ("n", "column"), ("owner", "owner"), ("chunk", "chunk"), ("turn", "turn")):
            assert columns[name] == [getattr(tile, wanted) for tile in rank.tiles]
        ends = [sum(times) for times in zip(*(columns[n] for n in ("begin", "wait", "compute", "finish")), strict=True)]
        assert ends == [round(1000 * tile.finished) for tile in rank.tiles]
        assert {(owner, chunk) for owner, chunk, _ in got["waits"]} == set(rank.waits())
        assert sum(got["total"]) == pytest.approx(1 - rank.shares_over_time(1, timeline.end)[0].idle, abs=1e-4)
        assert len({len(share) for share in got["shares"]}) == 1


def test_programs_that_share_a_unit_get_rows_of_their_own() -> None:
    rank = FUSED.ranks[0]
    more = [replace(tile, program=tile.program + 500, begin=tile.begin + 1) for tile in rank.tiles if tile.unit == 7]
    (drawn,) = data_of(render(replace(FUSED, ranks=(replace(rank, tiles=(*rank.tiles, *more)),))))["timelines"]
    assert drawn["ranks"][0]["rows"].count(7) == 2
    assert len(drawn["ranks"][0]["rows"]) == 133
    assert drawn["ranks"][0]["units"] == 132


def test_names_cannot_break_out() -> None:
    evil = "</script><script>alert('x')</script><!-- & \"quoted\""
    timeline = replace(FUSED, op=evil, strategy=evil, device_name=evil, where=evil, dtype=evil)
    result = replace(measured(FUSED), contenders=(Timing(evil, 1.0, 0.1),), skipped=((evil, evil),))
    page = render(timeline, result, [timeline])
    scripts = [attributes for tag, attributes in Page(page).tags if tag == "script"]
    assert scripts == [{"id": "data", "type": "application/json"}, {}]
    assert "alert('x')</script>" not in page
    assert data_of(page)["timelines"][0]["label"] == evil


def test_tens_of_thousands_of_tiles_stay_a_small_page() -> None:
    large = gathered(world=16, num_chunks=8, rows=16)
    assert len(large.ranks[0].tiles) > 30_000
    assert len(render(large)) < 2_000_000


def test_the_files_of_a_page_are_installed_with_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    patterns = [*settings.get("*", []), *settings.get("tileflux.perf", [])]
    lost = [name for name in ASSETS if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    assert not lost, f"add to package-data in pyproject.toml: {', '.join(lost)}"
    beside = {file.name for file in (ROOT / "tileflux" / "perf").iterdir() if file.name.startswith("page")}
    assert beside - {"page.py"} == set(ASSETS)


def colours_in(png: bytes) -> Counter[str]:
    """How many pixels of an 8-bit PNG without palette have which colour."""
    width, height, _, kind = struct.unpack(">IIBB", png[16:26])
    size = {2: 3, 6: 4}[kind]
    packed, at = b"", 8
    while at < len(png):
        length, name = struct.unpack(">I4s", png[at : at + 8])
        packed += png[at + 8 : at + 8 + length] if name == b"IDAT" else b""
        at += 12 + length
    raw, above, colours = zlib.decompress(packed), bytearray(width * size), Counter[str]()
    for row in range(height):
        begin = row * (width * size + 1)
        line = bytearray(raw[begin + 1 : begin + 1 + width * size])
        for i in range(len(line)):
            left, corner = (line[i - size], above[i - size]) if i >= size else (0, 0)
            guess = left + above[i] - corner
            nearest = min((left, above[i], corner), key=lambda value: abs(guess - value))
            line[i] = (line[i] + (0, left, above[i], (left + above[i]) // 2, nearest)[raw[begin]]) & 255
        colours.update(line[i : i + 3].hex() for i in range(0, len(line), size))
        above = line
    return colours


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
@pytest.mark.parametrize("name", ["gathered", "scattered", "apart", "two", "empty"])
def test_a_browser_draws_the_page_without_an_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(PAGES[name])
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"]
    options += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--window-size=1000,760"]
    done = subprocess.run(
        ["chromium", *options, f"--screenshot={tmp_path / 'page.png'}", f"file://{tmp_path / 'page.html'}"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    colours = colours_in((tmp_path / "page.png").read_bytes())
    assert len(colours) > 30
    # Blue and orange stand for ranks 0 and 1. The legend has some of each, their tiles have far more.
    enough = 0 if name == "empty" else 1000
    assert min(colours["0072b2"], colours["e69f00"]) >= enough
    if name in ("scattered", "apart"):
        # Of sums: where they are made elsewhere, neither the tiles nor the legend have any.
        assert (colours["10131c"] > 100) == (name == "scattered")
