"""The GEMM main loop on the CPU, with torch: tile by tile in the same order, over the same buffers and flags.

A CPU world runs the real protocol at torch's speed: waits, slots, epochs and acks are those of ``kernels/gemm.py``;
only the product of a tile is torch's. Rows travel on the group's copying thread while this one multiplies. Tiles are
stored into the peer's memory, unless a link is emulated: then they travel like rows.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from tileflux.config import GROUPS, GemmConfig
from tileflux.kernels.copy_host import wait_for_copies
from tileflux.kernels.groups import Groups
from tileflux.kernels.operands import Operands, Role
from tileflux.kernels.recording import HostRecording, current_recorder
from tileflux.kernels.turns import Turn
from tileflux.lang.schedule import arrival_order, replay
from tileflux.perf.timeline import TileSpan, Transfer
from tileflux.symm.base import Copy, FlagWrite
from tileflux.symm.group import Group

__all__ = ["Tile", "grouped_tiles", "multiply", "run_gemm", "tiles"]

_order = functools.cache(replay)


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


def run_gemm(
    operands: Operands,
    role: Role,
    config: GemmConfig,
    *,
    group: Group | None = None,
    turn: Turn | None = None,
    releases: bool = False,
) -> None:
    """What ``launch_gemm`` queues on a GPU; returns when it is done."""
    weight = _Weight(operands)
    if group is None or turn is None:
        rank, shards = 0, _Shards((operands.out.shape[0],), 1, operands.out.shape[0])
        policies: _Policies = _Policies(operands)
    else:
        plan = turn.plan
        rank = group.rank
        rows = plan.rows if role.is_sharded else plan.rows[:1]
        shards = _Shards(rows, plan.num_chunks, plan.chunk_rows)
        policies = _POLICIES[role.name](operands, group, turn)
    if role.feeds:
        policies.feed()
    spans = []
    groups = operands.groups
    if groups is None:
        order = tiles(role, config, rank, shards, operands.num_columns)
    else:
        order = grouped_tiles(groups, config, operands.num_columns)
    for tile in order:
        begin = time.perf_counter_ns()
        policies.wait(tile)
        ready = time.perf_counter_ns()
        value = None if tile.turn else weight.product(*policies.rows(tile), tile.columns, tile.expert)
        computed = time.perf_counter_ns()
        policies.finish(tile, value)
        spans.append((tile, begin, ready, computed, time.perf_counter_ns()))
    policies.end()
    if group is not None and turn is not None:
        wait_for_copies(group, turn.plan.op, policies.sending)
        if releases:
            turn.release()
    _record(role, config, rank, shards.chunk_rows, spans, policies)


def _record(
    role: Role,
    config: GemmConfig,
    rank: int,
    chunk_rows: int,
    spans: Sequence[tuple[Tile, int, int, int, int]],
    policies: _Policies,
) -> None:
    """Write down what a GPU's kernel would have, if somebody records this thread."""
    recorder = current_recorder()
    if recorder is None:
        return
    recording = HostRecording(role.name)
    for tile, *times in spans:
        row = (tile.rows.start - tile.chunk * chunk_rows) // config.block_m
        column = tile.columns.start // config.block_n
        recording.tiles.append(TileSpan(0, 0, tile.owner, tile.chunk, row, column, tile.turn, *times))
    free = 0
    for sent, copy in zip(policies.sent, policies.sending, strict=True):
        begin, free = max(sent.asked_ns, free), copy.landed_ns
        recording.transfers.append(Transfer(rank, sent.peer, sent.index, begin, free, sent.nbytes))
    recorder.add(recording)


@dataclass(frozen=True)
class _Sent:
    """What a copy under way carries, to whom."""

    peer: int
    index: int
    nbytes: int
    asked_ns: int


@dataclass(frozen=True)
class _Shards:
    rows: tuple[int, ...]
    num_chunks: int
    chunk_rows: int


