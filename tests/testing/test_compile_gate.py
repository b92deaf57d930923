from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

from tileflux import env
from tileflux.errors import CompileGateError
from tileflux.testing.compile_gate import (
    ARCHITECTURES,
    SHARED_MEMORY_BYTES,
    CompileCase,
    CompileReport,
    Imported,
    assert_clean,
    gate_library,
    run_gate,
)

KERNELS = str(Path(__file__).with_name("gate_kernels.py"))
TYPES = {
    "src": "*bf16",
    "dst": "*bf16",
    "inbox": "*bf16",
    "flag": "*i32",
    "ack": "*i32",
    "epoch": "i32",
    "guard": "*i64",
    "num_chunks": "i32",
    "src_desc": "tensordesc<bf16[64,64]>",
    "dst_desc": "tensordesc<bf16[64,64]>",
}


def case(
    kernel: str,
    arguments: str,
    constexprs: Mapping[str, object] | None = None,
    *,
    name: str = "",
    archs: tuple[int, ...] = (90,),
    num_warps: int = 4,
    waits: bool = False,
    signals: bool = False,
) -> CompileCase:
    return CompileCase(
        name=name or kernel,
        kernel=f"{KERNELS}:{kernel}",
        signature={argument: TYPES[argument] for argument in arguments.split()},
        constexprs={"BLOCK": 1024} if constexprs is None else constexprs,
        options={"num_warps": num_warps},
        architectures=archs,
        waits=waits,
        signals=signals,
    )


EXCHANGE = "src dst inbox flag ack epoch guard num_chunks"
FLOATS = {"src": "*fp32", "dst": "*fp32"}

CASES = (
    *(
        case(
            kernel,
            arguments,
            archs=ARCHITECTURES,
            num_warps=warps,
            name=f"{kernel} {warps}",
            waits=waits,
            signals=signals,
        )
        for kernel, arguments, waits, signals in (
            ("store_and_signal", "src dst flag epoch", False, True),
            ("wait_and_load", "src dst flag epoch guard", True, False),
            ("exchange", EXCHANGE, True, True),
        )
        for warps in (4, 8)
    ),
    case("release_without_barrier", "src dst flag epoch", archs=(80, 90), signals=True),
    case("release_at_gpu_scope", "src dst flag epoch", signals=True),
    case("wait_without_acquire", "src dst flag epoch", waits=True),
    case("look_once", "src dst flag epoch num_chunks", waits=True),
    case("exchange", EXCHANGE, {"BLOCK": 1024, "SIGNAL": False}, name="no signal", waits=True, signals=True),
    *(
        case(
            "tma_store_and_signal",
            "src_desc dst_desc flag epoch",
            {"BLOCK": 64, "COMPLETE": complete},
            name=f"tma store {complete}",
            archs=(90, 100),
            signals=True,
        )
        for complete in (False, True)
    ),
    *(
        case(
            "wait_and_tma_load",
            "src_desc dst flag epoch guard",
            {"BLOCK": 64, "FENCE": fence},
            name=f"tma load {fence}",
            waits=True,
        )
        for fence in (False, True)
    ),
    CompileCase(
        "spills", f"{KERNELS}:many_registers", FLOATS, {"BLOCK": 8192}, options={"maxnreg": 32}, architectures=(90,)
    ),
    CompileCase(
        "may spill",
        f"{KERNELS}:many_registers",
        FLOATS,
        {"BLOCK": 8192},
        options={"maxnreg": 32},
        architectures=(90,),
        max_spill_bytes=1024,
    ),
    CompileCase("128 KiB", f"{KERNELS}:much_shared_memory", FLOATS, {"ROWS": 128}, architectures=(80, 89)),
    CompileCase("256 KiB", f"{KERNELS}:much_shared_memory", FLOATS, {"ROWS": 256}, architectures=(90,)),
    CompileCase("wgmma", f"{KERNELS}:hopper_only", {"dst": "*fp32"}, architectures=(90, 100)),
    CompileCase(
        "objects",
        f"{KERNELS}:convert",
        {"src": "*fp32", "dst": "*bf16"},
        {"policy": Imported(f"{KERNELS}:double"), "dtype": Imported("triton.language:bfloat16"), "shape": (256, 1)},
        architectures=(90,),
    ),
    case("make_store_and_signal()", "src dst flag epoch", signals=True),
    CompileCase(
        "unaligned",
        f"{KERNELS}:many_registers",
        FLOATS,
        {"BLOCK": 1024},
        divisible_by_16=("src",),
        architectures=(90,),
    ),
    case("exit_with_three()", "src"),
    case("not_a_kernel", "src"),
    case("absent", "src"),
    case("store_and_signal", "src dst flag", name="argument missing"),
    case("store_and_signal", "src dst flag epoch guard", name="argument too many"),
    CompileCase("no module", "tileflux.no_such_module:kernel", {}, architectures=(90,)),
)


