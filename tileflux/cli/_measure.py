"""What a rank of the demo does: run every collective, compare every bit, then time it.

The order matters where ranks share a GPU. Everything is allocated before the first collective, and hosts meet before
and after results are compared: the first use of a kernel of torch's must not meet a peer's kernel that waits for
this rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from tileflux import ops
from tileflux.symm.group import Group
from tileflux.testing.collectives import COLLECTIVES, Collective, random_inputs
from tileflux.testing.numerics import assert_close, poisoned

__all__ = ["DTYPE", "Outcome", "RankReport", "Size", "measure", "references", "sizes"]

DTYPE = torch.bfloat16
_NUM_BATCHES = 5
Inputs = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Size:
    """What a rank brings to a collective, and how many calls are timed at once."""

    shape: tuple[int, int]
    num_calls: int


@dataclass(frozen=True)
class Outcome:
    """One collective at one size, as one rank saw it."""

    name: str
    nbytes: int
    """The larger of this rank's input and output."""
    checked: tuple[str, ...]
    problem: str
    """What is wrong with the result; empty if nothing is."""
    seconds: float
    """Per call: the median over batches of calls."""


@dataclass(frozen=True)
class RankReport:
    """All of one rank's outcomes, in the same order on every rank."""

    device_name: str
    outcomes: tuple[Outcome, ...]


def sizes(on_gpu: bool, world_size: int) -> tuple[Size, Size]:
    """A message where latency counts and one where bandwidth does. CPU ranks in excess of four get fewer calls each."""
    if on_gpu:
        return Size((64, 512), 50), Size((8192, 512), 20)
    calls = [max(1, calls * 4 // max(4, world_size)) for calls in (4, 2)]
    return Size((64, 512), calls[0]), Size((1024, 512), calls[1])


@dataclass(frozen=True)
class _Case:
    collective: Collective
    num_calls: int
    drawn: Inputs
    expected: torch.Tensor
    xs: Inputs
    out: torch.Tensor

    @classmethod
    def make(cls, collective: Collective, size: Size, group: Group, seed: int) -> _Case:
        drawn = collective.prepare(random_inputs(group.world_size, size.shape, DTYPE, seed))
        expected = collective.expect(drawn, group.rank)
        out = poisoned(tuple(expected.shape), DTYPE, group.device)
        return cls(collective, size.num_calls, drawn, expected, [x.to(group.device) for x in drawn], out)

    def run(self, group: Group) -> None:
        self.collective.run(group, self.xs, self.out)

    def problem(self, rank: int, reference: torch.Tensor | None) -> str:
        result = self.out.cpu()
        try:
            assert_close(result, self.expected, reduction=0, what=f"rank {rank}")
            if reference is not None:
                assert_close(result, reference, reduction=0, what=f"rank {rank}, against torch.distributed")
        except AssertionError as error:
            return str(error)
        return ""


def measure(group: Group, sizes: Sequence[Size], ticks: Path | None) -> RankReport:
    """Check and time all collectives. Rank 0 adds a byte to the file ``ticks`` for each case it has timed."""
    plan = [(collective, size) for size in sizes for collective in COLLECTIVES]
    cases = [_Case.make(collective, size, group, seed) for seed, (collective, size) in enumerate(plan)]
    checks = ("bits", "torch") if dist.is_initialized() else ("bits",)
    known = references()
    # All of them now: they are collective, and a rank that stopped at a wrong result would keep its peers waiting.
    values = [known[case.collective.name](case.drawn, group.rank) if "torch" in checks else None for case in cases]
    group.barrier()
    # Back to back: a call that disturbs the one before or after it shows here.
    for case in cases:
        case.run(group)
    problems = _compare(group, cases, values)
    seconds = []
    for case in cases:
        seconds.append(_time(group, case))
        if ticks is not None and group.rank == 0:
            with ticks.open("ab") as file:
                file.write(b".")
    # Once more, for what only many calls in a row bring about.
    problems = [first or later for first, later in zip(problems, _compare(group, cases, values), strict=True)]
    outcomes = tuple(
        Outcome(case.collective.name, max(case.xs[group.rank].nbytes, case.out.nbytes), checks, problem, each)
        for case, problem, each in zip(cases, problems, seconds, strict=True)
    )
    name = torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else "CPU"
    return RankReport(name, outcomes)


def _compare(group: Group, cases: Sequence[_Case], references: Sequence[torch.Tensor | None]) -> list[str]:
    """The problem of each case, after everybody's work is done; nobody goes on before everybody has compared."""
    ops.barrier(group=group)
    group.synchronize()
    group.barrier()
    problems = [case.problem(group.rank, value) for case, value in zip(cases, references, strict=True)]
    group.barrier()
    return problems


def _time(group: Group, case: _Case) -> float:
    batches = []
    for _ in range(1 + _NUM_BATCHES):
        ops.barrier(group=group)
        group.synchronize()
        start = time.perf_counter()
        for _ in range(case.num_calls):
            case.run(group)
        group.synchronize()
        batches.append((time.perf_counter() - start) / case.num_calls)
    return statistics.median(batches[1:])


def references() -> Mapping[str, Callable[[Inputs, int], torch.Tensor]]:
    """What torch.distributed makes of all ranks' inputs, by the name of the collective; tensors are on the CPU."""
    return {
        "all_gather": lambda xs, rank: ops.all_gather_reference(xs[rank]),
        "all_gather, uneven": lambda xs, rank: ops.all_gather_reference(xs[rank], sizes=[len(x) for x in xs]),
        "reduce_scatter": lambda xs, rank: ops.reduce_scatter_reference(xs[rank]),
        "all_reduce, one shot": lambda xs, rank: ops.all_reduce_reference(xs[rank]),
        "all_reduce, two shot": lambda xs, rank: ops.all_reduce_reference(xs[rank]),
        "all_to_all": lambda xs, rank: ops.all_to_all_reference(xs[rank]),
        "all_to_all, uneven": _all_to_all_uneven,
        "broadcast": lambda xs, rank: ops.broadcast_reference(xs[rank], root=len(xs) // 2),
    }


def _all_to_all_uneven(xs: Inputs, rank: int) -> torch.Tensor:
    # Who sends how much is the collective's own affair; rows that carry their sender's number tell.
    (collective,) = (each for each in COLLECTIVES if each.name == "all_to_all, uneven")
    marked = [torch.full((len(x), 1), float(source)) for source, x in enumerate(xs)]
    received = [collective.expect(marked, receiver) for receiver in range(len(xs))]
    send = [int((rows == rank).sum()) for rows in received]
    receive = [int((received[rank] == source).sum()) for source in range(len(xs))]
    return ops.all_to_all_reference(xs[rank], input_sizes=send, output_sizes=receive)
