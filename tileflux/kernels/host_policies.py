"""The policies on the CPU: what a tile reads, waits for and becomes, over the same buffers and flags as on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tileflux.kernels.groups import Groups, sum_choices
from tileflux.kernels.operands import Operands
from tileflux.kernels.turns import Turn
from tileflux.symm.base import Copy, FlagWrite
from tileflux.symm.group import Group

__all__ = ["POLICIES", "Policies", "Tile"]


@dataclass(frozen=True)
class Tile:
    """A tile to compute: whose rows, which of them, which columns."""

    owner: int
    chunk: int
    rows: range
    """Within the owner's shard."""
    columns: range
    number: int
    turn: int
    expert: int = 0
    """Of grouped rows; the owner is then the stage at which the last of them arrive."""


@dataclass(frozen=True)
class _Sent:
    """What a copy under way carries, to whom."""

    peer: int
    index: int
    nbytes: int
    asked_ns: int


class Policies:
    """What a tile reads, waits for and becomes: of plain ``gemm``, and where an op does not say otherwise."""

    def __init__(self, operands: Operands) -> None:
        self.operands = operands
        self.sending: list[Copy] = []
        """Copies under way: until the last has landed, the call is not over."""
        self.sent: list[_Sent] = []

    def send(self, group: Group, to: torch.Tensor, rows: torch.Tensor, flag: FlagWrite, peer: int, index: int) -> None:
        """Let rows, or a tile, travel to a peer; then the flag."""
        self.sent.append(_Sent(peer, index, rows.nbytes, time.perf_counter_ns()))
        self.sending.append(group.copy_async(to, rows, signal=flag))

    def feed(self) -> None:
        """Start sending."""

    def wait(self, tile: Tile) -> None:
        """Return when the tile may be computed."""

    def end(self) -> None:
        """Return when nothing more of this call will come from peers."""

    def rows(self, tile: Tile) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rows of x, and their scales."""
        x, scale, groups = self.operands.x, self.operands.scale_x, self.operands.groups
        if groups is None or not groups.picks_rows:
            return self._cut(x, scale, tile.rows)
        picked = _picked(groups, tile)
        return x[picked], scale if scale is None or scale.dim() == 0 else scale[picked]

    def finish(self, tile: Tile, value: torch.Tensor | None) -> None:
        """Put the tile where it belongs."""
        self._put(self.operands.out, tile.rows, tile.columns, value)

    def _cut(
        self, x: torch.Tensor, scale: torch.Tensor | None, rows: range, first: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        cut = slice(first + rows.start, first + rows.stop)
        return x[cut], scale if scale is None or scale.dim() == 0 else scale[cut]

    def _put(self, out: torch.Tensor, rows: range, columns: range, value: torch.Tensor | None, first: int = 0) -> None:
        assert value is not None
        out[first + rows.start : first + rows.stop, columns.start : columns.stop] = value


def _picked(groups: Groups, tile: Tile) -> torch.Tensor:
    """Which rows of x a tile's are."""
    return groups.tokens[tile.rows.start : tile.rows.stop].long()


class _Gathered(Policies):
    """Own rows in place, the others' where they have arrived."""

    def __init__(self, operands: Operands, group: Group, turn: Turn) -> None:
        super().__init__(operands)
        self.group, self.turn, self.rank, self.plan = group, turn, group.rank, turn.plan
        self._buffer = turn.rows_at(self.rank, operands.x.dtype, operands.depth)

    def rows(self, tile: Tile) -> tuple[torch.Tensor, torch.Tensor | None]:
        if tile.owner == self.rank:
            return super().rows(tile)
        scales = None if self.operands.scale_x is None else self.turn.gathered_scales()
        return self._cut(self._buffer, scales, tile.rows, self.plan.first_rows[tile.owner])

    def finish(self, tile: Tile, value: torch.Tensor | None) -> None:
        self._put(self.operands.out, tile.rows, tile.columns, value, self.plan.first_rows[tile.owner])


class _Gather(_Gathered):
    """Send own rows to everyone; a tile waits for the chunk it is in."""

    def feed(self) -> None:
        world_size, x, scale = self.group.world_size, self.operands.x, self.operands.scale_x
        first = self.plan.first_rows[self.rank]
        for hop in range(1, world_size):
            peer = (self.rank - hop) % world_size
            self.turn.wait_for_buffer(peer, calls_ago=1)
            buffer = self.turn.rows_at(peer, x.dtype, self.operands.depth)
            for chunk in range(self.plan.num_chunks):
                rows = self.plan.chunk(self.rank, chunk)
                if rows:
                    cut, place = slice(rows.start, rows.stop), slice(first + rows.start, first + rows.stop)
                    if scale is not None:
                        self.turn.scales_at(peer)[place] = scale[cut]
                    flag = FlagWrite(self.turn.flag(peer, chunk), self.turn.epoch() + 1)
                    self.send(self.group, buffer[place], x[cut], flag, peer, chunk)

    def wait(self, tile: Tile) -> None:
        if tile.owner != self.rank:
            self.turn.wait_for_flag(tile.owner, tile.chunk)


class _GatheredGrouped(_Gathered):
    """Rows picked from what all ranks have: own ones in place, the others' where they have arrived."""

    def rows(self, tile: Tile) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert self.operands.groups is not None
        picked = _picked(self.operands.groups, tile)
        first, x, scale = self.plan.first_rows[self.rank], self.operands.x, self.operands.scale_x
        # By number: through a mask torch does not put a single element of fp8.
        own = ((picked >= first) & (picked < first + len(x))).nonzero().flatten()
        rows, scales = self._buffer[picked], None
        rows[own] = x[picked[own] - first]
        if scale is not None:
            scales = self.turn.gathered_scales()[picked]
            scales[own] = scale[picked[own] - first]
        return rows, scales

    def finish(self, tile: Tile, value: torch.Tensor | None) -> None:
        self._put(self.operands.out, tile.rows, tile.columns, value)


