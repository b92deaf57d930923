"""The ops of experts in a ghost world: tokens come as those of ``ag_gemm`` do, and sums as partial ones of ``gemm_rs``.

Sums come and go slab by slab. The routing is made without anybody.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tileflux import ops
from tileflux.config import GemmConfig, GemmProblem
from tileflux.kernels.shards import combine_shards, gather_shards, slab_shards
from tileflux.kernels.turns import turn
from tileflux.ops._dense import config_text
from tileflux.ops.moe_gemm_rs import slab_tiles
from tileflux.ops.routing import Routing, route_gathered
from tileflux.symm.group import Group
from tileflux.testing.choice_sum import weighted_sum
from tileflux.testing.contenders import Shape, Suite, draw
from tileflux.testing.ghost_contenders import GhostGathering, GhostScatter, GhostTask, suite_of
from tileflux.testing.moe_contenders import check_found, check_rows
from tileflux.testing.moe_rows import Assignment, exact_rows, multiply_by_expert
from tileflux.testing.numerics import assert_close
from tileflux.testing.shapes import Mixture
from tileflux.tune.lookup import Choice, lookup, once_routed, problem_for

__all__ = ["GhostMoeGather", "GhostMoeScatter", "ghost_moe_suite"]


def ghost_moe_suite(
    group: Group, op: str, shape: Shape, mixture: Mixture, dtype: str, strategies: tuple[str, ...]
) -> Suite:
    """An op of experts by the real rank of a ghost world."""
    kinds: dict[str, type[GhostMoeGather | GhostMoeScatter]] = {
        "moe_ag_gemm": GhostMoeGather, "moe_gemm_rs": GhostMoeScatter
    }  # fmt: skip
    task = kinds[op](group, op, shape, getattr(torch, dtype), mixture)
    suite = suite_of(task, strategies)
    suite.parts = {"route": task.route, **suite.parts}
    suite.skipped["torch"] = "torch has no fused op for experts"
    suite.tile_rows = task.routing.groups.block_m
    return suite


class _WithExperts(GhostTask):
    assignment: Assignment
    routing: Routing

    def router(self, mixture: Mixture) -> Callable[[], Routing]:
        """Sorts what all tokens chose. What ranks would have to tell each other first, ghosts have told already."""
        ids, weights = (each.to(self.device) for each in (self.assignment.expert_ids, self.assignment.weights))
        return partial(
            route_gathered, ids, weights, num_experts=mixture.num_experts, group=self.group, sizes=self.rows,
            ep_size=mixture.ep_size,
        )  # fmt: skip

    def problem(self) -> GemmProblem:
        """As the op asks lookup."""
        _, n, k = self.weight.shape
        return problem_for(self.op, self.shape[0], n, k, self.dtype, self.device, self.group)

    def choose(self) -> Choice:
        """What auto takes."""
        problem = self.problem()
        return once_routed(lookup(problem), problem, self.routing.capacity)


class GhostMoeGather(_WithExperts, GhostGathering):
    """One call. Products of the pipelined baseline lie shard by shard, as they come."""

    def __init__(self, group: Group, op: str, shape: Shape, dtype: torch.dtype, mixture: Mixture) -> None:
        super().__init__(group, op, shape, dtype)
        (m, n, k), device, rank = shape, self.device, self.rank
        self.assignment = Assignment(m, self.world_size, mixture)
        self.route = self.router(mixture)
        self.routing = self.route()
        everything = draw(1, (m, k), dtype, device)
        self.bring(everything)
        num_experts = len(self.assignment.experts(rank))
        self.weight = draw(2, (num_experts, self.assignment.share(rank, n), k), dtype, device)
        self.cut(everything)
        self.out = torch.empty((m * mixture.top_k, self.weight.shape[1]), dtype=dtype, device=device)
        self.choice = self.choose()

    def cut(self, everything: torch.Tensor) -> None:
        """Which rows there are, whose tokens they are, and what comes of them."""
        device, rank = everything.device, self.rank
        self.picked = self.assignment.rows(rank, device)
        self.tokens = self.picked.tokens
        self.sorted_rows = everything[self.tokens]
        self.expected = exact_rows(self.sorted_rows, self.weight, self.picked.counts)
        self.order = [(rank + hop) % self.world_size for hop in range(self.world_size)]
        self._shards = {source: self.assignment.rows(rank, device, source) for source in self.order}
        self._shard_tokens = {source: each.tokens for source, each in self._shards.items()}
        sources = self.assignment.sources.to(device)[self.tokens]
        self._by_shard = torch.cat([(sources == source).nonzero().flatten() for source in self.order])
        self._found: list[torch.Tensor] = []

    def multiply(self) -> None:
        self._found = [multiply_by_expert(self.sorted_rows, self.weight, self.picked)]

    def sequential(self) -> None:
        self.communicate()
        rows = self.gathered.index_select(0, self.tokens)
        self._found = [multiply_by_expert(rows, self.weight, self.picked)]

    def pipelined(self) -> None:
        current = torch.cuda.current_stream(self.device)
        self._follow(current)
        arrived = []
        for copies in self.copies():
            self._start(*copies)
            arrived.append(self._streams[0].record_event())
        self._found = []
        for hop, source in enumerate(self.order):
            if hop:
                current.wait_event(arrived[hop - 1])
            self.multiply_shard(source)
        current.wait_stream(self._streams[1])

    def multiply_shard(self, source: int) -> None:
        """The rows of one rank's tokens."""
        rows = self.gathered.index_select(0, self._shard_tokens[source])
        self._found.append(multiply_by_expert(rows, self.weight, self._shards[source]))

    def play(self, strategy: str, config: GemmConfig, asked: dict[str, Any]) -> Callable[[], None]:
        row_bytes = self.shape[2] * self.dtype.itemsize
        here = turn(self.group, gather_shards(self.op, self.rows, row_bytes, False, config.num_chunks))
        how = {name: value for name, value in asked.items() if name != "sizes"}  # the routing has them

        def call() -> None:
            self.here = here
            self.ghosts.start()
            ops.moe_ag_gemm(self.x, self.weight, self.routing, **how)
            self.ghosts.gather(here, self.ghost_rows)
            self.ghosts.join()

        return call

    def check(self) -> None:
        check_rows(self.out, self.expected, self.shape[2], self.op)

    def check_sequential(self) -> None:
        check_found(self._found, self.expected, self.shape[2], self.op)

    def check_pipelined(self) -> None:
        check_found(self._found, self.expected[self._by_shard], self.shape[2], self.op)

    def poison(self) -> None:
        super().poison()
        self._found = []


