"""What a tile waits for, and what happens to a finished one: the policies that turn one GEMM main loop into every op.

A *wait* is called before the first tile of a chunk. A *finish* gets the finished tile, in fp32, and where it lies.
Both take the plan ``table`` of their op (``lang/turn.py``); plain ``gemm`` has none.
"""

import triton
import triton.language as tl

from tileflux.config import GROUPS
from tileflux.lang.hopper import PIECE, store_by_threads, store_by_tma, sum_by_threads
from tileflux.lang.remote import typed
from tileflux.lang.signal import arrive, count, signal, tma_fence, wait
from tileflux.lang.turn import (
    CHUNK_ROWS,
    GUARD,
    HALF_BYTES,
    OP,
    RANK,
    SLOT_BYTES,
    STAGING,
    ack_word,
    counter_word,
    current_epoch,
    data,
    flag_word,
    shard,
    word,
)

__all__ = [
    "await_word",
    "combine_tile",
    "scatter_tile",
    "send_sums",
    "send_tile",
    "slot",
    "spread_tile",
    "stage_sums",
    "stage_tile",
    "store_tile",
    "sum_slots",
    "wait_for_nothing",
    "wait_for_rows",
    "wait_for_slot",
    "wait_for_slots",
    "wait_for_stages",
]


_TOP_K = tl.constexpr(GROUPS.top_k)
_POSITIONS = tl.constexpr(GROUPS.positions)
_WEIGHTS = tl.constexpr(GROUPS.weights)


@triton.jit
def wait_for_nothing(table, owner, chunk, SPEC: tl.constexpr):
    """Everything is there."""


@triton.jit
def wait_for_rows(table, owner, chunk, SPEC: tl.constexpr):
    """The chunk's rows have arrived from their owner."""
    rank = word(table, RANK)
    if owner != rank:
        flag = flag_word(table, rank, owner, chunk, SPEC.world_size)
        _wait(flag, current_epoch(table, SPEC.world_size) + 1, owner, table, SPEC)


@triton.jit
def wait_for_stages(table, stage, chunk, SPEC: tl.constexpr):
    """All rows of every rank that arrives up to ``stage`` have come: of grouped rows, whose tiles have rows of many."""
    rank = word(table, RANK)
    for hop in range(1, stage + 1):
        source = (rank + hop) % SPEC.world_size
        _, num_rows = shard(table, source, SPEC.world_size)
        for index in range(tl.cdiv(num_rows, word(table, CHUNK_ROWS))):
            wait_for_rows(table, source, index, SPEC)


@triton.jit
def wait_for_slot(table, owner, chunk, SPEC: tl.constexpr):
    """The half of the owner's buffer that this call uses has been read: there, the call before the last is over."""
    rank = word(table, RANK)
    if owner != rank:
        wanted = current_epoch(table, SPEC.world_size) - 1
        _wait(ack_word(table, rank, owner, SPEC.world_size), wanted, owner, table, SPEC)


@triton.jit
def wait_for_slots(table, owner, chunk, SPEC: tl.constexpr):
    """As ``wait_for_slot``, for every peer."""
    rank = word(table, RANK)
    for hop in range(1, SPEC.world_size):
        wait_for_slot(table, (rank + hop) % SPEC.world_size, chunk, SPEC)


@triton.jit
def store_tile(value, out, place, table, SPEC: tl.constexpr):
    """Into the output. ``place`` is (owner, first row of its shard, row, column, end of the rows, N, number, turn)."""
    _store(value, out, place[1] + place[2], place[3], place[1] + place[4], place[5], SPEC)


@triton.jit
def scatter_tile(value, out, place, table, SPEC: tl.constexpr):
    """Into my slot at the tile's owner, with a flag; one's own tile, the last to come, is summed with all peers'."""
    rank = word(table, RANK)
    epoch = current_epoch(table, SPEC.world_size)
    owner, _, row, column, num_rows, N, number, _ = place
    _store(value, slot(table, owner, rank, epoch, SPEC.world_size), row, column, num_rows, N, SPEC)
    if owner != rank:
        signal(flag_word(table, owner, rank, number, SPEC.world_size), epoch + 1)
    else:
        _sum_own_tile(value.shape, out, place, number, table, SPEC)


