"""The reducer: every rank sends runs of its input to its peers and sums theirs and its own, in fp32, in rank order.

Reduce-scatter and one-shot all-reduce are plans for this one kernel. The order of the sum does not depend on who
arrives when, so results repeat bit for bit; all ranks of an all-reduce get the same bits.
"""

import torch
import triton
import triton.language as tl

from tileflux.config import GUARD
from tileflux.kernels import reduce_host
from tileflux.kernels.launch import BLOCK, MAX_REGISTERS, NUM_WARPS, extents_table, on_host
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

__all__ = ["ELEMENTS", "launch_reduce", "reduce"]

_RANK = tl.constexpr(GUARD.rank)

ELEMENTS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
"""What can be summed."""


def reduce(group: Group, op: str, x: torch.Tensor, out: torch.Tensor, plan: MovePlan) -> None:
    """Sum what ``plan`` brings of every rank's ``x`` into ``out``; both contiguous and of one type in ``ELEMENTS``."""
    if plan.is_empty:
        return
    if on_host(group):
        reduce_host.reduce(group, op, x, out, plan)
    else:
        launch_reduce(group, op, x, out, plan)


def launch_reduce(group: Group, op: str, x: torch.Tensor, out: torch.Tensor, plan: MovePlan) -> None:
    """Queue the kernel on the current stream."""
    ragged, extents = extents_table(group, plan)
    _reduce_kernel[(plan.num_lanes(group.config),)](
        x.data_ptr(),
        out.data_ptr(),
        extents,
        group.mailbox.table,
        group.guard.table,
        group.guard.op_number(op),
        ragged,
        *(plan.even or (0, 0, 0, 0))[:3],
        ELEMENT=ELEMENTS[x.dtype],
        WORLD=group.world_size,
        LANES=group.config.num_lanes,
        SLOT_BYTES=group.config.slot_bytes,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
        maxnreg=MAX_REGISTERS,
    )


