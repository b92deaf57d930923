"""What ``tileflux bench`` compares among real ranks: plain baselines, torch's own ops, and ours in each strategy."""

from __future__ import annotations

import abc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tileflux import ops
from tileflux.kernels.plan import split_rows
from tileflux.symm.group import Group
from tileflux.testing.numerics import assert_close
from tileflux.tune.lookup import Choice, lookup, problem_for

if TYPE_CHECKING:
    from tileflux.symm.cuda import SymmetricSum

__all__ = ["Contender", "Suite", "Task", "draw", "gemm_suite", "group_suite", "product"]

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Contender:
    """A way to get the result."""

    name: str
    run: Callable[[], object]
    check: Callable[[], None]
    """Raises ``AssertionError`` if the last run's result is wrong."""


@dataclass
class Suite:
    """Everything that is timed for one shape on one rank."""

    parts: dict[str, Callable[[], object]]
    """``gemm``, ``comm`` and ``beside``; of ops of experts ``route``, which is not in any contender's time."""
    contenders: list[Contender]
    poison: Callable[[], object]
    """Fills the results with what no right result contains."""
    auto: str
    tile_rows: int = 1
    """Rows of our tiles."""
    skipped: dict[str, str] = field(default_factory=dict)


def draw(seed: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normal random numbers, the same on every rank that asks with the same seed."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def product(a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``a @ weight.T`` in fp32."""
    return a.float() @ weight.float().t()


def gemm_suite(device: torch.device, m: int, n: int, k: int, dtype: str) -> Suite:
    """``gemm`` against the library's product."""
    kind = getattr(torch, dtype)
    x, weight = draw(1, (m, k), kind, device), draw(2, (n, k), kind, device)
    out = torch.empty(m, n, dtype=kind, device=device)
    expected = product(x, weight)

    def library() -> None:
        torch.mm(x, weight.t(), out=out)

    def check() -> None:
        assert_close(out, expected, reduction=k, what="gemm")

    contenders = [
        Contender("torch", library, check),
        Contender("ours", lambda: ops.gemm(x, weight, out=out), check),
    ]
    return Suite({"gemm": library}, contenders, lambda: out.fill_(torch.nan), "")


def group_suite(group: Group, op: str, shape: Shape, dtype: str, strategies: tuple[str, ...]) -> Suite:
    """A dense op among the ranks of ``group``."""
    task = _TASKS[op](group, op, shape, getattr(torch, dtype))
    contenders = [
        Contender("sequential", task.sequential, task.check),
        Contender("pipelined", lambda: task.ours("pipelined"), task.check),
    ]
    choice = task.choose()
    suite = Suite(task.parts(), contenders, task.poison, choice.strategy, choice.config.block_m)
    found, suite.skipped = task.by_torch()
    contenders += found
    for strategy in strategies:
        if strategy != "pipelined":  # ours is the baseline already
            contenders.append(Contender(f"ours {strategy}", lambda how=strategy: task.ours(how), task.check))  # type: ignore[misc]
    return suite


class Task(abc.ABC):
    """One op on one rank: its tensors, its baselines, and what the result must be."""

    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    expected: torch.Tensor
    factor: torch.Tensor
    """What the product alone multiplies with the weight."""
    whole: torch.Tensor
    """The product alone."""

    def __init__(self, group: Group, op: str, shape: Shape, dtype: torch.dtype) -> None:
        self.group, self.op, self.shape, self.dtype = group, op, shape, dtype
        self.rows = split_rows(shape[0], group.world_size)
        self._side = torch.cuda.Stream(group.device) if group.device.type == "cuda" else None
        # A launcher's NCCL is what people would call; elsewhere our own collectives are.
        self.with_nccl = group.device.type == "cuda" and dist.is_initialized() and "nccl" in str(dist.get_backend())

    @property
    def sizes(self) -> list[int] | None:
        """Rows per rank, where they differ."""
        return None if len(set(self.rows)) == 1 else list(self.rows)

    def multiply(self) -> None:
        """The product alone."""
        torch.mm(self.factor, self.weight.t(), out=self.whole)

    @abc.abstractmethod
    def communicate(self) -> None:
        """The collective alone."""

    @abc.abstractmethod
    def sequential(self) -> None:
        """What plain code does."""

    @abc.abstractmethod
    def ours(self, strategy: str) -> None:
        """Ours, in a strategy."""

    def check(self) -> None:
        """Compare the last result with what it must be."""
        self._compare(self.out)

    def _compare(self, result: torch.Tensor) -> None:
        assert_close(result, self.expected, reduction=self.shape[2], what=f"rank {self.group.rank}")

    def poison(self) -> None:
        self.out.fill_(torch.nan)

    def parts(self) -> dict[str, Callable[[], object]]:
        return {"gemm": self.multiply, "comm": self.communicate, "beside": self._beside}

    def choose(self) -> Choice:
        """What lookup says of this shape."""
        n, k = len(self.weight), self.x.shape[1]
        return lookup(problem_for(self.op, self.shape[0], n, k, self.dtype, self.group.device, self.group))

    def _beside(self) -> None:
        """Product and collective at once, neither waiting for the other."""
        if self._side is None:
            with ThreadPoolExecutor(1) as other:
                communicating = other.submit(self.communicate)
                self.multiply()
                communicating.result()
            return
        current = torch.cuda.current_stream(self.group.device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            self.multiply()
        self.communicate()
        current.wait_stream(self._side)


class DenseTask(Task):
    """One that torch has an op for."""

    torch_out: torch.Tensor

    @abc.abstractmethod
    def fused_by_torch(self) -> None:
        """Torch's fused op."""

    def check_torch(self) -> None:
        """As ``check``, for torch's result, which it allocates itself."""
        self._compare(self.torch_out)

    def by_torch(self) -> tuple[list[Contender], dict[str, str]]:
        """Torch's ways to the same result, and why others cannot be tried."""
        reason = self.why_not_torch()
        return ([], {"torch": reason}) if reason else ([Contender("torch", self.fused_by_torch, self.check_torch)], {})

    def why_not_torch(self) -> str:
        """Why torch's fused op cannot be tried; empty if it can."""
        if self.group.transport != "cuda":
            return "torch's fused ops need ranks that are processes with GPUs"
        return "torch's fused ops want rows that divide by the ranks" if self.sizes else ""


class _Gather(DenseTask):
    def __init__(self, group: Group, op: str, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__(group, op, shape, dtype)
        (m, n, k), device, rank = shape, group.device, group.rank
        num_columns = split_rows(n, group.world_size)[rank]
        self.weight = draw(100 + rank, (num_columns, k), dtype, device)
        self.factor = torch.cat([draw(source, (rows, k), dtype, device) for source, rows in enumerate(self.rows)])
        first = sum(self.rows[:rank])
        self.x = self.factor[first : first + self.rows[rank]].clone()
        self.expected = product(self.factor, self.weight)
        self.whole = torch.empty(m, num_columns, dtype=dtype, device=device)
        self.out = torch.empty_like(self.whole)
        self._gathered = torch.empty_like(self.factor)

    def communicate(self) -> None:
        if self.with_nccl and not self.sizes:
            dist.all_gather_into_tensor(self._gathered, self.x)
        else:
            ops.all_gather(self.x, group=self.group, sizes=self.sizes, out=self._gathered)

    def sequential(self) -> None:
        self.communicate()
        torch.mm(self._gathered, self.weight.t(), out=self.out)

    def ours(self, strategy: str) -> None:
        ops.ag_gemm(self.x, self.weight, group=self.group, sizes=self.sizes, strategy=strategy, out=self.out)

    def fused_by_torch(self) -> None:
        from tileflux.symm.cuda import fused_all_gather_matmul

        self.torch_out = fused_all_gather_matmul(self.x, self.weight.t())


class _Scatter(DenseTask):
    def __init__(self, group: Group, op: str, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__(group, op, shape, dtype)
        (m, n, k), device, rank = shape, group.device, group.rank
        first = sum(self.rows[:rank])
        mine = slice(0, m) if op == "gemm_ar" else slice(first, first + self.rows[rank])
        self.expected = torch.zeros(mine.stop - mine.start, n, device=device)
        for source, depth in enumerate(split_rows(k, group.world_size)):
            x, weight = draw(source, (m, depth), dtype, device), draw(100 + source, (n, depth), dtype, device)
            part = product(x[mine], weight)
            self.expected += part
            self._note(source, part)
            if source == rank:
                self.x = self.factor = x
                self.weight = weight
        self.whole = torch.empty(m, n, dtype=dtype, device=device)
        self.out = torch.empty(self.expected.shape, dtype=dtype, device=device)

    def _note(self, source: int, part: torch.Tensor) -> None:
        """Take what the rank ``source`` contributes to the expected sum."""

    def communicate(self) -> None:
        if self.op == "gemm_ar":
            if self.with_nccl:
                self.out.copy_(self.whole)
                dist.all_reduce(self.out)
            else:
                ops.all_reduce(self.whole, group=self.group, out=self.out)
        elif self.with_nccl and not self.sizes:
            dist.reduce_scatter_tensor(self.out, self.whole)
        else:
            ops.reduce_scatter(self.whole, group=self.group, sizes=self.sizes, out=self.out)

    def sequential(self) -> None:
        self.multiply()
        self.communicate()

    def ours(self, strategy: str) -> None:
        how: dict[str, Any] = {"group": self.group, "strategy": strategy, "out": self.out}
        if self.op == "gemm_ar":
            ops.gemm_ar(self.x, self.weight, **how)
        else:
            ops.gemm_rs(self.x, self.weight, sizes=self.sizes, **how)

    def fused_by_torch(self) -> None:
        from tileflux.symm.cuda import fused_matmul_reduce_scatter

        self.torch_out = fused_matmul_reduce_scatter(self.x, self.weight.t())


class _AllReduce(_Scatter):
    """Torch has no fused op for it: its product goes into symmetric memory, and then there is a choice of sums."""

    _step_by_step: torch.Tensor

    def __init__(self, group: Group, op: str, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__(group, op, shape, dtype)
        self._apart = torch.full_like(self.out, torch.nan)
        self.torch_out = self._apart

    def _note(self, source: int, part: torch.Tensor) -> None:
        # Torch's kernels round after every rank's part, which in bf16 is beyond the tolerance of a sum rounded once.
        self._step_by_step = self._step_by_step + part.to(self.dtype) if source else part.to(self.dtype)

    @cached_property
    def _sum(self) -> SymmetricSum:
        """Made by the first call: torch may refuse, and is then left out."""
        from tileflux.symm.cuda import SymmetricSum

        return SymmetricSum(tuple(self.whole.shape), self.dtype, self.group.device)

    def poison(self) -> None:
        super().poison()
        self._apart.fill_(torch.nan)
        if "_sum" in vars(self):
            self._sum.buffer.fill_(torch.nan)

    def by_torch(self) -> tuple[list[Contender], dict[str, str]]:
        if self.group.transport != "cuda":
            return [], {"torch": "torch's symmetric all-reduces need ranks that are processes with GPUs"}
        from tileflux.symm.cuda import ALL_REDUCES, why_not_all_reduce

        found, skipped = [], {}
        for way in ALL_REDUCES:
            name = f"torch {way}"
            reason = why_not_all_reduce(way, self.shape[:2], self.dtype, self.group.traits.has_multicast)
            if reason:
                skipped[name] = reason
            else:
                found.append(Contender(name, partial(self._multiply_and_sum, way), partial(self._check_sum, way)))
        return found, skipped

    def _multiply_and_sum(self, way: str) -> None:
        torch.mm(self.factor, self.weight.t(), out=self._sum.buffer)
        self.torch_out = self._sum.all_reduce(way, self._apart)

    def _check_sum(self, way: str) -> None:
        once = way == "multimem"  # the switch adds in fp32
        expected = self.expected if once else self._step_by_step
        assert_close(self.torch_out, expected, reduction=self.shape[2], what=f"rank {self.group.rank}")


_TASKS: dict[str, type[DenseTask]] = {"ag_gemm": _Gather, "gemm_rs": _Scatter, "gemm_ar": _AllReduce}
