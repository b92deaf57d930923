"""What is timed in a ghost world: library products and the copy engine, and ours in each strategy.

The baselines move the same bytes in both directions, by the copy engine, which takes no SM: the best that plain code
can do on this link. Ours plays against ghosts (``testing/ghost.py``), as ``tileflux bench`` compares it with the
baselines, and ``tileflux tune`` with itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tileflux import ops
from tileflux.config import GemmConfig
from tileflux.kernels.dense import pipelined_tiles
from tileflux.kernels.plan import split_rows
from tileflux.kernels.scatter import departures
from tileflux.kernels.shards import ShardPlan, gather_shards, scatter_shards
from tileflux.kernels.turns import Turn, turn
from tileflux.symm.group import Group
from tileflux.testing._ghost_task import GhostTask, ghosts_of
from tileflux.testing.contenders import Contender, Shape, Suite, draw, product
from tileflux.testing.numerics import assert_close

__all__ = [
    "GhostGather",
    "GhostGathering",
    "GhostScatter",
    "GhostTask",
    "ghost_suite",
    "ghost_task",
    "ghosts_of",
    "suite_of",
]

_NO_MAILBOX = "ghosts do not play the mailboxes of our collectives; the baseline is the same with copy engines"


def ghost_suite(group: Group, op: str, shape: Shape, dtype: str, strategies: tuple[str, ...]) -> Suite:
    """A dense op by the real rank of a ghost world."""
    return suite_of(ghost_task(group, op, shape, getattr(torch, dtype)), strategies)


def suite_of(task: GhostTask, strategies: tuple[str, ...]) -> Suite:
    """What is compared of a task."""
    parts: dict[str, Callable[[], object]] = {
        "gemm": task.multiply, "comm": task.communicate, "beside": task.beside
    }  # fmt: skip
    contenders = [
        Contender("sequential", task.sequential, task.check_sequential),
        Contender("pipelined", task.pipelined, task.check_pipelined),
    ]
    suite = Suite(parts, contenders, task.poison, task.choice.strategy, task.choice.config.block_m)
    suite.skipped["torch"] = "torch's fused ops need real ranks"
    for strategy in strategies:
        if strategy == "sequential":
            suite.skipped["ours sequential"] = _NO_MAILBOX
        else:
            contenders.append(Contender(f"ours {strategy}", task.caller(strategy), task.checker(strategy)))
    return suite


def ghost_task(group: Group, op: str, shape: Shape, dtype: torch.dtype) -> GhostTask:
    """One op of the real rank; ``ValueError`` for one that ghosts do not play."""
    kinds: dict[str, type[GhostTask]] = {"ag_gemm": GhostGather, "gemm_rs": GhostScatter}
    if op not in kinds:
        raise ValueError(f"{op} is not played by ghosts; {' and '.join(kinds)} are. Use --where mps")
    return kinds[op](group, op, shape, dtype)


class GhostGathering(GhostTask):
    """Rows of all ranks come in, and this rank's go out to everybody."""

    def bring(self, everything: torch.Tensor) -> None:
        """``[M, K]``: what ranks have together, of which ghosts send theirs."""
        own = self.place(self.rank)
        self.x = everything[own].clone()
        self.ghost_rows = torch.empty(everything.shape, dtype=self.dtype, pin_memory=True).copy_(everything)
        self.gathered = torch.zeros_like(everything)
        # Where one's own rows lie in the gathered ones they are before the call, as a layer's output could be.
        self.gathered[own] = self.x
        self._outbox = [torch.empty(self.x.shape, dtype=self.dtype, pin_memory=True) for _ in self.rows]

    def copies(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
        pairs = []
        for hop in range(1, self.world_size):
            source, peer = (self.rank + hop) % self.world_size, (self.rank - hop) % self.world_size
            place = self.place(source)
            pairs.append((self.gathered[place], self.ghost_rows[place], self._outbox[peer], self.x))
        return pairs

    def departed(self, peer: int) -> torch.Tensor:
        assert self.here is not None
        return self.here.rows_at(peer, self.dtype, self.shape[2])[self.place(self.rank)]

    def check_departed(self) -> None:
        for peer in self.peers:
            received = self.departed(peer).to(self.device)
            assert torch.equal(received, self.x), f"rank {peer} did not get this rank's rows"


class GhostGather(GhostGathering):
    """``ag_gemm``."""

    def __init__(self, group: Group, op: str, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__(group, op, shape, dtype)
        m, n, k = shape
        everything = draw(1, (m, k), dtype, self.device)
        self.bring(everything)
        self.weight = draw(2, (split_rows(n, self.world_size)[self.rank], k), dtype, self.device)
        self.expected = product(everything, self.weight)
        self.out = torch.empty(m, len(self.weight), dtype=dtype, device=self.device)
        self.choice = self.choose()

    def multiply(self) -> None:
        torch.mm(self.gathered, self.weight.t(), out=self.out)

    def sequential(self) -> None:
        self.communicate()
        self.multiply()

    def pipelined(self) -> None:
        current = torch.cuda.current_stream(self.device)
        self._follow(current)
        arrived = []
        for copies in self.copies():
            self._start(*copies)
            arrived.append(self._streams[0].record_event())
        for hop in range(self.world_size):
            if hop:
                current.wait_event(arrived[hop - 1])
            place = self.place((self.rank + hop) % self.world_size)
            torch.mm(self.gathered[place], self.weight.t(), out=self.out[place])
        current.wait_stream(self._streams[1])

    def play(self, strategy: str, config: GemmConfig, asked: dict[str, Any]) -> Callable[[], None]:
        row_bytes = self.shape[2] * self.dtype.itemsize
        # As the op cuts them: ghosts raise a flag for each of its chunks.
        here = turn(self.group, gather_shards(self.op, self.rows, row_bytes, False, config.num_chunks))
        if strategy == "pipelined":
            self._load_products(here)

        def call() -> None:
            self.here = here
            self.ghosts.start()
            # The op first: a kernel that it loads would wait for streams that wait for it.
            ops.ag_gemm(self.x, self.weight, group=self.group, **asked)
            self.ghosts.gather(here, self.ghost_rows)
            self.ghosts.join()

        return call

    def _load_products(self, here: Turn) -> None:
        """Have the library load what it multiplies chunks with.

        Within a call it would load behind a kernel that waits for rows which ghosts send when the call has been queued.
        """
        plan = here.plan
        chunks = [plan.chunk(rank, index) for rank in range(self.world_size) for index in range(plan.num_chunks)]
        for count in sorted({len(rows) for rows in chunks if rows}):
            torch.mm(self.gathered[:count], self.weight.t(), out=self.out[:count])
        self.group.synchronize()


class GhostScatter(GhostTask):
    """``gemm_rs``."""

    def __init__(self, group: Group, op: str, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__(group, op, shape, dtype)
        m, n, k = shape
        depth = split_rows(k, self.world_size)[self.rank]
        self.x, self.weight = draw(1, (m, depth), dtype, self.device), draw(2, (n, depth), dtype, self.device)
        self.exact = product(self.x, self.weight)
        self.bring(depth)
        self.choice = self.choose()

    def bring(self, num_terms: int) -> None:
        """What ghosts send beside ``exact``, this rank's part: as large, sums of as many products."""
        m, n, _ = self.shape
        size, dtype = (self.rows[self.rank], n), self.dtype
        drawn = (
            draw(3 + source, size, torch.float32, self.device) * num_terms**0.5 for source in range(len(self.rows))
        )
        self.partials = [torch.empty(size, dtype=dtype, pin_memory=True).copy_(each) for each in drawn]
        others = (each for source, each in enumerate(self.partials) if source != self.rank)
        self.expected = self.exact[self.place(self.rank)] + sum(each.to(self.device).float() for each in others)
        self.whole = torch.empty(m, n, dtype=dtype, device=self.device)
        self._slots = torch.empty(self.world_size, *size, dtype=dtype, device=self.device)
        self._outbox = [torch.empty(rows, n, dtype=dtype, pin_memory=True) for rows in self.rows]
        self.out = torch.empty(size, dtype=dtype, device=self.device)

    def multiply(self) -> None:
        torch.mm(self.x, self.weight.t(), out=self.whole)

    def make(self, owner: int, out: torch.Tensor) -> None:
        """This rank's part of one owner's rows."""
        torch.mm(self.x[self.place(owner)], self.weight.t(), out=out)

    def _steps(self) -> list[tuple[int, int]]:
        """(owner of what goes out, source of what comes in), step by step."""
        return [
            ((self.rank + 1 + hop) % self.world_size, (self.rank - 1 - hop) % self.world_size)
            for hop in range(self.world_size - 1)
        ]

    def copies(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
        return [
            (self._slots[source], self.partials[source], self._outbox[owner], self.whole[self.place(owner)])
            for owner, source in self._steps()
        ]

    def sequential(self) -> None:
        self.multiply()
        self.communicate()
        self._slots[self.rank].copy_(self.whole[self.place(self.rank)])
        torch.sum(self._slots, 0, out=self.out)

    def pipelined(self) -> None:
        current = torch.cuda.current_stream(self.device)
        for (owner, _), copies in zip(self._steps(), self.copies(), strict=True):
            self.make(owner, self.whole[self.place(owner)])
            # A peer can send what it has computed at the same step.
            self._follow(current)
            self._start(*copies)
        self.make(self.rank, self._slots[self.rank])
        for stream in self._streams:
            current.wait_stream(stream)
        torch.sum(self._slots, 0, out=self.out)

    def play(self, strategy: str, config: GemmConfig, asked: dict[str, Any]) -> Callable[[], None]:
        n = self.shape[1]
        tiles = config if strategy == "fused" else pipelined_tiles(config)
        here = turn(self.group, scatter_shards(self.op, self.rows, n, self.dtype.itemsize, tiles, by_copies=True))
        slabs = self.by_slab(here.plan)
        order = [(each.owner, each.slabs) for each in departures(self.rank, here.plan, tiles, n)]

        def call() -> None:
            self.here, self.epoch = here, self.ghosts.num_calls(self.op)
            here.leaving = None if strategy == "fused" else []
            self.ghosts.start()
            ops.gemm_rs(self.x, self.weight, group=self.group, **asked)
            self.ghosts.scatter(here, slabs, order=order, leaving=here.leaving)
            self.ghosts.join()

        return call

    def by_slab(self, plan: ShardPlan) -> list[torch.Tensor]:
        """The partial sums of each source as they are sent, pinned: slab by slab, whatever the shape says."""
        cuts = [slice(columns.start, columns.stop) for columns in plan.slabs(self.shape[1])]
        if len(cuts) == 1:
            return self.partials
        return [
            torch.cat([part[:, cut].reshape(-1) for cut in cuts]).view(part.shape).pin_memory()
            for part in self.partials
        ]

    def departed(self, peer: int) -> torch.Tensor:
        """Slab by slab, whatever its shape says."""
        assert self.here is not None
        return self.here.slot(peer, self.rank, self.dtype, self.shape[1], self.epoch)[: self.rows[peer]]

    def num_terms(self) -> int:
        """Of which a partial sum is made."""
        return self.x.shape[1]

    def check_departed(self) -> None:
        assert self.here is not None
        n = self.shape[1]
        for peer in self.peers:
            exact = self.exact[self.place(peer)]
            for index, columns in enumerate(self.here.plan.slabs(n)):
                received = self.here.slabs_at(peer, self.rank, range(index, index + 1), self.dtype, n).to(self.device)
                what = f"sums for rank {peer}, slab {index}"
                assert_close(received, exact[:, columns.start : columns.stop], reduction=self.num_terms(), what=what)
