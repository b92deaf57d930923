"""What ``tileflux bench`` compares for the ops of experts: plain baselines, and ours in each strategy.

Everybody gets the routing for nothing: ours as a ``Routing``, baselines as an index that the host knows. What it costs
to make one is timed apart.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from tileflux import ops
from tileflux.ops.routing import Routing
from tileflux.symm.group import Group
from tileflux.testing.choice_sum import weighted_sum
from tileflux.testing.contenders import Contender, Shape, Suite, Task, draw
from tileflux.testing.moe_pipelines import send_off, take_in
from tileflux.testing.moe_rows import Assignment, exact_rows, multiply_by_expert
from tileflux.testing.numerics import assert_close
from tileflux.testing.shapes import Mixture
from tileflux.tune.lookup import Choice, lookup, once_routed, problem_for

__all__ = ["check_rows", "grouped_suite", "moe_suite"]

_NO_TORCH = "torch has no fused op for experts"


def moe_suite(group: Group, op: str, shape: Shape, mixture: Mixture, dtype: str, strategies: tuple[str, ...]) -> Suite:
    """An op of experts among the ranks of ``group``."""
    task = _TASKS[op](group, op, shape, getattr(torch, dtype), mixture)
    contenders = [
        Contender("sequential", task.sequential, task.check_sequential),
        Contender("pipelined", task.pipelined, task.check_pipelined),
    ]
    suite = Suite(
        {"route": task.route, **task.parts()}, contenders, task.poison, task.choice.strategy,
        task.routing.groups.block_m, {"torch": _NO_TORCH},
    )  # fmt: skip
    for strategy in strategies:
        contenders.append(Contender(f"ours {strategy}", partial(task.ours, strategy), task.check))
    return suite


def grouped_suite(group: Group, shape: Shape, mixture: Mixture, dtype: str) -> Suite:
    """``grouped_gemm`` against ``torch._grouped_mm``; where rows have to be picked first, that picks them before."""
    (m, n, k), kind, device = shape, getattr(torch, dtype), group.device
    assignment = Assignment(m, 1, mixture)
    picked = assignment.rows(0, device)
    tokens, weight = draw(1, (m, k), kind, device), draw(2, (mixture.num_experts, n, k), kind, device)
    index = picked.tokens
    rows = tokens[index]
    expected = exact_rows(rows, weight, picked.counts)
    out = torch.empty((m * mixture.top_k, n), dtype=kind, device=device)
    counts = torch.tensor(picked.counts, device=device)
    route = router(group, assignment)
    routing = route()
    found: list[torch.Tensor] = []

    def multiply() -> None:
        found[:] = [multiply_by_expert(rows, weight, picked)]

    def pick_and_multiply() -> None:
        found[:] = [multiply_by_expert(tokens.index_select(0, index), weight, picked)]

    def ours() -> None:
        if mixture.is_picked:
            ops.moe_ag_gemm(tokens, weight, routing, out=out)
        else:
            ops.grouped_gemm(rows, weight, counts, out=out)

    def poison() -> None:
        found.clear()
        out.fill_(torch.nan)

    library = pick_and_multiply if mixture.is_picked else multiply
    contenders = [
        Contender("torch", library, lambda: check_found(found, expected, k)),
        Contender("ours", ours, lambda: check_rows(out, expected, k, "grouped_gemm")),
    ]
    parts: dict[str, Callable[[], object]] = {"route": route} if mixture.is_picked else {}
    return Suite(parts | {"gemm": multiply}, contenders, poison, "", routing.groups.block_m)


def router(group: Group, assignment: Assignment) -> Callable[[], Routing]:
    """What lets the ranks of ``group`` route what they have. Collective."""
    place, mixture = assignment.place(group.rank), assignment.mixture
    ids, weights = (each[place].to(group.device) for each in (assignment.expert_ids, assignment.weights))
    return partial(
        ops.route, ids, weights, num_experts=mixture.num_experts, ep_size=mixture.ep_size, group=group,
        sizes=assignment.sizes,
    )  # fmt: skip


def check_rows(out: torch.Tensor, expected: torch.Tensor, num_terms: int, what: str) -> None:
    """Compare rows, and see that none is written behind the last of them."""
    assert_close(out[: len(expected)], expected, reduction=num_terms, what=what)
    assert out[len(expected) :].isnan().all(), f"{what}: rows behind the last one are written"


def check_found(found: list[torch.Tensor], expected: torch.Tensor, num_terms: int, what: str = "torch") -> None:
    """Compare what torch has allocated by itself."""
    assert found, f"{what}: there is no result"
    assert_close(torch.cat(found), expected, reduction=num_terms, what=what)


class _MoeTask(Task):
    """One op of experts on one rank."""

    routing: Routing
    choice: Choice

    def __init__(self, group: Group, op: str, shape: Shape, dtype: torch.dtype, mixture: Mixture) -> None:
        super().__init__(group, op, shape, dtype)
        self.assignment = Assignment(shape[0], group.world_size, mixture)
        self.picked = self.assignment.rows(group.rank, group.device)
        self.route = router(group, self.assignment)
        """What both products of a layer share."""

    def choose(self) -> Choice:
        """What auto takes."""
        _, n, k = self.weight.shape
        problem = problem_for(self.op, self.shape[0], n, k, self.dtype, self.group.device, self.group)
        return once_routed(lookup(problem), problem, self.shape[0] * self.assignment.mixture.top_k)

    def _begin(self, *calls: Callable[[], object]) -> None:
        """The first of all that waits for others, after all that torch uses between such calls has run once.

        A kernel is not loaded while another one waits for this rank.
        """
        for call in calls:
            call()
        self._rest()
        self.routing = self.route()
        self._rest()

    def _rest(self) -> None:
        self.group.synchronize()
        self.group.barrier()

    @abc.abstractmethod
    def pipelined(self) -> None:
        """Shard by shard."""

    def check_sequential(self) -> None:
        """Of the baselines."""
        self.check()

    def check_pipelined(self) -> None:
        """The same."""
        self.check()


class _Gather(_MoeTask):
    """``moe_ag_gemm``. Baselines' products are where torch puts them; those of the pipelined one lie shard by shard."""

    def __init__(self, group: Group, op: str, shape: Shape, dtype: torch.dtype, mixture: Mixture) -> None:
        super().__init__(group, op, shape, dtype, mixture)
        (m, n, k), device, rank, world_size = shape, group.device, group.rank, group.world_size
        num_experts = len(self.assignment.experts(rank))
        self.weight = draw(100 + rank, (num_experts, self.assignment.share(rank, n), k), dtype, device)
        everything = torch.cat([draw(source, (rows, k), dtype, device) for source, rows in enumerate(self.rows)])
        self.x = everything[self.assignment.place(rank)].clone()
        self.tokens = self.picked.tokens
        self.factor = everything[self.tokens]
        self.expected = exact_rows(self.factor, self.weight, self.picked.counts)
        order = [(rank + hop) % world_size for hop in range(world_size)]
        self._shards = {source: self.assignment.rows(rank, device, source) for source in order}
        self._picks = {
            source: each.tokens - self.assignment.place(source).start for source, each in self._shards.items()
        }
        sources = self.assignment.sources.to(device)[self.tokens]
        self._by_shard = torch.cat([(sources == source).nonzero().flatten() for source in order])
        self.out = torch.empty((m * mixture.top_k, self.weight.shape[1]), dtype=dtype, device=device)
        self._gathered = torch.zeros_like(everything)
        self._found: list[torch.Tensor] = []
        self.choice = self.choose()
        shards = (partial(self._use, each, everything[self.assignment.place(each)]) for each in order)
        self._begin(self.multiply, self._pick_and_multiply, *shards)

    def multiply(self) -> None:
        self.whole = multiply_by_expert(self.factor, self.weight, self.picked)

    def communicate(self) -> None:
        if self.with_nccl and not self.sizes:
            dist.all_gather_into_tensor(self._gathered, self.x)
        else:
            ops.all_gather(self.x, group=self.group, sizes=self.sizes, out=self._gathered)

    def _pick_and_multiply(self) -> None:
        self._found = [multiply_by_expert(self._gathered.index_select(0, self.tokens), self.weight, self.picked)]

    def sequential(self) -> None:
        self.communicate()
        self._pick_and_multiply()

    def _use(self, source: int, arrived: torch.Tensor) -> None:
        rows = arrived.index_select(0, self._picks[source])
        self._found.append(multiply_by_expert(rows, self.weight, self._shards[source]))

    def pipelined(self) -> None:
        self._found = []
        take_in(self.group, self.x, self.rows, self.choice.config, self._gathered, self._use)

    def ours(self, strategy: str) -> None:
        ops.moe_ag_gemm(self.x, self.weight, self.routing, strategy=strategy, out=self.out)

    def check(self) -> None:
        check_rows(self.out, self.expected, self.shape[2], f"rank {self.group.rank}")

    def check_sequential(self) -> None:
        check_found(self._found, self.expected, self.shape[2], f"rank {self.group.rank}")

    def check_pipelined(self) -> None:
        check_found(self._found, self.expected[self._by_shard], self.shape[2], f"rank {self.group.rank}")

    def poison(self) -> None:
        super().poison()
        self._found = []
        self._gathered.fill_(torch.nan)


