"""What ``tileflux bench --host`` does on a rank: time how long a call holds the host, and what of that launches are.

On a GPU a call only queues work. Here the host's part is timed, in batches that the GPU need not keep up with; beside
it the same pieces of work queued again by themselves, with nothing around them. Kernels that would wait for peers are
replaced there by others of the same make that wait for nobody.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from tileflux import ops
from tileflux.kernels import steps
from tileflux.kernels.operands import GemmSpec
from tileflux.kernels.prepared import Launcher, Repeat, relaunchable
from tileflux.perf.figures import baseline_of
from tileflux.symm.group import Group
from tileflux.testing.bench import BenchCase, check_suite, make_suite
from tileflux.testing.contenders import Suite

__all__ = ["NUM_BATCHES", "Clock", "HostTimes", "Queued", "measure_host", "noted", "replayed"]

NUM_BATCHES = 20
_MOST_CALLS = 20
_MOST_QUEUED = 512  # of the 1024 places that a stream's queue has: a host that waits for one is not timed
_GHOST_CALLS = 4  # ghosts queue as much again
_CPU_CALLS = 4
_PLAIN_SIZE = 256
_LIBRARY = "torch.mm"

Call = Callable[[], object]


@dataclass(frozen=True)
class HostTimes:
    """One case as one rank saw it. On the CPU nothing is queued: a call's time is all of it, and launches are none."""

    problem: str
    """What is wrong with a result; empty if nothing is."""
    batches: dict[str, list[float]]
    """Seconds of the host in a call, by contender and batch."""
    bare: dict[str, list[float]]
    """Seconds to queue what a call queues, and nothing else."""
    launches: dict[str, int]
    """How many pieces of work a call queues: kernels, library products and copies."""
    skipped: dict[str, str]
    auto: str


@dataclass(frozen=True)
class Queued:
    """A piece of work that a call has queued."""

    kind: str
    """``gemm`` and ``step``: a kernel of ours; ``plain``: a GEMM that waits for nobody; ``library``: its product;
    ``copy``."""
    again: Call


def measure_host(group: Group, cases: Sequence[BenchCase], ticks: Path | None) -> list[HostTimes]:
    """Check and time every case. Rank 0 adds to the file ``ticks``: a dot for a round of batches, a line for a case."""
    order = sorted(range(len(cases)), key=lambda index: -cases[index].m * (cases[index].n + cases[index].k))
    results = {index: _measure(group, cases[index], ticks) for index in order}
    return [results[index] for index in range(len(cases))]


def _measure(group: Group, case: BenchCase, ticks: Path | None) -> HostTimes:
    suite = make_suite(group, case)
    problem = check_suite(group, suite)
    skipped = {name: why for name, why in suite.skipped.items() if baseline_of(name) != "torch"}
    stand_ins = _stand_ins(group) if _on_gpu(group) else {}
    # Nobody calls an op while another rank still loads: what waits for it would keep it from loading.
    group.synchronize()
    group.barrier()
    with _timed(case.op) as clock:
        calls = _calls(group, suite, clock, skipped)
        queued = {name: _note(group, call, clock) for name, call in calls.items()} if _on_gpu(group) else {}
        replays = {name: replayed(each, stand_ins) for name, each in queued.items()}
        batches: dict[str, list[float]] = {name: [] for name in [*calls, _LIBRARY]}
        bare: dict[str, list[float]] = {name: [] for name in replays}
        for _ in range(case.num_rounds or NUM_BATCHES):
            for name, call in calls.items():
                num_calls = _num_calls(group, len(queued.get(name, ())))
                batches[name].append(_batch(group, lambda call=call: clock.of(call), num_calls))  # type: ignore[misc]
                if name in replays:
                    bare[name].append(_batch(group, partial(_seconds_of, replays[name]), num_calls))
            product = suite.parts["gemm"]
            batches[_LIBRARY].append(_batch(group, partial(_seconds_of, product), _num_calls(group, 1)))
            _tick(group, ticks, b".")
    _tick(group, ticks, b"\n")
    return HostTimes(
        problem, batches, bare, {name: len(found) for name, found in queued.items()}, skipped, suite.auto
    )  # fmt: skip


def _calls(group: Group, suite: Suite, clock: Clock, skipped: dict[str, str]) -> dict[str, Call]:
    """Ours by name. Among real ranks the pipelined baseline is ours."""
    found = {each.name: each.run for each in suite.contenders if each.name.partition(" ")[0] == "ours"}
    if group.transport != "ghost" and suite.auto:
        pipelined = next(each.run for each in suite.contenders if each.name == "pipelined")
        found = {"ours pipelined": pipelined, **found}
    for name in list(found):
        if clock.of(found[name]) == 0.0:
            skipped[name] = "it is not our op that is called there, but the baseline"
            del found[name]
    return found


def _on_gpu(group: Group) -> bool:
    return group.device.type == "cuda"