@triton.jit
def send_tile(value, out, place, table, SPEC: tl.constexpr):
    """Into my slot at the tile's owner, one's own too; the last of a shard's tiles raises the flag of all."""
    rank = word(table, RANK)
    epoch = current_epoch(table, SPEC.world_size)
    owner, _, row, column, num_rows, N, _, _ = place
    _store(value, slot(table, owner, rank, epoch, SPEC.world_size), row, column, num_rows, N, SPEC)
    if owner != rank:
        _announce_part(value.shape, owner, 0, num_rows, N, table, SPEC)


@triton.jit
def _announce_part(SHAPE: tl.constexpr, owner, chunk, num_rows, num_columns, table, SPEC: tl.constexpr):
    """One more tile has been stored at ``owner``: the last of so many rows and columns raises the flag of ``chunk``."""
    rank = word(table, RANK)
    num_tiles = tl.cdiv(num_rows, SHAPE[0]) * tl.cdiv(num_columns, SHAPE[1])
    if arrive(counter_word(table, rank, owner, chunk, SPEC.world_size), num_tiles):
        signal(flag_word(table, owner, rank, chunk, SPEC.world_size), current_epoch(table, SPEC.world_size) + 1)


@triton.jit
def stage_tile(value, out, place, table, SPEC: tl.constexpr):
    """For copies to send: into this rank's own memory, and counted. One's own tile goes to one's own slot.

    Nothing is summed here: who waits for the last shard with tiles still to multiply would do both after it has come.
    """
    rank = word(table, RANK)
    owner, first_row, row, column, num_rows, N, _, _ = place
    if owner != rank:
        staging = data(table, rank, SPEC.world_size) + tl.load(table + STAGING)
        _store(value, staging, first_row + row, column, first_row + num_rows, N, SPEC)
        count(counter_word(table, rank, owner, 0, SPEC.world_size))
    else:
        epoch = current_epoch(table, SPEC.world_size)
        _store(value, slot(table, rank, rank, epoch, SPEC.world_size), row, column, num_rows, N, SPEC)


@triton.jit
def combine_tile(value, target, place, table, SPEC: tl.constexpr):
    """First turn: into memory of one's own, and counted. Second: tokens' choices are added up, and go to their owner.

    There, as in ``scatter_tile``, all ranks' are added up. ``target`` is (the output, the list of tiles, the slab, how
    many tiles it has in all).
    """
    out, groups, slab, wanted = target
    rank = word(table, RANK)
    owner, first_row, row, column, num_rows, N, number, turn = place
    counter = counter_word(table, rank, rank, slab, SPEC.world_size)
    staging = data(table, rank, SPEC.world_size) + tl.load(table + STAGING)
    if turn == 0:
        _store(value, staging, row, column, num_rows, N, SPEC)
        count(counter)
    else:
        wait_for_slot(table, owner, slab, SPEC)
        _wait(counter, wanted, rank, table, SPEC)
        epoch = current_epoch(table, SPEC.world_size)
        to = slot(table, owner, rank, epoch, SPEC.world_size)
        pitch = _pitch(N, SPEC)
        _combine_rows(value.shape, groups, staging, to, pitch, column, first_row, row, column, num_rows, N, SPEC)
        if owner != rank:
            signal(flag_word(table, owner, rank, number, SPEC.world_size), epoch + 1)
        else:
            _sum_own_tile(value.shape, out, place, number, table, SPEC)


