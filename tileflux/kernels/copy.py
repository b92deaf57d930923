"""The mover: every rank sends runs of its input to its peers and puts theirs into its output.

All-gather, all-to-all, broadcast and barrier are plans for this one kernel. ``move`` runs it: on a GPU compiled, on the
CPU through the host twin in ``kernels/copy_host.py`` or, when asked, interpreted.
"""

import torch
import triton
import triton.language as tl

from tileflux.config import GUARD
from tileflux.kernels import copy_host
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
)
from tileflux.lang.remote import copy_run, extent, part
from tileflux.symm.group import Group

__all__ = ["launch_move", "move"]

_RANK = tl.constexpr(GUARD.rank)


def move(group: Group, op: str, x: torch.Tensor, out: torch.Tensor, plan: MovePlan, *, min_pieces: int = 0) -> None:
    """Carry out ``plan`` from ``x`` to ``out``, both contiguous. ``min_pieces=1`` sends empty messages too."""
    if plan.is_empty and not min_pieces:
        return
    if on_host(group):
        copy_host.move(group, op, x, out, plan, min_pieces=min_pieces)
    else:
        launch_move(group, op, x, out, plan, min_pieces)


def launch_move(group: Group, op: str, x: torch.Tensor, out: torch.Tensor, plan: MovePlan, min_pieces: int) -> None:
    """Queue the kernel on the current stream."""
    ragged, extents = extents_table(group, plan)
    _move_kernel[(plan.num_lanes(group.config),)](
        x.data_ptr(),
        out.data_ptr(),
        extents,
        group.mailbox.table,
        group.guard.table,
        group.guard.op_number(op),
        ragged,
        *(plan.even or (0, 0, 0, 0)),
        min_pieces,
        WORLD=group.world_size,
        LANES=group.config.num_lanes,
        SLOT_BYTES=group.config.slot_bytes,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
        maxnreg=MAX_REGISTERS,
    )


_NUMBERS = ("x", "out", "op", "ragged", "send_bytes", "send_stride", "recv_bytes", "recv_stride", "min_pieces")


@triton.jit(do_not_specialize=_NUMBERS)
def _move_kernel(
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
    recv_stride: tl.int64,
    min_pieces: tl.int64,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per lane. Piece by piece: send to every peer, then take from every peer."""
    rank = tl.load(guard_ptr + _RANK).to(tl.int32)
    lane = tl.program_id(0)

    begin, nbytes, _ = _lane_run(extents_ptr, ragged, send_bytes, send_stride, rank, min_pieces, 0, WORLD, SLOT_BYTES)
    place, _, _ = _lane_run(extents_ptr, ragged, recv_bytes, recv_stride, rank, min_pieces, 1, WORLD, SLOT_BYTES)
    if x + begin != out + place:
        copy_run(out + place, x + begin, nbytes, BLOCK)

    num_steps = min_pieces.to(tl.int64)
    for hop in range(1, WORLD):
        peer = (rank + hop) % WORLD
        _, _, num_sent = _lane_run(extents_ptr, ragged, send_bytes, send_stride, peer, min_pieces, 0, WORLD, SLOT_BYTES)
        _, _, num_taken = _lane_run(
            extents_ptr, ragged, recv_bytes, recv_stride, peer, min_pieces, 1, WORLD, SLOT_BYTES
        )
        num_steps = tl.maximum(num_steps, tl.maximum(num_sent, num_taken))

    for step in range(num_steps):
        done = step * SLOT_BYTES
        for hop in range(1, WORLD):
            # Each rank starts with its right-hand neighbour, so that no two begin on the same target.
            peer = (rank + hop) % WORLD
            begin, nbytes, num_sent = _lane_run(
                extents_ptr, ragged, send_bytes, send_stride, peer, min_pieces, 0, WORLD, SLOT_BYTES
            )
            if step < num_sent:
                sequence = first_sent(boxes_ptr, rank, lane, peer, WORLD, LANES) + step.to(tl.int32)
                slot = acquire_slot(boxes_ptr, guard_ptr, op, rank, lane, peer, sequence, WORLD, LANES, SLOT_BYTES)
                copy_run(slot, x + begin + done, tl.minimum(nbytes - done, SLOT_BYTES), BLOCK)
                publish_slot(boxes_ptr, rank, lane, peer, sequence, WORLD, LANES)
        for hop in range(1, WORLD):
            peer = (rank + WORLD - hop) % WORLD
            begin, nbytes, num_taken = _lane_run(
                extents_ptr, ragged, recv_bytes, recv_stride, peer, min_pieces, 1, WORLD, SLOT_BYTES
            )
            if step < num_taken:
                sequence = first_taken(boxes_ptr, rank, lane, peer, WORLD, LANES) + step.to(tl.int32)
                slot = await_message(boxes_ptr, guard_ptr, op, rank, lane, peer, sequence, WORLD, LANES, SLOT_BYTES)
                copy_run(out + begin + done, slot, tl.minimum(nbytes - done, SLOT_BYTES), BLOCK)
                release_message(boxes_ptr, rank, lane, peer, sequence, WORLD, LANES)

    for hop in range(1, WORLD):
        peer = (rank + hop) % WORLD
        _, _, num_sent = _lane_run(extents_ptr, ragged, send_bytes, send_stride, peer, min_pieces, 0, WORLD, SLOT_BYTES)
        _, _, num_taken = _lane_run(
            extents_ptr, ragged, recv_bytes, recv_stride, peer, min_pieces, 1, WORLD, SLOT_BYTES
        )
        advance_channels(boxes_ptr, rank, lane, peer, num_sent.to(tl.int32), num_taken.to(tl.int32), WORLD, LANES)


@triton.jit
def _lane_run(
    extents_ptr,
    ragged,
    nbytes,
    stride,
    peer,
    min_pieces,
    SIDE: tl.constexpr,
    WORLD: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
):
    """(offset, length, pieces) of this lane's part of what is exchanged with ``peer``."""
    offset, length = extent(extents_ptr, ragged, nbytes.to(tl.int64), stride.to(tl.int64), peer, SIDE, WORLD)
    begin, share = part(length, tl.program_id(0), tl.num_programs(0))
    return offset + begin, share, tl.maximum(tl.cdiv(share, SLOT_BYTES), min_pieces.to(tl.int64))
