"""``tileflux demo``: what it prints, and that it cannot be talked into printing a time for a wrong result."""

from __future__ import annotations

import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tileflux import ops
from tileflux.cli import _measure, _worlds, app
from tileflux.cli._measure import Outcome, RankReport, measure, references, sizes
from tileflux.cli._worlds import Place, World, choose, mps_processes, virtual_ranks
from tileflux.cli.demo import merge
from tileflux.errors import PeerTimeout, TransportUnavailable
from tileflux.symm.group import Group
from tileflux.testing.collectives import COLLECTIVES

ROOT = Path(__file__).parents[2]
demo_module = import_module("tileflux.cli.demo")
NUM_ROWS = 2 * len(COLLECTIVES)
TIME = re.compile(r"\d (us|ms)\b")


def invoke(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["demo", *arguments])


def rows_of(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.rstrip().endswith(("right", "WRONG"))]


def check_output(output: str, checked: str) -> None:
    rows = rows_of(output)
    assert len(rows) == NUM_ROWS, output
    for index, row in enumerate(rows):
        assert row.startswith(COLLECTIVES[index % len(COLLECTIVES)].name)
        assert TIME.search(row) and "B/s" in row and "iB" in row and f" {checked} " in row
    assert max(len(line) for line in output.splitlines()) <= 80
    assert "\x1b" not in output and "timing" not in output
    assert f"All {NUM_ROWS} results are right on " in output.splitlines()[-1]


def test_as_a_program_in_a_pipe() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tileflux", "demo", "--where", "cpu"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    check_output(done.stdout, "bits, torch")
    assert "4 CPU processes over shared memory" in done.stdout.splitlines()[0]


def test_virtual_ranks() -> None:
    result = invoke("--where", "local", "--world", "2")
    assert result.exit_code == 0, result.output
    check_output(result.output, "bits")


def _plant(monkeypatch: pytest.MonkeyPatch, name: str, spoil: Callable[[Group, torch.Tensor], None]) -> None:
    """Have ``spoil`` do as it likes with the result of an op; forked ranks inherit it."""
    true_op = getattr(ops, name)

    def planted(x: torch.Tensor, *, group: Group, out: torch.Tensor, **options: object) -> torch.Tensor:
        true_op(x, group=group, out=out, **options)
        spoil(group, out)
        return out

    monkeypatch.setattr(ops, name, planted)


def check_wrong(result: Any, name: str, words: str) -> None:
    """Exit status 1; no time for ``name``, which is told apart; times for all others."""
    assert result.exit_code == 1
    rows = rows_of(result.output)
    assert len(rows) == NUM_ROWS, result.output
    wrong = [row for row in rows if row.startswith(name)]
    assert wrong and all("WRONG" in row and not TIME.search(row) and "B/s" not in row for row in wrong)
    assert all("right" in row and TIME.search(row) for row in rows if row not in wrong)
    assert re.search(words, result.output.replace("\n", " "))
    assert f"{len(wrong)} of {NUM_ROWS} results are wrong on 2 CPU processes" in result.output.splitlines()[-1]


def test_a_wrong_result_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(group: Group, out: torch.Tensor) -> None:
        if group.rank == 1:
            out[3, 5] += 1

    _plant(monkeypatch, "all_reduce", spoil)
    check_wrong(invoke("--where", "cpu", "--world", "2"), "all_reduce", r"rank 1: 1 of 32768 elements.*at \(3, 5\)")


def test_a_result_that_goes_wrong_later_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def spoil(group: Group, out: torch.Tensor) -> None:
        calls.append(out)
        if len(calls) == 12:
            out.zero_()

    def once(*args: Any) -> float:
        return 1e-3 if args[1].collective.name != "broadcast" else true_time(*args)

    true_time = _measure._time
    monkeypatch.setattr(_measure, "_time", once)  # no need to time all the others
    monkeypatch.setattr(_measure, "_NUM_BATCHES", 5)
    _plant(monkeypatch, "broadcast", lambda group, out: spoil(group, out))
    result = invoke("--where", "cpu", "--world", "2")
    assert result.exit_code == 0, "overwritten by the calls after it"
    calls.clear()
    _plant(monkeypatch, "broadcast", lambda group, out: out.zero_() if len(calls) > 12 else None)
    check_wrong(invoke("--where", "cpu", "--world", "2"), "broadcast", r"rank 0: \d+ of \d+ elements differ")


def test_a_result_unlike_torchs_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    true_reference = ops.reduce_scatter_reference
    monkeypatch.setattr(ops, "reduce_scatter_reference", lambda x: -true_reference(x))
    check_wrong(invoke("--where", "cpu", "--world", "2"), "reduce_scatter", "against torch.distributed")
