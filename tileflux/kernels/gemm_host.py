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
from tileflux.kernels.host_policies import POLICIES, Policies, Tile
from tileflux.kernels.operands import Operands, Role
from tileflux.kernels.recording import HostRecording, current_recorder
from tileflux.kernels.turns import Turn
from tileflux.lang.schedule import arrival_order, replay, slab_order
from tileflux.perf.timeline import TileSpan, Transfer
from tileflux.symm.group import Group

__all__ = ["Tile", "combined_tiles", "grouped_tiles", "multiply", "run_gemm", "tiles"]

_order = functools.cache(replay)


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
        policies: Policies = Policies(operands)
    else:
        plan = turn.plan
        rank = group.rank
        rows = plan.rows if role.is_sharded else plan.rows[:1]
        shards = _Shards(rows, plan.num_chunks, plan.chunk_rows)
        policies = POLICIES[role.name](operands, group, turn)
    if role.feeds:
        policies.feed()
    spans = []
    groups = operands.groups
    if role.combines and groups is not None:
        order = combined_tiles(groups, config, rank, shards.rows, operands.num_columns)
    elif groups is None:
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
    policies: Policies,
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
        owner, chunk, m, n, turn = order(
            step, rank, num_shards, shards.num_chunks, num_m, num_n, config.group_m, (config.span, config.alone)
        )
        row = chunk * shards.chunk_rows + m * config.block_m
        end = min(shards.rows[owner], (chunk + 1) * shards.chunk_rows, row + config.block_m)
        if row < end:
            columns = range(n * config.block_n, min(num_columns, (n + 1) * config.block_n))
            yield Tile(owner, chunk, range(row, end), columns, (chunk * num_m + m) * num_n + n, turn)


def grouped_tiles(groups: Groups, config: GemmConfig, num_columns: int) -> Iterator[Tile]:
    """Every tile of rows that are grouped by expert, in the order one program would take them."""
    listed, num_n = _listed(groups), -(-num_columns // config.block_n)
    for step in range(len(listed) * num_n):
        _, _, m, n, turn = _order(arrival_order)(step, 0, 1, 1, len(listed), num_n, config.group_m, (1, 0))
        expert, first, end, stage = listed[m]
        columns = range(n * config.block_n, min(num_columns, (n + 1) * config.block_n))
        yield Tile(stage, 0, range(first, min(first + groups.block_m, end)), columns, m * num_n + n, turn, expert)


def combined_tiles(
    groups: Groups, config: GemmConfig, rank: int, rows: tuple[int, ...], num_columns: int
) -> Iterator[Tile]:
    """Every tile of grouped rows, and every block of tokens that is added up of them, as ``slab_order`` has them."""
    listed, num_slabs, num_shards = _listed(groups), config.num_chunks, len(rows)
    num_all = -(-num_columns // config.block_n)
    num_n, num_blocks = -(-num_all // num_slabs), -(-max(rows) // config.block_m)
    for step in range(num_slabs * num_n * (len(listed) + num_shards * num_blocks)):
        owner, slab, m, n, turn = _order(slab_order)(
            step, rank, num_shards, num_slabs, len(listed), num_n, num_blocks, (1, 0)
        )
        columns = range(n * config.block_n, min(num_columns, (n + 1) * config.block_n))
        expert, (first, end) = 0, (m * config.block_m, rows[owner])
        if turn == 0:
            expert, first, end, owner = listed[m]
        if columns and first < end:
            cut = range(first, min(first + config.block_m, end))
            yield Tile(owner, slab, cut, columns, m * num_all + n, turn, expert)


def _listed(groups: Groups) -> list[tuple[int, int, int, int]]:
    """(expert, first row, end of its rows, stage) of every tile."""
    num_words = GROUPS.tile_words * int(groups.index[GROUPS.num_tiles])
    words = groups.index[GROUPS.tiles :][:num_words].view(-1, GROUPS.tile_words)
    return [tuple(tile) for tile in words.tolist()]


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
