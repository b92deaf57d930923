"""The host's part of a call: timed where the op is, with all that it queues noted, and queued again without waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

import tileflux
from tileflux import ops
from tileflux.config import GemmConfig
from tileflux.kernels import roles, steps
from tileflux.kernels.operands import Operands, make_spec
from tileflux.kernels.prepared import Launcher, Repeat
from tileflux.symm.group import Group
from tileflux.testing import host, run_ranks
from tileflux.testing.bench import BenchCase
from tileflux.testing.contenders import Contender, Suite
from tileflux.testing.ghost import ghost_group
from tileflux.testing.host import Clock, HostTimes, Queued, measure_host, noted, replayed
from tileflux.tune.lookup import STRATEGIES


def make_case(op: str, m: int = 64, dtype: str = "float32", num_rounds: int | None = 3) -> BenchCase:
    return BenchCase(op, m, 48, 32, dtype, STRATEGIES, num_rounds)


def test_on_the_cpu_calls_are_timed_and_nothing_is_queued(tmp_path: Path) -> None:
    cases = [make_case(op) for op in ("ag_gemm", "gemm_rs", "gemm_ar")] + [make_case("gemm_rs", 7)]
    right = {op: getattr(ops, op) for op in ("ag_gemm", "gemm_rs", "gemm_ar")}
    ticks = tmp_path / "ticks"
    for rank in run_ranks(measure_host, 2, args=(cases, ticks)):
        for times in rank:
            assert times.problem == "" and times.auto in STRATEGIES[1:]
            names = ["ours pipelined", "ours auto", "ours sequential", "ours fused", "torch.mm"]
            assert list(times.batches) == names
            assert all(len(batches) == 3 and min(batches) > 0 for batches in times.batches.values())
            assert times.bare == {} and times.launches == {} and times.skipped == {}
    assert ticks.read_text() == "...\n" * len(cases)
    assert all(getattr(ops, op) is each for op, each in right.items())


def test_a_product_alone() -> None:
    (times,) = run_ranks(measure_host, 1, args=([make_case("gemm", num_rounds=None)], None))[0]
    assert list(times.batches) == ["ours", "torch.mm"] and times.auto == ""
    assert {len(batches) for batches in times.batches.values()} == {host.NUM_BATCHES}


def test_of_what_was_skipped_only_ours_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks what torch costs the host."""
    make = host.make_suite

    def with_skipped(group: Group, case: BenchCase) -> Suite:
        suite = make(group, case)
        suite.skipped = dict.fromkeys(("torch", "torch two-shot", "ours made up"), "not today")
        return suite

    monkeypatch.setattr(host, "make_suite", with_skipped)
    (group,) = tileflux.local_groups(1)
    with group:
        (times,) = measure_host(group, [make_case("gemm", num_rounds=1)], None)
    assert times.skipped == {"ours made up": "not today"}


def _broken(group: Group) -> HostTimes:
    right = ops.ag_gemm

    def wrong(*arguments: Any, out: torch.Tensor, **named: Any) -> None:
        right(*arguments, out=out, **named)
        if group.rank == 1 and named["strategy"] == "fused":
            out[0, 0] += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "ag_gemm", wrong)
        return measure_host(group, [make_case("ag_gemm")], None)[0]


def test_a_wrong_result_is_told() -> None:
    first, second = run_ranks(_broken, 2)
    assert first.problem == "" and second.problem.startswith("ours fused: rank 1: ")


def test_only_the_op_is_timed_and_not_what_stands_around_it() -> None:
    def op(pause_s: float) -> str:
        time.sleep(pause_s)
        return "done"

    clock = Clock(op)

    def call() -> None:
        time.sleep(0.2)
        assert clock(0.02) == clock(0.02) == "done"

    assert 0.04 <= clock.of(call) < 0.2
    assert clock.of(lambda: time.sleep(0.01)) == 0.0, "no call of the op"


