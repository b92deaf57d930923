"""The mailbox of a rank: slots and flags through which collectives pass messages. Device side: ``lang/mailbox.py``.

For every lane and every pair of ranks there is a channel: ``NUM_SLOTS`` slots in the receiver's mailbox, a
``data`` flag there that counts messages put in, and an ``ack`` flag in the sender's that counts messages taken
out. A sender waits for a free slot, a receiver for a message, and neither waits for anything else: calls of
different collectives follow each other on the same channels with no synchronisation between them. The counts live
in the mailbox, so a captured CUDA graph goes on counting on every replay.
"""

from __future__ import annotations

import torch

from tileflux.config import NUM_SLOTS, CommConfig, MailboxLayout
from tileflux.symm.base import FlagWrite
from tileflux.symm.guard import Guard
from tileflux.symm.host_signal import HostWords, wrap
from tileflux.symm.workspace import Workspace

__all__ = ["HostChannels", "Mailbox"]


class Mailbox:
    """One rank's mailbox, and its view of the others'."""

    def __init__(self, workspace: Workspace, rank: int, world_size: int, config: CommConfig) -> None:
        self.layout = MailboxLayout(world_size, config.num_lanes, config.slot_bytes)
        self.region = workspace.region("mailbox", self.layout.nbytes, owner=__name__, describe=self.layout.describe)
        self.rank = rank

    @property
    def table(self) -> torch.Tensor:
        """Device table of all ranks' mailboxes."""
        return self.region.table


class HostChannels:
    """The channels of a rank's mailbox, worked by the CPU: the same protocol as ``lang/mailbox.py``."""

    def __init__(self, mailbox: Mailbox, guard: Guard) -> None:
        self._layout, self._rank, self._guard = mailbox.layout, mailbox.rank, guard
        ranks = range(mailbox.layout.world_size)
        self._bytes = [mailbox.region.view(rank) for rank in ranks]
        self._words = [HostWords(view) for view in self._bytes]
        self._own = self._words[self._rank]

    def acquire(self, lane: int, peer: int, op: str) -> torch.Tensor:
        """Wait for a free slot in ``peer``'s mailbox; returns its bytes to be filled."""
        layout = self._layout
        sequence = self._own.load(layout.word(layout.sent, lane, peer))
        freed = wrap(sequence - NUM_SLOTS + 1)
        self._guard.wait(self._own, layout.word(layout.ack, lane, peer), freed, peer, op)
        offset = layout.slot(lane, self._rank, sequence)
        return self._bytes[peer][offset : offset + layout.slot_bytes]

    def publish(self, lane: int, peer: int) -> None:
        """Announce the slot filled since ``acquire``."""
        self._words[peer].store(self._layout.word(self._layout.data, lane, self._rank), self._count_sent(lane, peer))

    def announcement(self, lane: int, peer: int) -> FlagWrite:
        """What announces the slot returned by ``acquire``, for whoever fills it.

        The message counts as sent from here on, so the next ``acquire`` gives the next slot. Announcements of a channel
        have to be made in their order: a receiver that sees the second one takes the first message for complete.
        """
        place = self._layout.word(self._layout.data, lane, self._rank)
        word = self._bytes[peer][4 * place : 4 * place + 4].view(torch.int32)
        return FlagWrite(word, self._count_sent(lane, peer))

    def _count_sent(self, lane: int, peer: int) -> int:
        count = self._layout.word(self._layout.sent, lane, peer)
        sequence = wrap(self._own.load(count) + 1)
        self._own.store(count, sequence)
        return sequence

    def receive(self, lane: int, peer: int, op: str) -> torch.Tensor:
        """Wait for the next message of ``peer``; returns the slot that holds it."""
        layout = self._layout
        sequence = self._own.load(layout.word(layout.taken, lane, peer))
        self._guard.wait(self._own, layout.word(layout.data, lane, peer), wrap(sequence + 1), peer, op)
        offset = layout.slot(lane, peer, sequence)
        return self._bytes[self._rank][offset : offset + layout.slot_bytes]

    def release(self, lane: int, peer: int) -> None:
        """Tell ``peer`` that the slot returned by ``receive`` has been read."""
        layout = self._layout
        count = layout.word(layout.taken, lane, peer)
        sequence = wrap(self._own.load(count) + 1)
        self._own.store(count, sequence)
        self._words[peer].store(layout.word(layout.ack, lane, self._rank), sequence)
