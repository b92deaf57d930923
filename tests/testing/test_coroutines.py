"""The scheduler alone, without kernels."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tileflux.errors import Deadlock
from tileflux.testing.coroutines import Scheduler


@pytest.fixture(autouse=True)
def no_threads_left_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


class Until:
    def __init__(self, ready: Callable[[], bool], what: str = "the impossible") -> None:
        self.ready, self._what = ready, what

    def describe(self) -> str:
        return self._what


def trace(seed: int, num_coroutines: int = 3, num_steps: int = 20) -> str:
    """Who ran when."""
    scheduler = Scheduler(seed, max_steps=1000)
    steps: list[str] = []

    def work(name: str) -> None:
        for _ in range(num_steps):
            steps.append(name)
            scheduler.switch()

    for index in range(num_coroutines):
        scheduler.spawn(lambda index=index: work("abcdefgh"[index]), str(index))
    scheduler.run()
    return "".join(steps)


def test_all_run_to_their_end_in_an_order_the_seed_decides() -> None:
    traces = [trace(seed) for seed in range(20)]
    assert all(sorted(steps) == sorted("abc" * 20) for steps in traces)
    assert len(set(traces)) == 20
    assert [trace(seed) for seed in range(20)] == traces


def test_some_seeds_interleave_finely_and_some_let_one_run_far_ahead() -> None:
    switches = [sum(a != b for a, b in zip(steps, steps[1:], strict=False)) for steps in map(trace, range(20))]
    assert max(switches) > 30
    assert min(switches) < 8


def test_exactly_one_runs_at_a_time() -> None:
    scheduler = Scheduler(0, max_steps=1000)
    inside: list[int] = []

    def work(index: int) -> None:
        for _ in range(10):
            inside.append(index)
            time.sleep(0.0005)  # gives the interpreter every chance to run another thread
            assert inside == [index]
            inside.clear()
            scheduler.switch()

    for index in range(4):
        scheduler.spawn(lambda index=index: work(index), str(index))
    scheduler.run()


def test_blocked_coroutine_runs_when_its_wait_is_over() -> None:
    for seed in range(10):
        scheduler = Scheduler(seed, max_steps=100)
        events: list[str] = []

        def consume(scheduler: Scheduler = scheduler, events: list[str] = events) -> None:
            scheduler.block(Until(lambda: "made" in events))
            events.append("used")

        scheduler.spawn(consume, "consumer")
        scheduler.spawn(lambda events=events: events.append("made"), "maker")
        scheduler.run()
        assert events == ["made", "used"]


def test_children_end_before_their_parent_goes_on() -> None:
    for seed in range(10):
        scheduler = Scheduler(seed, max_steps=100)
        done: list[int] = []

        def parent(scheduler: Scheduler = scheduler, done: list[int] = done) -> list[int]:
            children = [scheduler.spawn(lambda i=i: done.append(i), f"child {i}") for i in range(3)]
            scheduler.run_children(children)
            return sorted(done)

        root = scheduler.spawn(parent, "parent")
        scheduler.run()
        assert root.result == [0, 1, 2]


def test_wait_that_was_over_once_is_over() -> None:
    scheduler = Scheduler(0, max_steps=100)
    open_now = [True]

    def pass_through() -> str:
        scheduler.block(Until(lambda: open_now[0]))
        open_now[0] = False
        scheduler.switch()
        return "through"

    root = scheduler.spawn(pass_through, "visitor")
    scheduler.run()
    assert root.result == "through"


@pytest.mark.parametrize("seed", range(8))
def test_deadlock_names_those_that_wait_and_for_what(seed: int) -> None:
    scheduler = Scheduler(seed, max_steps=100)
    scheduler.spawn(lambda: scheduler.block(Until(lambda: False, "a letter")), "Vera")
    scheduler.spawn(lambda: scheduler.block(Until(lambda: False, "a call")), "Otto")
    scheduler.spawn(lambda: None, "nobody")
    with pytest.raises(Deadlock) as caught:
        scheduler.run()
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"every coroutine waits (seed {seed}, step ")
    assert lines[1:] == ["  Vera waits for a letter", "  Otto waits for a call"]


def test_error_unwinds_the_others_and_their_second_thoughts_do_not_count() -> None:
    scheduler = Scheduler(0, max_steps=100)
    unwound: list[str] = []

    def stubborn() -> None:
        try:
            scheduler.block(Until(lambda: False))
        finally:
            unwound.append("stubborn")
            scheduler.switch()  # as a `finally` that launches a kernel would
            unwound.append("not reached")

    def fail() -> None:
        scheduler.block(Until(lambda: scheduler.num_steps > 1))
        raise ZeroDivisionError

    scheduler.spawn(stubborn, "stubborn")
    scheduler.spawn(fail, "failing")
    with pytest.raises(ZeroDivisionError):
        scheduler.run()
    assert unwound == ["stubborn"]


def test_endless_coroutines_reach_the_step_limit() -> None:
    scheduler = Scheduler(0, max_steps=30)

    def endless() -> None:
        while True:
            scheduler.switch()

    scheduler.spawn(endless, "runner")
    with pytest.raises(Deadlock, match=r"30 steps did not end the simulation \(seed 0\)(.|\n)*runner"):
        scheduler.run()
    assert scheduler.num_steps == 31


def test_coroutine_that_blocks_its_thread_is_named() -> None:
    scheduler = Scheduler(0, max_steps=30, stall_s=0.1)
    never = threading.Event()
    scheduler.spawn(lambda: never.wait(timeout=0.5), "sleeper")
    with pytest.raises(Deadlock, match="sleeper has not come to a switch point for 0.1 s"):
        scheduler.run()


def test_nothing_to_run() -> None:
    Scheduler(0, max_steps=1).run()
