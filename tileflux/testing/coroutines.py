"""Coroutines without a library for them: threads that pass a baton, under a seeded scheduler.

Exactly one runs at a time, and the one that gives the baton away also chooses who gets it, so a seed fixes the whole
interleaving. Half of the seeds choose uniformly; the other half follow random priorities that change now and then,
which lets one coroutine run far ahead while another stands still: schedules that overwrite what is still being read.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tileflux.errors import Deadlock

__all__ = ["Coroutine", "Scheduler", "Wait"]

_CHANGE_RATES = (0.02, 0.1, 0.3)  # of priorities, per switch point


class Wait(Protocol):
    """What a coroutine waits for."""

    def ready(self) -> bool:
        """Whether the wait is over. Asked at every switch point, so it has to be cheap."""

    def describe(self) -> str:
        """What is waited for, to end the sentence ``<name> waits for``; empty for a wait that others explain."""


class Cancelled(BaseException):
    """Unwinds a coroutine after another has failed. Not an ``Exception``, so that kernels' handlers let it pass."""


class Coroutine:
    """One thread of control of a simulation."""

    def __init__(self, function: Callable[[], Any], name: str, index: int, priority: float) -> None:
        self.function, self.name, self.index, self.priority = function, name, index, priority
        self.result: Any = None
        self.done = False
        self.wait: Wait | None = None
        self.worker: _Worker | None = None
        self.data: Any = None
        """Whatever the owner of the scheduler wants to remember of this coroutine."""


class _Children:
    def __init__(self, children: Sequence[Coroutine]) -> None:
        self._children = children

    def ready(self) -> bool:
        return all(child.done for child in self._children)

    def describe(self) -> str:
        return ""


