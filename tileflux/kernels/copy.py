"""The mover: every rank sends runs of its input to its peers and puts theirs into its output.

All-gather, all-to-all, broadcast and barrier are plans for this one kernel. ``move`` runs it: on a GPU compiled, on the
CPU through the host twin in ``kernels/copy_host.py`` or, when asked, interpreted.
"""

import torch
import triton
import triton.language as tl

from tileflux.config import GUARD
from tileflux.kernels import copy_host
from tileflux.kernels.launch import NUMBERS, launch_arguments, launch_settings, on_host
from tileflux.kernels.loading import launching
from tileflux.kernels.plan import MovePlan
from tileflux.lang.exchange import count_messages, lane_run, longest_run, send_step
from tileflux.lang.mailbox import await_message, first_taken, release_message
from tileflux.lang.remote import copy_run
from tileflux.lang.signal import confirm
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
    arguments = launch_arguments(group, op, x, out, plan)
    with launching(group):
        _move_kernel[(plan.num_lanes(group.config),)](*arguments, min_pieces, **launch_settings(group))


@triton.jit(do_not_specialize=(*NUMBERS, "min_pieces"))
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
    min_pieces = min_pieces.to(tl.int64)

    begin, nbytes, _ = lane_run(extents_ptr, ragged, send_bytes, send_stride, rank, min_pieces, 0, WORLD, SLOT_BYTES)
    place, _, _ = lane_run(extents_ptr, ragged, recv_bytes, recv_stride, rank, min_pieces, 1, WORLD, SLOT_BYTES)
    if x + begin != out + place:
        copy_run(out + place, x + begin, nbytes, BLOCK)

    num_sent = longest_run(extents_ptr, ragged, send_bytes, send_stride, rank, min_pieces, 0, WORLD, SLOT_BYTES)
    num_taken = longest_run(extents_ptr, ragged, recv_bytes, recv_stride, rank, min_pieces, 1, WORLD, SLOT_BYTES)
    for step in range(tl.maximum(num_sent, num_taken)):
        send_step(
            x, step, extents_ptr, ragged, send_bytes, send_stride, min_pieces, boxes_ptr, guard_ptr, op, rank,
            WORLD, LANES, SLOT_BYTES, BLOCK,
        )  # fmt: skip
        done = step * SLOT_BYTES
        for hop in range(1, WORLD):
            peer = (rank + WORLD - hop) % WORLD
            begin, nbytes, num_pieces = lane_run(
                extents_ptr, ragged, recv_bytes, recv_stride, peer, min_pieces, 1, WORLD, SLOT_BYTES
            )
            if step < num_pieces:
                sequence = first_taken(boxes_ptr, rank, lane, peer, WORLD, LANES) + step.to(tl.int32)
                slot = await_message(boxes_ptr, guard_ptr, op, rank, lane, peer, sequence, WORLD, LANES, SLOT_BYTES)
                copy_run(out + begin + done, slot, tl.minimum(nbytes - done, SLOT_BYTES), BLOCK)
                release_message(boxes_ptr, rank, lane, peer, sequence, WORLD, LANES)

    confirm(guard_ptr, op)
    count_messages(
        extents_ptr, ragged, send_bytes, send_stride, recv_bytes, recv_stride, min_pieces, boxes_ptr, rank,
        WORLD, LANES, SLOT_BYTES,
    )  # fmt: skip
