"""The reducer: every rank sends runs of its input to its peers and sums theirs and its own, in fp32, in rank order.

Reduce-scatter and one-shot all-reduce are plans for this one kernel. The order of the sum does not depend on who arrives
when, so results repeat bit for bit; all ranks of an all-reduce get the same bits.
"""

import torch
import triton
import triton.language as tl

from tileflux.config import GUARD
from tileflux.kernels import reduce_host
from tileflux.kernels.launch import BLOCK_BYTES, element_type, extents_table, on_host, plan_arguments
from tileflux.kernels.plan import MovePlan
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
from tileflux.lang.remote import copy_run, extent, part, typed
from tileflux.symm.group import Group

__all__ = ["reduce"]

_RANK = tl.constexpr(GUARD.rank)


def reduce(group: Group, op: str, x: torch.Tensor, out: torch.Tensor, plan: MovePlan) -> None:
    """Sum what ``plan`` brings of every rank's ``x`` into ``out``; both flat and of one floating type."""
    if plan.is_empty:
        return
    if on_host(group):
        reduce_host.reduce(group, op, x, out, plan)
        return
    _, aligned = element_type(plan, x, out)
    _reduce_kernel[(plan.num_lanes(group.config),)](
        x,
        out,
        extents_table(group, plan),
        group.mailbox.table,
        group.guard.table,
        group.guard.op_number(op),
        *plan_arguments(plan)[:3],
        WORLD=group.world_size,
        LANES=group.config.num_lanes,
        SLOT_BYTES=group.config.slot_bytes,
        BLOCK_BYTES=BLOCK_BYTES // 2,
        RAGGED=plan.even is None,
        ALIGNED=aligned,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["op", "send_bytes", "send_stride", "recv_bytes"])
