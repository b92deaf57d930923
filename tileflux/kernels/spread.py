"""The mover of chosen rows: tokens go to every rank that wants them, once, with a few words about each.

Who goes where is on the device: ``sent [W, T_r + 1]`` counts, for each rank, which of this rank's tokens go there
(``lang/rows.py``). Rows go through the mailboxes, one program per lane, step by step: first send to all peers, then
take from all, the order that cannot deadlock. ``kernels/rows_plan.py`` says what a message is. Few tokens are one
message per lane and peer; for many the same launch goes on with more.
"""

import weakref

import triton
import triton.language as tl

from tileflux.config import GUARD, ROWS
from tileflux.kernels import rows_host
from tileflux.kernels.launch import BLOCK, MAX_REGISTERS, NUM_WARPS, DeviceTables, on_host
from tileflux.kernels.loading import launching, load_once
from tileflux.kernels.prepared import launch_step
from tileflux.kernels.rows_plan import plan_rows
from tileflux.lang.mailbox import (
    acquire_slot,
    advance_channels,
    await_message,
    first_sent,
    first_taken,
    publish_slot,
    release_message,
    slot_address,
)
from tileflux.lang.remote import copy_run, typed
from tileflux.lang.rows import (
    copy_row,
    first_token,
    goes_to,
    num_pieces,
    num_steps,
    num_tokens,
    number_of,
    piece,
    plan_word,
    totals,
)
from tileflux.lang.signal import confirm
from tileflux.symm.group import Group

__all__ = ["launch_rows", "spread_rows"]

_RANK = tl.constexpr(GUARD.rank)
_SLAB_BYTES = tl.constexpr(ROWS.slab_bytes)
_ROW_BYTES = tl.constexpr(ROWS.row_bytes)
_PLACES = tl.constexpr(ROWS.places)
_ROWS = tl.constexpr(ROWS.rows)
_NOTE_WORDS = tl.constexpr(ROWS.note_words)
_TOKENS = tl.constexpr(256)  # looked up at a time
_WORDS = tl.constexpr(1024)  # of notes, copied at a time

_tables = weakref.WeakKeyDictionary()


def spread_rows(group: Group, op: str, x, notes, sent, sizes, out, out_notes, arrived, received) -> None:
    """Send rows of ``x [T_r, ...]``, each with its ``notes [T_r, n]`` of int32, to the ranks that ``sent`` names.

    Fills ``out [capacity, ...]`` and ``out_notes [capacity, n]`` in the order of ranks, then of tokens; ``arrived [sum
    of sizes]`` with the row of every token of every rank, or -1; and ``received [W, W]`` with how many rows each rank
    has sent to each, by source. A row beyond ``capacity`` is left out.
    """
    row_bytes = out.shape[1:].numel() * out.element_size()
    plan = plan_rows(sizes, row_bytes, notes.shape[1], group.config)
    if on_host(group):
        rows_host.spread_rows(group, op, plan, x, notes, sent, out, out_notes, arrived, received)
        return
    tensors = (x, notes, sent, out, out_notes, arrived, received)
    launch_rows(group, op, _spread_kernel, plan, tensors, len(out), (), BLOCK)


def launch_rows(group: Group, op: str, kernel, plan, tensors, number: int, types, block: int) -> None:
    """Queue ``kernel``, compiled for ``types``, on the current stream, with a program for each lane of ``plan``."""
    tables = _tables.get(group)
    if tables is None:
        tables = _tables[group] = DeviceTables(group.device, ROWS.num_words(group.world_size))
    addresses = [each.data_ptr() for each in tensors]
    rest = (group.guard.op_number(op), number, group.mailbox.table, group.guard.table)
    constants = (*types, group.world_size, group.config.num_lanes, group.config.slot_bytes, block)

    def launch(grid: int, table) -> None:
        launch_step(kernel, grid, (*addresses, *rest, table), constants, NUM_WARPS, maxnreg=MAX_REGISTERS)

    def load() -> None:
        # Nobody's tokens on the way back: there is no step, and no rank to wait for.
        nothing = plan_rows((0,) * group.world_size, 0, None, group.config)
        launch(1, tables.find(nothing, lambda: nothing.words))

    load_once(group.device, ("rows", plan.has_head, *constants), load, group)
    table = tables.find(plan, lambda: plan.words)
    with launching(group):
        launch(plan.num_lanes, table)


