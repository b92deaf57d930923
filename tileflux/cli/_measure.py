"""What a rank of the demo does: run every collective and every dense op, compare each result, then time it.

The order matters where ranks share a GPU. Everything is allocated before the first collective, products that torch's
library makes are made once, and hosts meet before and after results are compared: the first use of a kernel of torch's
must not meet a peer's kernel that waits for this rank.
"""

from __future__ import annotations

import abc
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
from tileflux.testing.dense import DenseCase, ag_case, expected, gathered, reduction, rs_case
from tileflux.testing.numerics import assert_close, poisoned

__all__ = ["DENSE", "DTYPE", "Dense", "Outcome", "RankReport", "Sizes", "measure", "names", "references", "sizes"]

DTYPE = torch.bfloat16
_NUM_BATCHES = 5
Inputs = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Dense:
    """A way to call a dense op."""

    op: str
    strategy: str
    algorithm: str = ""

    @property
    def name(self) -> str:
        """As it is shown."""
        return ", ".join([self.op, self.strategy, *([self.algorithm.replace("_", " ")] if self.algorithm else [])])

    def options(self) -> dict[str, str]:
        """What chooses this way among the others."""
        return {"strategy": self.strategy, **({"algorithm": self.algorithm} if self.algorithm else {})}


DENSE = (
    *(Dense(op, strategy) for op in ("ag_gemm", "gemm_rs") for strategy in ("sequential", "pipelined", "fused")),
    *(Dense("gemm_ar", strategy) for strategy in ("sequential", "pipelined")),
    *(Dense("gemm_ar", "fused", algorithm) for algorithm in ("one_shot", "two_shot")),
)
"""Every strategy of every dense op that talks, in the order of the table."""


@dataclass(frozen=True)
class Sizes:
    """How much is done. With every shape goes the number of calls that are timed at once."""

    collectives: tuple[tuple[tuple[int, int], int], ...]
    """What a rank brings to a collective."""
    product: tuple[tuple[int, int, int], int]
    """M, N and K of a whole product."""


def names(sizes: Sizes) -> list[str]:
    """What is timed, in order."""
    return [each.name for _ in sizes.collectives for each in COLLECTIVES] + [each.name for each in DENSE]


@dataclass(frozen=True)
class Outcome:
    """One collective at one size, or one dense op, as one rank saw it."""

    name: str
    size: int | tuple[int, int, int]
    """Bytes of the larger of this rank's input and output; or M, N and K of the whole product."""
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


def sizes(on_gpu: bool, world_size: int) -> Sizes:
    """A message where latency counts, one where bandwidth does, and a product. Many CPU ranks make fewer calls."""
    if on_gpu:
        return Sizes((((64, 512), 50), ((8192, 512), 20)), ((1024, 2048, 512), 20))
    calls = [max(1, calls * 4 // max(4, world_size)) for calls in (4, 2)]
    return Sizes((((64, 512), calls[0]), ((1024, 512), calls[1])), ((256, 384, 512), 1))


class _Case(abc.ABC):
    """Something to run, compare and time."""

    checked: str

    def __init__(self, name: str, size: int | tuple[int, int, int], num_calls: int) -> None:
        self.name, self.size, self.num_calls = name, size, num_calls

    @abc.abstractmethod
    def run(self, group: Group) -> None:
        """Make the call."""

    @abc.abstractmethod
    def reference(self, rank: int) -> torch.Tensor:
        """The same from torch.distributed, on the CPU. Collective."""

    @abc.abstractmethod
    def problem(self, rank: int, reference: torch.Tensor | None) -> str:
        """What is wrong with the last call's result; empty if nothing is."""


class _CollectiveCase(_Case):
    checked = "bits"

    def __init__(self, collective: Collective, shape: tuple[int, int], num_calls: int, group: Group, seed: int) -> None:
        self._collective = collective
        self._drawn = collective.prepare(random_inputs(group.world_size, shape, DTYPE, seed))
        self._expected = collective.expect(self._drawn, group.rank)
        self._out = poisoned(tuple(self._expected.shape), DTYPE, group.device)
        self._xs = [x.to(group.device) for x in self._drawn]
        super().__init__(collective.name, max(self._xs[group.rank].nbytes, self._out.nbytes), num_calls)

    def run(self, group: Group) -> None:
        self._collective.run(group, self._xs, self._out)

    def reference(self, rank: int) -> torch.Tensor:
        return references()[self.name](self._drawn, rank)

    def problem(self, rank: int, reference: torch.Tensor | None) -> str:
        return _difference(self._out, self._expected, 0, rank, reference)


class _DenseCase(_Case):
    checked = "fp64"

    def __init__(self, dense: Dense, shape: tuple[int, int, int], num_calls: int, group: Group, seed: int) -> None:
        super().__init__(dense.name, shape, num_calls)
        self._dense = dense
        make = ag_case if dense.op == "ag_gemm" else rs_case
        self._case: DenseCase = make(group.world_size, shape, DTYPE, seed, bias=True)
        self._expected = expected(self._case, dense.op, group.rank)
        self._out = poisoned(tuple(self._expected.shape), DTYPE, group.device)
        self._arguments = self._case.arguments(dense.op, group.rank, group.device)
        if group.device.type == "cuda":
            # The product that torch's library will be asked for: its kernel is loaded now.
            rows = gathered(self._case).to(group.device) if dense.op == "ag_gemm" else self._arguments["x"]
            torch.addmm(self._arguments["bias"], rows, self._arguments["weight"].t())

    def run(self, group: Group) -> None:
        getattr(ops, self._dense.op)(**self._arguments, **self._dense.options(), group=group, out=self._out)

    def reference(self, rank: int) -> torch.Tensor:
        result: torch.Tensor = getattr(ops, f"{self._dense.op}_reference")(**self._case.arguments(self._dense.op, rank))
        return result

    def problem(self, rank: int, reference: torch.Tensor | None) -> str:
        return _difference(self._out, self._expected, reduction(self._case, self._dense.op), rank, reference)


def _difference(
    out: torch.Tensor, expected: torch.Tensor, num_terms: int, rank: int, reference: torch.Tensor | None
) -> str:
    result = out.cpu()
    try:
        assert_close(result, expected, reduction=num_terms, what=f"rank {rank}")
        if reference is not None:
            assert_close(result, reference, reduction=num_terms, what=f"rank {rank}, against torch.distributed")
    except AssertionError as error:
        return str(error)
    return ""


def measure(group: Group, sizes: Sizes, ticks: Path | None) -> RankReport:
    """Check and time everything. Rank 0 adds a byte to the file ``ticks`` for each case it has timed."""
    cases = _cases(group, sizes)
    with_torch = dist.is_initialized()
    # All of them now: they are collective, and a rank that stopped at a wrong result would keep its peers waiting.
    values = [case.reference(group.rank) if with_torch else None for case in cases]
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
    others = ("torch",) if with_torch else ()
    outcomes = tuple(
        Outcome(case.name, case.size, (case.checked, *others), problem, each)
        for case, problem, each in zip(cases, problems, seconds, strict=True)
    )
    name = torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else "CPU"
    return RankReport(name, outcomes)


def _cases(group: Group, sizes: Sizes) -> list[_Case]:
    cases: list[_Case] = []
    for shape, num_calls in sizes.collectives:
        for collective in COLLECTIVES:
            cases.append(_CollectiveCase(collective, shape, num_calls, group, seed=len(cases)))
    product, num_calls = sizes.product
    for dense in DENSE:
        cases.append(_DenseCase(dense, product, num_calls, group, seed=len(cases)))
    return cases


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
