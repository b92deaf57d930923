"""``tileflux tune``: what it prints and keeps, that ``auto`` then follows, and that nothing wrong is ever kept."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tileflux import env, explain
from tileflux.cli import _worlds, app, main
from tileflux.cli._worlds import World
from tileflux.config import GemmConfig, GemmProblem
from tileflux.errors import RankFailed, TransportUnavailable
from tileflux.symm.group import Group
from tileflux.testing import run_ranks
from tileflux.testing.bench import BenchCase
from tileflux.testing.tuning import Tuned
from tileflux.tune import store
from tileflux.tune.lookup import forget, lookup
from tileflux.tune.search import Candidate, Outcome

from .bench_cases import LAUNCHER, pretend

tune_module = import_module("tileflux.cli.tune")
CONFIG = GemmConfig(64, 128, 32)
BEFORE = Candidate("fused", "", GemmConfig())
TUNED = Candidate("fused", "", dataclasses.replace(CONFIG, num_chunks=2))
SEQUENTIAL = Candidate("sequential", "", GemmConfig())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store, no launcher, no GPU."""
    for name in (*LAUNCHER, "TILEFLUX_LINK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TILEFLUX_TUNE_DIR", str(tmp_path / "tuned"))
    monkeypatch.setattr(_worlds, "num_gpus", lambda: 0)
    forget()
    return tmp_path / "tuned"


def invoke(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["tune", *arguments])


