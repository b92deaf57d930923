"""``tileflux bench --host``: what becomes of ranks' host times, and what cannot be asked for."""

from __future__ import annotations

import csv
import io
import json
import re
from typing import Any

import pytest
from rich.console import Console

from tileflux.cli import _host, _worlds, main
from tileflux.cli._report import Session
from tileflux.cli._worlds import World, mps_processes
from tileflux.errors import TransportUnavailable
from tileflux.testing.bench import BenchCase
from tileflux.testing.host import HostTimes, measure_host

from .bench_cases import LAUNCHER, bench_module, invoke, pretend

SESSION = Session("tileflux bench", "2020-02-02T00:00:00+00:00", "mps", "2 ranks", 2, "A GPU", "", {"torch": "9.9"})


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHER, "TILEFLUX_LINK"):
        monkeypatch.delenv(name, raising=False)


def times(scale: float = 1.0, problem: str = "") -> HostTimes:
    """80 us for a fused call and 30 us for its launches, in three batches; the first is slow."""
    micros = {"ours fused": [200.0, 80.0, 70.0], "torch.mm": [9.0, 6.0, 5.0]}
    batches = {name: [1e-6 * scale * each for each in values] for name, values in micros.items()}
    bare = {"ours fused": [1e-6 * scale * each for each in (50.0, 30.0, 20.0)]}
    return HostTimes(problem, batches, bare, {"ours fused": 12}, {"ours sequential": "not today"}, "fused")


def case(m: int = 512) -> BenchCase:
    return BenchCase("ag_gemm", m, 64, 32, "bfloat16", ("fused",), 3)


def shown(results: list[_host.HostResult], on_gpu: bool = True) -> str:
    file = io.StringIO()
    _host.show(Console(file=file, width=80, highlight=False), results, on_gpu)
    return file.getvalue()


def test_in_each_batch_the_slowest_rank_counts() -> None:
    quick, slow = times(0.5), times()
    quick.batches["ours fused"][2] = 90e-6
    (result,) = _host.merge([case()], [[quick], [slow]])
    fused, library = result.calls
    assert (fused.name, fused.num_queued, library.name, library.num_queued) == ("ours fused", 12, "torch.mm", None)
    assert fused.seconds == pytest.approx(90e-6) and fused.best == pytest.approx(80e-6)
    assert fused.bare == pytest.approx(30e-6) and fused.beyond == pytest.approx(60e-6)
    assert library.bare is None and library.beyond is None
    assert result.batches["ours fused"] == [quick.batches["ours fused"], slow.batches["ours fused"]]
    assert result.find("torch.mm") is library and result.find("ours auto") is None


def test_the_table_and_the_sentence() -> None:
    results = _host.merge([case(), case(1024)], [[times(), times(2.0)]])
    text = shown(results)
    assert re.search(r"ours fused +80\.0 +70\.0 +12 +30\.0 +50\.0\s", text)
    assert re.search(r"torch\.mm +6\.0 +5\.0\s", text) and text.count("beyond\n") <= 1
    assert "ours sequential: skipped, not today" in text and max(map(len, text.splitlines())) <= 80
    said = "A call of ours fused holds the host for 160 us: 60 us for the 12 things it queues, 100 us beyond them"
    assert _host.sentence(results) == f"{said}; torch.mm for 12 us (the longest of all shapes)."
    assert _host.sentence(results[:1]).endswith("50 us beyond them; torch.mm for 6 us.")
    text = " ".join(shown(results, on_gpu=False).split())
    assert "On the CPU nothing is queued: this is all of the call" in text and "beyond" not in text


def test_a_wrong_result_has_no_times() -> None:
    results = _host.merge(
        [case(), case(1024)], [[times(), times()], [times(), times(problem="ours fused: [off] by one")]]
    )
    text = shown(results)
    assert "WRONG, so no times: ours fused: [off] by one" in text and text.count("torch.mm") == 1
    assert [row["m"] for row in csv.DictReader(io.StringIO(_host.as_csv(SESSION, results)))] == ["512", "512"]
    report = _host.as_json(SESSION, results)
    assert not report["ok"] and report["cases"][1]["calls"] == []
    assert _host.sentence(results[1:]) == "Nothing of ours was timed."


