"""``tileflux demo``: what it prints, and that it cannot be talked into printing a time for a wrong result."""

from __future__ import annotations

import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tileflux import ops
from tileflux.cli import _worlds, app
from tileflux.cli._measure import DENSE, Outcome, RankReport, measure, names, references, sizes
from tileflux.cli._worlds import Place, World, choose, mps_processes, virtual_ranks
from tileflux.cli.demo import merge
from tileflux.errors import PeerTimeout, TransportUnavailable
from tileflux.symm.group import Group
from tileflux.testing.collectives import COLLECTIVES
from tileflux.tune.lookup import STRATEGIES

ROOT = Path(__file__).parents[2]
demo_module = import_module("tileflux.cli.demo")
NAMES = [collective.name for collective in COLLECTIVES] * 2 + [dense.name for dense in DENSE]
NUM_ROWS = len(NAMES)
TIME = re.compile(r"\d (us|ms)\b")
PRODUCT = re.compile(r" \d+ x \d+ x \d+ ")


def invoke(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["demo", "--no-picture", *arguments])


def rows_of(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.rstrip().endswith(("right", "WRONG"))]


def check_output(output: str, *, with_torch: bool) -> None:
    rows = rows_of(output)
    assert len(rows) == NUM_ROWS, output
    for name, row in zip(NAMES, rows, strict=True):
        multiplies = "gemm" in name
        checked = ("fp64" if multiplies else "bits") + (", torch" if with_torch else "")
        assert row.startswith(f"{name}  ") and TIME.search(row) and f" {checked}  " in row
        assert bool(PRODUCT.search(row)) == multiplies
        assert ("B/s" in row and "iB" in row) != multiplies
    assert max(len(line) for line in output.splitlines()) <= 80
    assert "\x1b" not in output and "timing" not in output
    assert output.rpartition("\n\n")[2].startswith(f"All {NUM_ROWS} results are right on ")


def test_as_a_program_in_a_pipe() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tileflux", "demo", "--where", "cpu", "--no-picture"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check_output(done.stdout, with_torch=True)
    assert "4 CPU processes over shared memory" in done.stdout.splitlines()[0]


def test_virtual_ranks() -> None:
    result = invoke("--where", "local", "--world", "2")
    assert result.exit_code == 0, result.output
    check_output(result.output, with_torch=False)


def _plant(
    monkeypatch: pytest.MonkeyPatch, name: str, spoil: Callable[[Group, torch.Tensor], None], **when: str
) -> None:
    """Have ``spoil`` do as it likes with the result of an op called with options ``when``; forked ranks inherit it."""
    true_op = getattr(ops, name)

    def planted(*args: object, group: Group, out: torch.Tensor, **options: object) -> torch.Tensor:
        true_op(*args, group=group, out=out, **options)
        if when.items() <= options.items():
            spoil(group, out)
        return out

    monkeypatch.setattr(ops, name, planted)


def check_wrong(result: Any, name: str | tuple[str, ...], words: str) -> None:
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


def test_a_wrong_product_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(group: Group, out: torch.Tensor) -> None:
        if group.rank == 1:
            out[3, 5] += 1

    _plant(monkeypatch, "ag_gemm", spoil, strategy="sequential")
    _plant(monkeypatch, "gemm_rs", spoil, strategy="pipelined")
    _plant(monkeypatch, "gemm_ar", spoil, strategy="fused", algorithm="one_shot")
    wrong = ("ag_gemm, sequential", "gemm_rs, pipelined", "gemm_ar, fused, one shot")
    words = r"gemm_rs, pipelined, 256 x 384 x 512: rank 1: .* at \(3, 5\)"
    check_wrong(invoke("--where", "cpu", "--world", "2"), wrong, words)


def test_a_result_that_goes_wrong_while_timed_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def spoil(group: Group, out: torch.Tensor) -> None:
        calls.append(group.rank)
        if len(calls) > 2:  # one at each size is compared before the timing
            out.zero_()

    _plant(monkeypatch, "broadcast", spoil)
    check_wrong(invoke("--where", "cpu", "--world", "2"), "broadcast", r"rank 0: \d+ of \d+ elements differ")