class _GatherGrouped(_GatheredGrouped, _Gather):
    """Send own rows to everyone; a tile waits for all ranks whose rows may be among its own."""

    _stage = 0

    def wait(self, tile: Tile) -> None:
        self._wait_for(tile.owner)

    def end(self) -> None:
        self._wait_for(self.group.world_size - 1)

    def _wait_for(self, stage: int) -> None:
        while self._stage < stage:
            self._stage += 1
            source = (self.rank + self._stage) % self.group.world_size
            for chunk in range(self.plan.num_chunks):
                if self.plan.chunk(source, chunk):
                    self.turn.wait_for_flag(source, chunk)


class _Scatter(Policies):
    """A tile goes to its owner; the owner sums all ranks' when it comes to its own."""

    def __init__(self, operands: Operands, group: Group, turn: Turn) -> None:
        super().__init__(operands)
        self.group, self.turn, self.rank, self.plan = group, turn, group.rank, turn.plan
        self.world_size = group.world_size
        self._is_linked = group.traits.link is not None
        self._free: set[int] = set()

    def wait(self, tile: Tile) -> None:
        self._wait_for_slot(tile.owner)

    def rows(self, tile: Tile) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._cut(self.operands.x, self.operands.scale_x, tile.rows, self.plan.first_rows[tile.owner])

    def finish(self, tile: Tile, value: torch.Tensor | None) -> None:
        self._send(tile.owner, tile, value)
        if tile.owner == self.rank:
            self._sum(tile)

    def _send(self, peer: int, tile: Tile, value: torch.Tensor | None) -> None:
        assert value is not None
        rows, columns = slice(tile.rows.start, tile.rows.stop), slice(tile.columns.start, tile.columns.stop)
        place = self._slot(peer, self.rank)[rows, columns]
        if self._is_linked and peer != self.rank:
            flag = FlagWrite(self.turn.flag(peer, tile.number), self.turn.epoch() + 1)
            self.send(self.group, place, value.to(place.dtype), flag, peer, tile.number)
        else:
            place.copy_(value)
            self.turn.raise_flag(peer, tile.number)

    def _wait_for_slot(self, peer: int) -> None:
        if peer != self.rank and peer not in self._free:
            self.turn.wait_for_buffer(peer, calls_ago=2)
            self._free.add(peer)

    def _slot(self, owner: int, source: int) -> torch.Tensor:
        return self.turn.slot(owner, source, self.operands.out.dtype, self.operands.num_columns)

    def _sum(self, tile: Tile) -> None:
        for hop in range(1, self.world_size):
            self.turn.wait_for_flag((self.rank - hop) % self.world_size, tile.number)
        rows, columns = slice(tile.rows.start, tile.rows.stop), slice(tile.columns.start, tile.columns.stop)
        total = torch.zeros(len(tile.rows), len(tile.columns))
        for source in range(self.world_size):
            total += self._slot(self.rank, source)[rows, columns]
        self.operands.out[rows, columns] = total


class _Combine(_Scatter):
    """First turn: a tile stays here. Second: tokens' choices are added up, and go to their owner."""

    def __init__(self, operands: Operands, group: Group, turn: Turn) -> None:
        super().__init__(operands, group, turn)
        assert operands.groups is not None
        shape, kind = (-1, operands.num_columns), operands.out.dtype
        self._products = turn.own[: turn.plan.staging_bytes].view(kind).view(shape)
        self._positions, self._weights = operands.groups.positions, operands.groups.weights

    def wait(self, tile: Tile) -> None:
        if tile.turn:
            self._wait_for_slot(tile.owner)

    def rows(self, tile: Tile) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._cut(self.operands.x, self.operands.scale_x, tile.rows)

    def finish(self, tile: Tile, value: torch.Tensor | None) -> None:
        if tile.turn == 0:
            self._put(self._products, tile.rows, tile.columns, value)
            return
        first = self.plan.first_rows[tile.owner]
        tokens = slice(first + tile.rows.start, first + tile.rows.stop)
        products = self._products[:, tile.columns.start : tile.columns.stop]
        super().finish(tile, sum_choices(products, self._positions[tokens], self._weights[tokens]))


class _Spread(_Scatter):
    """First turn: a tile goes to everyone. Second: everyone sums all ranks'."""

    def wait(self, tile: Tile) -> None:
        for hop in range(1, self.world_size):
            self._wait_for_slot((self.rank + hop) % self.world_size)

    def rows(self, tile: Tile) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._cut(self.operands.x, self.operands.scale_x, tile.rows)

    def finish(self, tile: Tile, value: torch.Tensor | None) -> None:
        if tile.turn:
            self._sum(tile)
            return
        assert value is not None
        value = value.to(self.operands.out.dtype)
        for hop in range(self.world_size):
            peer = (self.rank + 1 + hop) % self.world_size
            self._send(peer, tile, value)


POLICIES: dict[str, Callable[[Operands, Group, Turn], Policies]] = {
    "ag_gemm": _Gather,
    "ag_gemm, rows already here": _Gathered,
    "moe_ag_gemm": _GatherGrouped,
    "moe_ag_gemm, rows already here": _GatheredGrouped,
    "gemm_rs": _Scatter,
    "moe_gemm_rs": _Combine,
    "gemm_ar": _Spread,
}
