"""What ``tileflux bench`` may be asked for: mistakes are one line, and nothing runs; the rest reaches the ranks."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from tileflux import env
from tileflux.cli import _plot, _worlds, main
from tileflux.cli._request import Op, RoutingKind, ShapeSet, Strategy, parse_sweeps
from tileflux.testing.bench import BenchCase
from tileflux.testing.moe import ROUTING_KINDS
from tileflux.testing.shapes import MODEL_SHAPES, MOE_SHAPES, Mixture
from tileflux.tune.lookup import STRATEGIES

from .bench_cases import LAUNCHER, Recorder, invoke, pretend

MOE = ["8", "8", "8", "--experts", "4", "--top-k", "2"]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHER, "TILEFLUX_LINK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nope", "1", "2", "3"], "'nope' is not one of 'ag_gemm', 'gemm_rs', 'gemm_ar', 'gemm'"),
        ([], "'op'|OP|op"),
        (["ag_gemm"], "ag_gemm needs M, N and K, or --shapes; M, N, K missing"),
        (["ag_gemm", "8", "8"], "K missing"),
        (["ag_gemm", "0", "8", "8"], "'m'"),
        (["ag_gemm", "8", "8", "-1"], "-1"),
        (["ag_gemm", "8", "8", "many"], "'k'"),
        (["ag_gemm", "8", "8", "8", "--iters", "0"], "'--iters'"),
        (["ag_gemm", "8", "8", "8", "--world", "0"], "'--world'"),
        (["ag_gemm", "8", "8", "8", "--world", "65"], "'--world'"),
        (["ag_gemm", "8", "8", "8", "--dtype", "int7"], "'int7' is not one of 'float32', 'float16', 'bfloat16'"),
        (["ag_gemm", "8", "8", "8", "--strategy", "luck"], "'luck' is not one of 'sequential', "),
        (["ag_gemm", "8", "8", "8", "--where", "moon"], "'ghost', 'torchrun'"),
        (["ag_gemm", "8", "8", "8", "--where", "mps"], "torch sees none here; use --where cpu or local"),
        (["ag_gemm", "8", "8", "8", "--where", "ghost"], "--where ghost needs a GPU, and torch sees none here"),
        (["ag_gemm", "8", "8", "8", "--where", "torchrun"], "torchrun --nproc-per-node"),
        (["ag_gemm", "8", "8", "8", "--sweep", "q=1:2"], "--sweep q=1:2 should name m, n or k"),
        (["ag_gemm", "8", "8", "8", "--sweep", "m=8:4"], "from small to large"),
        (["ag_gemm", "8", "8", "8", "--sweep", "m=0,4"], "at least 1"),
        (["ag_gemm", "8", "8", "8", "--sweep", "m=a:b"], "should be like m=512:8192"),
        (["ag_gemm", "8", "8", "8", "--sweep", "k=1:2:3"], "should be like k=512:8192"),
        (["ag_gemm", "8", "8", "8", "--sweep", "m="], "should be like m=512:8192"),
        (["ag_gemm", "8", "8", "8", "--sweep", "m=1", "--sweep", "m=2"], "m is swept already"),
        (["ag_gemm", "--shapes", "bert"], "'bert' is not one of 'flux', "),
        (["ag_gemm", "--shapes", "decode"], "--shapes decode has nothing for ag_gemm; it is for gemm_ar, gemm"),
        (["ag_gemm", "8", "8", "8", "--shapes", "flux"], "--shapes flux takes the place of M, N and K"),
        (["ag_gemm", "--shapes", "flux", "--sweep", "n=1:2"], "only m can be swept with --shapes"),
        (["ag_gemm", "8", "8", "8", "--link", "fast"], "--link fast: 'fast' should be a bandwidth"),
        (["ag_gemm", "8", "8", "8", "--link", "1GB/s", "--where", "local"], "between CPU processes only"),
        (["ag_gemm", "8", "8", "8", "--json", "/nowhere/a.json"], "--json /nowhere/a.json: there is no folder"),
        (["ag_gemm", "8", "8", "8", "--csv", "/tmp"], "--csv /tmp is a folder, and should be a file"),
        (["ag_gemm", "8", "8", "8", "--json", "-", "--csv", "-"], "both be on standard output"),
        (["ag_gemm", "8", "8", "8", "--plot", "picture.txt"], "--plot picture.txt should end in .png, .svg, .pdf"),
        (["gemm_ar", "8", "8", "8", "--where", "ghost"], "gemm_rs, moe_ag_gemm and moe_gemm_rs, not gemm_ar"),
        (["moe_ag_gemm", "8", "8", "8"], "moe_ag_gemm needs --experts and --top-k, or --shapes; --experts, --top-k mi"),
        (["moe_ag_gemm", "8", "8", "8", "--experts", "4"], "or --shapes; --top-k missing"),
        (
            ["moe_ag_gemm", "8", "8", "--experts", "4", "--top-k", "2"],
            "moe_ag_gemm needs M, N and K, or --shapes; K mi",
        ),
        (["moe_ag_gemm", *MOE, "--experts", "0"], "'--experts'"),
        (["moe_ag_gemm", *MOE, "--experts", "1025"], "--experts 1025: there may be 1024 at most"),
        (["moe_ag_gemm", *MOE, "--top-k", "5"], "--top-k 5: a token cannot choose more than the 4 experts there are"),
        (["moe_ag_gemm", *MOE, "--ep", "3"], "--ep 3 should divide the 4 ranks and the 4 experts"),
        (["moe_ag_gemm", *MOE, "--ep", "4", "--world", "2"], "--ep 4 should divide the 2 ranks and the 4 experts"),
        (["moe_ag_gemm", *MOE, "--routing", "unfair"], "'unfair' is not one of 'uniform', 'skewed'"),
        (["moe_ag_gemm", *MOE, "--host"], "--host times the dense ops, not moe_ag_gemm"),
        (["moe_ag_gemm", "--shapes", "flux"], "--shapes flux has nothing for moe_ag_gemm; comet, mixtral, qwen-moe"),
        (["moe_ag_gemm", "--shapes", "comet", "--experts", "4"], "--shapes comet says how many experts there are"),
        (["moe_ag_gemm", *MOE[:3], "--shapes", "comet"], "--shapes comet takes the place of M, N and K"),
        (["moe_ag_gemm", "--shapes", "comet", "--sweep", "k=1,2"], "only m can be swept with --shapes"),
        (
            ["ag_gemm", "8", "8", "8", "--experts", "4"],
            "--experts is for moe_ag_gemm, moe_gemm_rs, grouped_gemm, ep; ag_gem",
        ),
        (["ep", *MOE], "ep needs M, the tokens of all ranks, and their width H, and nothing else"),
        (["ep", *MOE[1:2], *MOE[3:]], "ep needs M, the tokens of all ranks, and their width H, and nothing else"),
        (["ep", *MOE[1:], "--ep", "2"], "ep: every rank has whole experts of its own, as many as the others: no --ep"),
        (["ep", *MOE[1:], "--world", "3"], "--experts 4 should be a multiple of the 3 ranks"),
        (["ep", *MOE[1:], "--sweep", "n=1,2"], "--sweep n: ep has no N"),
        (["ep", *MOE[1:], "--strategy", "pipelined"], "ep has no strategy pipelined; sequential, fused"),
        (["ep", *MOE[1:], "--where", "ghost"], "and moe_gemm_rs, not ep; use --where mps"),
        (["ag_gemm", "8", "8", "8", "--routing", "skewed"], "--routing is for moe_ag_gemm"),
        (["ag_gemm", "--shapes", "moe"], "--shapes moe has nothing for ag_gemm; it is for moe_ag_gemm, moe_gemm_rs"),
        (["grouped_gemm", *MOE, "--world", "2"], "grouped_gemm is one rank's own product: no --world"),
        (["grouped_gemm", *MOE, "--ep", "2"], "grouped_gemm is one rank's own product: no --ep"),
        (["grouped_gemm", *MOE, "--strategy", "fused"], "grouped_gemm has no strategies"),
        (["gemm", "8", "8", "8", "--world", "2"], "gemm is one rank's own product"),
        (["gemm", "8", "8", "8", "--where", "ghost"], "gemm is one rank's own product"),
        (["gemm", "8", "8", "8", "--strategy", "fused"], "gemm has no strategies"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_runs(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_worlds, "num_gpus", lambda: 0)
    recorder = Recorder(monkeypatch)
    assert main(["bench", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and recorder.worlds == []
    assert re.search(words, printed.err) and len(printed.err.splitlines()) == 1
    assert printed.err.startswith("tileflux bench: ")


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("TILEFLUX_LINK", "slow", "TILEFLUX_LINK='slow' is not a link"),
        ("TILEFLUX_TIMEOUT_S", "soon", "TILEFLUX_TIMEOUT_S='soon' is not a positive number"),
        ("TILEFLUX_CPU_BACKEND", "interpret", "would time Triton's interpreter"),
        ("TILEFLUX_TRANSPORT", "cuda", "TILEFLUX_TRANSPORT=cuda does not go with"),
    ],
)
def test_a_wrong_setting_is_one_line(
    variable: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, value)
    assert main(["bench", "ag_gemm", "8", "8", "8", "--where", "cpu"]) == 2
    printed = capsys.readouterr()
    assert words in printed.err and len(printed.err.splitlines()) == 1 and printed.out == ""


def test_a_picture_without_matplotlib_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recorder = Recorder(monkeypatch)
    monkeypatch.setattr(_plot.importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "ag_gemm", "8", "8", "8", "--plot", str(tmp_path / "a.png")]) == 2
    assert capsys.readouterr().err == (
        "tileflux bench: --plot needs matplotlib, which is not installed: pip install 'tileflux[plot]'\n"
    )
    assert recorder.worlds == []


def test_sweeps() -> None:
    assert parse_sweeps([]) == {}
    assert parse_sweeps(["m=512:8192"]) == {"m": [512, 1024, 2048, 4096, 8192]}
    assert parse_sweeps(["m=3:13", "k=7,5,7"]) == {"m": [3, 6, 12], "k": [7, 5]}
    assert parse_sweeps(["n=5:5"]) == {"n": [5]}


def test_a_sweep_is_every_combination(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    result = invoke("gemm_rs", "1", "2", "3", "--sweep", "m=8:16", "--sweep", "k=4,6", "--where", "cpu", "--iters", "7")
    assert result.exit_code == 0, result.output
    assert [(case.m, case.n, case.k) for case in recorder.cases] == [(8, 2, 4), (8, 2, 6), (16, 2, 4), (16, 2, 6)]
    assert {(case.op, case.dtype, case.num_rounds) for case in recorder.cases} == {("gemm_rs", "float32", 7)}
    assert "ours fused wins 4 of 4 shapes; 1.33x over sequential in the geometric mean" in result.output
    headings = [line.split(" (")[0] for line in result.output.splitlines() if line.startswith("gemm_rs ")]
    assert headings == ["gemm_rs 8 x 2 x 4", "gemm_rs 8 x 2 x 6", "gemm_rs 16 x 2 x 4", "gemm_rs 16 x 2 x 6"]


@pytest.mark.parametrize(("op", "name"), [("ag_gemm", "llama"), ("gemm_rs", "flux"), ("gemm_ar", "decode")])
def test_sets_of_shapes(op: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    assert invoke(op, "--shapes", name, "--where", "cpu").exit_code == 0
    wanted = [(shape.m, shape.n, shape.k) for shape in MODEL_SHAPES[name] if op in shape.ops]
    assert [(case.m, case.n, case.k) for case in recorder.cases] == wanted and wanted
    assert invoke(op, "--shapes", name, "--where", "cpu", "--sweep", "m=1,2").exit_code == 0
    layers = list(dict.fromkeys((n, k) for _, n, k in wanted))
    assert [(case.m, case.n, case.k) for case in recorder.cases] == [(m, *layer) for layer in layers for m in (1, 2)]


@pytest.mark.parametrize("name", MOE_SHAPES)
@pytest.mark.parametrize("op", [Op.MOE_AG_GEMM, Op.MOE_GEMM_RS, Op.GROUPED_GEMM])
def test_sets_of_layers_of_experts(op: Op, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    ep = () if op is Op.GROUPED_GEMM else ("--ep", "2")
    wanted = []
    for m in (None, 16, 32):
        for layer in MOE_SHAPES[name]:
            into, out_of = (m or layer.m, layer.ffn, layer.hidden), (m or layer.m, layer.hidden, layer.ffn)
            mixture = Mixture(layer.num_experts, layer.top_k, 2 if ep else 1)
            picked = dataclasses.replace(mixture, is_picked=True)
            wanted += {
                Op.MOE_AG_GEMM: [(m, into, mixture)],
                Op.MOE_GEMM_RS: [(m, out_of, mixture)],
                Op.GROUPED_GEMM: [(m, size, each) for size in (into, out_of) for each in (mixture, picked)],
            }[op]
    for sweep in ((), ("--sweep", "m=16:32")):
        assert invoke(op, "--shapes", name, "--where", "cpu", *ep, *sweep).exit_code == 0
        found = [((case.m, case.n, case.k), case.mixture) for case in recorder.cases]
        expected = [(size, mixture) for m, size, mixture in wanted if bool(m) == bool(sweep)]
        assert sorted(found, key=str) == sorted(set(expected), key=str) and expected


def test_names_on_the_command_line_are_those_of_the_library() -> None:
    assert {each.value for each in ShapeSet} == {*MODEL_SHAPES, *MOE_SHAPES} and not set(MODEL_SHAPES) & set(MOE_SHAPES)
    assert {each.value for each in RoutingKind} <= set(ROUTING_KINDS)
    assert {each.value for each in Strategy} == set(STRATEGIES)


@pytest.mark.parametrize(
    ("arguments", "gpus", "size", "dtype"),
    [
        ([], 0, 4, "float32"),
        (["--where", "mps"], 1, 4, "bfloat16"),
        (["--where", "ghost"], 1, 8, "bfloat16"),
        (["--where", "ghost", "--world", "3", "--dtype", "float16"], 1, 3, "float16"),
        (["--where", "local", "--dtype", "bfloat16", "--world", "2"], 0, 2, "bfloat16"),
    ],
)
def test_defaults_depend_on_the_world(
    arguments: list[str], gpus: int, size: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, gpus)
    recorder = Recorder(monkeypatch)
    result = invoke("ag_gemm", "8", "8", "8", *arguments)
    assert result.exit_code == 0, result.output
    assert recorder.worlds[0].size == size
    (case,) = recorder.cases
    assert case == BenchCase("ag_gemm", 8, 8, 8, dtype, ("sequential", "pipelined", "fused", "auto"), None)
    assert type(case.op) is type(case.dtype) is str, "ranks should not need the command line to read their cases"


@pytest.mark.parametrize(
    ("op", "strategies"),
    [
        ("moe_ag_gemm", ("sequential", "pipelined", "fused", "auto")),
        ("moe_gemm_rs", ("sequential", "pipelined", "fused", "auto")),
        ("grouped_gemm", ()),
    ],
)
def test_what_ops_of_experts_are_asked_for(
    op: str, strategies: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recorder, file = Recorder(monkeypatch), tmp_path / "a.json"
    result = invoke(op, *MOE, "--where", "cpu", "--routing", "skewed", "--json", str(file))
    assert result.exit_code == 0, result.output
    mixtures = [Mixture(4, 2, 1, "skewed")]
    mixtures += [dataclasses.replace(mixtures[0], is_picked=True)] if op == "grouped_gemm" else []
    assert list(recorder.cases) == [BenchCase(op, 8, 8, 8, "float32", strategies, None, each) for each in mixtures]
    assert all(type(case.mixture.routing) is str for case in recorder.cases if case.mixture)
    report = json.loads(file.read_text())
    ranks = "" if op == "grouped_gemm" else " --world 4"
    layout = "" if op == "grouped_gemm" else " --ep 1"
    assert report["command"] == (
        f"tileflux bench {op} 8 8 8 --where cpu --dtype float32{ranks} --experts 4 --top-k 2{layout} --routing skewed"
    )
    assert report["cases"][0]["mixture"] == dataclasses.asdict(mixtures[0])
    assert f"{op} 8 x 8 x 8, E=4 top=2 skewed (auto" in result.output


def test_what_an_exchange_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    assert invoke("ep", *MOE[1:], "--where", "cpu", "--sweep", "k=8,16").exit_code == 0
    given = ("float32", ("sequential", "fused", "auto"), None, Mixture(4, 2))
    assert list(recorder.cases) == [BenchCase("ep", 8, 0, width, *given) for width in (8, 16)]
    assert invoke("ep", "--shapes", "mixtral", "--sweep", "m=512", "--where", "cpu").exit_code == 0
    assert [(case.m, case.n, case.k, case.mixture) for case in recorder.cases] == [(512, 0, 4096, Mixture(8, 2))]


def test_strategies_are_taken_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    wanted = ["--strategy", "fused", "--strategy", "auto", "--strategy", "fused"]
    assert invoke("ag_gemm", "8", "8", "8", "--where", "cpu", *wanted).exit_code == 0
    assert recorder.cases[0].strategies == ("fused", "auto")


def test_a_link_is_set_for_the_ranks_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorder = Recorder(monkeypatch)
    file = tmp_path / "a.json"
    result = invoke("ag_gemm", "8", "8", "8", "--where", "cpu", "--link", "2GB/s,20us", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert recorder.link == "2GB/s,20us" and env.link() is None
    assert "over shared memory, link 2GB/s,20us, float32" in result.output.splitlines()[0]
    report = json.loads(file.read_text())
    assert report["link"] == "2GB/s,20us" and report["command"].endswith(" --link 2GB/s,20us")


def test_a_link_of_the_environment_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    monkeypatch.setenv("TILEFLUX_LINK", "1GB/s")
    assert "link 1GB/s, " in invoke("ag_gemm", "8", "8", "8", "--where", "cpu").output
    assert recorder.link == "1GB/s"
    assert "link 2GB/s, " in invoke("ag_gemm", "8", "8", "8", "--where", "cpu", "--link", "2GB/s").output
    assert recorder.link == "2GB/s" and str(env.link()) == "1GB/s"


def test_help_has_examples_and_fits_the_screen() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    assert "Examples:" in result.output and "tileflux bench ag_gemm 4096 49152 12288" in result.output
    assert max(len(line) for line in result.output.splitlines()) <= 80
