"""``tileflux bench``: mistakes before anything runs, real ranks once, and no speed for a wrong result."""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import tileflux
from tileflux import ops
from tileflux.cli import _worlds
from tileflux.cli._request import Options, Request
from tileflux.cli._worlds import BenchPlace, World, ghost_world, mps_processes, virtual_ranks
from tileflux.errors import PeerTimeout, RankFailed, TilefluxError, TransportUnavailable
from tileflux.symm.group import Group
from tileflux.testing.bench import BenchCase, RankTimes, measure

from .bench_cases import LAUNCHER, ROOT, Recorder, bench_module, invoke, launch, pretend, rows_of

NAMES = ["sequential", "pipelined", "ours sequential", "ours fused", "ours auto"]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHER, "TILEFLUX_LINK"):
        monkeypatch.delenv(name, raising=False)


def test_as_a_program_in_a_pipe(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tileflux", "bench", "ag_gemm", "64", "64", "64", "--where", "cpu", "--world", "2",
         "--iters", "2", "--json", str(tmp_path / "a.json"), "--csv", str(tmp_path / "a.csv")],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    output = done.stdout
    head = f"tileflux {tileflux.__version__} bench ag_gemm: 2 CPU processes over shared memory, float32, 2 rounds"
    assert output.splitlines()[0] == head
    assert [re.split(r"  +", row)[0] for row in rows_of(output)] == NAMES
    assert "\x1b" not in output and "timing" not in output
    assert "torch: skipped, " in output and "T_beside" in output
    assert "Times of CPU ranks do not tell which strategy is quicker on a GPU." in " ".join(output.split())
    assert re.search(r"^ours \w+ (wins|loses|is level)", output.splitlines()[-1])
    report = json.loads((tmp_path / "a.json").read_text())
    assert report["ok"] and report["where"] == "cpu" and report["world_size"] == 2 and report["link"] == ""
    assert report["versions"]["torch"] == torch.__version__ and report["versions"]["tileflux"] == tileflux.__version__
    assert report["date"].startswith("20") and "core" in report["device"]
    assert report["command"] == ("tileflux bench ag_gemm 64 64 64 --where cpu --dtype float32 --iters 2 --world 2")
    (case,) = report["cases"]
    assert [contender["name"] for contender in case["contenders"]] == NAMES
    assert all(len(rank) == 2 for contender in case["contenders"] for rank in contender["rounds"])
    assert len(list(csv.DictReader(io.StringIO((tmp_path / "a.csv").read_text())))) == len(NAMES)


@pytest.mark.parametrize("op", ["gemm_rs", "gemm_ar"])
def test_fewer_rows_than_ranks(op: str) -> None:
    result = invoke(op, "1", "32", "64", "--where", "local", "--world", "2", "--iters", "1", "--strategy", "fused")
    assert result.exit_code == 0, result.output
    assert [re.split(r"  +", row)[0] for row in rows_of(result.output)] == ["sequential", "pipelined", "ours fused"]


def test_a_plain_product_needs_no_world() -> None:
    result = invoke("gemm", "32", "64", "64", "--where", "cpu", "--iters", "2")
    assert result.exit_code == 0, result.output
    assert "bench gemm: one CPU process, float32, 2 rounds" in result.output.splitlines()[0]
    assert [row.split()[0] for row in rows_of(result.output)] == ["torch", "ours"]
    assert "hidden" not in result.output


def test_a_wrong_result_gets_no_speed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    true_op = ops.ag_gemm

    def planted(x: torch.Tensor, *args: Any, group: Group, out: torch.Tensor, strategy: str, **options: Any) -> Any:
        true_op(x, *args, group=group, out=out, strategy=strategy, **options)
        if group.rank == 1 and strategy == "fused" and len(out) == 48:
            out[3, 5] += 1
        return out

    monkeypatch.setattr(ops, "ag_gemm", planted)
    result = invoke("ag_gemm", "32", "64", "64", "--sweep", "m=32,48", "--where", "cpu", "--world", "2", "--iters", "1",
                    "--json", str(tmp_path / "a.json"), "--csv", str(tmp_path / "a.csv"))  # fmt: skip
    assert result.exit_code == 1
    (line,) = (line for line in result.output.splitlines() if "48 x 64 x 64" in line)
    assert re.search(r"WRONG, so no times: ours fused: rank 1: .* at \(3, 5\)", line)
    assert len(rows_of(result.output)) == len(NAMES), "the other shape has its times"
    assert result.output.splitlines()[-1] == "1 of 2 shapes gave a wrong result."
    report = json.loads((tmp_path / "a.json").read_text())
    assert not report["ok"]
    assert ["contenders" in case for case in report["cases"]] == [True, False]
    assert {row["m"] for row in csv.DictReader(io.StringIO((tmp_path / "a.csv").read_text()))} == {"32"}