def test_a_result_unlike_torchs_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    true_reference = ops.reduce_scatter_reference
    monkeypatch.setattr(ops, "reduce_scatter_reference", lambda x: -true_reference(x))
    check_wrong(invoke("--where", "cpu", "--world", "2"), "reduce_scatter", "against torch.distributed")


def test_a_product_unlike_torchs_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    true_reference = ops.gemm_ar_reference
    monkeypatch.setattr(ops, "gemm_ar_reference", lambda *args, **kwargs: -true_reference(*args, **kwargs))
    check_wrong(invoke("--where", "cpu", "--world", "2"), "gemm_ar", "against torch.distributed")


def _all_fail(monkeypatch: pytest.MonkeyPatch, error: Exception) -> Any:
    def spoil(group: Group, out: torch.Tensor) -> None:
        if group.rank == 1:
            raise error

    _plant(monkeypatch, "all_gather", spoil)
    result = invoke("--where", "cpu", "--world", "2")
    assert result.exit_code == 1
    assert rows_of(result.output) == []
    return result


def test_a_rank_that_gives_up_says_why_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    error = PeerTimeout(op="all_gather", rank=1, peer=0, waited_for=0, flag="data", wanted=3, seen=2, seconds=1.0)
    printed = _all_fail(monkeypatch, error).stderr
    assert printed.startswith("tileflux demo: rank 1 of 2 failed first: PeerTimeout: all_gather: rank 1 waited 1.0 s")
    assert len(printed.splitlines()) == 1


