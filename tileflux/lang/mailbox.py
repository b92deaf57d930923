"""Channels between mailboxes, as kernels work them. The layout and the host's twin are in ``symm/mailbox.py``.

A channel carries numbered messages from one rank to another on one lane. Message ``sequence`` goes through slot
``sequence % NUM_SLOTS`` of the receiver's mailbox. Its life, with who writes and who waits:

    sender    acquire_slot   waits for ack >= sequence - NUM_SLOTS + 1   (the slot's last message has been read)
              ...stores into the slot...
              publish_slot   sets the receiver's data flag to sequence + 1
    receiver  await_message  waits for data >= sequence + 1
              ...loads from the slot...
              release_message sets the sender's ack flag to sequence + 1

The sequence a launch begins with is read from the mailbox and written back, advanced, at its end; in between it is
computed, so no program reads a count that it has written itself. ``boxes`` is the device table of mailbox addresses.
"""

import triton
import triton.language as tl

from tileflux.config import NUM_SLOTS, MailboxLayout
from tileflux.lang.signal import signal, wait

__all__ = [
    "acquire_slot",
    "advance_channels",
    "await_message",
    "first_sent",
    "first_taken",
    "publish_slot",
    "release_message",
    "slot_address",
]

_NUM_SLOTS = tl.constexpr(NUM_SLOTS)
_DATA = tl.constexpr(MailboxLayout.data)
_ACK = tl.constexpr(MailboxLayout.ack)
_SENT = tl.constexpr(MailboxLayout.sent)
_TAKEN = tl.constexpr(MailboxLayout.taken)


@triton.jit
def first_sent(boxes, rank, lane, peer, WORLD: tl.constexpr, LANES: tl.constexpr):
    """Sequence of the first message this launch sends to ``peer``."""
    return tl.load(_word(boxes, rank, _SENT, lane, peer, WORLD, LANES))


@triton.jit
def first_taken(boxes, rank, lane, peer, WORLD: tl.constexpr, LANES: tl.constexpr):
    """Sequence of the first message this launch takes from ``peer``."""
    return tl.load(_word(boxes, rank, _TAKEN, lane, peer, WORLD, LANES))


@triton.jit
def acquire_slot(
    boxes, guard, op, rank, lane, peer, sequence, WORLD: tl.constexpr, LANES: tl.constexpr, SLOT_BYTES: tl.constexpr
):
    """Wait until the slot is free; returns its address in ``peer``'s mailbox."""
    ack = _word(boxes, rank, _ACK, lane, peer, WORLD, LANES)
    wait(ack, sequence - (_NUM_SLOTS - 1), peer, guard, op)
    return slot_address(boxes, peer, lane, rank, sequence, WORLD, LANES, SLOT_BYTES)


@triton.jit
def publish_slot(boxes, rank, lane, peer, sequence, WORLD: tl.constexpr, LANES: tl.constexpr):
    """Announce the slot this program has filled."""
    signal(_word(boxes, peer, _DATA, lane, rank, WORLD, LANES), sequence + 1)


@triton.jit
def await_message(
    boxes, guard, op, rank, lane, peer, sequence, WORLD: tl.constexpr, LANES: tl.constexpr, SLOT_BYTES: tl.constexpr
):
    """Wait for a message of ``peer``; returns the address of the slot in this rank's mailbox."""
    data = _word(boxes, rank, _DATA, lane, peer, WORLD, LANES)
    wait(data, sequence + 1, peer, guard, op)
    return slot_address(boxes, rank, lane, peer, sequence, WORLD, LANES, SLOT_BYTES)


@triton.jit
def release_message(boxes, rank, lane, peer, sequence, WORLD: tl.constexpr, LANES: tl.constexpr):
    """Tell ``peer`` that its message has been read, so that the slot may be written again."""
    signal(_word(boxes, peer, _ACK, lane, rank, WORLD, LANES), sequence + 1)


@triton.jit
def await_all(boxes, guard, op, rank, lane, step, WORLD: tl.constexpr, LANES: tl.constexpr, SLOT_BYTES: tl.constexpr):
    """Wait until message number ``step`` of this launch has come from every peer."""
    for hop in range(1, WORLD):
        peer = (rank + WORLD - hop) % WORLD
        sequence = first_taken(boxes, rank, lane, peer, WORLD, LANES) + step
        await_message(boxes, guard, op, rank, lane, peer, sequence, WORLD, LANES, SLOT_BYTES)


@triton.jit
def release_all(boxes, rank, lane, step, WORLD: tl.constexpr, LANES: tl.constexpr):
    """Tell every peer that its message number ``step`` of this launch has been read."""
    for hop in range(1, WORLD):
        peer = (rank + WORLD - hop) % WORLD
        sequence = first_taken(boxes, rank, lane, peer, WORLD, LANES) + step
        release_message(boxes, rank, lane, peer, sequence, WORLD, LANES)


@triton.jit
def advance_channels(boxes, rank, lane, peer, num_sent, num_taken, WORLD: tl.constexpr, LANES: tl.constexpr):
    """Write back, at the end of a launch, where the next one begins."""
    sent = _word(boxes, rank, _SENT, lane, peer, WORLD, LANES)
    taken = _word(boxes, rank, _TAKEN, lane, peer, WORLD, LANES)
    next_sent = tl.load(sent) + num_sent
    next_taken = tl.load(taken) + num_taken
    # Every thread has its copy of the old counts before any thread overwrites them.
    tl.debug_barrier()
    tl.store(sent, next_sent)
    tl.store(taken, next_taken)


@triton.jit
def _word(boxes, owner, KIND: tl.constexpr, lane, peer, WORLD: tl.constexpr, LANES: tl.constexpr):
    words = tl.load(boxes + owner).to(tl.pointer_type(tl.int32))
    return words + ((KIND * LANES + lane) * WORLD + peer)


@triton.jit
def slot_address(
    boxes, owner, lane, source, sequence, WORLD: tl.constexpr, LANES: tl.constexpr, SLOT_BYTES: tl.constexpr
):
    """Where in ``owner``'s mailbox message ``sequence`` from ``source`` lies."""
    HEADER: tl.constexpr = (16 * LANES * WORLD + 255) // 256 * 256
    index = (lane * WORLD + source) * _NUM_SLOTS + (sequence & (_NUM_SLOTS - 1))
    return tl.load(boxes + owner) + HEADER + index.to(tl.int64) * SLOT_BYTES
