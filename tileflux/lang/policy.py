"""What a tile waits for, and what happens to a finished one: the policies that turn one GEMM main loop into every op.

A *wait* is called before the first tile of a chunk. A *finish* gets the finished tile, in fp32, and where it lies. Of
a tile that leaves by TMA, which takes its time, others are told later, by ``count_settled`` during the next one.
Both take the plan ``table`` of their op (``lang/turn.py``); plain ``gemm`` has none.
"""

import triton
import triton.language as tl

from tileflux.lang.hopper import PIECE, store_by_threads, store_by_tma, sum_by_threads
from tileflux.lang.remote import typed
from tileflux.lang.signal import arrive, count, settle_stores, signal, tma_fence, wait
from tileflux.lang.turn import (
    CHUNK_ROWS,
    GUARD,
    HALF_BYTES,
    OP,
    RANK,
    SLAB_COLUMNS,
    SLOT_BYTES,
    STAGING,
    ack_word,
    await_acks,
    await_flags,
    counter_word,
    current_epoch,
    data,
    flag_word,
    raise_flags,
    shard,
    word,
)

__all__ = [
    "announce_part",
    "await_word",
    "count_settled",
    "pitch_of",
    "scatter_tile",
    "send_tile",
    "settling_counter",
    "slot",
    "spread_tile",
    "stage_tile",
    "store_block",
    "store_tile",
    "sum_own_tile",
    "sum_slots",
    "wait_for_nothing",
    "wait_for_rows",
    "wait_for_slot",
    "wait_for_slots",
    "wait_for_stages",
    "wait_for_word",
]


@triton.jit
def wait_for_nothing(table, owner, chunk, SPEC: tl.constexpr):
    """Everything is there."""


@triton.jit
def wait_for_rows(table, owner, chunk, SPEC: tl.constexpr):
    """The chunk's rows have arrived from their owner."""
    rank = word(table, RANK)
    source = owner
    if SPEC.alone < 0:
        # One's own go through the weight with the next rank's: if they began before, each would read it for themselves.
        source = tl.where(owner == rank, (rank + 1) % SPEC.world_size, owner)
        _, num_rows = shard(table, source, SPEC.world_size)
        source = tl.where(chunk * word(table, CHUNK_ROWS) < num_rows, source, rank)
    if source != rank:
        flag = flag_word(table, rank, source, chunk, SPEC.world_size)
        wait_for_word(flag, current_epoch(table, SPEC.world_size) + 1, source, table, SPEC)


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
        wait_for_word(ack_word(table, rank, owner, SPEC.world_size), wanted, owner, table, SPEC)


@triton.jit
def wait_for_slots(table, owner, chunk, SPEC: tl.constexpr):
    """As ``wait_for_slot``, for every peer."""
    await_acks(table, current_epoch(table, SPEC.world_size) - 1, SPEC.world_size)
    if SPEC.use_tma:
        tma_fence()


@triton.jit
def store_tile(value, out, place, table, SPEC: tl.constexpr):
    """Into the output. ``place`` is (owner, first row of its shard, row, column, end of the rows, N, number, turn)."""
    store_block(value, out, place[1] + place[2], place[3], place[1] + place[4], place[5], SPEC)


@triton.jit
def scatter_tile(value, out, place, table, SPEC: tl.constexpr):
    """Into my slot at the tile's owner, with a flag; one's own tile, the last to come, is summed with all peers'."""
    rank = word(table, RANK)
    epoch = current_epoch(table, SPEC.world_size)
    owner, _, row, column, num_rows, N, number, _ = place
    store_block(value, slot(table, owner, rank, epoch, SPEC.world_size), row, column, num_rows, N, SPEC)
    if owner != rank:
        signal(flag_word(table, owner, rank, number, SPEC.world_size), epoch + 1)
    else:
        sum_own_tile(value.shape, out, place, number, table, SPEC)


@triton.jit
def send_tile(value, out, place, table, SPEC: tl.constexpr):
    """Into my slot at the tile's owner, one's own too; the last of a shard's tiles raises the flag of all."""
    rank = word(table, RANK)
    epoch = current_epoch(table, SPEC.world_size)
    owner, _, row, column, num_rows, N, _, _ = place
    store_block(value, slot(table, owner, rank, epoch, SPEC.world_size), row, column, num_rows, N, SPEC)
    if owner != rank:
        announce_part(value.shape, owner, 0, num_rows, N, table, SPEC)