def test_a_rank_that_breaks_shows_where(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = _all_fail(monkeypatch, ZeroDivisionError("planted")).stderr
    assert printed.startswith("tileflux demo: rank 1 of 2 failed first: ZeroDivisionError: planted")
    assert "Traceback" in printed and "test_demo.py" in printed


def _broken_virtual_rank(group: Group) -> None:
    if group.rank == 1:
        raise TransportUnavailable("no way", "make one")
    group.barrier()


def test_an_error_of_a_virtual_rank_is_told_once() -> None:
    with pytest.raises(_worlds.RankFailed) as raised:
        _worlds.run(virtual_ranks(2, "cpu"), _broken_virtual_rank, timeout_s=20, group_timeout_s=0.5)
    assert _worlds.is_unavailable(raised.value)
    assert _worlds.explain(raised.value) == ("no way", "make one")


def test_merging_takes_the_slowest_rank_and_the_largest_message() -> None:
    reports = [
        RankReport("CPU", (Outcome("a", size, ("bits",), "", seconds), Outcome("b", 1, ("bits",), problem, seconds)))
        for size, seconds, problem in ((10, 0.3, ""), (30, 0.1, "bad"), (20, 0.2, ""))
    ]
    first, second = merge(reports)
    assert (first.size, first.seconds, first.problems) == (30, 0.3, ())
    assert (second.seconds, second.problems) == (None, ("bad",))


def test_every_strategy_is_shown_and_timed_in_the_order_of_the_table() -> None:
    assert {(dense.op, dense.strategy) for dense in DENSE} == {
        (op, strategy) for op in ("ag_gemm", "gemm_ar", "gemm_rs") for strategy in STRATEGIES if strategy != "auto"
    }
    assert {dense.algorithm for dense in DENSE} == {"", "one_shot", "two_shot"}
    assert names(sizes(False, 4)) == NAMES == names(sizes(True, 4))


def test_every_collective_has_its_reference() -> None:
    assert set(references()) == {collective.name for collective in COLLECTIVES}


@pytest.mark.parametrize(
    ("place", "size", "gpus", "has_mps", "wanted"),
    [
        (Place.AUTO, 4, 0, False, ("fork", "cpu")),
        (Place.AUTO, 4, 1, True, ("mps", "cuda:0")),
        (Place.AUTO, 4, 1, False, ("virtual", "cuda:0")),
        (Place.AUTO, 4, 3, True, ("mps", "cuda:0")),
        (Place.AUTO, 4, 4, True, ("spawn", "cuda")),
        (Place.AUTO, 2, 3, True, ("spawn", "cuda")),
        (Place.CPU, 4, 8, True, ("fork", "cpu")),
        (Place.LOCAL, 4, 8, True, ("virtual", "cuda:0")),
        (Place.LOCAL, 4, 0, False, ("virtual", "cpu")),
        (Place.MPS, 4, 8, True, ("mps", "cuda:0")),
    ],
)
def test_choice_of_world(
    place: Place, size: int, gpus: int, has_mps: bool, wanted: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _pretend(monkeypatch, gpus, has_mps)
    world = choose(place, size)
    assert (world.size, world.where, world.device) == (size, *wanted)


def _pretend(monkeypatch: pytest.MonkeyPatch, gpus: int, has_mps: bool) -> None:
    monkeypatch.setattr(_worlds, "num_gpus", lambda: gpus)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if has_mps else None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize(("variable", "value"), [("TRITON_INTERPRET", "1"), ("TILEFLUX_TRANSPORT", "shm")])
def test_settings_that_keep_auto_off_the_gpu(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, 8, True)
    monkeypatch.setenv(variable, value)
    assert choose(Place.AUTO, 4).device == "cpu"


@pytest.mark.parametrize(
    ("arguments", "gpus", "has_mps", "settings", "words"),
    [
        (["--where", "mps"], 0, True, {}, "torch sees none here; use --where cpu or local"),
        (["--where", "mps"], 1, False, {}, "nvidia-cuda-mps-control, which is not on PATH; use --where local"),
        (["--where", "mps"], 1, True, {"TRITON_INTERPRET": "1"}, "TRITON_INTERPRET=1 keeps kernels off the GPU"),
        (["--where", "mps"], 1, True, {"TILEFLUX_TRANSPORT": "shm"}, "TILEFLUX_TRANSPORT=shm does not go with"),
        (["--where", "cpu"], 1, True, {"TILEFLUX_TRANSPORT": "cuda"}, "TILEFLUX_TRANSPORT=cuda does not go with"),
        ([], 0, True, {"TILEFLUX_TRANSPORT": "cuda"}, "TILEFLUX_TRANSPORT=cuda does not go with"),
        ([], 0, True, {"TILEFLUX_CPU_BACKEND": "interpret"}, "would time Triton's interpreter"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_line(
    arguments: list[str],
    gpus: int,
    has_mps: bool,
    settings: dict[str, str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _pretend(monkeypatch, gpus, has_mps)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr and len(result.stderr.splitlines()) == 1


def _report(world: World) -> RankReport:
    return RankReport("Made-up GPU", (Outcome("all_gather", 1 << 20, ("bits",), "", 1e-3),))


@pytest.mark.parametrize("where", ["auto", "mps"])
def test_only_auto_does_without_mps_and_says_so(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, 1, True)

    def run(world: World, *args: object, **kwargs: object) -> list[RankReport]:
        if world == mps_processes(4):
            raise TransportUnavailable("the daemon is not well", "let it rest")
        assert world == virtual_ranks(4, "cuda:0")
        return [_report(world)] * 4

    monkeypatch.setattr(demo_module, "run", run)
    result = invoke("--where", where)
    if where == "auto":
        assert result.exit_code == 0
        assert "MPS does not work here: the daemon is not well" in result.output
        assert "on 4 virtual ranks on one GPU (Made-up GPU), in" in result.output.replace("\n", " ")
    else:
        assert result.exit_code == 1
        assert result.stderr == "tileflux demo: the daemon is not well; to fix: let it rest\n"


def test_what_goes_to_a_fresh_process_can_be_sent() -> None:
    sent = (virtual_ranks(4, "cuda:0"), measure, (sizes(True, 4), None))
    assert pickle.loads(pickle.dumps(sent)) == sent


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["auto", "local", "mps"])
def test_on_a_gpu(where: str) -> None:
    result = invoke("--where", where)
    assert result.exit_code == 0, result.output
    check_output(result.output, with_torch=where != "local")


def test_it_ends_with_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(demo_module, "_PICTURE", (256, 256, 256))
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["demo", "--where", "cpu", "--world", "2"])
    assert result.exit_code == 0, result.output
    assert "% of the communication is hidden" in " ".join(result.output.split())
    page = tmp_path / "tileflux-demo.html"
    assert str(page) in result.output.replace("\n", "")
    assert "sequential" in page.read_text() and "fused" in page.read_text()
