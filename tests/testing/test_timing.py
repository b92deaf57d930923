"""Rounds in which everything takes its turn, and a stopwatch that times the work and not the host that queues it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from tileflux.perf.figures import summarize
from tileflux.testing import timing
from tileflux.testing.timing import HEAD_START_S, Stopwatch, head_start, median_error, time_rounds

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Script:
    """A stopwatch whose every reading is the number of the reading."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def seconds(self, call: Callable[[], object]) -> float:
        call()
        return float(len(self.log))


def run_script(num_rounds: int, **options: Any) -> tuple[list[str], dict[str, list[float]]]:
    """What was called in which order, with ``|`` after a round, and the readings."""
    script = Script()
    calls = {name: lambda name=name: script.log.append(name) for name in "abc"}
    ends: list[int] = []
    seconds = time_rounds(script, calls, num_rounds, after_round=lambda: ends.append(len(script.log)), **options)
    log = list(script.log)
    for end in reversed(ends):
        log.insert(end, "|")
    return log, seconds


@pytest.mark.parametrize("num_warmups", [0, 1, 2, 3])
def test_rounds_go_forwards_and_backwards_in_turn(num_warmups: int) -> None:
    log, _ = run_script(4, num_warmups=num_warmups)
    rounds = "".join(log).replace("|", "")
    rounds = [rounds[begin : begin + 3] for begin in range(0, len(rounds), 3)]
    assert len(rounds) == num_warmups + 4 and set(rounds) == {"abc", "cba"}
    assert all(one != other for one, other in zip(rounds, rounds[1:], strict=False))
    assert rounds[num_warmups] == "abc", "the first round that counts is the same whatever came before"


def test_warm_ups_are_neither_counted_nor_told() -> None:
    log, seconds = run_script(3)
    assert "".join(log) == "abccba" + "abc|cba|abc|"
    assert seconds == {"a": [7.0, 12.0, 13.0], "b": [8.0, 11.0, 14.0], "c": [9.0, 10.0, 15.0]}


def test_rounds_that_warm_up_do_not_count() -> None:
    answers = iter([False, False, False, True])
    log, seconds = run_script(2, num_warmups=1, is_warm=lambda: next(answers))
    assert "".join(log) == "cba" + "abccbaabc" + "abc|cba|"
    assert all(len(each) == 2 for each in seconds.values())


def test_no_rounds_give_empty_lists() -> None:
    log, seconds = run_script(0, num_warmups=1)
    assert "".join(log) == "cba" and seconds == {"a": [], "b": [], "c": []}


def test_on_the_cpu_a_call_is_timed_from_when_all_are_together() -> None:
    calls: list[str] = []

    def together() -> None:
        calls.append("together")
        time.sleep(0.3)

    def call() -> None:
        calls.append("call")
        time.sleep(0.05)

    watch = Stopwatch(CPU, together)
    quickest = min(watch.seconds(call) for _ in range(3))
    assert calls == ["together", "call"] * 3
    assert 0.05 <= quickest < 0.3, "what the others took to come was timed as well"