class GhostMoeScatter(_WithExperts, GhostScatter):
    """One call. The pipelined baseline finds its rows shard by shard, as that of ``moe_ag_gemm`` leaves them."""

    def __init__(self, group: Group, op: str, shape: Shape, dtype: torch.dtype, mixture: Mixture) -> None:
        GhostTask.__init__(self, group, op, shape, dtype)
        m, n, k = shape
        self.assignment = Assignment(m, self.world_size, mixture)
        self.route = self.router(mixture)
        self.routing = self.route()
        width = self.assignment.share(self.rank, k)
        self.weight = draw(2, (len(self.assignment.experts(self.rank)), n, width), dtype, self.device)
        self.cut(width)
        self.bring(width)
        self.choice = self.choose()

    def cut(self, width: int) -> None:
        """This rank's rows, whose tokens they are, and what they add to the sums of all tokens."""
        (m, n, _), rank, device = self.shape, self.rank, self.weight.device
        assignment, top_k = self.assignment, self.assignment.mixture.top_k
        self.picked = assignment.rows(rank, device)
        self.factor = draw(1, (len(self.picked.slots), width), self.dtype, device)
        self.x = self.factor.new_full((m * top_k, width), torch.nan)
        self.x[: len(self.factor)] = self.factor
        self._gates = assignment.weights.to(device)
        tokens = self.picked.tokens
        products = exact_rows(self.factor, self.weight, self.picked.counts)
        products *= self._gates.flatten()[self.picked.slots][:, None]
        self.exact = torch.zeros((m, n), device=device).index_add_(0, tokens, products)
        self._positions = self.picked.positions(0, m)
        owners = assignment.sources.to(device)[tokens]
        self._shards = []
        for owner in range(self.world_size):
            shard, place = assignment.rows(rank, device, owner), assignment.place(owner)
            positions, gates = shard.positions(place.start, self.rows[owner]), self._gates[place].contiguous()
            self._shards.append((shard, self.factor[owners == owner].clone(), positions, gates))
        self._terms = self.shape[2] * top_k

    def multiply(self) -> None:
        self._products = multiply_by_expert(self.factor, self.weight, self.picked)

    def make_all(self) -> None:
        """This rank's part of all sums."""
        self.multiply()
        weighted_sum(self._products, self._positions, self._gates, self.whole)

    def make(self, owner: int, out: torch.Tensor) -> None:
        shard, rows, positions, gates = self._shards[owner]
        weighted_sum(multiply_by_expert(rows, self.weight, shard), positions, gates, out)

    def sequential(self) -> None:
        self.make_all()
        self.communicate()
        self._slots[self.rank].copy_(self.whole[self.place(self.rank)])
        torch.sum(self._slots, 0, out=self.out)

    def play(self, strategy: str, config: GemmConfig, asked: dict[str, Any]) -> Callable[[], None]:
        block_m, n = self.routing.groups.block_m, self.shape[1]
        capacity, itemsize, num_experts = self.routing.capacity, self.dtype.itemsize, len(self.weight)
        given = config_text(asked["config"])
        tiles = slab_tiles(config, given, block_m, self.problem(), strategy, capacity, num_experts)
        plan_of = slab_shards if strategy == "pipelined" else combine_shards
        here = turn(self.group, plan_of(self.op, self.rows, capacity, n, itemsize, tiles, by_copies=True))
        how = {name: value for name, value in asked.items() if name != "sizes"}  # the routing has them
        slabs = self.by_slab(here.plan)
        order = self.order(strategy, len(here.plan.slabs(n)))

        def call() -> None:
            self.here, self.epoch = here, self.ghosts.num_calls(self.op)
            here.leaving = None if strategy == "fused" else []
            self.ghosts.start()
            ops.moe_gemm_rs(self.x, self.weight, self.routing, **how)
            self.ghosts.scatter(here, slabs, order=order, leaving=here.leaving)
            self.ghosts.join()

        return call

    def order(self, strategy: str, num_slabs: int) -> list[tuple[int, range]]:
        """(owner, slab) as this rank sends them: slab by slab; pipelined, if it is one, the farthest rank's first."""
        hops = range(1, self.world_size)
        if strategy == "pipelined" and num_slabs == 1:
            hops = hops[::-1]
        owners = [(self.rank + hop) % self.world_size for hop in hops]
        return [(owner, range(slab, slab + 1)) for slab in range(num_slabs) for owner in owners]

    def check(self) -> None:
        # A sum of as many products as a token has choices.
        assert_close(self.out, self.expected, reduction=self._terms, what=self.op)

    def num_terms(self) -> int:
        return self._terms