@pytest.fixture(scope="module")
def reports() -> dict[tuple[str, int], CompileReport]:
    """All cases in one run, as the children take longer to start than most kernels to compile.

    The calling process says that it interprets kernels, as it does when the whole suite runs so.
    """
    with env.scoped({"TRITON_INTERPRET": "1"}):
        found = run_gate(CASES)
    assert [(report.case, report.arch) for report in found] == [(c.name, a) for c in CASES for a in c.architectures]
    return {(report.case, report.arch): report for report in found}


def only_problem(report: CompileReport) -> str:
    (problem,) = report.problems
    return problem


Reports = dict[tuple[str, int], CompileReport]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("kernel", ["store_and_signal", "wait_and_load", "exchange"])
def test_signal_and_wait_pass(reports: Reports, kernel: str, warps: int, arch: int) -> None:
    report = reports[f"{kernel} {warps}", arch]
    report.check()
    assert report.registers is not None and 8 <= report.registers <= 64
    assert report.stack_bytes == 0
    assert f".target sm_{arch}" in report.ptx
    assert f".reqntid {32 * warps}" in report.ptx


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_poll_is_a_plain_load(reports: Reports, arch: int) -> None:
    ptx = reports["wait_and_load 4", arch].ptx
    assert "ld.global.sys.acquire.b32" in ptx
    assert "atom.global.sys.acquire" not in ptx and ".acquire.sys.add" not in ptx


@pytest.mark.parametrize("arch", [80, 90])
def test_release_without_barrier(reports: Reports, arch: int) -> None:
    problem = only_problem(reports["release_without_barrier", arch])
    assert problem.startswith("no CTA barrier between `st.global") and "release.exch" in problem


def test_release_at_gpu_scope(reports: Reports) -> None:
    missing, narrow = reports["release_at_gpu_scope", 90].problems
    assert "nothing releases at sys scope" in missing
    assert "orders at gpu scope" in narrow


def test_wait_without_acquire(reports: Reports) -> None:
    assert "nothing acquires at sys scope" in only_problem(reports["wait_without_acquire", 90])


def test_flag_looked_at_once(reports: Reports) -> None:
    assert "looked at only once" in only_problem(reports["look_once", 90])


def test_signal_left_out(reports: Reports) -> None:
    assert "nothing releases at sys scope" in only_problem(reports["no signal", 90])


@pytest.mark.parametrize("arch", [90, 100])
def test_tma_store_before_signal(reports: Reports, arch: int) -> None:
    wrong, right = reports["tma store False", arch], reports["tma store True", arch]
    assert "cp.async.bulk.wait_group.read" in right.ptx
    assert only_problem(wrong).startswith("no `cp.async.bulk.wait_group 0` (without .read) between the TMA store")
    right.check()


def test_tma_load_after_wait(reports: Reports) -> None:
    assert only_problem(reports["tma load False", 90]).startswith("no fence.proxy.async between the acquire")
    reports["tma load True", 90].check()


def test_spills(reports: Reports) -> None:
    report = reports["spills", 90]
    assert report.stack_bytes is not None and report.stack_bytes > 0
    assert only_problem(report) == f"spills {report.stack_bytes} bytes a thread, allowed are 0"
    reports["may spill", 90].check()


def test_shared_memory(reports: Reports) -> None:
    reports["128 KiB", 80].check()
    assert reports["128 KiB", 80].shared_bytes == 128 * 1024
    assert only_problem(reports["128 KiB", 89]) == "asks for 131072 bytes of shared memory, the chip has 101376"
    assert only_problem(reports["256 KiB", 90]) == "asks for 262144 bytes of shared memory, the chip has 232448"


def test_a_kernel_that_aborts_the_compiler(reports: Reports) -> None:
    reports["wgmma", 90].check()
    report = reports["wgmma", 100]
    assert only_problem(report).startswith("the compiling process died: SIGABRT (LLVM ERROR: Cannot select")
    assert (report.registers, report.ptx) == (None, "")


def test_a_kernel_that_ends_the_process(reports: Reports) -> None:
    assert only_problem(reports["exit_with_three()", 90]) == (
        "the compiling process died: exit status 3 (source.mlir:1:2: error: the reason)"
    )


def test_constexprs_that_are_objects(reports: Reports) -> None:
    reports["objects", 90].check()
    assert "cvt.rn.bf16x2.f32" in reports["objects", 90].ptx


def test_divisibility_is_as_the_case_says(reports: Reports) -> None:
    both, src_only = reports["may spill", 90].ptx, reports["unaligned", 90].ptx
    assert "ld.global.v4.b32" in both and "st.global.v4.b32" in both
    assert "ld.global.v4.b32" in src_only and "st.global.v4.b32" not in src_only


