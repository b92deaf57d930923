"""How the ranks of a fused op take turns with its buffers: reading its plan, sending rows, and giving back.

A call has a number, its epoch: how many calls of this op the rank has finished before. Who writes and who waits:

    feeder      waits for ack[peer] >= epoch           the peer has finished the call that last used the buffer
                ...copies its rows into the peer's buffer...
                sets the peer's flag to epoch + 1      when the last feeder has moved its part of the chunk
    multiplier  waits for flag >= epoch + 1            before the first tile of a chunk
    last program of the launch to end
                sets every peer's ack to epoch + 1, and the epoch
                sets the count of fetched tiles back, also where the launch does not end the call

Where copies need no SM there are no feeders, and tiles are not stored at their owners: the copy engine carries rows,
and shards of products, on a stream beside the launch.

    open_call   waits for every ack >= epoch           all peers have finished the call before
                sets next to epoch + 1                 which a copy carries to the peer's flag, behind the bytes
    close_chunk waits for a chunk's count of tiles     before its copy; sets the count back

``table`` is the plan (``config.TableLayout``); the words are in ``config.ControlLayout``. Epochs are read from memory,
so that a CUDA graph counts on. A buffer with two halves is used in turn: epoch n waits for ``ack >= n - 1``.
"""

import triton
import triton.language as tl

from tileflux.config import CONTROL, MAX_CHUNKS, TABLE
from tileflux.lang.hopper import lanes, num_threads
from tileflux.lang.remote import copy_run, part
from tileflux.lang.signal import arrive, clock_ns, confirm, reached_all, signal, signal_all, take, wait
from tileflux.lang.trace import note_transfer

__all__ = [
    "ack_word",
    "await_acks",
    "await_flags",
    "await_pieces",
    "close_chunk",
    "confirm_call",
    "counter_word",
    "current_epoch",
    "data",
    "entry",
    "feed",
    "fetch",
    "flag_word",
    "leave",
    "leave_counted",
    "open_call",
    "push_run",
    "raise_flags",
    "release",
    "release_counted",
    "release_silently",
    "shard",
    "word",
]

GUARD = tl.constexpr(TABLE.guard)
OP = tl.constexpr(TABLE.op)
RANK = tl.constexpr(TABLE.rank)
NUM_CHUNKS = tl.constexpr(TABLE.num_chunks)
CHUNK_ROWS = tl.constexpr(TABLE.chunk_rows)
HALF_BYTES = tl.constexpr(TABLE.half_bytes)
SLOT_BYTES = tl.constexpr(TABLE.slot_bytes)
SCALES = tl.constexpr(TABLE.scales)
STAGING = tl.constexpr(TABLE.staging)
SLAB_COLUMNS = tl.constexpr(TABLE.slab_columns)
_ARRAYS = tl.constexpr(TABLE.arrays)
_EPOCH = tl.constexpr(CONTROL.epoch)
_DONE = tl.constexpr(CONTROL.done)
_NEXT = tl.constexpr(CONTROL.next)
_FETCHED = tl.constexpr(CONTROL.fetched)
_ACK = tl.constexpr(CONTROL.ack)
_MAX_CHUNKS = tl.constexpr(MAX_CHUNKS)


@triton.jit
def word(table, INDEX: tl.constexpr):
    """A single number of the plan, 32 bits wide."""
    return tl.load(table + INDEX).to(tl.int32)


@triton.jit
def entry(table, ARRAY: tl.constexpr, rank, WORLD: tl.constexpr):
    """``rank``'s word of array number ARRAY: 0 rows, 1 first row, 2 control, 3 flags, 4 data."""
    return tl.load(table + _ARRAYS + ARRAY * WORLD + rank)


@triton.jit
def shard(table, rank, WORLD: tl.constexpr):
    """(first row, number of rows) that ``rank`` holds of the M rows."""
    return entry(table, 1, rank, WORLD).to(tl.int32), entry(table, 0, rank, WORLD).to(tl.int32)


@triton.jit
def current_epoch(table, WORLD: tl.constexpr):
    """Calls of this op that this rank has finished."""
    return tl.load(_control(table, word(table, RANK), WORLD) + _EPOCH)


@triton.jit
def flag_word(table, owner, source, index, WORLD: tl.constexpr):
    """The flag number ``index`` that ``source`` raises in ``owner``'s memory."""
    # A word belongs to one source whatever the plan: a rank that is a call ahead must not raise another one's flag.
    return entry(table, 3, owner, WORLD).to(tl.pointer_type(tl.int32)) + index * WORLD + source


@triton.jit
def ack_word(table, owner, peer, WORLD: tl.constexpr):
    """Where ``owner`` is told how many calls ``peer`` has finished."""
    return _control(table, owner, WORLD) + _ACK + peer