class _Scatter(_MoeTask):
    """``moe_gemm_rs``. The pipelined baseline finds its rows shard by shard, as that of ``moe_ag_gemm`` leaves them."""

    def __init__(self, group: Group, op: str, shape: Shape, dtype: torch.dtype, mixture: Mixture) -> None:
        super().__init__(group, op, shape, dtype, mixture)
        (m, n, _), device, rank, world_size = shape, group.device, group.rank, group.world_size
        self.expected = torch.zeros((self.rows[rank], n), device=device)
        for source in range(world_size):
            h, weight = self._drawn(source)
            self._add_exact(source, h, weight)
            if source == rank:
                self.factor, self.weight = h, weight
        self.x = self.factor.new_full((m * mixture.top_k, self.factor.shape[1]), torch.nan)
        self.x[: len(self.factor)] = self.factor
        weights, tokens = self.assignment.weights.to(device), self.picked.tokens
        sources = self.assignment.sources.to(device)[tokens]
        self._positions, self._weights = self.picked.positions(0, m), weights
        self._shards = {}
        for owner in range(world_size):
            place = self.assignment.place(owner)
            shard = self.assignment.rows(rank, device, owner)
            h = self.factor[sources == owner].clone()
            positions = shard.positions(place.start, self.rows[owner])
            self._shards[owner] = (shard, h, positions, weights[place].contiguous())
        self._sums = torch.empty((m, n), dtype=dtype, device=device)
        self.out = torch.empty((self.rows[rank], n), dtype=dtype, device=device)
        self.choice = self.choose()
        self._begin(self._multiply_and_sum, *(partial(self._make, owner) for owner in range(world_size)))

    def _drawn(self, source: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows and weights of a rank."""
        _, n, k = self.shape
        assignment, device, width = self.assignment, self.group.device, self.assignment.share(source, k)
        num_rows, num_experts = len(assignment.rows(source).slots), len(assignment.experts(source))
        h = draw(source, (num_rows, width), self.dtype, device)
        return h, draw(100 + source, (num_experts, n, width), self.dtype, device)

    def _add_exact(self, source: int, h: torch.Tensor, weight: torch.Tensor) -> None:
        """What a rank's rows add to this rank's tokens."""
        rank, device = self.group.rank, self.group.device
        own = self.assignment.rows(source, device, rank)
        tokens = self.assignment.rows(source, device).tokens
        is_own = self.assignment.sources.to(device)[tokens] == rank
        products = exact_rows(h[is_own], weight, own.counts)
        products *= self.assignment.weights.to(device).flatten()[own.slots][:, None]
        self.expected.index_add_(0, own.tokens - self.assignment.place(rank).start, products)

    def multiply(self) -> None:
        self.whole = multiply_by_expert(self.factor, self.weight, self.picked)

    def communicate(self) -> None:
        if self.with_nccl and not self.sizes:
            dist.reduce_scatter_tensor(self.out, self._sums)
        else:
            ops.reduce_scatter(self._sums, group=self.group, sizes=self.sizes, out=self.out)

    def _multiply_and_sum(self) -> None:
        self.multiply()
        weighted_sum(self.whole, self._positions, self._weights, self._sums)

    def sequential(self) -> None:
        self._multiply_and_sum()
        self.communicate()

    def _make(self, owner: int) -> torch.Tensor:
        shard, h, positions, weights = self._shards[owner]
        sums = torch.empty((self.rows[owner], self.shape[1]), dtype=self.dtype, device=self.group.device)
        weighted_sum(multiply_by_expert(h, self.weight, shard), positions, weights, sums)
        return sums

    def pipelined(self) -> None:
        send_off(self.group, self.rows, self.choice.config, self.out, self._make)

    def ours(self, strategy: str) -> None:
        ops.moe_gemm_rs(self.x, self.weight, self.routing, strategy=strategy, out=self.out)

    def check(self) -> None:
        # A sum of as many products as a token has choices.
        terms = self.shape[2] * self.assignment.mixture.top_k
        assert_close(self.out, self.expected, reduction=terms, what=f"rank {self.group.rank}")

    def poison(self) -> None:
        super().poison()
        self._sums.fill_(torch.nan)


_TASKS: dict[str, type[_Gather] | type[_Scatter]] = {"moe_ag_gemm": _Gather, "moe_gemm_rs": _Scatter}