def test_nothing_but_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [RankTimes("torch: rank 0: all of it", {}, {}, "")]
    monkeypatch.setattr(bench_module, "run", lambda world, *args, **kwargs: [wrong] * world.size)
    result = invoke("ag_gemm", "8", "8", "8", "--where", "cpu")
    assert result.exit_code == 1
    assert rows_of(result.output) == [] and "spread" not in result.output
    assert result.output.splitlines()[-1] == "1 of 1 shapes gave a wrong result."


def test_a_picture_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    Recorder(monkeypatch)
    file = tmp_path / "a.png"
    result = invoke("ag_gemm", "8", "8", "8", "--sweep", "m=8:64", "--where", "cpu", "--plot", str(file))
    assert result.exit_code == 0, result.output
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_file_that_can_no_longer_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The folder goes while ranks run: the table has been printed, and the rest is one line."""
    recorder = Recorder(monkeypatch)
    folder = tmp_path / "gone"
    folder.mkdir()

    def run(*args: Any, **kwargs: Any) -> list[Any]:
        folder.rmdir()
        return recorder(*args, **kwargs)

    monkeypatch.setattr(bench_module, "run", run)
    result = invoke("ag_gemm", "8", "8", "8", "--where", "cpu", "--json", str(folder / "a.json"))
    assert result.exit_code == 1 and len(rows_of(result.stdout)) == 2
    assert result.stderr == f"tileflux bench: cannot write {folder / 'a.json'}: No such file or directory\n"


def test_a_rank_among_ghosts(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1)
    recorder = Recorder(monkeypatch)
    result = invoke("ag_gemm", "8", "8", "8", "--where", "ghost", "--json", "-")
    assert recorder.worlds == [ghost_world(8)]
    assert "1 rank with 7 ghost peers behind PCIe, bfloat16, 20 to 100 rounds" in result.stderr
    report = json.loads(result.stdout)
    assert (report["where"], report["world_size"], report["device"]) == ("ghost", 8, "Made-up GPU")
    assert len(report["cases"][0]["contenders"][0]["rounds"]) == 1, "one rank is real"


@pytest.mark.parametrize("option", ["--json", "--csv"])
def test_on_standard_output_the_table_makes_room(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Recorder(monkeypatch)
    result = invoke("ag_gemm", "8", "8", "8", "--where", "cpu", option, "-")
    assert result.exit_code == 0
    if option == "--json":
        assert json.loads(result.stdout)["summary"] == "ours fused wins: 1.33x over sequential."
    else:
        rows = list(csv.DictReader(io.StringIO(result.stdout)))
        assert [row["contender"] for row in rows] == ["sequential", "ours fused"]
    assert len(rows_of(result.stderr)) == 2


@pytest.mark.parametrize("where", ["auto", "mps"])
def test_only_auto_does_without_mps_and_says_so(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1)
    recorder = Recorder(monkeypatch)

    def run(world: World, *args: Any, **kwargs: Any) -> list[Any]:
        if world == mps_processes(4):
            raise TransportUnavailable("the daemon is not well", "let it rest")
        return recorder(world, *args, **kwargs)

    monkeypatch.setattr(bench_module, "run", run)
    result = invoke("ag_gemm", "8", "8", "8", "--where", where)
    if where == "auto":
        assert result.exit_code == 0 and recorder.worlds == [virtual_ranks(4, "cuda:0")]
        assert "MPS does not work here: the daemon is not well" in result.output
        assert "4 virtual ranks on one GPU on Made-up GPU." in result.output
    else:
        assert result.exit_code == 1
        assert result.stderr == "tileflux bench: the daemon is not well; to fix: let it rest\n"


TIMEOUT = PeerTimeout(op="x", rank=1, peer=0, waited_for=0, flag="f", wanted=3, seen=2, seconds=1.0)


@pytest.mark.parametrize(
    ("cause", "num_lines"),
    [
        (TIMEOUT, 1),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB"), 1),
        (MemoryError("none left"), 1),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 1 TiB"), 1),
        (None, 1),  # killed
        (ZeroDivisionError("planted"), 3),
    ],
)
def test_a_traceback_only_for_what_is_not_understood(
    cause: BaseException | None, num_lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*args: object, **kwargs: object) -> None:
        raise RankFailed(f"rank 1 of 4 failed first: {cause}\nTraceback\n  somewhere", 1, cause)

    monkeypatch.setattr(bench_module, "run", run)
    result = invoke("ag_gemm", "8", "8", "8", "--where", "cpu")
    assert result.exit_code == 1 and rows_of(result.output) == []
    assert result.stderr.startswith(f"tileflux bench: rank 1 of 4 failed first: {cause}")
    assert len(result.stderr.splitlines()) == num_lines


@pytest.mark.parametrize("num_rounds", [10, None])
def test_how_far_it_is_on_a_terminal(num_rounds: int | None) -> None:
    cases = tuple(BenchCase("ag_gemm", m, 8, 8, "float32", (), num_rounds) for m in (1, 2, 3))
    options = Options(None, (), None, BenchPlace.CPU, None, (), 10, (), None, None, None, None, None)  # type: ignore[arg-type]
    request = Request(options, _worlds.cpu_processes(2), cases, None)
    folders: list[Path] = []

    def work(ticks: Path | None) -> list[Any]:
        assert ticks is not None
        folders.append(ticks.parent)
        time.sleep(0.3)
        ticks.write_text("..........\n.....")
        time.sleep(0.4)
        ticks.write_text("..........\n" * 3)
        time.sleep(0.4)
        return []

    file = io.StringIO()
    assert bench_module._watched(Console(file=file, force_terminal=True, width=80), request, work) == []
    shown = file.getvalue()
    far = ("50 % of all rounds", "100 %") if num_rounds else ("round 5", "round 10")
    words = ["starting ranks", f"timing shape 2 of 3: {far[0]}", f"timing shape 3 of 3: {far[1]}"]
    places = [shown.find(each) for each in words]
    assert -1 not in places and places == sorted(places)
    assert not folders[0].exists()


def test_what_goes_to_a_fresh_process_can_be_sent() -> None:
    case = BenchCase("ag_gemm", 8, 8, 8, "float32", ("fused",), 1)
    sent = (ghost_world(8), measure, ((case,), Path("ticks")))
    assert pickle.loads(pickle.dumps(sent)) == sent


LONG = ["ag_gemm", "64", "64", "64", "--where", "cpu", "--world", "2", "--iters", "1000000"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopping_it_leaves_nothing_behind(number: signal.Signals, status: int, tmp_path: Path) -> None:
    mark = f"mark-{os.getpid()}-{number}"
    variables = {**os.environ, "TILEFLUX_TEST_MARK": mark, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-m", "tileflux", "bench", *LONG],
        cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        deadline = time.monotonic() + 60
        while len(_marked(mark)) < 3:
            assert process.poll() is None and time.monotonic() < deadline, "two ranks should be running by now"
            time.sleep(0.05)
        time.sleep(0.5)
        assert list(tmp_path.iterdir()), "ranks meet in a folder of their own"
        process.send_signal(number)
        output, errors = process.communicate(timeout=30)
        assert process.returncode == status, errors
    assert "Traceback" not in errors and rows_of(output) == []
    assert errors == ("tileflux: interrupted\n" if number == signal.SIGINT else "")
    assert _marked(mark) == [] and list(tmp_path.iterdir()) == []


def _marked(mark: str) -> list[int]:
    """Processes whose environment carries the mark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"TILEFLUX_TEST_MARK={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def test_under_torchrun_rank_0_prints_for_all() -> None:
    first, second = launch("gemm_rs", "32", "64", "64", "--iters", "2", "--json", "-", "--where", "torchrun")
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert second[1:] == ("", "")
    report = json.loads(first[1])
    assert (report["where"], report["world_size"]) == ("torchrun", 2)
    assert len(report["cases"][0]["contenders"][0]["rounds"]) == 2
    assert "2 processes of torchrun over shared memory" in first[2] and len(rows_of(first[2])) == len(NAMES)


