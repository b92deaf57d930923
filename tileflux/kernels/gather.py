"""The way back of chosen rows: what ranks have made of a token is added up there, then at the token's owner.

    out[t] = sum over ranks d = 0, 1, ... of round(sum over choices j of weights[row, j] * rows[positions[row, j]])

where ``row`` is where token ``t`` of this rank is on rank d, if it is there. Sums are in fp32, in the order of choices,
then of ranks, and do not depend on who comes when. Rows go through the mailboxes, as in ``kernels/spread.py``: tokens
are cut alike on all ranks, so that those of one step are in the slots of all ranks at once.
"""

import triton
import triton.language as tl

from tileflux.config import GUARD, ROWS
from tileflux.kernels import rows_host
from tileflux.kernels.launch import on_host
from tileflux.kernels.reduce import ELEMENTS
from tileflux.kernels.rows_plan import plan_rows
from tileflux.kernels.spread import launch_rows
from tileflux.lang.mailbox import (
    acquire_slot,
    advance_channels,
    await_all,
    first_sent,
    first_taken,
    publish_slot,
    release_all,
    slot_address,
)
from tileflux.lang.remote import typed
from tileflux.lang.rows import first_token, goes_to, num_pieces, num_steps, num_tokens, piece, plan_word
from tileflux.lang.signal import confirm
from tileflux.symm.group import Group

__all__ = ["BLOCK", "gather_rows"]

_RANK = tl.constexpr(GUARD.rank)
_SLAB_BYTES = tl.constexpr(ROWS.slab_bytes)
_ROW_BYTES = tl.constexpr(ROWS.row_bytes)
_ROWS = tl.constexpr(ROWS.rows)

BLOCK = 4096
"""Columns added up at a time: a row at once, where it can be; one load after the other is what it takes long for."""


def gather_rows(group: Group, op: str, rows, positions, weights, sent, arrived, sizes, out) -> None:
    """Add up, for every token here, the ``rows [n, H]`` at its ``positions [capacity, k]``, times ``weights``, send the
    sums to their owners, and add up all ranks' in ``out [T_r, H]``. ``sent`` and ``arrived``: see ``spread_rows``."""
    plan = plan_rows(sizes, out.shape[1] * out.element_size(), None, group.config)
    if on_host(group):
        rows_host.gather_rows(group, op, plan, rows, positions, weights, sent, arrived, out)
        return
    tensors = (rows, positions, weights, sent, arrived, out)
    launch_rows(group, op, _gather_kernel, plan, tensors, positions.shape[1], (ELEMENTS[out.dtype],), BLOCK)