def test_json_and_csv() -> None:
    results = _host.merge([case()], [[times()]])
    report = json.loads(json.dumps(_host.as_json(SESSION, results)))
    assert report["ok"] and report["world_size"] == 2 and report["versions"] == {"torch": "9.9"}
    (found,) = report["cases"]
    assert (found["op"], found["m"], found["dtype"], found["auto"]) == ("ag_gemm", 512, "bfloat16", "fused")
    fused, library = found["calls"]
    assert fused["seconds"] == pytest.approx(80e-6) and fused["beyond"] == pytest.approx(50e-6)
    assert len(fused["batches"]) == 1 and len(fused["batches"][0]) == 3 and library["num_queued"] is None
    fused, library = csv.DictReader(io.StringIO(_host.as_csv(SESSION, results)))
    assert (fused["contender"], fused["num_queued"], library["bare"]) == ("ours fused", "12", "")
    assert float(fused["best"]) == pytest.approx(70e-6) and fused["where"] == "mps"


def test_real_ranks_on_the_cpu() -> None:
    result = invoke(
        "gemm_rs", "64", "32", "32", "--where", "cpu", "--world", "2", "--host", "--iters", "2", "--json", "-"
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["command"].endswith("--iters 2 --world 2 --host") and report["where"] == "cpu"
    names = [call["name"] for call in report["cases"][0]["calls"]]
    assert names == ["ours pipelined", "ours sequential", "ours fused", "ours auto", "torch.mm"]
    assert "host time, 2 batches of calls" in result.stderr and "A call of ours auto holds the host" in result.stderr


class Recorder:
    """Stands in for ``run``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, problem: str = "", error: Exception | None = None) -> None:
        self.worlds: list[World] = []
        self.problem, self.error = problem, error
        monkeypatch.setattr(bench_module, "run", self)

    def __call__(self, world: World, function: object, args: tuple[Any, ...], *, timeout_s: float) -> list[Any]:
        assert function is measure_host
        self.worlds.append(world)
        if self.error is not None:
            raise self.error
        return [[times(problem=self.problem) for _ in args[0]]] * (1 if world.where == "ghost" else world.size)


@pytest.mark.parametrize("where", ["ghost", "mps"])
def test_on_a_gpu_that_is_made_up(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1)
    recorder = Recorder(monkeypatch)
    result = invoke("ag_gemm", "8", "8", "8", "--where", where, "--host")
    assert result.exit_code == 0 and [world.where for world in recorder.worlds] == [where]
    assert "host time, 20 batches of calls" in result.output and "Made-up GPU, its host " in result.output
    assert result.output.splitlines()[-1].startswith("A call of ours fused holds the host for 80 us")
    Recorder(monkeypatch, problem="ours fused: rank 0: off")
    result = invoke("ag_gemm", "8", "8", "8", "--where", where, "--host")
    assert result.exit_code == 1 and result.output.splitlines()[-1] == "1 of 1 shapes gave a wrong result."


def test_without_mps_there_is_no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual ranks would time each other."""
    pretend(monkeypatch, 1)
    recorder = Recorder(monkeypatch, error=TransportUnavailable("the daemon is not well", "let it rest"))
    result = invoke("ag_gemm", "8", "8", "8", "--host")
    assert result.exit_code == 1 and recorder.worlds == [mps_processes(4)]
    assert result.stderr == "tileflux bench: the daemon is not well; to fix: let it rest\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ag_gemm", "8", "8", "8", "--host", "--where", "local"], "virtual ranks hold each other's host"),
        (["ag_gemm", "8", "8", "8", "--host", "--plot", "a.png"], "leave one of --plot and --host out"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_worlds, "num_gpus", lambda: 0)
    recorder = Recorder(monkeypatch)
    assert main(["bench", *arguments]) == 2 and recorder.worlds == []
    assert words in (error := capsys.readouterr().err) and len(error.splitlines()) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["mps", "ghost"])
def test_on_a_gpu(where: str) -> None:
    result = invoke(
        "ag_gemm", "1024", "512", "512", "--where", where, "--world", "2", "--iters", "3", "--host", "--csv", "-"
    )
    assert result.exit_code == 0, result.output
    rows = {row["contender"]: row for row in csv.DictReader(io.StringIO(result.stdout))}
    assert int(rows["ours fused"]["num_queued"]) >= 1 and float(rows["ours fused"]["bare"]) > 0