@pytest.mark.parametrize("where", ["auto", "torchrun"])
def test_under_torchrun_a_mistake_is_told_once(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    told = []
    for local_rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        result = invoke("gemm_rs", "32", "64", "64", "--world", "2", "--where", where)
        assert (result.exit_code, result.stdout) == (2, "")
        told.append(result.stderr)
    assert told == ["tileflux bench: --world 2: torchrun says how many ranks there are (--nproc-per-node)\n", ""]


def test_an_error_of_ours_keeps_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: object, **kwargs: object) -> None:
        raise RankFailed("rank 0 of 1 failed first", 0, TransportUnavailable("no bindings", "install them"))

    monkeypatch.setattr(bench_module, "run", run)
    assert invoke("ag_gemm", "8", "8", "8", "--where", "cpu").stderr == (
        "tileflux bench: no bindings; to fix: install them\n"
    )
    assert issubclass(TransportUnavailable, TilefluxError)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "where"),
    [(op, where) for op in ("ag_gemm", "gemm_rs", "gemm_ar") for where in ("local", "mps", "ghost")
     if (op, where) != ("gemm_ar", "ghost")],
)  # fmt: skip
def test_on_a_gpu(op: str, where: str) -> None:
    result = invoke(op, "512", "512", "256", "--where", where, "--world", "2", "--iters", "3")
    assert result.exit_code == 0, result.output
    assert "ours fused" in [re.split(r"  +", row)[0] for row in rows_of(result.output)]
