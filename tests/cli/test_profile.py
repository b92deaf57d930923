"""``tileflux profile``: a page and a trace of one call, and mistakes that are told before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tileflux import ops
from tileflux.cli import app
from tileflux.cli._worlds import cpu_processes
from tileflux.cli.profile import record
from tileflux.errors import TilefluxError
from tileflux.testing.bench import BenchCase


def invoke(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, ["profile", *arguments])


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
def test_a_page_and_a_trace_of_cpu_ranks(op: str, tmp_path: Path) -> None:
    html, trace = tmp_path / "call.html", tmp_path / "call.trace"
    where = ("--where", "cpu", "--world", "2", "--iters", "2", "--link", "1GB/s,10us")
    result = invoke(op, "300", "130", "70", *where, "--html", str(html), "--trace", str(trace))
    assert result.exit_code == 0, result.output
    assert "% of the communication is hidden" in result.output and str(html) in result.output
    page = html.read_text()
    assert op in page and "fused" in page and "sequential" in page
    events = json.loads(trace.read_text())["traceEvents"]
    assert any(event.get("ph") == "X" for event in events)


def test_every_tile_of_both_strategies_is_recorded() -> None:
    case = BenchCase("ag_gemm", 300, 64, 32, "float32", (), 1)
    picture = record(cpu_processes(3), case, "cpu")
    assert picture.timeline.strategy == "fused" and [each.strategy for each in picture.others] == ["sequential"]
    for rank in picture.timeline.ranks:
        # 100 rows of each of 3 ranks, in one tile of up to 128 each.
        assert sorted(tile.owner for tile in rank.tiles) == [0, 1, 2]
        assert [tile.owner for tile in rank.tiles][0] == rank.rank, "one's own rows come first"
        for tile in rank.tiles:
            assert 0 <= tile.begin <= tile.ready <= tile.computed <= tile.finished <= rank.end
    pairs = {(each.source, each.target) for each in picture.timeline.transfers}
    assert pairs == {(source, target) for source in range(3) for target in range(3) if source != target}
    for each in picture.timeline.transfers:
        assert each.begin <= each.end and each.nbytes == 100 * 32 * 4
    (plain,) = picture.others
    for rank in plain.ranks:
        first = min(tile.begin for tile in rank.tiles)
        assert all(each.end <= first for each in plain.transfers if each.target == rank.rank)


def test_a_wrong_result_is_not_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = ops.ag_gemm

    def wrong(*arguments: Any, out: torch.Tensor, **options: Any) -> torch.Tensor:
        right(*arguments, out=out, **options)
        out[0, 0] += 1
        return out

    monkeypatch.setattr(ops, "ag_gemm", wrong)
    with pytest.raises(TilefluxError, match="a result is wrong, so nothing was recorded"):
        record(cpu_processes(2), BenchCase("ag_gemm", 64, 64, 64, "float32", (), 1), "cpu")
    html = tmp_path / "call.html"
    result = invoke("ag_gemm", "64", "64", "64", "--where", "cpu", "--world", "2", "--iters", "1", "--html", str(html))
    assert result.exit_code == 1 and not html.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gemm_ar", "8", "8", "8", "--where", "cpu"), "gemm_ar is not recorded"),
        (("gemm", "8", "8", "8", "--where", "cpu"), "gemm is not recorded"),
        (("moe_ag_gemm", "8", "8", "8", "--where", "cpu"), "moe_ag_gemm is not recorded"),
        (("ag_gemm", "8", "8", "8", "--where", "cpu", "--html", "/nowhere/x.html"), "there is no folder /nowhere"),
        (("ag_gemm", "8", "8", "8", "--where", "cpu", "--link", "fast"), "--link fast"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], words: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert words in result.output and len(result.output.strip().splitlines()) == 1


@pytest.mark.gpu
def test_a_ghost_world(tmp_path: Path) -> None:
    html = tmp_path / "call.html"
    result = invoke(
        "ag_gemm", "1024", "2048", "512", "--where", "ghost", "--world", "4", "--iters", "2", "--html", str(html)
    )
    assert result.exit_code == 0, result.output
    page = html.read_text()
    assert "<b>4</b> ranks" in page and "of the communication is hidden" in page
