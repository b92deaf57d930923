"""What ``tileflux tune`` does on a rank: prove each way right, time it, and come to the same winner as its peers."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from triton.runtime.errors import OutOfResources, PTXASError

from tileflux import ops
from tileflux.config import GemmProblem
from tileflux.kernels.plan import split_rows
from tileflux.symm.group import Group
from tileflux.testing import contenders
from tileflux.testing.bench import BenchCase
from tileflux.testing.compiling import Compilers, variants
from tileflux.testing.ghost_contenders import GhostTask, ghost_task
from tileflux.testing.numerics import assert_close
from tileflux.testing.timing import Stopwatch, agree_max, meet
from tileflux.tune.lookup import lookup, problem_for
from tileflux.tune.search import Candidate, Outcome, as_candidate, candidates, refinements, search

__all__ = ["Journal", "Tuned", "tune"]

_RIGHT, _UNFIT, _WRONG = 0.0, 1.0, 2.0
_COMPILING_SHARE = 0.5  # of the budget; what is not compiled by then, launches compile as far as there is time


@dataclass(frozen=True)
class Tuned:
    """One shape, as every rank found it."""

    problem: GemmProblem
    """With the sizes of rank 0, which are the largest."""
    before: Candidate
    """What ``auto`` took until now."""
    outcome: Outcome | None
    """None where nothing could run."""
    wrong: tuple[str, ...]
    """Candidates with wrong results, and what is wrong with them. They are not timed, and cannot win."""


@dataclass(frozen=True)
class Journal:
    """How far a search is, and what it has found, in a folder: for who watches, and for when it is interrupted."""

    folder: Path

    def tick(self, mark: bytes) -> None:
        """A dot for a candidate, a line for a shape."""
        with (self.folder / "ticks").open("ab") as file:
            file.write(mark)

    def ticks(self) -> str:
        """All so far."""
        file = self.folder / "ticks"
        return file.read_text() if file.exists() else ""

    def note(self, index: int, tuned: Tuned) -> None:
        """A shape is done."""
        whole = self.folder / f"{index}.part"
        whole.write_bytes(pickle.dumps(tuned))
        whole.rename(self.folder / f"{index}.found")  # there entirely or not at all
        self.tick(b"\n")

    def found(self) -> dict[int, Tuned]:
        """The shapes that are done, by their place among the cases."""
        return {int(file.stem): pickle.loads(file.read_bytes()) for file in sorted(self.folder.glob("*.found"))}


def tune(
    group: Group, cases: Sequence[BenchCase], budget_s: float, num_jobs: int, journal: Journal | None = None
) -> list[Tuned]:
    """Search each shape, for ``budget_s`` each, with ``num_jobs`` processes of all ranks together that compile.

    Rank 0 keeps the journal.
    """
    # The largest first: symmetric memory that grows is memory that stays.
    order = sorted(range(len(cases)), key=lambda index: -cases[index].m * (cases[index].n + cases[index].k))
    with Compilers(max(1, num_jobs // _num_ranks(group)) if num_jobs > 1 else 0) as compilers:
        found = {}
        for index in order:
            found[index] = _tune(group, cases[index], budget_s, compilers, journal)
            if journal is not None and group.rank == 0:
                journal.note(index, found[index])
    return [found[index] for index in range(len(cases))]


def _num_ranks(group: Group) -> int:
    return 1 if group.transport == "ghost" else group.world_size


def _tune(group: Group, case: BenchCase, budget_s: float, compilers: Compilers, journal: Journal | None) -> Tuned:
    start = time.monotonic()
    problem = _problem(group, case)
    before = as_candidate(lookup(problem))

    def tick(mark: bytes) -> None:
        if journal is not None and group.rank == 0:
            journal.tick(mark)

    def compile_ahead(tried: list[Candidate], limit_s: float) -> list[Candidate]:
        # Every rank its part: who waited for another that compiles all might do so for longer than a wait may last.
        compilers.compile(variants(problem, tried, group)[group.rank :: _num_ranks(group)], limit_s)
        return tried

    trial = _Trial(group, case, lambda: tick(b"."))
    tried = compile_ahead([before, *candidates(problem)], _COMPILING_SHARE * budget_s)
    (spent,) = trial.agree_max([time.monotonic() - start])
    outcome = search(
        tried, trial.seconds, trial.agree_max,
        budget_s=max(0.0, budget_s - spent), keep=(before,),
        refine=lambda best: compile_ahead(refinements(problem, best), _COMPILING_SHARE * budget_s),
    )  # fmt: skip
    return Tuned(problem, before, outcome, tuple(trial.wrong))


def _problem(group: Group, case: BenchCase) -> GemmProblem:
    """The same on all ranks, also where the divided size does not divide: all must try the same."""
    n = split_rows(case.n, group.world_size)[0] if case.op == "ag_gemm" else case.n
    k = split_rows(case.k, group.world_size)[0] if case.op in ("gemm_rs", "gemm_ar") else case.k
    dtype = getattr(torch, case.dtype)
    return problem_for(case.op, case.m, n, k, dtype, group.device, None if case.op == "gemm" else group)


class _Trial:
    """The candidates of one shape on one rank."""

    def __init__(self, group: Group, case: BenchCase, tick: Callable[[], None]) -> None:
        self.group, self.case, self.wrong = group, case, list[str]()
        self._tick = tick
        shape, dtype = (case.m, case.n, case.k), getattr(torch, case.dtype)
        if case.op == "gemm":
            self._task: Any = _Alone(group.device, shape, dtype)
        elif group.transport == "ghost":
            self._task = ghost_task(group, case.op, shape, dtype)
        else:
            self._task = contenders._TASKS[case.op](group, case.op, shape, dtype)
        self._watch = Stopwatch(group.device, lambda: meet(group))
        self._calls: dict[Candidate, Callable[[], object] | None] = {}

    def seconds(self, candidate: Candidate) -> float:
        """Of one call; infinity for a candidate that cannot run here, or is wrong on some rank."""
        if candidate not in self._calls:
            self._calls[candidate] = self._prove(candidate)
            self._tick()
        call = self._calls[candidate]
        return math.inf if call is None else self._watch.seconds(call)

    def agree_max(self, values: Sequence[float]) -> list[float]:
        """The greatest of each over ranks."""
        return agree_max(self.group, values)

    def _prove(self, candidate: Candidate) -> Callable[[], object] | None:
        """The call, if it runs and gives what it must on all ranks."""
        call = self._call(candidate)
        self._task.poison()
        self._rest()
        state = self._fit(candidate)
        self._rest()
        if self.agree_max([state])[0] == _RIGHT:
            call()
            self.group.synchronize()
            try:
                self._check(candidate)
            except AssertionError as error:
                self.wrong.append(f"{candidate}: {error}")
                state = _WRONG
            self._rest()
            state = self.agree_max([state])[0]
            return call if state == _RIGHT else None
        return None

    def _fit(self, candidate: Candidate) -> float:
        """Whether the kernel with these tiles can be had at all, tried by a product that waits for nobody.

        Within a call a kernel that the GPU refuses would leave peers waiting.
        """
        if self.group.device.type == "cuda":
            try:
                ops.gemm(self._task.x, self._task.weight, config=candidate.config)
                self.group.synchronize()
            except (OutOfResources, PTXASError):
                return _UNFIT
        return _RIGHT

    def _rest(self) -> None:
        """Nobody computes: a kernel is not loaded while another waits for this rank."""
        self.group.synchronize()
        self.group.barrier()

    def _check(self, candidate: Candidate) -> None:
        task = self._task
        (task.checker(candidate.strategy) if isinstance(task, GhostTask) else task.check)()

    def _call(self, candidate: Candidate) -> Callable[[], object]:
        op, task = self.case.op, self._task
        if isinstance(task, GhostTask):
            return task.caller(candidate.strategy, candidate.config)
        how: dict[str, Any] = {"config": candidate.config, "out": task.out}
        if op != "gemm":
            how |= {"group": self.group, "strategy": candidate.strategy}
            how |= {"algorithm": candidate.algorithm} if op == "gemm_ar" else {"sizes": task.sizes}

        def call() -> None:
            getattr(ops, op)(task.x, task.weight, **how)

        return call


class _Alone:
    """``gemm``: one rank's own product."""

    def __init__(self, device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        m, n, k = shape
        self._depth = k
        self.x, self.weight = (
            contenders.draw(1, (m, k), dtype, device), contenders.draw(2, (n, k), dtype, device)
        )  # fmt: skip
        self.out = torch.empty(m, n, dtype=dtype, device=device)
        self._expected = contenders.product(self.x, self.weight)

    def poison(self) -> None:
        self.out.fill_(torch.nan)

    def check(self) -> None:
        assert_close(self.out, self._expected, reduction=self._depth, what="gemm")
