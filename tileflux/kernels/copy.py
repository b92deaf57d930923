"""The mover: every rank sends runs of its input to its peers and puts theirs into its output.

All-gather, all-to-all, broadcast and barrier are plans for this one kernel. ``move`` runs it: on a GPU compiled, on the
CPU through the host twin in ``kernels/copy_host.py`` or, when asked, interpreted.
"""

import torch
import triton
import triton.language as tl

from tileflux.config import GUARD
from tileflux.kernels import copy_host
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
)
from tileflux.lang.remote import copy_run, extent, part, typed
from tileflux.symm.group import Group

__all__ = ["move"]

_RANK = tl.constexpr(GUARD.rank)


def move(group: Group, op: str, x: torch.Tensor, out: torch.Tensor, plan: MovePlan, *, min_pieces: int = 0) -> None:
    """Carry out ``plan`` from ``x`` to ``out``, both contiguous bytes. ``min_pieces=1`` sends empty messages too."""
    if plan.is_empty and not min_pieces:
        return
    if on_host(group):
        copy_host.move(group, op, x, out, plan, min_pieces=min_pieces)
        return
    element, aligned = element_type(plan, x, out)
    _move_kernel[(plan.num_lanes(group.config),)](
        x.view(element),
        out.view(element),
        extents_table(group, plan),
        group.mailbox.table,
        group.guard.table,
        group.guard.op_number(op),
        *plan_arguments(plan),
        WORLD=group.world_size,
        LANES=group.config.num_lanes,
        SLOT_BYTES=group.config.slot_bytes,
        BLOCK_BYTES=BLOCK_BYTES,
        RAGGED=plan.even is None,
        ALIGNED=aligned,
        MIN_PIECES=min_pieces,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["op", "send_bytes", "send_stride", "recv_bytes", "recv_stride"])
def _move_kernel(
    x_ptr,
    out_ptr,
    extents_ptr,
    boxes_ptr,
    guard_ptr,
    op,
    send_bytes,
    send_stride,
    recv_bytes,
    recv_stride,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    RAGGED: tl.constexpr,
    ALIGNED: tl.constexpr,
    MIN_PIECES: tl.constexpr,
):
    """One program per lane. Piece by piece: send to every peer, then take from every peer."""
    rank = tl.load(guard_ptr + _RANK).to(tl.int32)
    lane = tl.program_id(0)
    send_bytes = send_bytes.to(tl.int64)
    send_stride = send_stride.to(tl.int64)
    recv_bytes = recv_bytes.to(tl.int64)
    recv_stride = recv_stride.to(tl.int64)
    x_address = x_ptr.to(tl.int64)
    out_address = out_ptr.to(tl.int64)

    begin, nbytes, _ = _lane_run(extents_ptr, send_bytes, send_stride, rank, 0, WORLD, RAGGED, SLOT_BYTES, 0)
    target, _, _ = _lane_run(extents_ptr, recv_bytes, recv_stride, rank, 1, WORLD, RAGGED, SLOT_BYTES, 0)
    if x_address + begin != out_address + target:
        own = typed(out_address + target, out_ptr, ALIGNED)
        copy_run(own, typed(x_address + begin, x_ptr, ALIGNED), nbytes, BLOCK_BYTES)

    num_steps = tl.full((), 0, tl.int64)
    for hop in range(1, WORLD):
        peer = (rank + hop) % WORLD
        _, _, num_sent = _lane_run(extents_ptr, send_bytes, send_stride, peer, 0, WORLD, RAGGED, SLOT_BYTES, MIN_PIECES)
        _, _, num_taken = _lane_run(extents_ptr, recv_bytes, recv_stride, peer, 1, WORLD, RAGGED, SLOT_BYTES, MIN_PIECES)
        num_steps = tl.maximum(num_steps, tl.maximum(num_sent, num_taken))

    for step in range(0, num_steps):
        for hop in range(1, WORLD):
            # Each rank starts with its right-hand neighbour, so that no two begin on the same target.
            peer = (rank + hop) % WORLD
            begin, nbytes, num_sent = _lane_run(
                extents_ptr, send_bytes, send_stride, peer, 0, WORLD, RAGGED, SLOT_BYTES, MIN_PIECES
            )
            if step < num_sent:
                done = step * SLOT_BYTES
                sequence = first_sent(boxes_ptr, rank, lane, peer, WORLD, LANES) + step.to(tl.int32)
                slot = acquire_slot(boxes_ptr, guard_ptr, op, rank, lane, peer, sequence, WORLD, LANES, SLOT_BYTES)
                source = typed(x_address + begin + done, x_ptr, ALIGNED)
                copy_run(typed(slot, x_ptr, True), source, tl.minimum(nbytes - done, SLOT_BYTES), BLOCK_BYTES)
                publish_slot(boxes_ptr, rank, lane, peer, sequence, WORLD, LANES)
        for hop in range(1, WORLD):
            peer = (rank + WORLD - hop) % WORLD
            begin, nbytes, num_taken = _lane_run(
                extents_ptr, recv_bytes, recv_stride, peer, 1, WORLD, RAGGED, SLOT_BYTES, MIN_PIECES
            )
            if step < num_taken:
                done = step * SLOT_BYTES
                sequence = first_taken(boxes_ptr, rank, lane, peer, WORLD, LANES) + step.to(tl.int32)
                slot = await_message(boxes_ptr, guard_ptr, op, rank, lane, peer, sequence, WORLD, LANES, SLOT_BYTES)
                place = typed(out_address + begin + done, out_ptr, ALIGNED)
                copy_run(place, typed(slot, out_ptr, True), tl.minimum(nbytes - done, SLOT_BYTES), BLOCK_BYTES)
                release_message(boxes_ptr, rank, lane, peer, sequence, WORLD, LANES)

    for hop in range(1, WORLD):
        peer = (rank + hop) % WORLD
        _, _, num_sent = _lane_run(extents_ptr, send_bytes, send_stride, peer, 0, WORLD, RAGGED, SLOT_BYTES, MIN_PIECES)
        _, _, num_taken = _lane_run(extents_ptr, recv_bytes, recv_stride, peer, 1, WORLD, RAGGED, SLOT_BYTES, MIN_PIECES)
        advance_channels(boxes_ptr, rank, lane, peer, num_sent.to(tl.int32), num_taken.to(tl.int32), WORLD, LANES)


@triton.jit
def _lane_run(
    extents_ptr,
    nbytes,
    stride,
    peer,
    SIDE: tl.constexpr,
    WORLD: tl.constexpr,
    RAGGED: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    MIN_PIECES: tl.constexpr,
):
    """(offset, length, pieces) of this lane's part of what is exchanged with ``peer``."""
    offset, length = extent(extents_ptr, nbytes, stride, peer, SIDE, WORLD, RAGGED)
    begin, share = part(length, tl.program_id(0), tl.num_programs(0))
    return offset + begin, share, tl.maximum(tl.cdiv(share, SLOT_BYTES), MIN_PIECES)