@triton.jit
def data(table, owner, WORLD: tl.constexpr):
    """Address of ``owner``'s buffer."""
    return entry(table, 4, owner, WORLD)


@triton.jit
def raise_flags(table, index, COUNT: tl.constexpr, WORLD: tl.constexpr):
    """Raise this rank's flag number ``index`` at the next COUNT ranks; the last of W is this one itself."""
    owners, numbers = _ranks(table, WORLD)
    flags = flag_word(table, owners, word(table, RANK), index, WORLD)
    signal_all(flags, numbers < COUNT, current_epoch(table, WORLD) + 1)


@triton.jit
def await_flags(table, index, COUNT: tl.constexpr, WORLD: tl.constexpr):
    """Until the next COUNT ranks have raised their flag number ``index`` here; the last of W is this one itself."""
    _await_words(_flag_here, index, current_epoch(table, WORLD) + 1, table, COUNT, WORLD)


@triton.jit
def await_pieces(table, slab, WORLD: tl.constexpr):
    """Until ``slab`` is here where the next rank's shard comes slab by slab, and others' whole, announced as slab 0."""
    _await_words(_piece_here, slab, current_epoch(table, WORLD) + 1, table, WORLD - 1, WORLD)


@triton.jit
def await_acks(table, wanted, WORLD: tl.constexpr):
    """Until every peer has finished ``wanted`` calls."""
    _await_words(_ack_here, 0, wanted, table, WORLD - 1, WORLD)


@triton.jit
def _await_words(HERE: tl.constexpr, index, wanted, table, COUNT: tl.constexpr, WORLD: tl.constexpr):
    """Until all of them have come: looked at together. Who is long in coming is waited for with a deadline."""
    ranks, numbers = _ranks(table, WORLD)
    if reached_all(HERE(table, ranks, index, WORLD), numbers < COUNT, wanted) == 0:
        rank = word(table, RANK)
        guard = tl.load(table + GUARD).to(tl.pointer_type(tl.int64))
        for hop in range(1, COUNT + 1):
            peer = (rank + hop) % WORLD
            wait(HERE(table, peer, index, WORLD), wanted, peer, guard, word(table, OP))


@triton.jit
def _flag_here(table, source, index, WORLD: tl.constexpr):
    return flag_word(table, word(table, RANK), source, index, WORLD)


@triton.jit
def _piece_here(table, source, slab, WORLD: tl.constexpr):
    return _flag_here(table, source, tl.where(source == (word(table, RANK) + 1) % WORLD, slab, 0), WORLD)


@triton.jit
def _ack_here(table, peer, index, WORLD: tl.constexpr):
    return ack_word(table, word(table, RANK), peer, WORLD)


@triton.jit
def _ranks(table, WORLD: tl.constexpr):
    """All ranks from the next one on, a thread for each, and their numbers in that order; beyond W they repeat."""
    COUNT: tl.constexpr = max(num_threads(), triton.next_power_of_2(WORLD))
    numbers = lanes(COUNT, 1)
    return (word(table, RANK) + 1 + numbers) % WORLD, numbers


@triton.jit
def feed(
    x, scale_x, row_bytes, table, feeder, num_feeders, trace,
    SCALED: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, RECORDS: tl.constexpr,
):  # fmt: skip
    """Send this rank's rows, and their scales, to every peer, chunk by chunk: one of ``num_feeders`` equal programs.

    The left-hand neighbour comes first, since it multiplies this rank's rows right after its own.
    """
    rank = word(table, RANK)
    epoch = current_epoch(table, WORLD)
    guard = tl.load(table + GUARD).to(tl.pointer_type(tl.int64))
    first_row, num_rows = shard(table, rank, WORLD)
    chunk_rows = word(table, CHUNK_ROWS)
    for hop in range(1, WORLD):
        peer = (rank + WORLD - hop) % WORLD
        wait(ack_word(table, rank, peer, WORLD), epoch, peer, guard, word(table, OP))
        buffer = data(table, peer, WORLD)
        for chunk in range(word(table, NUM_CHUNKS)):
            begin = chunk * chunk_rows
            count = min(chunk_rows, num_rows - begin)
            if count > 0:
                if RECORDS:
                    start = clock_ns()
                place = (first_row + begin).to(tl.int64)
                if SCALED:  # noqa: SIM102 - `and` does not keep the compiler from what follows
                    if feeder == 0:
                        scales = buffer + tl.load(table + SCALES)
                        copy_run(scales + place * 4, scale_x + begin.to(tl.int64) * 4, count.to(tl.int64) * 4, BLOCK)
                was_last = push_run(
                    buffer + place * row_bytes, x + begin.to(tl.int64) * row_bytes, count.to(tl.int64) * row_bytes,
                    flag_word(table, peer, rank, chunk, WORLD), epoch + 1,
                    counter_word(table, rank, peer, chunk, WORLD), feeder, num_feeders, BLOCK,
                )  # fmt: skip
                if RECORDS:  # noqa: SIM102
                    if was_last:
                        note_transfer(trace, peer, chunk, start)