class Compiled:
    """A compiled kernel that notes its launches."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.function, self.packed_metadata = "function", "metadata"

    def run(self, *given: Any) -> None:
        self.launched.append((given[0], *given[9:]))


@pytest.fixture
def no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tileflux.kernels.prepared.raw_stream", lambda device: 7)


def make_launcher(compiled: Compiled, role: Any = None) -> Launcher:
    """Of a step, or of a GEMM in a role."""
    if role is None:
        return Launcher(compiled, 0, (8, 2048))
    operands = Operands(torch.zeros(4, 32), torch.zeros(8, 32), torch.zeros(4, 8))
    world_size = 1 if role is roles.PLAIN else 4
    spec = make_spec(
        operands, role, GemmConfig(), world_size=world_size, num_feeders=0, releases=world_size > 1, use_tma=False
    )
    return Launcher(compiled, 0, (role.order, role.wait, role.finish, spec))


@pytest.mark.usefixtures("no_stream")
def test_everything_that_is_queued_is_noted_once_and_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    by_triton: list[tuple[Any, ...]] = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *given, **named: by_triton.append((*given, named)))
    kernel = JITFunction.__new__(JITFunction)
    step, fused, plain = Compiled(), Compiled(), Compiled()
    launchers = [
        make_launcher(step), make_launcher(fused, roles.ARRIVING), make_launcher(plain, roles.PLAIN)
    ]  # fmt: skip
    a, b, out = torch.randn(3, 4), torch.randn(4, 5), torch.full((3, 5), torch.nan)
    target = torch.full((3, 5), torch.nan)
    again = launchers[0].repeat(5, ("x", "table"), ())
    here = SimpleNamespace(table=torch.zeros(1))

    def work() -> None:
        for number, launcher in enumerate(launchers):
            launcher.launch(number, "x", number)
        again(None, here, a, None, out)
        kernel[(9,)]("y", num_warps=4)
        torch.mm(a, b, out=out)
        target.copy_(out, non_blocking=True)

    before = (Launcher.launch, Repeat.__call__, torch.mm, torch.Tensor.copy_, "copy_" in vars(torch.Tensor))
    clock, found = Clock(work), list[Queued]()
    clock()
    found = clock.note(lambda: (torch.zeros(1).copy_(torch.ones(1)), clock()))
    assert [each.kind for each in found] == ["step", "gemm", "plain", "step", "step", "library", "copy"], (
        "within the op alone"
    )
    assert (Launcher.launch, Repeat.__call__, torch.mm, torch.Tensor.copy_, "copy_" in vars(torch.Tensor)) == before
    assert torch.equal(out, a @ b) and torch.equal(target, out)
    clock()
    num_calls = 3
    assert [len(each.launched) for each in (step, fused, plain)] == [2 * num_calls, num_calls, num_calls]
    assert len(by_triton) == num_calls
    # Again: our kernels that may wait are replaced, and the rest is as it was.
    out.fill_(torch.nan), target.fill_(torch.nan)
    replaced: list[str] = []
    replayed(found, {"gemm": lambda: replaced.append("gemm"), "step": lambda: replaced.append("step")})()
    assert replaced == ["step", "gemm", "step", "step"]
    assert [len(each.launched) for each in (step, fused, plain)] == [2 * num_calls, num_calls, num_calls + 1]
    assert plain.launched[-1] == plain.launched[0] and len(by_triton) == num_calls
    assert torch.equal(out, a @ b) and torch.equal(target, out)


def test_a_call_that_fails_leaves_nothing_noting() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    clock, copy = Clock(fail), torch.Tensor.copy_
    with pytest.raises(ZeroDivisionError):
        clock.note(clock)
    assert torch.Tensor.copy_ == copy
    found: list[Queued] = []
    with noted(found):
        torch.zeros(2).copy_(torch.ones(2))
    torch.zeros(2).copy_(torch.ones(2))
    assert [each.kind for each in found] == ["copy"]


@pytest.mark.usefixtures("no_stream")
def test_the_smallest_launch_goes_past_triton_where_ours_do(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Compiled()
    asked: list[object] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., Compiled]:
            def launch(word: object, num_warps: int) -> Compiled:
                asked.append((grid, num_warps))
                return compiled

            return launch

    monkeypatch.setattr(steps, "_clock_kernel", Kernel())
    for past_triton, num_asked in ((True, 1), (False, 4)):
        asked.clear(), compiled.launched.clear()
        monkeypatch.setattr(host, "relaunchable", lambda kernel, value=past_triton: value)
        launch = host._smallest_launch(torch.device("cpu"))
        for _ in range(3):
            launch()
        assert asked == [((1,), 1)] * num_asked and len(compiled.launched) == 4 - num_asked


@pytest.mark.parametrize(
    ("device", "transport", "num_queued", "num_calls"),
    [
        ("cuda", "cuda", 3, 20),
        ("cuda", "cuda", 60, 8),
        ("cuda", "cuda", 2000, 1),
        ("cuda", "ghost", 3, 4),
        ("cpu", "shm", 0, 4),
    ],
)
def test_a_batch_fits_the_queue(device: str, transport: str, num_queued: int, num_calls: int) -> None:
    group: Any = SimpleNamespace(device=torch.device(device), transport=transport)
    assert host._num_calls(group, num_queued) == num_calls


def test_a_batch_begins_and_ends_with_nothing_queued() -> None:
    log: list[str] = []
    group: Any = SimpleNamespace(synchronize=lambda: log.append("sync"), barrier=lambda: log.append("barrier"))

    def timed() -> float:
        log.append("call")
        return 2.0

    assert host._batch(group, timed, 3) == 2.0
    assert log == ["sync", "barrier", "call", "call", "call", "sync"]


def test_the_baseline_does_not_pass_for_ours() -> None:
    """As in a ghost world, where auto may be plain code."""
    clock = Clock(lambda: time.sleep(0.001))
    contenders = [
        Contender("sequential", lambda: None, lambda: None),
        Contender("pipelined", lambda: None, lambda: None),
        Contender("ours fused", clock, lambda: None),
        Contender("ours auto", lambda: None, lambda: None),
    ]
    suite, skipped = Suite({}, contenders, lambda: None, "sequential"), dict[str, str]()
    group: Any = SimpleNamespace(transport="ghost")
    assert list(host._calls(group, suite, clock, skipped)) == ["ours fused"]
    assert list(skipped) == ["ours auto"]


def _among_ghosts(rank: int, world_size: int) -> list[HostTimes]:
    with ghost_group(4, timeout_s=10) as group:
        cases = [BenchCase(op, 1024, 512, 512, "bfloat16", STRATEGIES, 3) for op in ("ag_gemm", "gemm_rs")]
        return measure_host(group, cases, None)


@pytest.mark.gpu
def test_among_ghosts() -> None:
    (found,) = run_ranks(_among_ghosts, 1, where="spawn", device="cuda:0", make_group=False, timeout_s=150)
    for times in found:
        assert times.problem == "" and set(times.bare) == set(times.launches) == set(times.batches) - {"torch.mm"}
        assert all(
            min(batches) > 0 and max(batches) < 0.1 for batches in (*times.batches.values(), *times.bare.values())
        )
        assert times.launches["ours fused"] >= 3 and times.launches["ours pipelined"] >= 8


@pytest.mark.gpu
def test_a_product_on_a_gpu_is_one_launch() -> None:
    cases = [BenchCase("gemm", 512, 512, 512, "bfloat16", (), 3)]
    ((times,),) = run_ranks(measure_host, 1, args=(cases, None), where="spawn", device="cuda:0", timeout_s=150)
    assert times.problem == "" and times.launches == {"ours": 1}
    assert min(times.bare["ours"]) <= max(times.batches["ours"])
