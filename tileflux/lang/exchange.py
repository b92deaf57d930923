"""What every collective kernel does with its lane: find its run, send it piece by piece, and count the messages."""

import triton
import triton.language as tl

from tileflux.lang.mailbox import acquire_slot, advance_channels, first_sent, publish_slot
from tileflux.lang.remote import copy_run, extent, part

__all__ = ["count_messages", "lane_run", "longest_run", "send_step"]


@triton.jit
def lane_run(
    extents,
    ragged,
    nbytes,
    stride,
    peer,
    min_pieces,
    SIDE: tl.constexpr,
    WORLD: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
):
    """(offset, length, pieces) of this lane's part of what is exchanged with ``peer``; SIDE as in ``extent``."""
    offset, length = extent(extents, ragged, nbytes.to(tl.int64), stride.to(tl.int64), peer, SIDE, WORLD)
    begin, share = part(length, tl.program_id(0), tl.num_programs(0))
    return offset + begin, share, tl.maximum(tl.cdiv(share, SLOT_BYTES), min_pieces)


@triton.jit
def longest_run(
    extents,
    ragged,
    nbytes,
    stride,
    rank,
    min_pieces,
    SIDE: tl.constexpr,
    WORLD: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
):
    """Pieces of this lane's longest part for any peer."""
    longest = tl.full((), 0, tl.int64)
    for hop in range(1, WORLD):
        peer = (rank + hop) % WORLD
        _, _, num_pieces = lane_run(extents, ragged, nbytes, stride, peer, min_pieces, SIDE, WORLD, SLOT_BYTES)
        longest = tl.maximum(longest, num_pieces)
    return longest


@triton.jit
def send_step(
    x, step, extents, ragged, nbytes, stride, min_pieces, boxes, guard, op, rank,
    WORLD: tl.constexpr, LANES: tl.constexpr, SLOT_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put piece number ``step`` of every peer's run of ``x`` into that peer's mailbox."""
    lane = tl.program_id(0)
    done = step * SLOT_BYTES
    for hop in range(1, WORLD):
        # Each rank starts with its right-hand neighbour, so that no two begin on the same target.
        peer = (rank + hop) % WORLD
        begin, share, num_pieces = lane_run(extents, ragged, nbytes, stride, peer, min_pieces, 0, WORLD, SLOT_BYTES)
        if step < num_pieces:
            sequence = first_sent(boxes, rank, lane, peer, WORLD, LANES) + step.to(tl.int32)
            slot = acquire_slot(boxes, guard, op, rank, lane, peer, sequence, WORLD, LANES, SLOT_BYTES)
            copy_run(slot, x + begin + done, tl.minimum(share - done, SLOT_BYTES), BLOCK)
            publish_slot(boxes, rank, lane, peer, sequence, WORLD, LANES)


@triton.jit
def count_messages(
    extents, ragged, send_bytes, send_stride, recv_bytes, recv_stride, min_pieces, boxes, rank,
    WORLD: tl.constexpr, LANES: tl.constexpr, SLOT_BYTES: tl.constexpr,
):  # fmt: skip
    """Write back, at the end of a launch, how many messages this lane sent to and took from every peer."""
    for hop in range(1, WORLD):
        peer = (rank + hop) % WORLD
        _, _, num_sent = lane_run(extents, ragged, send_bytes, send_stride, peer, min_pieces, 0, WORLD, SLOT_BYTES)
        _, _, num_taken = lane_run(extents, ragged, recv_bytes, recv_stride, peer, min_pieces, 1, WORLD, SLOT_BYTES)
        lane = tl.program_id(0)
        advance_channels(boxes, rank, lane, peer, num_sent.to(tl.int32), num_taken.to(tl.int32), WORLD, LANES)