@triton.jit
def open_call(table, WORLD: tl.constexpr):
    """Before copies send rows: every peer has finished the call before; ``next`` becomes what flags are set to."""
    rank = word(table, RANK)
    epoch = current_epoch(table, WORLD)
    await_acks(table, epoch, WORLD)
    tl.store(_control(table, rank, WORLD) + _NEXT, epoch + 1)


@triton.jit
def close_chunk(table, owner, chunk, num_tiles, WORLD: tl.constexpr):
    """Before a copy sends a chunk of a shard: all its tiles have been counted. Notes that, for who watches."""
    rank = word(table, RANK)
    guard = tl.load(table + GUARD).to(tl.pointer_type(tl.int64))
    counter = counter_word(table, rank, owner, chunk, WORLD)
    wait(counter, num_tiles, rank, guard, word(table, OP))
    tl.store(counter, 0)
    # Not the epoch: the launch that counted may have ended the call.
    staged = counter + WORLD * _MAX_CHUNKS
    signal(staged, tl.load(_control(table, rank, WORLD) + _NEXT))


@triton.jit
def push_run(to, source, nbytes, flag, value, counter, feeder, num_feeders, BLOCK: tl.constexpr):
    """Move this feeder's part of a run, and raise the flag if all others have moved theirs: then 1, else 0."""
    begin, length = part(nbytes, feeder, num_feeders)
    copy_run(to + begin, source + begin, length, BLOCK)
    was_last = arrive(counter, num_feeders)
    if was_last:
        signal(flag, value)
    return was_last


@triton.jit
def fetch(table, WORLD: tl.constexpr):
    """Ask for the next step of the tile order that no program of this launch has; ``taken`` says which."""
    return take(_control(table, word(table, RANK), WORLD) + _FETCHED)


@triton.jit
def confirm_call(table):
    """``confirm`` with the guard and the op of the plan: the end of every launch that waits."""
    confirm(tl.load(table + GUARD).to(tl.pointer_type(tl.int64)), word(table, OP))


@triton.jit
def leave(table, WORLD: tl.constexpr):
    """End of a launch: 1 for the last of its programs, which sets the count of fetched tiles back; else 0."""
    confirm_call(table)
    control = _control(table, word(table, RANK), WORLD)
    was_last = arrive(control + _DONE, tl.num_programs(0))
    if was_last:
        # A plain store: all have fetched for the last time, and whoever fetches next is in a later launch.
        tl.store(control + _FETCHED, 0)
    return was_last


@triton.jit
def release(table, WORLD: tl.constexpr):
    """End of a launch that ends a call: its last program tells the peers that this rank has finished."""
    epoch = current_epoch(table, WORLD)
    if leave(table, WORLD):
        _give_back(table, epoch, WORLD)


@triton.jit
def release_silently(table, WORLD: tl.constexpr):
    """As ``release``, of a call whose end nobody waits for."""
    epoch = current_epoch(table, WORLD)
    if leave(table, WORLD):
        tl.store(_control(table, word(table, RANK), WORLD) + _EPOCH, epoch + 1)


@triton.jit
def release_counted(table, WORLD: tl.constexpr):
    """As ``release``, where programs have counted in this rank's own counters, which are set back."""
    epoch = current_epoch(table, WORLD)
    if leave_counted(table, WORLD):
        _give_back(table, epoch, WORLD)


@triton.jit
def leave_counted(table, WORLD: tl.constexpr):
    """As ``leave``, likewise."""
    rank = word(table, RANK)
    was_last = leave(table, WORLD)
    if was_last:
        tl.store(counter_word(table, rank, rank, tl.arange(0, _MAX_CHUNKS), WORLD), 0)
    return was_last


@triton.jit
def _give_back(table, epoch, WORLD: tl.constexpr):
    rank = word(table, RANK)
    peers, numbers = _ranks(table, WORLD)
    signal_all(ack_word(table, peers, rank, WORLD), numbers < WORLD - 1, epoch + 1)
    tl.store(_control(table, rank, WORLD) + _EPOCH, epoch + 1)


@triton.jit
def _control(table, owner, WORLD: tl.constexpr):
    return entry(table, 2, owner, WORLD).to(tl.pointer_type(tl.int32))


@triton.jit
def counter_word(table, rank, peer, chunk, WORLD: tl.constexpr):
    """Where programs of ``rank`` count who has moved its part of a chunk for ``peer``, or finished tiles of it."""
    return _control(table, rank, WORLD) + _ACK + WORLD + peer * _MAX_CHUNKS + chunk