@triton.jit
def stage_sums(value, target, place, table, SPEC: tl.constexpr):
    """As ``combine_tile``, for copies to send: sums go into this rank's own memory, and are counted by owner and slab.

    There, and in slots, a shard lies slab by slab, so that each is one run of bytes. One's own sums go to one's own
    slot, and nothing is added up here, as in ``stage_tile``. In front of the products the memory has room for a slot of
    every owner.
    """
    _, groups, slab, wanted = target
    rank = word(table, RANK)
    owner, first_row, row, column, num_rows, N, _, turn = place
    counter = counter_word(table, rank, rank, slab, SPEC.world_size)
    sums = data(table, rank, SPEC.world_size) + tl.load(table + STAGING)
    products = sums + SPEC.world_size * tl.load(table + SLOT_BYTES)
    if turn == 0:
        _store(value, products, row, column, num_rows, N, SPEC)
        count(counter)
    else:
        _wait(counter, wanted, rank, table, SPEC)
        to = sums + owner.to(tl.int64) * tl.load(table + SLOT_BYTES)
        if owner == rank:
            to = slot(table, rank, rank, current_epoch(table, SPEC.world_size), SPEC.world_size)
        _combine_into_slab(value.shape, groups, slab, place, products, to, SPEC)
        if owner != rank:
            count(counter_word(table, rank, owner, slab, SPEC.world_size))


@triton.jit
def send_sums(value, target, place, table, SPEC: tl.constexpr):
    """As ``stage_sums``, but into my slot at the owner; the last of a slab's raises its flag."""
    _, groups, slab, wanted = target
    rank = word(table, RANK)
    owner, _, row, column, num_rows, N, _, turn = place
    counter = counter_word(table, rank, rank, slab, SPEC.world_size)
    products = data(table, rank, SPEC.world_size) + tl.load(table + STAGING)
    if turn == 0:
        _store(value, products, row, column, num_rows, N, SPEC)
        count(counter)
    else:
        _wait(counter, wanted, rank, table, SPEC)
        to = slot(table, owner, rank, current_epoch(table, SPEC.world_size), SPEC.world_size)
        num_columns = _combine_into_slab(value.shape, groups, slab, place, products, to, SPEC)
        if owner != rank:
            _announce_part(value.shape, owner, slab, num_rows, num_columns, table, SPEC)