@triton.jit(
    do_not_specialize=(
        "x", "notes", "sent", "out", "out_notes", "arrived", "received", "op", "capacity", "boxes_ptr", "guard_ptr",
        "table_ptr",
    )
)  # fmt: skip
def _spread_kernel(
    x: tl.int64,
    notes: tl.int64,
    sent: tl.int64,
    out: tl.int64,
    out_notes: tl.int64,
    arrived: tl.int64,
    received: tl.int64,
    op: tl.int32,
    capacity: tl.int32,
    boxes_ptr,
    guard_ptr,
    table_ptr,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per lane. Where the rows of a rank begin is known once the first message of every rank is there."""
    rank = tl.load(guard_ptr + _RANK).to(tl.int32)
    lane = tl.program_id(0)
    ranks = tl.arange(0, triton.next_power_of_2(WORLD))
    counts = ranks * 0
    for step in range(num_steps(table_ptr, WORLD)):
        _send(x, notes, sent, step, table_ptr, boxes_ptr, guard_ptr, op, rank, WORLD, LANES, SLOT_BYTES, BLOCK)
        if step == 0:
            counts = _await_counts(sent, received, table_ptr, boxes_ptr, guard_ptr, op, rank, WORLD, LANES, SLOT_BYTES)
        for hop in range(WORLD):
            source = (rank + WORLD - hop) % WORLD
            base = tl.sum(tl.where(ranks < source, counts, 0), axis=0)
            if step < num_pieces(table_ptr, source):
                if hop == 0:
                    _keep(x, notes, sent, out, out_notes, arrived, base, capacity, step, table_ptr, rank, WORLD, BLOCK)
                else:
                    sequence = first_taken(boxes_ptr, rank, lane, source, WORLD, LANES) + step
                    slot = await_message(
                        boxes_ptr, guard_ptr, op, rank, lane, source, sequence, WORLD, LANES, SLOT_BYTES
                    )
                    _take(slot, out, out_notes, arrived, base, capacity, step, table_ptr, source, WORLD, BLOCK)
                    release_message(boxes_ptr, rank, lane, source, sequence, WORLD, LANES)
    confirm(guard_ptr, op)
    for hop in range(1, WORLD):
        peer = (rank + hop) % WORLD
        num_sent, num_taken = num_pieces(table_ptr, rank), num_pieces(table_ptr, peer)
        advance_channels(boxes_ptr, rank, lane, peer, num_sent, num_taken, WORLD, LANES)


@triton.jit
def _send(
    x, notes, sent, step, table, boxes, guard, op, rank,
    WORLD: tl.constexpr, LANES: tl.constexpr, SLOT_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put this step's piece of this rank's tokens into the mailboxes of all peers: of its rows, those that go there."""
    if step < num_pieces(table, rank):
        lane = tl.program_id(0)
        begin, count, shift, nbytes = piece(table, rank, step)
        for hop in range(1, WORLD):
            peer = (rank + hop) % WORLD
            sequence = first_sent(boxes, rank, lane, peer, WORLD, LANES) + step
            slot = acquire_slot(boxes, guard, op, rank, lane, peer, sequence, WORLD, LANES, SLOT_BYTES)
            _store_head(slot, notes, sent, begin, count, table, rank, peer, WORLD, BLOCK)
        for number in range(count):
            token = begin + number
            row = x + token.to(tl.int64) * plan_word(table, _ROW_BYTES) + shift
            place = plan_word(table, _ROWS) + number * plan_word(table, _SLAB_BYTES)
            _spread_row(row, nbytes, place, sent, token, step, table, boxes, rank, WORLD, LANES, SLOT_BYTES, BLOCK)
        for hop in range(1, WORLD):
            peer = (rank + hop) % WORLD
            sequence = first_sent(boxes, rank, lane, peer, WORLD, LANES) + step
            publish_slot(boxes, rank, lane, peer, sequence, WORLD, LANES)


@triton.jit
def _store_head(slot, notes, sent, begin, count, table, rank, peer, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """What a message begins with: counts for all ranks, then the number of each token for this peer, then notes."""
    own = num_tokens(table, rank)
    ranks = tl.arange(0, triton.next_power_of_2(WORLD))
    tl.store(typed(slot, tl.int32, True) + ranks, totals(sent, ranks, own, WORLD), mask=ranks < WORLD)
    places = slot + plan_word(table, _PLACES)
    for done in range(0, count, _TOKENS):
        numbers = done + tl.arange(0, _TOKENS)
        inside = numbers < count
        number = number_of(sent, peer, begin + numbers, own, inside)
        tl.store(typed(places, tl.int32, False) + numbers, number, mask=inside)
    note_bytes = plan_word(table, _NOTE_WORDS) * 4
    copy_run(places + count * 4, notes + begin * note_bytes, count * note_bytes, BLOCK)


@triton.jit
def _spread_row(
    row, nbytes, place, sent, token, step, table, boxes, rank,
    WORLD: tl.constexpr, LANES: tl.constexpr, SLOT_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Load the bytes at ``row`` once, and store them ``place`` bytes into the slots of all peers that they go to."""
    if ((row | nbytes) & 15) == 0:
        _spread_elements(
            row, nbytes // 16 * 2, place, sent, token, step, table, boxes, rank,
            tl.int64, True, WORLD, LANES, SLOT_BYTES, BLOCK,
        )  # fmt: skip
    elif ((row | nbytes) & 3) == 0:
        _spread_elements(
            row, nbytes // 4, place, sent, token, step, table, boxes, rank,
            tl.int32, False, WORLD, LANES, SLOT_BYTES, BLOCK,
        )  # fmt: skip
    else:
        _spread_elements(
            row, nbytes, place, sent, token, step, table, boxes, rank,
            tl.int8, False, WORLD, LANES, SLOT_BYTES, BLOCK,
        )  # fmt: skip


@triton.jit
def _spread_elements(
    row, num_elements, place, sent, token, step, table, boxes, rank, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr,
    WORLD: tl.constexpr, LANES: tl.constexpr, SLOT_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane, own = tl.program_id(0), num_tokens(table, rank)
    for block in range(tl.cdiv(num_elements, BLOCK)):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < num_elements
        values = tl.load(typed(row, ELEMENT, ALIGNED) + offsets, mask=inside)
        for hop in range(1, WORLD):
            peer = (rank + hop) % WORLD
            if goes_to(sent, peer, token, own):
                sequence = first_sent(boxes, rank, lane, peer, WORLD, LANES) + step
                slot = slot_address(boxes, peer, lane, rank, sequence, WORLD, LANES, SLOT_BYTES)
                tl.store(typed(slot + place, ELEMENT, ALIGNED) + offsets, values, mask=inside)


@triton.jit
def _await_counts(
    sent, received, table, boxes, guard, op, rank, WORLD: tl.constexpr, LANES: tl.constexpr, SLOT_BYTES: tl.constexpr
):
    """How many rows each rank sends here, from its first message; the first lane writes down what all send to all."""
    lane = tl.program_id(0)
    ranks = tl.arange(0, triton.next_power_of_2(WORLD))
    own = totals(sent, ranks, num_tokens(table, rank), WORLD)
    counts = tl.where(ranks == rank, own, 0)
    matrix = typed(received, tl.int32, False) + ranks
    if lane == 0:
        tl.store(matrix + rank * WORLD, own, mask=ranks < WORLD)
    for hop in range(1, WORLD):
        source = (rank + WORLD - hop) % WORLD
        sequence = first_taken(boxes, rank, lane, source, WORLD, LANES)
        slot = await_message(boxes, guard, op, rank, lane, source, sequence, WORLD, LANES, SLOT_BYTES)
        words = typed(slot, tl.int32, True)
        counts = tl.where(ranks == source, tl.load(words + rank), counts)
        if lane == 0:
            tl.store(matrix + source * WORLD, tl.load(words + ranks, mask=ranks < WORLD), mask=ranks < WORLD)
    return counts


@triton.jit
def _take(slot, out, out_notes, arrived, base, capacity, step, table, source, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """Put the rows of a message where they belong, and their notes; write down where that is."""
    begin, count, shift, nbytes = piece(table, source, step)
    places = slot + plan_word(table, _PLACES)
    to = typed(arrived, tl.int32, False) + first_token(table, source, WORLD) + begin
    for done in range(0, count, _TOKENS):
        numbers = done + tl.arange(0, _TOKENS)
        inside = numbers < count
        place = tl.load(typed(places, tl.int32, False) + numbers, mask=inside, other=-1)
        tl.store(to + numbers, _row(place, base, capacity), mask=inside)
    words = plan_word(table, _NOTE_WORDS).to(tl.int32)
    for done in range(0, count * words, _WORDS):
        numbers = done + tl.arange(0, _WORDS)
        inside = numbers < count * words
        place = tl.load(typed(places, tl.int32, False) + numbers // words, mask=inside, other=-1)
        row = _row(place, base, capacity)
        note = tl.load(typed(places, tl.int32, False) + count + numbers, mask=inside)
        target = typed(out_notes, tl.int32, False) + row.to(tl.int64) * words + numbers % words
        tl.store(target, note, mask=inside & (row >= 0))
    for number in range(count):
        row = _row(tl.load(typed(places, tl.int32, False) + number), base, capacity).to(tl.int64)
        if row >= 0:
            source_row = slot + plan_word(table, _ROWS) + number * plan_word(table, _SLAB_BYTES)
            copy_row(out + row * plan_word(table, _ROW_BYTES) + shift, source_row, nbytes, BLOCK)


@triton.jit
def _keep(
    x, notes, sent, out, out_notes, arrived, base, capacity, step, table, rank, WORLD: tl.constexpr, BLOCK: tl.constexpr
):
    """The same with this rank's own tokens, which go through no slot."""
    begin, count, shift, nbytes = piece(table, rank, step)
    own, row_bytes = num_tokens(table, rank), plan_word(table, _ROW_BYTES)
    note_bytes = plan_word(table, _NOTE_WORDS) * 4
    for number in range(count):
        token = begin + number
        row = _row(number_of(sent, rank, token, own, None), base, capacity)
        tl.store(typed(arrived, tl.int32, False) + first_token(table, rank, WORLD) + token, row)
        if row >= 0:
            to, source = row.to(tl.int64), token.to(tl.int64)
            copy_run(out_notes + to * note_bytes, notes + source * note_bytes, note_bytes, _TOKENS)
            copy_row(out + to * row_bytes + shift, x + source * row_bytes + shift, nbytes, BLOCK)


@triton.jit
def _row(place, base, capacity):
    """The row of the token that is number ``place`` of its rank's, or -1 if it is none, or there is no room."""
    return tl.where((place >= 0) & (base + place < capacity), base + place, -1)