class FakeGpu:
    """A stream that notes what it is told, and events that are as far apart as the call says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.sleeps: list[int] = []
        self.clock = 0.0
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing
                self.time_ms = -1.0

            def record(self) -> None:
                gpu.log.append("record")
                self.time_ms = gpu.clock

            def synchronize(self) -> None:
                gpu.log.append("synchronize")

            def elapsed_time(self, end: Event) -> float:
                return end.time_ms - self.time_ms

        def sleep(cycles: int) -> None:
            assert isinstance(cycles, int)
            gpu.log.append("sleep")
            gpu.sleeps.append(cycles)

        monkeypatch.setattr(torch.cuda, "_sleep", sleep)
        monkeypatch.setattr(torch.cuda, "Event", Event)

    def call(self, host_s: float, gpu_s: float) -> Callable[[], None]:
        """A call that holds the host and the GPU for so long."""

        def call() -> None:
            self.log.append("call")
            self.clock += 1e3 * gpu_s
            time.sleep(host_s)

        return call


def test_on_a_gpu_the_stream_is_timed_and_not_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    watch = Stopwatch(GPU, lambda: gpu.log.append("together"))
    assert watch.seconds(gpu.call(host_s=0.02, gpu_s=0.25)) == pytest.approx(0.25)
    assert gpu.log == ["sleep", "together", "record", "call", "record", "synchronize"]


def test_the_head_start_grows_with_what_the_host_needed_the_last_time(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    watch = Stopwatch(GPU, lambda: None)
    quick, slow, compiling = gpu.call(0.0, 1e-3), gpu.call(0.02, 1e-3), gpu.call(0.3, 1e-3)
    least = int(HEAD_START_S * timing._CYCLES_PER_S)
    for call in (slow, quick, slow):
        watch.seconds(call)
    assert gpu.sleeps[:2] == [least, least], "of a call that was never made nothing is known"
    assert gpu.sleeps[2] >= 1.5 * 0.02 * timing._CYCLES_PER_S
    watch.seconds(quick)
    assert gpu.sleeps[3] < gpu.sleeps[2], "calls have head starts of their own"
    for _ in range(2):
        watch.seconds(compiling)
    assert gpu.sleeps[5] == int(timing._LONGEST_S * timing._CYCLES_PER_S), "who compiles does not the next time"
    gpu.sleeps.clear()
    head_start()
    head_start(0.5)
    assert gpu.sleeps == [least, int(0.5 * timing._CYCLES_PER_S)]


def test_a_call_that_queues_with_the_others_waits_for_them_in_its_head_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meeting the others takes the host's time too."""
    gpu = FakeGpu(monkeypatch)
    watch = Stopwatch(GPU, lambda: time.sleep(0.02))
    call = gpu.call(0.0, 1e-3)
    watch.seconds(call)
    watch.seconds(call)
    assert gpu.sleeps[1] >= 1.5 * 0.02 * timing._CYCLES_PER_S


@pytest.mark.gpu
def test_a_pause_of_the_stream_is_what_the_stopwatch_reads() -> None:
    """The host's own pause is hidden by the head start from the second reading on."""
    watch = Stopwatch(torch.device("cuda"), lambda: None)

    def call() -> None:
        torch.cuda._sleep(20_000_000)
        time.sleep(0.025)
        torch.cuda._sleep(20_000_000)

    readings = [watch.seconds(call) for _ in range(4)]
    assert readings[0] >= 0.025, "nothing was known of the host's pause"
    assert 0.01 <= min(readings[1:]) < readings[0]


def test_the_error_of_a_median_is_what_medians_differ_by() -> None:
    """Of 2000 medians of 40 normal times each, the deviation is as each one's own rounds say."""
    generator = torch.Generator().manual_seed(11)
    times = 1 + 0.05 * torch.randn(2000, 40, generator=generator)
    spreads = [summarize("", [row]).spread for row in times.tolist()]
    said = sum(median_error(spread, 40) for spread in spreads) / len(spreads)
    assert said == pytest.approx(float(times.quantile(0.5, dim=1).std()), rel=0.1)


def test_rounds_end_when_it_is_enough() -> None:
    script = Script()
    seen: list[int] = []

    def is_enough(seconds: Mapping[str, list[float]]) -> bool:
        seen.append(len(seconds["a"]))
        return len(seconds["a"]) == 3

    calls = {name: lambda name=name: script.log.append(name) for name in "ab"}
    assert time_rounds(script, calls, 9, num_warmups=1, is_enough=is_enough)["a"] == [3.0, 6.0, 7.0]
    assert seen == [1, 2, 3]


class TellingGroup:
    """Two ranks on a GPU, as far as ``agree_max`` asks: notes what is done, and gathers nothing of a peer's."""

    world_size, transport, device = 2, "local", torch.device("cpu")

    def __init__(self) -> None:
        self.done: list[str] = []

    def synchronize(self) -> None:
        self.done.append("waited")

    def all_gather(self, mine: torch.Tensor, group: object) -> TellingGroup:
        self.done.append("queued")
        self.rows = [*mine.tolist(), [2.0, 5.0]]
        return self

    def tolist(self) -> list[list[float]]:
        self.done.append("copied")
        return self.rows


def test_what_ranks_agree_on_is_copied_once_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = TellingGroup()
    monkeypatch.setattr("tileflux.testing.timing.ops.all_gather", group.all_gather)
    assert timing.agree_max(group, [3.0, 4.0]) == [3.0, 5.0]
    assert group.done == ["queued", "waited", "copied"], "a copy that waits keeps a virtual rank from making its own"
