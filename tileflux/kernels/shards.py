"""How M rows are cut into shards and chunks, and how large the regions are that they go through: in numbers alone.

A plan is the same on every rank. ``turns.py`` gives it memory.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from tileflux.config import MAX_CHUNKS, GemmConfig, hashed_once

__all__ = [
    "ALIGNMENT",
    "ShardPlan",
    "combine_shards",
    "gather_shards",
    "pull_shards",
    "scatter_shards",
    "slab_shards",
    "spread_shards",
    "swap_shards",
]

ALIGNMENT = 256
"""Of what lies in one region behind something else, in bytes."""


@hashed_once
@dataclass(frozen=True)
class ShardPlan:
    """How the rows of one call are cut, and what its regions hold."""

    op: str
    rows: tuple[int, ...]
    num_chunks: int
    chunk_rows: int
    num_flags: int
    """Flags each source raises in a peer's memory."""
    data_bytes: int
    slot_bytes: int = 0
    scales: int = 0
    by_copies: bool = False
    """Products are copied to their owners: instead of a second half of slots, the buffer holds what is to be copied."""
    staging_bytes: int = 0
    """Of memory of this rank's own, which calls of all plans share: what is not to be sent as it is.

    Where copies send it slab by slab there is, in front of it, a slot for each owner, from which they do."""
    slab_columns: int = 0
    """Where shards lie and are sent slab by slab, the columns of one; the last has what is left."""

    @functools.cached_property
    def first_rows(self) -> tuple[int, ...]:
        """Row of the whole at which each rank's shard begins."""
        return tuple(sum(self.rows[:rank]) for rank in range(len(self.rows)))

    def chunk(self, rank: int, index: int) -> range:
        """Rows, within ``rank``'s shard, of one of its chunks."""
        return range(min(self.rows[rank], index * self.chunk_rows), min(self.rows[rank], (index + 1) * self.chunk_rows))

    def slabs(self, num_columns: int) -> list[range]:
        """The columns of every slab, or all of them where there are none; none is empty."""
        if not self.slab_columns:
            return [range(num_columns)]
        firsts = range(0, num_columns, self.slab_columns)
        return [range(first, min(num_columns, first + self.slab_columns)) for first in firsts]

    def has_even_slabs(self, num_columns: int) -> bool:
        """Whether all slabs of so many columns are equally wide."""
        return not self.slab_columns or num_columns % self.slab_columns == 0

    def columns(self, slabs: range, num_columns: int) -> range:
        """Of some slabs, one behind the other."""
        all_slabs = self.slabs(num_columns)
        return range(all_slabs[slabs[0]].start, all_slabs[slabs[-1]].stop)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@functools.lru_cache(maxsize=4096)
