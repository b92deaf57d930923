"""What the ops of a ghost world have in common when they are timed: its sizes, its copies, and what has left."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch

from tileflux.config import GemmConfig
from tileflux.kernels.plan import split_rows
from tileflux.kernels.turns import Turn
from tileflux.symm.group import Group
from tileflux.testing.contenders import Shape
from tileflux.testing.ghost import Ghosts
from tileflux.testing.numerics import assert_close
from tileflux.tune.lookup import Choice, lookup, problem_for

__all__ = ["GhostTask", "ghosts_of"]


class GhostTask(abc.ABC):
    """One op of the real rank: its tensors, what ghosts send, and what the result must be."""

    out: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor
    expected: torch.Tensor
    choice: Choice

    def __init__(self, group: Group, op: str, shape: Shape, dtype: torch.dtype) -> None:
        self.group, self.op, self.shape, self.dtype = group, op, shape, dtype
        self.rank, self.world_size, self.device = group.rank, group.world_size, group.device
        self.rows = split_rows(shape[0], self.world_size)
        self.sizes = None if len(set(self.rows)) == 1 else list(self.rows)
        self.ghosts = ghosts_of(group)
        self._streams = (torch.cuda.Stream(self.device), torch.cuda.Stream(self.device))
        """For what comes in, and for what goes out."""
        self.here: Turn | None = None
        self.epoch = 0

    def choose(self) -> Choice:
        """What lookup says of this shape."""
        n, k = len(self.weight), self.x.shape[1]
        return lookup(problem_for(self.op, self.shape[0], n, k, self.dtype, self.device, self.group))

    def place(self, rank: int) -> slice:
        """The rows of ``rank`` among all."""
        first = sum(self.rows[:rank])
        return slice(first, first + self.rows[rank])

    @abc.abstractmethod
    def multiply(self) -> None:
        """The whole product alone."""

    @abc.abstractmethod
    def copies(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Step by step: what comes in (to, from) and what goes out (to, from)."""

    def communicate(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """All copies, in both directions at once, with something on the current stream beside them."""
        current = torch.cuda.current_stream(self.device)
        self._follow(current)
        for copies in self.copies():
            self._start(*copies)
        meanwhile()
        for stream in self._streams:
            current.wait_stream(stream)

    def beside(self) -> None:
        """Product and copies at once, neither waiting for the other."""
        self.communicate(self.multiply)

    def _follow(self, current: torch.cuda.Stream) -> None:
        for stream in self._streams:
            stream.wait_stream(current)

    def _start(self, to: torch.Tensor, source: torch.Tensor, target: torch.Tensor, mine: torch.Tensor) -> None:
        """One copy in, one out."""
        incoming, outgoing = self._streams
        with torch.cuda.stream(incoming):
            to.copy_(source, non_blocking=True)
        with torch.cuda.stream(outgoing):
            target.copy_(mine, non_blocking=True)

    @abc.abstractmethod
    def sequential(self) -> None:
        """One after the other."""

    @abc.abstractmethod
    def pipelined(self) -> None:
        """A library product per shard."""

    def caller(self, strategy: str, config: GemmConfig | None = None) -> Callable[[], None]:
        """Our op in a strategy, with the ghosts beside it, as ``config`` or what lookup says has it cut.

        Ghosts have no mailboxes, so where that is ``sequential`` the baseline is called. What ``auto`` takes is settled
        here: ghosts have to know.
        """
        asked: dict[str, Any] = {"sizes": self.sizes, "strategy": strategy, "config": config, "out": self.out}
        taken, tiles = self.resolve(strategy, config)
        return self.sequential if taken == "sequential" else self.play(taken, tiles, asked)

    def resolve(self, strategy: str, config: GemmConfig | None) -> tuple[str, GemmConfig]:
        """What the op will do when it is asked for this."""
        return self.choice.strategy if strategy == "auto" else strategy, config or self.choice.config

    def checker(self, strategy: str) -> Callable[[], None]:
        """What tells whether the last call of such a caller was right; ours also by what the ghosts have got."""
        return self.check_sequential if self.resolve(strategy, None)[0] == "sequential" else self.check_ours

    @abc.abstractmethod
    def play(self, strategy: str, config: GemmConfig, asked: dict[str, Any]) -> Callable[[], None]:
        """Our op as it is asked for, which means fused or pipelined with these tiles and chunks."""

    def poison(self) -> None:
        """Fill the result, and what the last call has sent to the ghosts, with what no right one contains."""
        self.out.fill_(torch.nan)
        if self.here is not None:
            for peer in self.peers:
                self.departed(peer).fill_(torch.nan)

    @property
    def peers(self) -> list[int]:
        """The ghosts."""
        return [peer for peer in range(self.world_size) if peer != self.rank]

    def check(self) -> None:
        """Compare the last result with what it must be."""
        assert_close(self.out, self.expected, reduction=self.shape[2], what=self.op)

    def check_sequential(self) -> None:
        """The same of a baseline."""
        self.check()

    def check_pipelined(self) -> None:
        """The same."""
        self.check()

    def check_ours(self) -> None:
        """The same, and what the ghosts have got."""
        self.check()
        self.check_departed()

    @abc.abstractmethod
    def departed(self, peer: int) -> torch.Tensor:
        """What the last call has put into a ghost's memory."""

    @abc.abstractmethod
    def check_departed(self) -> None:
        """Compare what has reached the ghosts."""


_played: weakref.WeakKeyDictionary[Group, Ghosts] = weakref.WeakKeyDictionary()


def ghosts_of(group: Group) -> Ghosts:
    """One set of ghosts per group: they count its calls."""
    found = _played.get(group)
    if found is None:
        # By a proxy: what a group is the key of must not keep it alive.
        found = _played[group] = Ghosts(cast(Group, weakref.proxy(group)))
    return found