def _reduce_kernel(
    x_ptr,
    out_ptr,
    extents_ptr,
    boxes_ptr,
    guard_ptr,
    op,
    send_bytes,
    send_stride,
    recv_bytes,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    RAGGED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program per lane. Piece by piece: send to every peer, wait for all of theirs, sum, give the slots back."""
    rank = tl.load(guard_ptr + _RANK).to(tl.int32)
    lane = tl.program_id(0)
    num_lanes = tl.num_programs(0)
    send_bytes = send_bytes.to(tl.int64)
    send_stride = send_stride.to(tl.int64)
    recv_bytes = recv_bytes.to(tl.int64)
    x_address = x_ptr.to(tl.int64)

    # Every rank brings a run of the same length, the one that belongs here.
    own_offset, _ = extent(extents_ptr, send_bytes, send_stride, rank, 0, WORLD, RAGGED)
    _, own_length = extent(extents_ptr, recv_bytes, recv_bytes, rank, 1, WORLD, RAGGED)
    own_begin, own_nbytes = part(own_length, lane, num_lanes)
    num_taken = tl.cdiv(own_nbytes, SLOT_BYTES)

    num_steps = num_taken
    for hop in range(1, WORLD):
        _, length = extent(extents_ptr, send_bytes, send_stride, (rank + hop) % WORLD, 0, WORLD, RAGGED)
        _, nbytes = part(length, lane, num_lanes)
        num_steps = tl.maximum(num_steps, tl.cdiv(nbytes, SLOT_BYTES))

    for step in range(0, num_steps):
        done = step * SLOT_BYTES
        for hop in range(1, WORLD):
            peer = (rank + hop) % WORLD
            offset, length = extent(extents_ptr, send_bytes, send_stride, peer, 0, WORLD, RAGGED)
            begin, nbytes = part(length, lane, num_lanes)
            if done < nbytes:
                sequence = first_sent(boxes_ptr, rank, lane, peer, WORLD, LANES) + step.to(tl.int32)
                slot = acquire_slot(boxes_ptr, guard_ptr, op, rank, lane, peer, sequence, WORLD, LANES, SLOT_BYTES)
                source = typed(x_address + offset + begin + done, x_ptr, ALIGNED)
                copy_run(typed(slot, x_ptr, True), source, tl.minimum(nbytes - done, SLOT_BYTES), BLOCK_BYTES)
                publish_slot(boxes_ptr, rank, lane, peer, sequence, WORLD, LANES)
        if done < own_nbytes:
            source = typed(x_address + own_offset + own_begin + done, x_ptr, ALIGNED)
            place = typed(out_ptr.to(tl.int64) + own_begin + done, out_ptr, ALIGNED)
            nbytes = tl.minimum(own_nbytes - done, SLOT_BYTES)
            _sum_piece(
                place, source, nbytes, step.to(tl.int32), boxes_ptr, guard_ptr, op, rank, WORLD, LANES, SLOT_BYTES, BLOCK_BYTES
            )  # fmt: skip

    for hop in range(1, WORLD):
        peer = (rank + hop) % WORLD
        _, length = extent(extents_ptr, send_bytes, send_stride, peer, 0, WORLD, RAGGED)
        _, nbytes = part(length, lane, num_lanes)
        num_sent = tl.cdiv(nbytes, SLOT_BYTES)
        advance_channels(boxes_ptr, rank, lane, peer, num_sent.to(tl.int32), num_taken.to(tl.int32), WORLD, LANES)


@triton.jit
def _sum_piece(
    place,
    source,
    nbytes,
    step,
    boxes_ptr,
    guard_ptr,
    op,
    rank,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    """Add this rank's piece at ``source`` and its peers' pieces, in rank order, into ``place``."""
    lane = tl.program_id(0)
    for hop in range(1, WORLD):
        peer = (rank + WORLD - hop) % WORLD
        sequence = first_taken(boxes_ptr, rank, lane, peer, WORLD, LANES) + step
        await_message(boxes_ptr, guard_ptr, op, rank, lane, peer, sequence, WORLD, LANES, SLOT_BYTES)
    _sum_run(place, source, nbytes, step, boxes_ptr, rank, WORLD, LANES, SLOT_BYTES, BLOCK_BYTES)
    for hop in range(1, WORLD):
        peer = (rank + WORLD - hop) % WORLD
        sequence = first_taken(boxes_ptr, rank, lane, peer, WORLD, LANES) + step
        release_message(boxes_ptr, rank, lane, peer, sequence, WORLD, LANES)


@triton.jit
def _sum_run(
    place,
    source,
    nbytes,
    step,
    boxes_ptr,
    rank,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    ELEMENT_BYTES: tl.constexpr = place.dtype.element_ty.primitive_bitwidth // 8
    BLOCK: tl.constexpr = BLOCK_BYTES // ELEMENT_BYTES
    num_elements = nbytes // ELEMENT_BYTES
    num_blocks = num_elements // BLOCK
    lanes = tl.arange(0, BLOCK)
    for block in range(0, num_blocks):
        offsets = block * BLOCK + lanes
        total = _sum_block(source, offsets, None, step, boxes_ptr, rank, WORLD, LANES, SLOT_BYTES)
        tl.store(place + offsets, total.to(place.dtype.element_ty))
    if num_blocks * BLOCK < num_elements:
        offsets = num_blocks * BLOCK + lanes
        inside = offsets < num_elements
        total = _sum_block(source, offsets, inside, step, boxes_ptr, rank, WORLD, LANES, SLOT_BYTES)
        tl.store(place + offsets, total.to(place.dtype.element_ty), mask=inside)


@triton.jit
def _sum_block(
    source, offsets, inside, step, boxes_ptr, rank, WORLD: tl.constexpr, LANES: tl.constexpr, SLOT_BYTES: tl.constexpr
):
    """fp32 sum over ranks 0, 1, ... of the elements at ``offsets``; the own rank's come from ``source``."""
    lane = tl.program_id(0)
    total = tl.zeros(offsets.shape, tl.float32)
    for peer in tl.static_range(WORLD):
        taken = first_taken(boxes_ptr, rank, lane, peer, WORLD, LANES) + step
        slot = slot_address(boxes_ptr, rank, lane, peer, taken, WORLD, LANES, SLOT_BYTES)
        elements = source
        if peer != rank:
            elements = typed(slot, source, True)
        total += tl.load(elements + offsets, mask=inside).to(tl.float32)
    return total