@triton.jit
def _combine_into_slab(SHAPE: tl.constexpr, groups, slab, place, products, to, SPEC: tl.constexpr):
    """``_combine_rows`` into a shard that lies slab by slab; returns the columns of this one."""
    _, first_row, row, column, num_rows, N, _, _ = place
    slab_columns = tl.cdiv(tl.cdiv(N, SPEC.block_n), SPEC.num_slabs) * SPEC.block_n
    first = slab * slab_columns
    num_columns = min(N - first, slab_columns)
    to += num_rows.to(tl.int64) * first * (SPEC.out_type.primitive_bitwidth // 8)
    _combine_rows(
        SHAPE, groups, products, to, _pitch(num_columns, SPEC), column - first,
        first_row, row, column, num_rows, N, SPEC,
    )  # fmt: skip
    return num_columns


@triton.jit
def _combine_rows(
    SHAPE: tl.constexpr, groups, staging, to, to_pitch, to_column, first_row, row, column, num_rows, N,
    SPEC: tl.constexpr,
):  # fmt: skip
    """The choices of a block of tokens, weighted and added up in fp32, a few tokens at a time.

    The block goes to ``to``, at the same row and at ``to_column``, where rows are ``to_pitch`` elements apart.
    """
    ROWS: tl.constexpr = 16
    words = groups.to(tl.pointer_type(tl.int32))
    top_k = tl.load(words + _TOP_K)
    positions = words + tl.load(words + _POSITIONS)
    weights = (words + tl.load(words + _WEIGHTS)).to(tl.pointer_type(tl.float32))
    pitch = _pitch(N, SPEC)
    columns = column + tl.arange(0, SHAPE[1])
    rows_here = typed(staging, SPEC.out_type, SPEC.out_aligned)
    for begin in range(0, SHAPE[0], ROWS):
        rows = row + begin + tl.arange(0, ROWS)
        choices = (first_row + rows) * top_k
        total = tl.zeros((ROWS, SHAPE[1]), tl.float32)
        for choice in range(top_k):
            place = tl.load(positions + choices + choice, mask=rows < num_rows, other=-1)
            weight = tl.load(weights + choices + choice, mask=rows < num_rows, other=0.0)
            mask = (place >= 0)[:, None] & (columns < pitch)[None, :]
            offsets = place[:, None].to(tl.int64) * pitch + columns[None, :]
            value = tl.load(rows_here + offsets, mask=mask, other=0.0).to(tl.float32)
            total += tl.where(mask, weight[:, None] * value, 0.0)
        offsets = rows[:, None].to(tl.int64) * to_pitch + (to_column + tl.arange(0, SHAPE[1]))[None, :]
        mask = (rows < num_rows)[:, None] & (columns < pitch)[None, :]
        tl.store(typed(to, SPEC.out_type, SPEC.out_aligned) + offsets, total.to(SPEC.out_type), mask=mask)


@triton.jit
def spread_tile(value, out, place, table, SPEC: tl.constexpr):
    """First turn: into my slot on every rank, with a flag. Second turn: wait for everyone's, and sum."""
    rank = word(table, RANK)
    epoch = current_epoch(table, SPEC.world_size)
    _, _, row, column, num_rows, N, number, turn = place
    if turn == 0:
        for hop in range(SPEC.world_size):
            peer = (rank + 1 + hop) % SPEC.world_size
            _store(value, slot(table, peer, rank, epoch, SPEC.world_size), row, column, num_rows, N, SPEC)
            signal(flag_word(table, peer, rank, number, SPEC.world_size), epoch + 1)
    else:
        for hop in range(SPEC.world_size):
            # One's own flag too: another program of this rank may have computed the tile.
            source = (rank + SPEC.world_size - 1 - hop) % SPEC.world_size
            _wait(flag_word(table, rank, source, number, SPEC.world_size), epoch + 1, source, table, SPEC)
        _sum_tile(value.shape, out, place, table, SPEC)


@triton.jit
def sum_slots(first, offsets, mask, stride, TYPE: tl.constexpr, ALIGNED: tl.constexpr, WORLD: tl.constexpr):
    """fp32 sum, from rank 0 on, of what lies at ``offsets`` in each of W slots, ``stride`` bytes apart."""
    total = tl.zeros(offsets.shape, tl.float32)
    for source in range(WORLD):
        source_slot = typed(first + source.to(tl.int64) * stride, TYPE, ALIGNED)
        total += tl.load(source_slot + offsets, mask=mask).to(tl.float32)
    return total


@triton.jit
def _sum_own_tile(SHAPE: tl.constexpr, out, place, index, table, SPEC: tl.constexpr):
    """Sum a tile that this program has just stored with all peers', each announced by its flag number ``index``."""
    rank = word(table, RANK)
    epoch = current_epoch(table, SPEC.world_size)
    for hop in range(1, SPEC.world_size):
        source = (rank + SPEC.world_size - hop) % SPEC.world_size
        _wait(flag_word(table, rank, source, index, SPEC.world_size), epoch + 1, source, table, SPEC)
    # The sum reads this program's own partial back from memory, with other threads than have stored it.
    tl.debug_barrier()
    _sum_tile(SHAPE, out, place, table, SPEC)


@triton.jit
def _sum_tile(SHAPE: tl.constexpr, out, place, table, SPEC: tl.constexpr):
    """Sum what lies in all ranks' slots of a tile into the output."""
    rank = word(table, RANK)
    _, _, row, column, num_rows, N, _, _ = place
    pitch = _pitch(N, SPEC)
    first = slot(table, rank, rank * 0, current_epoch(table, SPEC.world_size), SPEC.world_size)
    if SPEC.is_hopper:
        corner = row.to(tl.int64) * pitch + column
        # Slots are whole units of 16 bytes, so that the compiler can tell.
        stride = tl.load(table + SLOT_BYTES) // 16 * (128 // SPEC.out_type.primitive_bitwidth)
        sum_by_threads(
            typed(first, SPEC.out_type, SPEC.out_aligned) + corner, stride,
            typed(out, SPEC.out_type, SPEC.out_aligned) + corner, num_rows - row, pitch - column, pitch,
            SHAPE[0], SHAPE[1], SPEC.out_type, SPEC.world_size,
        )  # fmt: skip
    else:
        _sum_rows(SHAPE, first, out, row, column, num_rows, pitch, table, SPEC)


@triton.jit
def _sum_rows(SHAPE: tl.constexpr, first, out, row, column, num_rows, pitch, table, SPEC: tl.constexpr):
    """A few rows at a time: the registers of a whole tile are those of its accumulator."""
    ROWS: tl.constexpr = 16
    columns = column + tl.arange(0, SHAPE[1])
    for begin in range(0, SHAPE[0], ROWS):
        rows = row + begin + tl.arange(0, ROWS)
        offsets = rows[:, None].to(tl.int64) * pitch + columns[None, :]
        mask = (rows < num_rows)[:, None] & (columns < pitch)[None, :]
        stride = tl.load(table + SLOT_BYTES)
        total = sum_slots(first, offsets, mask, stride, SPEC.out_type, SPEC.out_aligned, SPEC.world_size)
        tl.store(typed(out, SPEC.out_type, SPEC.out_aligned) + offsets, total.to(SPEC.out_type), mask=mask)


@triton.jit
def slot(table, owner, source, epoch, WORLD: tl.constexpr):
    """Address of ``source``'s slot at ``owner``, in the half of the buffer that this epoch uses."""
    half = (epoch & 1).to(tl.int64) * tl.load(table + HALF_BYTES)
    return data(table, owner, WORLD) + half + source.to(tl.int64) * tl.load(table + SLOT_BYTES)


@triton.jit
def _store(value, to, row, column, num_rows, N, SPEC: tl.constexpr):
    if SPEC.is_hopper:
        _store_on_hopper(value, to, row, column, num_rows, N, SPEC)
    else:
        _store_rows(value, to, row, column, num_rows, N, SPEC)


@triton.jit
def _store_on_hopper(value, to, row, column, num_rows, N, SPEC: tl.constexpr):
    if SPEC.out_by_tma:
        store_by_tma(value, to, row, column, 0, value.shape[1] // PIECE)
    else:
        pitch = _pitch(N, SPEC)
        corner = typed(to, SPEC.out_type, SPEC.out_aligned) + (row.to(tl.int64) * pitch + column)
        store_by_threads(value, corner, num_rows - row, pitch - column, pitch, SPEC.out_type)


@triton.jit
def _store_rows(value, to, row, column, num_rows, N, SPEC: tl.constexpr):
    pitch = _pitch(N, SPEC)
    # One 64-bit address, and 32-bit offsets from it: an address per element would take twice the accumulator's room.
    corner = typed(to, SPEC.out_type, SPEC.out_aligned) + (row.to(tl.int64) * pitch + column)
    rows = tl.arange(0, value.shape[0])
    columns = tl.arange(0, value.shape[1])
    mask = (row + rows < num_rows)[:, None] & (column + columns < pitch)[None, :]
    tl.store(corner + (rows[:, None] * pitch + columns[None, :]), value.to(SPEC.out_type), mask=mask)


@triton.jit
def _pitch(N, SPEC: tl.constexpr):
    """N; where rows are whole units of 16 bytes, so that the compiler can tell and stores not element by element."""
    if SPEC.out_aligned:
        N = N // (128 // SPEC.out_type.primitive_bitwidth) * (128 // SPEC.out_type.primitive_bitwidth)
    return N


@triton.jit
def await_word(flag, wanted, peer, table):
    """``wait`` with the guard and the op of the plan."""
    wait(flag, wanted, peer, tl.load(table + GUARD).to(tl.pointer_type(tl.int64)), word(table, OP))


@triton.jit
def _wait(flag, wanted, peer, table, SPEC: tl.constexpr):
    await_word(flag, wanted, peer, table)
    if SPEC.use_tma:
        tma_fence()
