"""What both GEMM main loops do around the tiles: cut the work up, find a step's tile, feed the peers, and leave."""

import triton
import triton.language as tl

from tileflux.config import GROUPS
from tileflux.lang.turn import (
    CHUNK_ROWS,
    NUM_CHUNKS,
    RANK,
    confirm_call,
    feed,
    leave,
    leave_counted,
    release,
    release_counted,
    shard,
    word,
)

__all__ = ["cut", "feed_rows", "leave_launch", "locate", "num_steps_of", "picked_rows"]

_COPY_BLOCK = tl.constexpr(2048)
_NUM_TILES = tl.constexpr(GROUPS.num_tiles)
_ROWS = tl.constexpr(GROUPS.rows)
_TILES = tl.constexpr(GROUPS.tiles)
_TILE_WORDS = tl.constexpr(GROUPS.tile_words)
_EXPERT = tl.constexpr(GROUPS.expert)
_FIRST = tl.constexpr(GROUPS.first)
_END = tl.constexpr(GROUPS.end)
_STAGE = tl.constexpr(GROUPS.stage)


@triton.jit
def cut(rows, N, table, SPEC: tl.constexpr):
    """(rank, chunks a shard is cut into, rows of a chunk, tiles of a chunk down and across).

    ``rows`` is how many there are; where they are grouped by expert, the address of their list of tiles.
    """
    M = rows.to(tl.int32)
    rank = M * 0
    num_chunks = rank + 1
    chunk_rows = M
    if SPEC.has_table:
        rank = word(table, RANK)
    if SPEC.num_shards > 1:
        num_chunks = word(table, NUM_CHUNKS)
        chunk_rows = word(table, CHUNK_ROWS)
    num_n = tl.cdiv(N, SPEC.block_n)
    if SPEC.awaits_rows:
        # A rank without columns still waits for everybody's rows: its buffer is not free before they have come.
        num_n = tl.maximum(num_n, 1)
    num_m = tl.cdiv(chunk_rows, SPEC.block_m)
    if SPEC.is_grouped:
        num_m = tl.load(_words(rows) + _NUM_TILES)
    if SPEC.combines:
        num_chunks = rank * 0 + SPEC.num_slabs
        num_n = tl.cdiv(num_n, SPEC.num_slabs)
    return rank, num_chunks, chunk_rows, num_m, num_n


@triton.jit
def num_steps_of(parts, SPEC: tl.constexpr):
    """Steps of all programs, of what ``cut`` has given."""
    _, num_chunks, chunk_rows, num_m, num_n = parts
    if SPEC.combines:
        num_steps = num_chunks * num_n * (num_m + SPEC.num_shards * tl.cdiv(chunk_rows, SPEC.block_m))
    else:
        num_steps = SPEC.num_turns * SPEC.num_shards * num_chunks * num_m * num_n
    return num_steps


@triton.jit
def locate(step, parts, rows, N, table, ORDER: tl.constexpr, SPEC: tl.constexpr):
    """(owner, chunk, m, n, turn, first row of the shard, row in it, end of the rows, expert) of a step's tile.

    There is no tile where row is not before the end. Of grouped rows the owner is the stage at which the last of the
    tile's rows arrive.
    """
    rank, num_chunks, chunk_rows, num_m, num_n = parts
    band = rank * 0 + SPEC.group_m
    if SPEC.combines:
        band = tl.cdiv(chunk_rows, SPEC.block_m)
    bands = (SPEC.span, SPEC.alone)
    owner, chunk, m, n, turn = ORDER(step, rank, SPEC.num_shards, num_chunks, num_m, num_n, band, bands)
    first_row = chunk_rows * 0
    num_rows = rows.to(tl.int32)
    if SPEC.num_shards > 1:
        first_row, num_rows = shard(table, owner, SPEC.world_size)
    row = chunk * chunk_rows + m * SPEC.block_m
    # No tile goes past its chunk: the rows behind it are another flag's.
    end = min(num_rows, (chunk + 1) * chunk_rows)
    expert = owner * 0
    if SPEC.combines:
        row = m * SPEC.block_m
        end = num_rows
    if SPEC.is_grouped:  # noqa: SIM102
        if turn == 0:
            tile = _words(rows) + _TILES + m * _TILE_WORDS
            expert = tl.load(tile + _EXPERT)
            first_row = first_row * 0
            row = tl.load(tile + _FIRST)
            end = tl.load(tile + _END)
            owner = tl.load(tile + _STAGE)
    if SPEC.combines:  # noqa: SIM102
        if n * SPEC.block_n >= N:  # the last slab may have fewer columns than others
            end = row
    return owner, chunk, m, n, turn, first_row, row, end, expert


@triton.jit
def picked_rows(groups, rows, mask):
    """Which row of x each of the sorted ``rows`` is."""
    words = _words(groups)
    return tl.load(words + tl.load(words + _ROWS) + rows, mask=mask, other=0)


@triton.jit
def _words(groups):
    return groups.to(tl.pointer_type(tl.int32))


@triton.jit
def feed_rows(a, scale_a, K, table, trace, SPEC: tl.constexpr):
    """What a program does that feeds: its part of this rank's rows, and of their scales, to every peer."""
    row_bytes = K.to(tl.int64) * (SPEC.a_type.primitive_bitwidth // 8)
    scaled_rows: tl.constexpr = SPEC.scale_a == "channel"
    feed(
        a, scale_a, row_bytes, table, tl.program_id(0), K * 0 + SPEC.num_feeders, trace,
        scaled_rows, SPEC.world_size, _COPY_BLOCK, SPEC.records,
    )  # fmt: skip


@triton.jit
def leave_launch(table, SPEC: tl.constexpr):
    """The end of a program, whatever it has done."""
    if SPEC.releases and SPEC.combines:
        release_counted(table, SPEC.world_size)
    elif SPEC.releases:
        release(table, SPEC.world_size)
    elif SPEC.combines:
        leave_counted(table, SPEC.world_size)
    elif SPEC.fetches:
        leave(table, SPEC.world_size)
    elif SPEC.has_table:
        confirm_call(table)