def test_kernel_made_by_a_function(reports: Reports) -> None:
    reports["make_store_and_signal()", 90].check()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("not_a_kernel", "is 3, not a @triton.jit or @gluon.jit kernel"),
        ("absent", "has no absent"),
        ("argument missing", "gives store_and_signal no type or value for epoch"),
        ("argument too many", "store_and_signal has no argument guard; it has src, dst, flag, epoch, BLOCK"),
        ("no module", "No module named 'tileflux.no_such_module'"),
    ],
)
def test_a_case_that_does_not_fit_its_kernel(reports: Reports, name: str, message: str) -> None:
    problem = only_problem(reports[name, 90])
    assert problem.startswith("does not compile: ") and message in problem


def test_all_problems_are_raised_at_once(reports: Reports) -> None:
    with pytest.raises(CompileGateError) as caught:
        assert_clean(list(reports.values()))
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 + sum(len(report.problems) for report in reports.values())
    assert lines[0] == f"{len(lines) - 1} problem(s) in {len(reports)} compilations"
    assert any(line.startswith("wgmma sm_100: the compiling process died") for line in lines)


def test_no_reports_do_not_pass() -> None:
    with pytest.raises(ValueError, match="judged nothing"):
        assert_clean([])


def test_deadline() -> None:
    (report,) = run_gate([case("hang()", "src")], deadline_s=1)
    assert only_problem(report) == "took longer than 1 s to compile"
    assert report.seconds < 60


def test_kept_cache_and_chosen_architectures(tmp_path: Path) -> None:
    two = case("store_and_signal", "src dst flag epoch", archs=(80, 90), signals=True)
    (report,) = run_gate([two], archs=[90], cache_dir=tmp_path)
    report.check()
    assert report.arch == 90
    assert len(list(tmp_path.rglob("*.cubin"))) == 1


def test_an_interrupt_ends_the_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever reaches the caller from outside must not leave it waiting for the children's deadline."""
    monkeypatch.setattr("concurrent.futures.Future.result", lambda future: _interrupt_after(2.0))
    start, num_threads = time.monotonic(), threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        run_gate([case("hang()", "src"), case("hang()", "dst", name="second")], jobs=1, deadline_s=300)
    assert time.monotonic() - start < 60
    assert threading.active_count() == num_threads


def _interrupt_after(seconds: float) -> None:
    time.sleep(seconds)
    raise KeyboardInterrupt


def test_gate_library(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("tileflux.testing.compile_cases")
    cases = (
        case("store_and_signal", "src dst flag epoch", archs=(80, 90), signals=True),
        case("release_without_barrier", "src dst flag epoch", archs=(80,), signals=True),
    )
    library.CASES = cases  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, library.__name__, library)
    assert [(report.case, report.arch) for report in gate_library([90], jobs=1)] == [("store_and_signal", 90)]
    with pytest.raises(CompileGateError, match="1 problem.*\nrelease_without_barrier sm_80: no CTA barrier"):
        gate_library(jobs=1)


def test_compilers_see_none_of_the_callers_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON_INTERPRET", "TRITON_KERNEL_OVERRIDE", "PTXAS_OPTIONS", "TRITON_PTXAS_PATH", "TMPDIR"):
        monkeypatch.setenv(name, "as set")
    found = env.compiler_environment("cache", "scratch", ["/first", ""])
    assert not {"TRITON_INTERPRET", "TRITON_KERNEL_OVERRIDE", "PTXAS_OPTIONS"} & found.keys()
    assert found["TRITON_PTXAS_PATH"] == "as set"
    assert (found["TRITON_CACHE_DIR"], found["TMPDIR"]) == ("cache", "scratch")
    assert found["PYTHONPATH"] == f"/first:{Path.cwd()}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel": "tileflux.kernels.copy"}, "should be 'module:name'"),
        ({"architectures": (90, 75)}, r"architectures \[75\] should be among \[80"),
        ({"architectures": ()}, "no architectures"),
        ({"constexprs": {"src": 1}}, "src should be in signature or in constexprs, not in both"),
        ({"divisible_by_16": ("n",)}, "divisible_by_16 names n"),
        ({"max_spill_bytes": -1}, "max_spill_bytes=-1"),
        ({"constexprs": {"policy": print}}, "constexpr <built-in function print>"),
    ],
)
def test_a_case_is_checked_when_made(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"name": "x", "kernel": "a:b", "signature": {"src": "*bf16"}, **changes}
    with pytest.raises(ValueError, match=message):
        CompileCase(**arguments)  # type: ignore[arg-type]


def test_a_run_is_checked_before_it_starts() -> None:
    one = case("store_and_signal", "src dst flag epoch")
    with pytest.raises(ValueError, match=r"case names \['store_and_signal'\] are not unique"):
        run_gate([one, one])
    with pytest.raises(ValueError, match="jobs=0"):
        run_gate([one], jobs=0)
    with pytest.raises(ValueError, match="architectures"):
        run_gate([one], archs=[70])
    assert run_gate([one], archs=[80]) == []
    assert set(ARCHITECTURES) <= SHARED_MEMORY_BYTES.keys()