@triton.jit(
    do_not_specialize=(
        "rows", "positions", "weights", "sent", "arrived", "out", "op", "top_k", "boxes_ptr", "guard_ptr", "table_ptr",
    )
)  # fmt: skip
def _gather_kernel(
    rows: tl.int64,
    positions: tl.int64,
    weights: tl.int64,
    sent: tl.int64,
    arrived: tl.int64,
    out: tl.int64,
    op: tl.int32,
    top_k: tl.int32,
    boxes_ptr,
    guard_ptr,
    table_ptr,
    ELEMENT: tl.constexpr,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per lane. Step by step: send sums to every owner, then add up all ranks' of one's own tokens."""
    rank = tl.load(guard_ptr + _RANK).to(tl.int32)
    lane = tl.program_id(0)
    num_own = num_pieces(table_ptr, rank)
    for step in range(num_steps(table_ptr, WORLD)):
        for hop in range(1, WORLD):
            owner = (rank + hop) % WORLD
            if step < num_pieces(table_ptr, owner):
                sequence = first_sent(boxes_ptr, rank, lane, owner, WORLD, LANES) + step
                slot = acquire_slot(boxes_ptr, guard_ptr, op, rank, lane, owner, sequence, WORLD, LANES, SLOT_BYTES)
                _send(slot, rows, positions, weights, arrived, top_k, step, table_ptr, owner, ELEMENT, WORLD, BLOCK)
                publish_slot(boxes_ptr, rank, lane, owner, sequence, WORLD, LANES)
        if step < num_own:
            await_all(boxes_ptr, guard_ptr, op, rank, lane, step, WORLD, LANES, SLOT_BYTES)
            _add_up(
                rows, positions, weights, sent, arrived, out, top_k, step, table_ptr, boxes_ptr, rank,
                ELEMENT, WORLD, LANES, SLOT_BYTES, BLOCK,
            )  # fmt: skip
            release_all(boxes_ptr, rank, lane, step, WORLD, LANES)
    confirm(guard_ptr, op)
    for hop in range(1, WORLD):
        peer = (rank + hop) % WORLD
        advance_channels(boxes_ptr, rank, lane, peer, num_pieces(table_ptr, peer), num_own, WORLD, LANES)


@triton.jit
def _send(
    slot, rows, positions, weights, arrived, top_k, step, table, owner,
    ELEMENT: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put into ``slot`` the sums of this step's tokens of ``owner`` that are here."""
    begin, count, shift, nbytes = piece(table, owner, step)
    for number in range(count):
        row = tl.load(typed(arrived, tl.int32, False) + first_token(table, owner, WORLD) + begin + number)
        if row >= 0:
            place = slot + plan_word(table, _ROWS) + number * plan_word(table, _SLAB_BYTES)
            if ((rows | nbytes | plan_word(table, _ROW_BYTES)) & 15) == 0:
                _send_sum(place, rows, positions, weights, top_k, row, shift, nbytes, table, ELEMENT, True, BLOCK)
            else:
                _send_sum(place, rows, positions, weights, top_k, row, shift, nbytes, table, ELEMENT, False, BLOCK)


@triton.jit
def _send_sum(
    place, rows, positions, weights, top_k, row, shift, nbytes, table,
    ELEMENT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    num_elements = _num_elements(nbytes, ELEMENT, ALIGNED)
    for block in range(tl.cdiv(num_elements, BLOCK)):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < num_elements
        total = _weighed(rows, positions, weights, top_k, row, shift, offsets, inside, table, ELEMENT, ALIGNED)
        tl.store(typed(place, ELEMENT, ALIGNED) + offsets, total.to(ELEMENT), mask=inside)


@triton.jit
def _add_up(
    rows, positions, weights, sent, arrived, out, top_k, step, table, boxes, rank,
    ELEMENT: tl.constexpr, WORLD: tl.constexpr, LANES: tl.constexpr, SLOT_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """This step's own tokens: the sums of all ranks that they were sent to."""
    _, count, _, nbytes = piece(table, rank, step)
    for number in range(count):
        if ((rows | out | nbytes | plan_word(table, _ROW_BYTES)) & 15) == 0:
            _add_token(
                rows, positions, weights, sent, arrived, out, top_k, number, step, table, boxes, rank,
                ELEMENT, True, WORLD, LANES, SLOT_BYTES, BLOCK,
            )  # fmt: skip
        else:
            _add_token(
                rows, positions, weights, sent, arrived, out, top_k, number, step, table, boxes, rank,
                ELEMENT, False, WORLD, LANES, SLOT_BYTES, BLOCK,
            )  # fmt: skip


@triton.jit
def _add_token(
    rows, positions, weights, sent, arrived, out, top_k, number, step, table, boxes, rank,
    ELEMENT: tl.constexpr, ALIGNED: tl.constexpr,
    WORLD: tl.constexpr, LANES: tl.constexpr, SLOT_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane, own = tl.program_id(0), num_tokens(table, rank)
    begin, _, shift, nbytes = piece(table, rank, step)
    token = begin + number
    place = out + token.to(tl.int64) * plan_word(table, _ROW_BYTES) + shift
    in_slot = plan_word(table, _ROWS) + number * plan_word(table, _SLAB_BYTES)
    num_elements = _num_elements(nbytes, ELEMENT, ALIGNED)
    for block in range(tl.cdiv(num_elements, BLOCK)):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < num_elements
        total = tl.zeros([BLOCK], tl.float32)
        for source in range(WORLD):
            if source == rank:
                row = tl.load(typed(arrived, tl.int32, False) + first_token(table, rank, WORLD) + token)
                if row >= 0:
                    # Rounded, as it would be if it came from a peer.
                    mine = _weighed(
                        rows, positions, weights, top_k, row, shift, offsets, inside, table, ELEMENT, ALIGNED
                    )
                    total += mine.to(ELEMENT).to(tl.float32)
            elif goes_to(sent, source, token, own):
                sequence = first_taken(boxes, rank, lane, source, WORLD, LANES) + step
                slot = slot_address(boxes, rank, lane, source, sequence, WORLD, LANES, SLOT_BYTES)
                value = tl.load(typed(slot + in_slot, ELEMENT, ALIGNED) + offsets, mask=inside, other=0.0)
                total += value.to(tl.float32)
        tl.store(typed(place, ELEMENT, ALIGNED) + offsets, total.to(ELEMENT), mask=inside)


@triton.jit
def _weighed(
    rows, positions, weights, top_k, row, shift, offsets, inside, table, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr
):
    """The rows of one token here, weighted and added up in the order of its choices."""
    total = tl.zeros(offsets.shape, tl.float32)
    for choice in range(top_k):
        index = row.to(tl.int64) * top_k + choice
        position = tl.load(typed(positions, tl.int32, False) + index)
        if position >= 0:
            address = rows + position.to(tl.int64) * plan_word(table, _ROW_BYTES) + shift
            value = tl.load(typed(address, ELEMENT, ALIGNED) + offsets, mask=inside, other=0.0)
            total += tl.load(typed(weights, tl.float32, False) + index) * value.to(tl.float32)
    return total


@triton.jit
def _num_elements(nbytes, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
    """Of a row's bytes. In words that say so if they are 16 at a time: else masks make accesses narrow."""
    SIZE: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    if ALIGNED:
        return nbytes.to(tl.int32) // 16 * (16 // SIZE)
    return nbytes.to(tl.int32) // SIZE