@triton.jit
def announce_part(SHAPE: tl.constexpr, owner, chunk, num_rows, num_columns, table, SPEC: tl.constexpr):
    """One more tile has been stored at ``owner``: the last of so many rows and columns raises the flag of ``chunk``."""
    rank = word(table, RANK)
    num_tiles = tl.cdiv(num_rows, SHAPE[0]) * tl.cdiv(num_columns, SHAPE[1])
    if arrive(counter_word(table, rank, owner, chunk, SPEC.world_size), num_tiles):
        signal(flag_word(table, owner, rank, chunk, SPEC.world_size), current_epoch(table, SPEC.world_size) + 1)
    if SPEC.use_tma:
        tma_fence()


@triton.jit
def stage_tile(value, out, place, table, SPEC: tl.constexpr):
    """For copies to send: into this rank's own memory, and counted; one's own tile into one's own slot."""
    # Nothing is summed here: who waits for the last shard with tiles left to multiply would do both after it has come.
    rank = word(table, RANK)
    owner, first_row, row, column, num_rows, N, _, _ = place
    # A shard lies slab by slab, so that each can leave, in one piece, as soon as it is complete.
    slab_columns = word(table, SLAB_COLUMNS)
    slab = column // slab_columns
    first_column = slab * slab_columns
    width = min(N - first_column, slab_columns)
    if SPEC.settles:
        # All slabs are equally wide, so that they are rows of one matrix, one behind the other.
        staging, own_slot, buffers = out
        below = slab * num_rows + row
        if owner != rank:
            below += first_row * tl.cdiv(N, slab_columns)
            store_by_tma(value, (staging, buffers), below, column - first_column, 0, value.shape[1] // PIECE)
        else:
            store_by_tma(value, (own_slot, buffers), below, column - first_column, 0, value.shape[1] // PIECE)
    else:
        before = num_rows.to(tl.int64) * first_column
        if owner != rank:
            to = data(table, rank, SPEC.world_size) + tl.load(table + STAGING)
            before += first_row.to(tl.int64) * N
        else:
            to = slot(table, rank, rank, current_epoch(table, SPEC.world_size), SPEC.world_size)
        to += before * (SPEC.out_type.primitive_bitwidth // 8)
        store_block(value, to, row, column - first_column, num_rows, width, SPEC)
        if owner != rank:
            count(counter_word(table, rank, owner, slab, SPEC.world_size))


@triton.jit
def settling_counter(place, table, SPEC: tl.constexpr):
    """The address at which ``count_settled`` counts a tile that ``stage_tile`` has stored by TMA; 0 for one's own."""
    rank = word(table, RANK)
    owner, _, _, column, _, _, _, _ = place
    slab = column // word(table, SLAB_COLUMNS)
    return tl.where(owner != rank, counter_word(table, rank, owner, slab, SPEC.world_size).to(tl.int64), 0)


@triton.jit
def count_settled(counter):
    """Count the tile at whose end ``settling_counter`` gave this, once it is written."""
    settle_stores()
    if counter != 0:
        count(counter.to(tl.pointer_type(tl.int32)))


@triton.jit
def spread_tile(value, out, place, table, SPEC: tl.constexpr):
    """First turn: into my slot on every rank, with a flag. Second turn: wait for everyone's, and sum."""
    rank = word(table, RANK)
    epoch = current_epoch(table, SPEC.world_size)
    _, _, row, column, num_rows, N, number, turn = place
    if turn == 0:
        for hop in range(SPEC.world_size):
            peer = (rank + 1 + hop) % SPEC.world_size
            store_block(value, slot(table, peer, rank, epoch, SPEC.world_size), row, column, num_rows, N, SPEC)
        raise_flags(table, number, SPEC.world_size, SPEC.world_size)
    else:
        # One's own flag too: another program of this rank may have computed the tile.
        _wait_for_flags(table, number, SPEC.world_size, SPEC)
        _sum_tile(value.shape, out, place, table, SPEC)


@triton.jit
def _wait_for_flags(table, index, COUNT: tl.constexpr, SPEC: tl.constexpr):
    """``await_flags``; and what TMA loads from then on is what was there."""
    await_flags(table, index, COUNT, SPEC.world_size)
    if SPEC.use_tma:
        tma_fence()


@triton.jit
def sum_slots(first, offsets, mask, stride, TYPE: tl.constexpr, ALIGNED: tl.constexpr, WORLD: tl.constexpr):
    """fp32 sum, from rank 0 on, of what lies at ``offsets`` in each of W slots, ``stride`` bytes apart."""
    total = tl.zeros(offsets.shape, tl.float32)
    for source in range(WORLD):
        source_slot = typed(first + source.to(tl.int64) * stride, TYPE, ALIGNED)
        total += tl.load(source_slot + offsets, mask=mask).to(tl.float32)
    return total


@triton.jit
def sum_own_tile(SHAPE: tl.constexpr, out, place, index, table, SPEC: tl.constexpr):
    """Sum a tile that this program has just stored with all peers', each announced by its flag number ``index``."""
    _wait_for_flags(table, index, SPEC.world_size - 1, SPEC)
    # The sum reads this program's own partial back from memory, with other threads than have stored it.
    tl.debug_barrier()
    _sum_tile(SHAPE, out, place, table, SPEC)


@triton.jit
def _sum_tile(SHAPE: tl.constexpr, out, place, table, SPEC: tl.constexpr):
    """Sum what lies in all ranks' slots of a tile into the output."""
    rank = word(table, RANK)
    _, _, row, column, num_rows, N, _, _ = place
    pitch = pitch_of(N, SPEC)
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
def store_block(value, to, row, column, num_rows, N, SPEC: tl.constexpr):
    """A tile of ``value`` to ``to``, where rows are N elements apart, as far as there are rows and columns."""
    if SPEC.is_hopper:
        _store_on_hopper(value, to, row, column, num_rows, N, SPEC)
    else:
        _store_rows(value, to, row, column, num_rows, N, SPEC)


@triton.jit
def _store_on_hopper(value, to, row, column, num_rows, N, SPEC: tl.constexpr):
    if SPEC.out_by_tma:
        store_by_tma(value, to, row, column, 0, value.shape[1] // PIECE)
    else:
        pitch = pitch_of(N, SPEC)
        corner = typed(to, SPEC.out_type, SPEC.out_aligned) + (row.to(tl.int64) * pitch + column)
        store_by_threads(value, corner, num_rows - row, pitch - column, pitch, SPEC.out_type)


@triton.jit
def _store_rows(value, to, row, column, num_rows, N, SPEC: tl.constexpr):
    pitch = pitch_of(N, SPEC)
    # One 64-bit address, and 32-bit offsets from it: an address per element would take twice the accumulator's room.
    corner = typed(to, SPEC.out_type, SPEC.out_aligned) + (row.to(tl.int64) * pitch + column)
    rows = tl.arange(0, value.shape[0])
    columns = tl.arange(0, value.shape[1])
    mask = (row + rows < num_rows)[:, None] & (column + columns < pitch)[None, :]
    tl.store(corner + (rows[:, None] * pitch + columns[None, :]), value.to(SPEC.out_type), mask=mask)


@triton.jit
def pitch_of(N, SPEC: tl.constexpr):
    """N; where rows are whole units of 16 bytes, so that the compiler can tell and stores not element by element."""
    if SPEC.out_aligned:
        N = N // (128 // SPEC.out_type.primitive_bitwidth) * (128 // SPEC.out_type.primitive_bitwidth)
    return N


@triton.jit
def await_word(flag, wanted, peer, table):
    """``wait`` with the guard and the op of the plan."""
    wait(flag, wanted, peer, tl.load(table + GUARD).to(tl.pointer_type(tl.int64)), word(table, OP))


@triton.jit
def wait_for_word(flag, wanted, peer, table, SPEC: tl.constexpr):
    """``await_word``; and what TMA loads from then on is what was there."""
    await_word(flag, wanted, peer, table)
    if SPEC.use_tma:
        tma_fence()
