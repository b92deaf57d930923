"""The reducer: every rank sends runs of its input to its peers and sums theirs and its own, in fp32, in rank order.

Reduce-scatter and one-shot all-reduce are plans for this one kernel. The order of the sum does not depend on who
arrives when, so results repeat bit for bit; all ranks of an all-reduce get the same bits.
"""

import torch
import triton
import triton.language as tl

from tileflux.config import GUARD
from tileflux.kernels import reduce_host
from tileflux.kernels.launch import NUMBERS, launch_arguments, launch_settings, on_host
from tileflux.kernels.loading import launching
from tileflux.kernels.plan import MovePlan
from tileflux.lang.exchange import count_messages, lane_run, longest_run, send_step
from tileflux.lang.mailbox import await_all, first_taken, release_all, slot_address
from tileflux.lang.remote import typed
from tileflux.lang.signal import confirm
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
    arguments = launch_arguments(group, op, x, out, plan)
    with launching(group):
        _reduce_kernel[(plan.num_lanes(group.config),)](*arguments, ELEMENT=ELEMENTS[x.dtype], **launch_settings(group))


@triton.jit(do_not_specialize=NUMBERS)
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
    recv_stride: tl.int64,
    ELEMENT: tl.constexpr,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per lane. Piece by piece: send to every peer, wait for all of theirs, sum, give the slots back."""
    rank = tl.load(guard_ptr + _RANK).to(tl.int32)
    lane = tl.program_id(0)
    none = tl.full((), 0, tl.int64)

    # Every rank brings a run of the same length: the one that belongs here.
    begin, _, _ = lane_run(extents_ptr, ragged, send_bytes, send_stride, rank, none, 0, WORLD, SLOT_BYTES)
    place, nbytes, num_taken = lane_run(extents_ptr, ragged, recv_bytes, recv_stride, rank, none, 1, WORLD, SLOT_BYTES)
    num_sent = longest_run(extents_ptr, ragged, send_bytes, send_stride, rank, none, 0, WORLD, SLOT_BYTES)
    for step in range(tl.maximum(num_sent, num_taken)):
        send_step(
            x, step, extents_ptr, ragged, send_bytes, send_stride, none, boxes_ptr, guard_ptr, op, rank,
            WORLD, LANES, SLOT_BYTES, BLOCK,
        )  # fmt: skip
        if step < num_taken:
            done = step * SLOT_BYTES
            index = step.to(tl.int32)
            await_all(boxes_ptr, guard_ptr, op, rank, lane, index, WORLD, LANES, SLOT_BYTES)
            _sum_run(
                out + place + done, x + begin + done, tl.minimum(nbytes - done, SLOT_BYTES), index, boxes_ptr, rank,
                ELEMENT, WORLD, LANES, SLOT_BYTES, BLOCK,
            )  # fmt: skip
            release_all(boxes_ptr, rank, lane, index, WORLD, LANES)

    confirm(guard_ptr, op)
    count_messages(
        extents_ptr, ragged, send_bytes, send_stride, recv_bytes, recv_stride, none, boxes_ptr, rank,
        WORLD, LANES, SLOT_BYTES,
    )  # fmt: skip


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