def _num_calls(group: Group, num_queued: int) -> int:
    if not _on_gpu(group):
        return _CPU_CALLS
    most = _GHOST_CALLS if group.transport == "ghost" else _MOST_CALLS
    return max(1, min(most, _MOST_QUEUED // max(1, num_queued)))


def _batch(group: Group, timed: Callable[[], float], num_calls: int) -> float:
    """Seconds of the host in one of ``num_calls``, begun by all ranks together on idle GPUs."""
    group.synchronize()
    group.barrier()
    seconds = sum(timed() for _ in range(num_calls)) / num_calls
    group.synchronize()
    return seconds


def _seconds_of(call: Call) -> float:
    """Until it returns."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Clock:
    """Stands in for an op: times it, and, if asked, notes what it queues.

    In the place of the op and not around the whole call, because in a ghost world that is what ghosts queue as well.
    """

    def __init__(self, op: Callable[..., object]) -> None:
        self._op = op
        self._seconds = 0.0
        self._queued: list[Queued] | None = None

    def __call__(self, *arguments: Any, **named: Any) -> object:
        with contextlib.nullcontext() if self._queued is None else noted(self._queued):
            start = time.perf_counter()
            result = self._op(*arguments, **named)
            self._seconds += time.perf_counter() - start
        return result

    def of(self, call: Call) -> float:
        """Seconds that a call spends in the op; 0 if it does not call it."""
        self._seconds = 0.0
        call()
        return self._seconds

    def note(self, call: Call) -> list[Queued]:
        """What the op queues within a call."""
        self._queued = []
        try:
            call()
            return self._queued
        finally:
            self._queued = None


@contextlib.contextmanager
def _timed(op: str) -> Iterator[Clock]:
    clock = Clock(getattr(ops, op))
    with _replaced(ops, op, clock):
        yield clock


def _note(group: Group, call: Call, clock: Clock) -> list[Queued]:
    group.synchronize()
    group.barrier()
    found = clock.note(call)
    group.synchronize()
    return found


@contextlib.contextmanager
def noted(found: list[Queued]) -> Iterator[None]:
    """Note what is queued meanwhile: kernels of ours, by Triton's launcher or past it, products and copies."""
    launch, repeat, run = Launcher.launch, Repeat.__call__, JITFunction.run
    multiply, copy = torch.mm, torch.Tensor.copy_

    def note_launch(self: Launcher, grid: int, *arguments: object) -> None:
        found.append(Queued(_kind(self._constants), partial(launch, self, grid, *arguments)))
        launch(self, grid, *arguments)

    def note_repeat(self: Repeat, *arguments: Any) -> None:
        found.append(Queued("step", partial(repeat, self, *arguments)))
        repeat(self, *arguments)

    def note_run(self: Any, *arguments: Any, **named: Any) -> object:
        found.append(Queued("step", partial(run, self, *arguments, **named)))
        return run(self, *arguments, **named)

    def note_product(*arguments: Any, **named: Any) -> torch.Tensor:
        found.append(Queued("library", partial(multiply, *arguments, **named)))
        return multiply(*arguments, **named)

    def note_copy(self: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        found.append(Queued("copy", partial(copy, self, *arguments, **named)))
        return copy(self, *arguments, **named)

    with contextlib.ExitStack() as stack:
        for owner, name, noting in (
            (Launcher, "launch", note_launch),
            (Repeat, "__call__", note_repeat),
            (JITFunction, "run", note_run),
            (torch, "mm", note_product),
            (torch.Tensor, "copy_", note_copy),
        ):
            stack.enter_context(_replaced(owner, name, noting))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    own, right = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, right)
        else:  # inherited
            delattr(owner, name)


def _kind(constants: tuple[Any, ...]) -> str:
    """Of a kernel, by what it was compiled for: the last of a GEMM's constants is its ``GemmSpec``."""
    spec = constants[-1] if constants else None
    if not isinstance(spec, GemmSpec):
        return "step"
    return "gemm" if spec.has_table else "plain"


def replayed(queued: Sequence[Queued], stand_ins: Mapping[str, Call]) -> Call:
    """A call that queues as much again: what waits for nobody as it was, the rest by what stands in for its kind."""
    again = [stand_ins.get(each.kind, each.again) for each in queued]

    def call() -> None:
        for each in again:
            each()

    return call


def _stand_ins(group: Group) -> dict[str, Call]:
    """By kind of kernel: one of the same make that waits for nobody.

    Products and copies need none: again they write what the last call has written, and all ranks are idle then.
    """
    x, weight, out = (torch.zeros(_PLAIN_SIZE, _PLAIN_SIZE, dtype=torch.bfloat16, device=group.device) for _ in "xwo")
    found: list[Queued] = []
    for _ in range(3):  # the first compiles, and goes through Triton
        found.clear()
        with noted(found):
            ops.gemm(x, weight, out=out)
    (product,) = found
    return {"gemm": product.again, "step": _smallest_launch(group.device)}


def _smallest_launch(device: torch.device) -> Call:
    """A kernel of one program that waits for nobody, launched as our steps are."""
    word = torch.zeros(1, dtype=torch.int64, device=device)
    launch = partial(steps._clock_kernel[(1,)], word, num_warps=1)
    compiled = launch()
    if not relaunchable(steps._clock_kernel):
        return launch
    return partial(Launcher(compiled, device.index or 0, ()).launch, 1, word)


def _tick(group: Group, ticks: Path | None, mark: bytes) -> None:
    if ticks is not None and group.rank == 0:
        with ticks.open("ab") as file:
            file.write(mark)