class Scheduler:
    """Runs coroutines one at a time; see the module's docstring. Used once."""

    def __init__(self, seed: int, max_steps: int, stall_s: float = 60.0) -> None:
        self.seed, self.max_steps, self._stall_s = seed, max_steps, stall_s
        self.num_steps = 0
        self.schedule: list[int] = []
        """Indices of the coroutines chosen, switch point by switch point."""
        self.running: Coroutine | None = None
        self._random = random.Random(seed)
        self._change_rate = self._random.choice(_CHANGE_RATES) if self._random.random() < 0.5 else None
        self._alive: list[Coroutine] = []
        self._num_spawned = 0
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._failure: BaseException | None = None
        self._over = threading.Lock()
        self._over.acquire()

    def spawn(self, function: Callable[[], Any], name: str) -> Coroutine:
        """Add a coroutine; it starts when it is first chosen."""
        coroutine = Coroutine(function, name, self._num_spawned, self._random.random())
        self._num_spawned += 1
        self._alive.append(coroutine)
        return coroutine

    def run(self) -> None:
        """Run until all coroutines have ended; raises the first error of any, once all the others are unwound."""
        first = self._choose()
        if first is None:
            return
        self._resume(first)
        try:
            self._await_end()
        finally:
            self._dismiss_workers()
        if self._failure is not None:
            raise self._failure

    def switch(self) -> None:
        """A point at which another coroutine may get the baton. Called by the running one."""
        coroutine = self.running
        if self._failure is not None:
            raise Cancelled
        assert coroutine is not None
        self.num_steps += 1
        if self.num_steps > self.max_steps:
            self._failure = Deadlock(
                f"{self.max_steps} steps did not end the simulation (seed {self.seed}); coroutines still at work:\n"
                + "\n".join(self._states())
            )
            raise Cancelled
        chosen = self._choose()
        if chosen is coroutine:
            return
        if chosen is None:
            self._failure = self._deadlock()
            raise Cancelled
        worker = coroutine.worker
        assert worker is not None
        self._resume(chosen)
        worker.sleep()
        if self._failure is not None:
            raise Cancelled

    def block(self, wait: Wait) -> None:
        """Let others run until the wait is over: at least a switch point, even if it is over already."""
        coroutine = self.running
        assert coroutine is not None
        coroutine.wait = wait
        self.switch()
        coroutine.wait = None

    def run_children(self, children: Sequence[Coroutine]) -> None:
        """Block the running coroutine until all of ``children`` have ended."""
        self.block(_Children(children))

    def execute(self, coroutine: Coroutine) -> Coroutine | None:
        """Run a coroutine to its end on the calling worker; returns the next one for this worker, if any."""
        worker = coroutine.worker
        assert worker is not None
        try:
            coroutine.result = coroutine.function()
        except Cancelled:
            pass
        except BaseException as error:
            if self._failure is None:
                error.add_note(f"in {coroutine.name}, simulated with seed {self.seed}, step {self.num_steps}")
                self._failure = error
        coroutine.done = True
        self._alive.remove(coroutine)
        following = self._following()
        if following is not None and following.worker is None:
            following.worker = worker
            self.running = following
            return following
        self._idle.append(worker)
        if following is None:
            self._over.release()
        else:
            self._resume(following)
        return None

    def _following(self) -> Coroutine | None:
        """Who gets the baton of one that has ended."""
        if self._failure is None and self._alive:
            chosen = self._choose()
            if chosen is not None:
                return chosen
            self._failure = self._deadlock()
        # Only those that have begun hold anything to unwind.
        return next((coroutine for coroutine in self._alive if coroutine.worker is not None), None)

    def _choose(self) -> Coroutine | None:
        able = [coroutine for coroutine in self._alive if coroutine.wait is None or coroutine.wait.ready()]
        if not able:
            return None
        if self._change_rate is None:
            chosen = able[int(self._random.random() * len(able))]
        else:
            if self.running is not None and self._random.random() < self._change_rate:
                self.running.priority = self._random.random()
            chosen = max(able, key=lambda coroutine: coroutine.priority)
        self.schedule.append(chosen.index)
        return chosen

    def _resume(self, coroutine: Coroutine) -> None:
        self.running = coroutine
        if coroutine.worker is None:
            if not self._idle:
                self._idle.append(_Worker(self))
                self._workers.append(self._idle[-1])
            coroutine.worker = self._idle.pop()
            coroutine.worker.task = coroutine
        coroutine.worker.wake()

    def _deadlock(self) -> Deadlock:
        return Deadlock(
            f"every coroutine waits (seed {self.seed}, step {self.num_steps}):\n" + "\n".join(self._states())
        )

    def _states(self) -> list[str]:
        lines = []
        for coroutine in self._alive:
            if coroutine.wait is None:
                lines.append(f"  {coroutine.name} runs")
            elif what := coroutine.wait.describe():
                lines.append(f"  {coroutine.name} waits for {what}")
        return lines

    def _await_end(self) -> None:
        seen_steps = -1
        try:
            while not self._over.acquire(timeout=self._stall_s):
                if self.num_steps == seen_steps:
                    name = self.running.name if self.running is not None else "nobody"
                    raise Deadlock(
                        f"{name} has not come to a switch point for {self._stall_s:g} s: it waits for something "
                        "that the simulator does not know, or computes too long"
                    )
                seen_steps = self.num_steps
        except BaseException as error:
            # The running coroutine finds out at its next switch point.
            self._failure = self._failure or error
            self._over.acquire(timeout=1.0)
            raise

    def _dismiss_workers(self) -> None:
        for worker in self._idle:
            worker.dismiss()


class _Worker:
    """A thread that runs coroutines, one after another, whenever it is handed the baton."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.task: Coroutine | None = None
        self._scheduler = scheduler
        self._baton = threading.Lock()
        self._baton.acquire()
        self._thread = threading.Thread(target=self._work, name=f"simulated-{id(self):x}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Hand this thread the baton."""
        self._baton.release()

    def sleep(self) -> None:
        """Wait for the baton. Called on this thread."""
        self._baton.acquire()

    def dismiss(self) -> None:
        """End the thread, which must be idle."""
        self.task = None
        self.wake()
        self._thread.join()

    def _work(self) -> None:
        while True:
            self.sleep()
            task, self.task = self.task, None
            if task is None:
                return
            while task is not None:
                task = self._scheduler.execute(task)