def tiles(role: Role, config: GemmConfig, rank: int, shards: _Shards, num_columns: int) -> Iterator[Tile]:
    """Every tile of a rank, in the order one program would take them."""
    num_m = -(-shards.chunk_rows // config.block_m)
    num_n = -(-num_columns // config.block_n)
    if role.awaits_rows:
        # A rank without columns still waits for everybody's rows: its buffer is not free before they have come.
        num_n = max(num_n, 1)
    order = _order(role.order)
    num_shards = len(shards.rows)
    for step in range(role.num_turns * num_shards * shards.num_chunks * num_m * num_n):
        owner, chunk, m, n, turn = order(step, rank, num_shards, shards.num_chunks, num_m, num_n, config.group_m)
        row = chunk * shards.chunk_rows + m * config.block_m
        end = min(shards.rows[owner], (chunk + 1) * shards.chunk_rows, row + config.block_m)
        if row < end:
            columns = range(n * config.block_n, min(num_columns, (n + 1) * config.block_n))
            yield Tile(owner, chunk, range(row, end), columns, (chunk * num_m + m) * num_n + n, turn)


def grouped_tiles(groups: Groups, config: GemmConfig, num_columns: int) -> Iterator[Tile]:
    """Every tile of rows that are grouped by expert, in the order one program would take them."""
    words, num_n = groups.index, -(-num_columns // config.block_n)
    num_m = int(words[GROUPS.num_tiles])
    listed = words[GROUPS.tiles :][: GROUPS.tile_words * num_m].view(-1, GROUPS.tile_words).tolist()
    for step in range(num_m * num_n):
        _, _, m, n, turn = _order(arrival_order)(step, 0, 1, 1, num_m, num_n, config.group_m)
        expert, first, end, stage = listed[m]
        columns = range(n * config.block_n, min(num_columns, (n + 1) * config.block_n))
        yield Tile(stage, 0, range(first, min(first + groups.block_m, end)), columns, m * num_n + n, turn, expert)


def multiply(operands: Operands) -> None:
    """The whole product as one tile."""
    out = operands.out
    out.copy_(_Weight(operands).product(operands.x, operands.scale_x, range(operands.num_columns)))


class _Weight:
    """The operands that all tiles share, in the type torch multiplies fast and without loss: fp32, or fp64 for int8."""

    def __init__(self, operands: Operands) -> None:
        self._operands = operands
        self._type = torch.float64 if operands.x.dtype == torch.int8 else torch.float32
        self._weight = operands.weight.to(self._type)

    def product(self, x: torch.Tensor, scale: torch.Tensor | None, columns: range, expert: int = 0) -> torch.Tensor:
        """A tile in fp32, with scales, bias and activation."""
        given = self._operands
        x = x.to(self._type)
        value = self._part(x, scale, columns, expert)
        if given.is_gated:
            up = range(columns.start + given.num_columns, columns.stop + given.num_columns)
            return functional.silu(value) * self._part(x, scale, up, expert)
        return _ACTIVATIONS[given.activation](value)

    def _part(self, x: torch.Tensor, scale: torch.Tensor | None, columns: range, expert: int) -> torch.Tensor:
        given, depth = self._operands, self._operands.depth
        before = expert * given.num_columns * (2 if given.is_gated else 1)
        cut = slice(before + columns.start, before + columns.stop)
        if given.groups is None or given.k_major:
            weight = self._weight[cut]
        else:
            weight = self._weight[columns.start : columns.stop, expert * depth : (expert + 1) * depth]
        value = (x @ weight.t()).float()
        if scale is not None:
            value *= scale if scale.dim() == 0 else scale[:, None]
        if given.scale_weight is not None:
            value *= given.scale_weight if given.scale_weight.dim() == 0 else given.scale_weight[cut]
        if given.bias is not None and given.adds_bias:
            value += given.bias[cut].float()
        return value


def _picked(groups: Groups, tile: Tile) -> torch.Tensor:
    """Which rows of x a tile's are."""
    first = int(groups.index[GROUPS.rows])
    return groups.index[first + tile.rows.start : first + tile.rows.stop].long()


def gelu(value: torch.Tensor) -> torch.Tensor:
    """With ``erfc``, where torch's own in fp32 subtracts almost 1 from 1: far below zero little of it is left."""
    if value.dtype != torch.float32 or value.is_cuda:
        return functional.gelu(value)
    tail: torch.Tensor = torch.special.erfc(value * -(0.5**0.5))
    return tail.mul_(value).mul_(0.5)


_ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda value: value,
    "relu": functional.relu,
    "gelu": gelu,
    "silu": functional.silu,
}


class _Policies:
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


class _Gathered(_Policies):
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


class _Scatter(_Policies):
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


_POLICIES: dict[str, Callable[[Operands, Group, Turn], _Policies]] = {
    "ag_gemm": _Gather,
    "ag_gemm, rows already here": _Gathered,
    "moe_ag_gemm": _GatherGrouped,
    "moe_ag_gemm, rows already here": _GatheredGrouped,
    "gemm_rs": _Scatter,
    "gemm_ar": _Spread,
}