def gather_shards(op: str, rows: tuple[int, ...], row_bytes: int, scaled: bool, num_chunks: int) -> ShardPlan:
    """All-gather: a buffer for all rows, a flag per chunk. Ranks may differ in N, so nothing here depends on it."""
    longest = max(1, *rows)
    # Cuts are on whole tiles of any size; a shard that is not cut is the chunk itself, and has no steps behind its end.
    chunk_rows = min(longest, _round_up(-(-longest // num_chunks), 256))
    num_chunks = -(-longest // chunk_rows)
    scales = _round_up(sum(rows) * row_bytes, ALIGNMENT)
    data_bytes = scales + 4 * sum(rows) if scaled else sum(rows) * row_bytes
    return ShardPlan(op, rows, num_chunks, chunk_rows, MAX_CHUNKS, data_bytes, scales=scales)


@functools.lru_cache(maxsize=4096)
def pull_shards(op: str, rows: tuple[int, ...], row_bytes: int) -> ShardPlan:
    """Partial sums that peers read where they are: a buffer for all rows, and one flag."""
    return ShardPlan(op, rows, 1, max(1, *rows), 1, sum(rows) * row_bytes)


@functools.lru_cache(maxsize=4096)
def swap_shards(op: str, world_size: int, nbytes: int, num_programs: int) -> ShardPlan:
    """Sums that everybody sends to everybody: twice a slot per source, a flag per program, and room for one's own."""
    slot_bytes = _round_up(nbytes, 16)
    data_bytes = 2 * _round_up(world_size * slot_bytes, ALIGNMENT)
    return ShardPlan(op, (1,) * world_size, 1, 1, num_programs, data_bytes, slot_bytes, staging_bytes=nbytes)


@functools.lru_cache(maxsize=4096)
def scatter_shards(
    op: str, rows: tuple[int, ...], num_columns: int, itemsize: int, config: GemmConfig, by_copies: bool = False
) -> ShardPlan:
    """Reduce-scatter: twice a slot per source for the rows one owns, a flag per tile of them.

    By copies, a flag per slab of a shard, of which there are ``config.num_chunks``.
    """
    longest = max(1, *rows)
    slot_bytes = _round_up(longest * num_columns * itemsize, 16)
    across = -(-num_columns // config.block_n)
    data_bytes = 2 * _round_up(len(rows) * slot_bytes, ALIGNMENT)
    if not by_copies:
        return ShardPlan(op, rows, 1, longest, -(-longest // config.block_m) * across, data_bytes, slot_bytes)
    slab_columns = 0 if config.num_chunks == 1 else _whole_tiles(across, config)
    return ShardPlan(
        op, rows, 1, longest, MAX_CHUNKS, data_bytes, slot_bytes, by_copies=True, slab_columns=slab_columns
    )


def _whole_tiles(num_tiles: int, config: GemmConfig) -> int:
    """Columns of one of ``config.num_chunks`` slabs, or fewer, of so many tiles."""
    return max(1, -(-num_tiles // config.num_chunks)) * config.block_n


@functools.lru_cache(maxsize=4096)
def spread_shards(
    op: str, world_size: int, num_rows: int, num_columns: int, itemsize: int, config: GemmConfig
) -> ShardPlan:
    """One-shot all-reduce: twice a slot per source for all rows, a flag per tile."""
    whole = scatter_shards(op, (num_rows,) * world_size, num_columns, itemsize, config)
    return dataclasses.replace(whole, chunk_rows=num_rows)


@functools.lru_cache(maxsize=4096)
def combine_shards(
    op: str,
    rows: tuple[int, ...],
    capacity: int,
    num_columns: int,
    itemsize: int,
    config: GemmConfig,
    by_slab: bool = False,
    by_copies: bool = False,
) -> ShardPlan:
    """Reduce-scatter of tokens whose rows are elsewhere: as ``scatter_shards``, and room for ``capacity`` such rows.

    ``by_slab``, as by copies always, each slab has one flag. What copies send is in memory of this rank's own, too: the
    buffer has slots alone.
    """
    plan = scatter_shards(op, rows, num_columns, itemsize, config)
    plan = dataclasses.replace(plan, staging_bytes=capacity * num_columns * itemsize)
    if by_slab or by_copies:
        slab_columns = _whole_tiles(-(-num_columns // config.block_n), config)
        plan = dataclasses.replace(plan, num_flags=MAX_CHUNKS, slab_columns=slab_columns)
    if by_copies:
        staging_bytes = len(rows) * plan.slot_bytes + plan.staging_bytes
        plan = dataclasses.replace(
            plan, data_bytes=plan.data_bytes // 2, by_copies=True, staging_bytes=staging_bytes
        )  # fmt: skip
    return plan


@functools.lru_cache(maxsize=4096)
def slab_shards(
    op: str,
    rows: tuple[int, ...],
    capacity: int,
    num_columns: int,
    itemsize: int,
    config: GemmConfig,
    by_copies: bool = False,
) -> ShardPlan:
    """As ``combine_shards`` by slab, where each slab is multiplied by itself, and all are equally wide.

    This rank's own memory has a slot for each owner, however they are sent, and behind them one slab's rows.
    """
    plan = scatter_shards(op, rows, num_columns, itemsize, config)
    slab_columns = _even_slab(num_columns, config.block_n, config.num_chunks)
    return dataclasses.replace(
        plan, num_flags=MAX_CHUNKS, slab_columns=slab_columns, by_copies=by_copies,
        data_bytes=plan.data_bytes // 2 if by_copies else plan.data_bytes,
        staging_bytes=len(rows) * plan.slot_bytes + capacity * slab_columns * itemsize,
    )  # fmt: skip


def _even_slab(num_columns: int, block_n: int, num_slabs: int) -> int:
    """Columns of a slab of which no more than ``num_slabs`` make up all: whole tiles, unless that is far too wide.

    A multiple of 16 in any case, so that each begins as aligned as the first; if none divides
    them, one slab has room for all.
    """
    widths = [num_columns // count for count in range(num_slabs, 0, -1) if num_columns % (16 * count) == 0]
    narrowest = min(widths, default=_round_up(num_columns, 16))
    return next((width for width in widths if width % block_n == 0 and width <= 2 * narrowest), narrowest)