@triton.jit(do_not_specialize=["x", "out", "op", "ragged", "send_bytes", "send_stride", "recv_bytes"])
def _reduce_kernel(
    x: tl.int64,
    out: tl.int64,
    extents_ptr,
    boxes_ptr,
    guard_ptr,
    op: tl.int32,
    ragged: tl.int32,
    send_bytes: tl.int64,
    send_stride: tl.int64,
    recv_bytes: tl.int64,
    ELEMENT: tl.constexpr,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per lane. Piece by piece: send to every peer, wait for all of theirs, sum, give the slots back."""
    rank = tl.load(guard_ptr + _RANK).to(tl.int32)
    lane = tl.program_id(0)

    # Every rank brings a run of the same length: the one that belongs here.
    own_begin, _ = _lane_run(extents_ptr, ragged, send_bytes, send_stride, rank, 0, WORLD)
    place, own_nbytes = _lane_run(extents_ptr, ragged, recv_bytes, recv_bytes * 0, rank, 1, WORLD)
    num_taken = tl.cdiv(own_nbytes, SLOT_BYTES)
    num_steps = num_taken
    for hop in range(1, WORLD):
        _, nbytes = _lane_run(extents_ptr, ragged, send_bytes, send_stride, (rank + hop) % WORLD, 0, WORLD)
        num_steps = tl.maximum(num_steps, tl.cdiv(nbytes, SLOT_BYTES))

    for step in range(num_steps):
        done = step * SLOT_BYTES
        for hop in range(1, WORLD):
            peer = (rank + hop) % WORLD
            begin, nbytes = _lane_run(extents_ptr, ragged, send_bytes, send_stride, peer, 0, WORLD)
            if done < nbytes:
                sequence = first_sent(boxes_ptr, rank, lane, peer, WORLD, LANES) + step.to(tl.int32)
                slot = acquire_slot(boxes_ptr, guard_ptr, op, rank, lane, peer, sequence, WORLD, LANES, SLOT_BYTES)
                copy_run(slot, x + begin + done, tl.minimum(nbytes - done, SLOT_BYTES), BLOCK)
                publish_slot(boxes_ptr, rank, lane, peer, sequence, WORLD, LANES)
        if done < own_nbytes:
            index = step.to(tl.int32)
            for hop in range(1, WORLD):
                peer = (rank + WORLD - hop) % WORLD
                sequence = first_taken(boxes_ptr, rank, lane, peer, WORLD, LANES) + index
                await_message(boxes_ptr, guard_ptr, op, rank, lane, peer, sequence, WORLD, LANES, SLOT_BYTES)
            _sum_run(
                out + place + done,
                x + own_begin + done,
                tl.minimum(own_nbytes - done, SLOT_BYTES),
                index, boxes_ptr, rank, ELEMENT, WORLD, LANES, SLOT_BYTES, BLOCK,
            )  # fmt: skip
            for hop in range(1, WORLD):
                peer = (rank + WORLD - hop) % WORLD
                sequence = first_taken(boxes_ptr, rank, lane, peer, WORLD, LANES) + index
                release_message(boxes_ptr, rank, lane, peer, sequence, WORLD, LANES)

    for hop in range(1, WORLD):
        peer = (rank + hop) % WORLD
        _, nbytes = _lane_run(extents_ptr, ragged, send_bytes, send_stride, peer, 0, WORLD)
        num_sent = tl.cdiv(nbytes, SLOT_BYTES)
        advance_channels(boxes_ptr, rank, lane, peer, num_sent.to(tl.int32), num_taken.to(tl.int32), WORLD, LANES)


@triton.jit
def _lane_run(extents_ptr, ragged, nbytes, stride, peer, SIDE: tl.constexpr, WORLD: tl.constexpr):
    """(offset, length) of this lane's part of what is exchanged with ``peer``."""
    offset, length = extent(extents_ptr, ragged, nbytes.to(tl.int64), stride.to(tl.int64), peer, SIDE, WORLD)
    begin, share = part(length, tl.program_id(0), tl.num_programs(0))
    return offset + begin, share


@triton.jit
def _sum_run(
    place, own, nbytes, step, boxes_ptr, rank,
    ELEMENT: tl.constexpr, WORLD: tl.constexpr, LANES: tl.constexpr, SLOT_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the run at ``own`` and the peers' messages number ``step`` of this launch, in rank order, into ``place``."""
    # A piece fits a slot: 32 bits count its elements, and half the registers hold their offsets.
    num_elements = nbytes.to(tl.int32) // (ELEMENT.primitive_bitwidth // 8)
    lanes = tl.arange(0, BLOCK)
    begin = num_elements * 0
    if ((place | own) & 15) == 0:
        to = typed(place, ELEMENT, True)
        for block in range(num_elements // BLOCK):
            offsets = block * BLOCK + lanes
            total = _sum_block(own, offsets, None, step, boxes_ptr, rank, ELEMENT, True, WORLD, LANES, SLOT_BYTES)
            tl.store(to + offsets, total.to(ELEMENT))
        begin = num_elements // BLOCK * BLOCK
    # What is left of the last block, or all of it where 16 bytes at a time cannot be.
    for first in range(begin, num_elements, BLOCK):
        offsets = first + lanes
        inside = offsets < num_elements
        total = _sum_block(own, offsets, inside, step, boxes_ptr, rank, ELEMENT, False, WORLD, LANES, SLOT_BYTES)
        tl.store(typed(place, ELEMENT, False) + offsets, total.to(ELEMENT), mask=inside)


@triton.jit
def _sum_block(
    own, offsets, inside, step, boxes_ptr, rank,
    ELEMENT: tl.constexpr, ALIGNED: tl.constexpr, WORLD: tl.constexpr, LANES: tl.constexpr, SLOT_BYTES: tl.constexpr,
):  # fmt: skip
    """fp32 sum over ranks 0, 1, ... of the elements at ``offsets``; this rank's come from ``own``, not from a slot."""
    lane = tl.program_id(0)
    total = tl.zeros(offsets.shape, tl.float32)
    for peer in tl.static_range(WORLD):
        sequence = first_taken(boxes_ptr, rank, lane, peer, WORLD, LANES) + step
        address = slot_address(boxes_ptr, rank, lane, peer, sequence, WORLD, LANES, SLOT_BYTES)
        if peer == rank:
            address = own
        total += tl.load(typed(address, ELEMENT, ALIGNED) + offsets, mask=inside).to(tl.float32)
    return total
