"""``moe_ag_gemm`` in a ghost world: tokens come as those of ``ag_gemm`` do, and the routing is made without anybody.

``moe_gemm_rs`` stores its sums to peers from SMs, which ghosts do not answer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tileflux import ops
from tileflux.config import GemmConfig
from tileflux.kernels.turns import gather_shards, turn
from tileflux.ops.routing import Routing, route_gathered
from tileflux.symm.group import Group
from tileflux.testing.contenders import Shape, Suite, draw
from tileflux.testing.ghost_contenders import GhostGathering, suite_of
from tileflux.testing.moe_contenders import check_found, check_rows
from tileflux.testing.moe_rows import Assignment, exact_rows, multiply_by_expert
from tileflux.testing.shapes import Mixture
from tileflux.tune.lookup import Choice, lookup, problem_for

__all__ = ["GhostMoeGather", "ghost_moe_suite"]


def ghost_moe_suite(
    group: Group, op: str, shape: Shape, mixture: Mixture, dtype: str, strategies: tuple[str, ...]
) -> Suite:
    """An op of experts by the real rank of a ghost world; ``ValueError`` for one that ghosts do not play."""
    if op != "moe_ag_gemm":
        raise ValueError(f"{op} is not played by ghosts; of the ops of experts moe_ag_gemm is. Use --where mps")
    task = GhostMoeGather(group, op, shape, getattr(torch, dtype), mixture)
    suite = suite_of(task, strategies)
    suite.parts = {"route": task.route, **suite.parts}
    suite.skipped["torch"] = "torch has no fused op for experts"
    suite.tile_rows = task.routing.groups.block_m
    return suite


class GhostMoeGather(GhostGathering):
    """One call. Products of the pipelined baseline lie shard by shard, as they come."""

    def __init__(self, group: Group, op: str, shape: Shape, dtype: torch.dtype, mixture: Mixture) -> None:
        super().__init__(group, op, shape, dtype)
        (m, n, k), device, rank = shape, self.device, self.rank
        self.assignment = Assignment(m, self.world_size, mixture)
        self.route = self._router(mixture)
        self.routing = self.route()
        everything = draw(1, (m, k), dtype, device)
        self.bring(everything)
        num_experts = len(self.assignment.experts(rank))
        self.weight = draw(2, (num_experts, self.assignment.share(rank, n), k), dtype, device)
        self.cut(everything)
        self.out = torch.empty((m * mixture.top_k, self.weight.shape[1]), dtype=dtype, device=device)
        self.choice = self.choose()

    def _router(self, mixture: Mixture) -> Callable[[], Routing]:
        """Sorts what all tokens chose. What ranks would have to tell each other first, ghosts have told already."""
        ids, weights = (each.to(self.device) for each in (self.assignment.expert_ids, self.assignment.weights))
        return partial(
            route_gathered, ids, weights, num_experts=mixture.num_experts, group=self.group, sizes=self.rows,
            ep_size=mixture.ep_size,
        )  # fmt: skip

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

    def choose(self) -> Choice:
        """What lookup says of this shape."""
        _, n, k = self.weight.shape
        return lookup(problem_for(self.op, self.shape[0], n, k, self.dtype, self.device, self.group))

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
