"""Frozen descriptions of how work is cut up, with the rules that make them valid.

A leaf: kernels, symmetric memory and tuning all read it, and it reads nothing of ours.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GUARD", "NUM_SLOTS", "CommConfig", "GuardLayout", "MailboxLayout"]

NUM_SLOTS = 2
"""Messages in flight on one channel of a mailbox: one being read while the next is written."""


@dataclass(frozen=True)
class GuardLayout:
    """Where the words of the guard lie (see ``lang/signal.py``), in 8-byte words.

    The *guard table* is private to a rank and handed to every kernel that waits. The *guard block* is symmetric:
    peers set ``broken`` in it, and read from it whom its owner waited for.
    """

    # guard table
    rank: int = 0
    world_size: int = 1
    timeout_ns: int = 2
    alarm: int = 3  # address of a host-visible word, set when the record below is complete
    blocks: int = 8  # addresses of every rank's guard block, one word each
    # guard block
    broken: int = 0  # a wait somewhere in the group gave up: stop waiting
    state: int = 1  # of the record: 0 free, 1 being written, 2 complete
    op: int = 2
    peer: int = 3
    flag: int = 4  # address of the flag waited for
    wanted: int = 5
    seen: int = 6
    waited_ns: int = 7
    block_words: int = 8


GUARD = GuardLayout()


@dataclass(frozen=True)
class CommConfig:
    """How collectives cut a message up.

    ``num_lanes`` programs work side by side, each on its own part of the message through its own slots and flags,
    so that no program ever waits for another of its own rank. A part larger than ``slot_bytes`` goes in several
    messages. Symmetric memory held: ``num_lanes * world_size * NUM_SLOTS * slot_bytes`` per rank.
    """

    num_lanes: int = 1
    slot_bytes: int = 64 * 1024
    min_lane_bytes: int = 4 * 1024  # below this a further lane costs more in flags than it moves

    def __post_init__(self) -> None:
        if not 1 <= self.num_lanes <= 1024:
            raise ValueError(f"num_lanes={self.num_lanes} should be between 1 and 1024")
        if not 256 <= self.slot_bytes < 2**31 or self.slot_bytes % 256:
            raise ValueError(f"slot_bytes={self.slot_bytes} should be a positive multiple of 256, under 2 GiB")
        if self.min_lane_bytes < 1:
            raise ValueError(f"min_lane_bytes={self.min_lane_bytes} should be at least 1")

    def lanes_for(self, nbytes: int) -> int:
        """Lanes worth using for the largest message of a call; every rank must come to the same number."""
        return max(1, min(self.num_lanes, -(-nbytes // self.min_lane_bytes)))


@dataclass(frozen=True)
class MailboxLayout:
    """Where the parts of one rank's mailbox lie (see ``lang/mailbox.py``).

    First four arrays of 32-bit words ``[num_lanes, world_size]``: ``data`` (messages a peer has put here), ``ack``
    (messages a peer has taken out of its own mailbox), ``sent`` and ``taken`` (this rank's own counts, private).
    Then the slots: ``[num_lanes, world_size, NUM_SLOTS, slot_bytes]`` by source rank.
    """

    world_size: int
    num_lanes: int
    slot_bytes: int

    data: int = 0
    ack: int = 1
    sent: int = 2
    taken: int = 3

    @property
    def header_bytes(self) -> int:
        """Bytes before the first slot."""
        return -(-4 * 4 * self.num_lanes * self.world_size // 256) * 256

    @property
    def nbytes(self) -> int:
        """Bytes of the whole mailbox."""
        return self.header_bytes + self.num_lanes * self.world_size * NUM_SLOTS * self.slot_bytes

    def word(self, kind: int, lane: int, peer: int) -> int:
        """Index of a 32-bit word."""
        return (kind * self.num_lanes + lane) * self.world_size + peer

    def slot(self, lane: int, source: int, sequence: int) -> int:
        """Byte offset of the slot that message number ``sequence`` from ``source`` goes through."""
        index = (lane * self.world_size + source) * NUM_SLOTS + sequence % NUM_SLOTS
        return self.header_bytes + index * self.slot_bytes

    def describe(self, offset: int) -> str:
        """The flag at a byte offset, in words."""
        kind, rest = divmod(offset // 4, self.num_lanes * self.world_size)
        lane, peer = divmod(rest, self.world_size)
        names = {self.data: "data", self.ack: "ack", self.sent: "sent", self.taken: "taken"}
        return f"{names.get(kind, 'slot')}[lane {lane}, rank {peer}]"