def made_up(case: BenchCase, winner: Candidate = TUNED, wrong: tuple[str, ...] = ()) -> Tuned:
    seconds = {BEFORE: 1.1e-3, SEQUENTIAL: 1.3e-3, winner: 1e-3}
    problem = GemmProblem(case.op, case.m, case.n // 4, case.k, 4, case.dtype, link="shared memory")
    return Tuned(problem, BEFORE, Outcome(winner, seconds, 9, 3), wrong)


class Recorder:
    """Stands in for ``run``: keeps what it was asked for, and answers as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Tuned) -> None:
        self.worlds: list[World] = []
        self.cases: Sequence[BenchCase] = ()
        self.budget_s, self.num_jobs = -1.0, -1
        self.answers = answers
        self.error: Exception | None = None
        self.num_done: int | None = None
        """After so many shapes somebody interrupts."""
        monkeypatch.setattr(tune_module, "run", self)

    def __call__(self, world: World, function: object, args: tuple[Any, ...], *, timeout_s: float) -> list[Any]:
        assert function is tune_module.tuning.tune and timeout_s >= 3600
        self.worlds.append(world)
        self.cases, self.budget_s, self.num_jobs, journal = args
        if self.num_done is not None:
            for index in range(len(self.cases))[::-1][: self.num_done]:  # the largest come first
                journal.note(index, made_up(self.cases[index]))
            raise KeyboardInterrupt
        if self.error is not None and world.where != "virtual":
            raise self.error
        num_ranks = 1 if world.where == "ghost" else world.size
        return [list(self.answers) or [made_up(case) for case in self.cases]] * num_ranks


def _reason(group: Group, op: str, shape: tuple[int, int, int]) -> str:
    import torch

    return explain(op, *shape, group=group, dtype=torch.float32).reason


@pytest.mark.parametrize(("op", "shape"), [("ag_gemm", (64, 24, 32)), ("gemm_ar", (64, 48, 16))])
def test_auto_follows_what_was_measured(op: str, shape: tuple[int, int, int], folder: Path) -> None:
    arguments = [op, "64", "48", "32", "--where", "cpu", "--world", "2", "--budget", "0"]
    before = run_ranks(_reason, 2, args=(op, shape))
    assert not any("measured" in reason for reason in before)
    dry = invoke(*arguments, "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert "nothing was kept" in dry.output and not folder.exists()
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    assert re.search(r"64 x 48 x 32 .* \d\.\d\dx .* of \d", result.output)
    assert max(len(line) for line in result.output.splitlines()[1:-1]) <= 80, "all but the world and the file"
    (entry,) = store.load(str(folder))
    assert (entry.problem.op, entry.problem.m, entry.problem.n, entry.problem.k) == (op, *shape)
    assert sorted(entry.versions) == ["tileflux", "torch", "triton"] and all(entry.versions.values())
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", entry.date)
    for reason in run_ranks(_reason, 2, args=(op, shape)):
        assert reason == f"measured on the CPU, {entry.date}: {entry.verdict}"


def test_the_table_and_the_sentence(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    recorder = Recorder(monkeypatch)
    result = invoke("ag_gemm", "512", "256", "64", "--sweep", "m=512,1024", "--budget", "7", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    assert recorder.budget_s == 7 and recorder.num_jobs == len(os.sched_getaffinity(0))
    assert [case.m for case in recorder.cases] == [512, 1024]
    assert {case.dtype for case in recorder.cases} == {"bfloat16"}
    text = " ".join(result.output.split())
    assert "512 x 256 x 64 fused 128x128x64 fused 64x128x32, 2 1.10x 1.30x 9 of 12 chunks" in text
    assert "auto gets quicker: at 2 of 2 shapes, 1.10x over before in the geometric mean; kept in " in text
    assert [entry.config for entry in store.load(str(folder))] == [TUNED.config] * 2
    assert [dict(entry.seconds) for entry in store.load(str(folder))] == [{"fused": 1e-3, "sequential": 1.3e-3}] * 2


def test_jobs_are_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    assert invoke("ag_gemm", "512", "256", "64", "--jobs", "5", "--dry-run").exit_code == 0
    assert recorder.num_jobs == 5


def test_what_was_the_quickest_before_is_kept_as_measured(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    case = BenchCase("ag_gemm", 512, 256, 64, "float32", (), 1)
    tuned = made_up(case)
    assert tuned.outcome is not None
    Recorder(monkeypatch, dataclasses.replace(tuned, outcome=dataclasses.replace(tuned.outcome, winner=BEFORE)))
    result = invoke("ag_gemm", "512", "256", "64")
    assert result.exit_code == 0 and "auto took the quickest already; kept in" in result.output
    assert [entry.config for entry in store.load(str(folder))] == [BEFORE.config]


def test_where_auto_cannot_follow_it_says_why(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The same depth at two widths, of which the wider decides."""
    assert store.load(str(folder)) == (), "remembered, and to be forgotten"
    wide, narrow = (BenchCase("ag_gemm", 512, n, 64, "float32", (), 1) for n in (1024, 256))
    Recorder(monkeypatch, made_up(wide), made_up(narrow, dataclasses.replace(TUNED, strategy="pipelined")))
    text = " ".join(invoke("ag_gemm", "512", "1024", "64", "--sweep", "n=1024,256").output.split())
    note = "512 x 64 x 64 on a rank: pipelined was quickest, but auto takes fused: measured on the CPU"
    assert note in text and text.count("but auto takes") == 1


def test_nothing_wrong_is_kept(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    case = BenchCase("ag_gemm", 512, 256, 64, "float32", (), 1)
    nothing = dataclasses.replace(made_up(case), outcome=None, wrong=("fused 64x128x32: rank 1: off [by] one",))
    Recorder(monkeypatch, nothing)
    result = invoke("ag_gemm", "512", "256", "64")
    assert result.exit_code == 1 and not list(folder.glob("*.json"))
    assert "nothing ran right" in result.output and "WRONG fused 64x128x32: rank 1: off [by] one" in result.output
    assert "Nothing was found that runs right; nothing was kept." in result.output
    Recorder(monkeypatch, made_up(case, wrong=("pipelined: rank 0: off",)))
    result = invoke("ag_gemm", "512", "256", "64")
    assert result.exit_code == 1 and "WRONG pipelined: rank 0: off" in result.output
    assert [entry.config for entry in store.load(str(folder))] == [TUNED.config], "what is right is kept all the same"


def test_every_ranks_wrong_results_are_told_and_the_winners_own_time_is_kept() -> None:
    case = BenchCase("ag_gemm", 512, 256, 64, "float32", (), 1)
    ranks = [made_up(case, wrong=wrong) for wrong in ((), ("a: off",), ("a: off", "b: off"))]
    assert tune_module._merge(ranks).wrong == ("a: off", "b: off")
    tuned = made_up(case)
    assert tuned.outcome is not None
    level = dataclasses.replace(tuned.outcome, seconds={**tuned.outcome.seconds, BEFORE: 0.995e-3})
    entry = tune_module._entry(dataclasses.replace(tuned, outcome=level), "2026-11-15", {}, False)
    assert entry.config == TUNED.config and entry.seconds["fused"] == 1e-3


def test_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path) -> None:
    Recorder(monkeypatch)
    file = tmp_path / "found.json"
    assert invoke("ag_gemm", "512", "256", "64", "--json", str(file)).exit_code == 0
    whole = json.loads(file.read_text())
    assert whole["ok"] and whole["files"] == [str(folder / "ag_gemm.json")] and whole["world_size"] == 4
    (shape,) = whole["shapes"]
    assert (shape["m"], shape["over_before"], shape["num_left_out"]) == (512, pytest.approx(1.1), 3)
    assert shape["entry"] == json.loads((folder / "ag_gemm.json").read_text())["entries"][0]
    printed = CliRunner().invoke(app, ["tune", "ag_gemm", "512", "256", "64", "--dry-run", "--json", "-"])
    assert json.loads(printed.stdout)["files"] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "'op'|OP|op"),
        (["ag_gemm", "8", "8"], "K missing"),
        (["ag_gemm", "8", "8", "8", "--budget", "-1"], "'--budget'"),
        (["ag_gemm", "8", "8", "8", "--jobs", "0"], "'--jobs'"),
        (["ag_gemm", "8", "8", "8", "--world", "1"], "--world 1: one rank has nothing to wait for"),
        (["ag_gemm", "8", "8", "8", "--where", "ghost"], "--where ghost needs a GPU"),
        (
            ["moe_ag_gemm", "8", "8", "8"],
            "moe_ag_gemm is not tuned: a kept entry knows nothing of experts; ag_gemm, gem",
        ),
        (["grouped_gemm", "8", "8", "8"], "grouped_gemm is not tuned"),
        (["gemm_ar", "8", "8", "8", "--where", "ghost"], "ghosts play .* and moe_gemm_rs, not gemm_ar"),
        (["ag_gemm", "8", "8", "8", "--where", "mps"], "torch sees none here"),
        (["ag_gemm", "8", "8", "8", "--json", "/nowhere/a.json"], "there is no folder /nowhere"),
        (["ag_gemm", "--shapes", "decode"], "--shapes decode has nothing for ag_gemm"),
        (["gemm", "8", "8", "8", "--world", "2"], "gemm is one rank's own product"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_runs(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(monkeypatch)
    assert main(["tune", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and recorder.worlds == []
    assert re.search(words, printed.err) and len(printed.err.splitlines()) == 1
    assert printed.err.startswith("tileflux tune: ")


def test_what_could_not_be_kept_is_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorder = Recorder(monkeypatch)
    (tmp_path / "file").touch()
    for changes, words in (
        ({"TILEFLUX_TUNE_DIR": str(tmp_path / "file")}, "set TILEFLUX_TUNE_DIR, or use --dry-run"),
        ({"TILEFLUX_TUNE_DIR": ""}, "name a folder, or use --dry-run"),
        ({"TILEFLUX_LINK": "1GB/s,50us"}, "only --dry-run goes with it"),
    ):
        with env.scoped(changes):
            result = invoke("ag_gemm", "8", "8", "8", "--where", "cpu")
            assert result.exit_code == 2 and words in result.output and recorder.worlds == []
            assert invoke("ag_gemm", "8", "8", "8", "--where", "cpu", "--dry-run").exit_code == 0
            recorder.worlds.clear()


def test_a_store_that_cannot_be_read_is_not_overwritten(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    Recorder(monkeypatch)
    folder.mkdir()
    (folder / "ag_gemm.json").write_text("mine")
    result = invoke("ag_gemm", "512", "256", "64")
    assert result.exit_code == 1 and "move it away" in result.output
    assert (folder / "ag_gemm.json").read_text() == "mine"


def test_torchrun_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    for name in LAUNCHER:
        monkeypatch.setenv(name, "0")
    result = invoke("ag_gemm", "8", "8", "8")
    assert result.exit_code == 2 and "torchrun's ranks are not tuned" in result.output
    monkeypatch.setenv("LOCAL_RANK", "1")
    result = invoke("ag_gemm", "8", "8", "8")
    assert (result.exit_code, result.output, recorder.worlds) == (2, "", [])


def test_without_mps_virtual_ranks_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, gpus=1)
    recorder = Recorder(monkeypatch)
    recorder.error = TransportUnavailable("no MPS. To fix: start it")
    result = invoke("ag_gemm", "512", "256", "64", "--dry-run")
    assert result.exit_code == 0, result.output
    assert [world.where for world in recorder.worlds] == [
        "mps",
        "virtual",
    ] and "MPS does not work here" in result.output
    result = invoke("ag_gemm", "512", "256", "64", "--dry-run", "--where", "mps")
    assert result.exit_code == 1 and "no MPS" in result.output


def test_what_was_measured_among_ghosts_says_so(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    pretend(monkeypatch, gpus=1)
    recorder = Recorder(monkeypatch)
    result = invoke("ag_gemm", "512", "256", "64", "--where", "ghost")
    assert result.exit_code == 0, result.output
    assert recorder.worlds == [_worlds.ghost_world(8)]
    (entry,) = store.load(str(folder))
    assert entry.with_ghosts and "with ghost peers" in lookup(entry.problem).reason
    # What was measured among real ranks takes its place, and says nothing of ghosts.
    assert invoke("ag_gemm", "512", "256", "64", "--where", "cpu", "--dtype", "bfloat16").exit_code == 0
    forget()
    (entry,) = store.load(str(folder))
    assert not entry.with_ghosts and "ghost" not in lookup(entry.problem).reason


def test_a_rank_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    recorder = Recorder(monkeypatch)
    recorder.error = RankFailed("rank 1 of 4 failed first: ZeroDivisionError\n\nTraceback", 1, ZeroDivisionError())
    result = invoke("ag_gemm", "512", "256", "64", "--where", "cpu")
    assert result.exit_code == 1 and "Traceback" in result.output and not list(folder.glob("*.json"))


@pytest.mark.parametrize("num_done", [0, 2])
def test_interrupted_it_keeps_the_shapes_that_are_done(
    num_done: int, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    recorder = Recorder(monkeypatch)
    recorder.num_done = num_done
    assert main(["tune", "ag_gemm", "512", "256", "64", "--sweep", "m=512,1024,2048"]) == 130
    kept = store.load(str(folder)) if folder.exists() else ()
    assert sorted(entry.problem.m for entry in kept) == [512, 1024, 2048][3 - num_done :]
    assert all(entry.config == TUNED.config for entry in kept)


def test_help_fits_the_screen() -> None:
    result = invoke("--help")
    assert result.exit_code == 0 and "Examples:" in result.output
    assert max(len(line) for line in result.output.splitlines()) <= 80
