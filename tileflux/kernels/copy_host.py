"""The mover on the CPU: the loops of ``kernels/copy.py`` in Python, over the same mailboxes and flags.

Lanes run one after the other, each to its end, like the programs of an interpreted kernel: a rank that began a second
lane before the first was done would wait for a peer that does not.

Where a link is emulated, pieces go through it on the group's copying thread, and a call returns when its last piece has
landed: until then the thread reads what the caller passed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tileflux.kernels.plan import Extent, MovePlan, num_pieces, part
from tileflux.symm.base import Copy, FlagWrite
from tileflux.symm.group import Group
from tileflux.symm.host_signal import HostWords

__all__ = ["HostLane", "host_lanes", "move", "wait_for_copies"]


class HostLane:
    """One lane of one collective call: sends and takes pieces, step by step."""

    def __init__(self, group: Group, op: str, plan: MovePlan, lane: int, min_pieces: int) -> None:
        self.channels, self.op, self.rank, self.lane = group.channels, op, group.rank, lane
        self._group, self._is_linked = group, group.traits.link is not None
        self._sending: list[Copy] = []
        self._plan, self._num_lanes = plan, plan.num_lanes(group.config)
        self._slot_bytes, self._min_pieces = group.config.slot_bytes, min_pieces
        world_size = group.world_size
        self.targets = [(self.rank + hop) % world_size for hop in range(1, world_size)]
        self.sources = [(self.rank + world_size - hop) % world_size for hop in range(1, world_size)]

    @property
    def num_steps(self) -> int:
        """Pieces of the longest run."""
        return max(self._num_pieces(extent) for extent in self._plan.send + self._plan.recv)

    def send(self, x: torch.Tensor, step: int) -> None:
        """Put this step's piece into every peer's mailbox."""
        for peer in self.targets:
            piece = self.piece(self._plan.send[peer], step)
            if piece is not None:
                slot = self.channels.acquire(self.lane, peer, self.op)[: piece.nbytes]
                bytes_of_x = x[piece.offset : piece.offset + piece.nbytes]
                # An empty message does not overtake: it is the only one of its call on its channel.
                if self._is_linked and piece.nbytes:
                    flag = self.channels.announcement(self.lane, peer)
                    self._sending.append(self._group.copy_async(slot, bytes_of_x, signal=flag))
                else:
                    slot.copy_(bytes_of_x)
                    self.channels.publish(self.lane, peer)

    def wait_until_sent(self) -> None:
        """Return when everything sent has landed, and ``x`` may change."""
        wait_for_copies(self._group, self.op, self._sending)
        self._sending.clear()

    def piece(self, extent: Extent, step: int) -> Extent | None:
        """What this lane moves of a run in this step, or None if it has no more to move."""
        if step >= self._num_pieces(extent):
            return None
        share = part(extent.nbytes, self.lane, self._num_lanes)
        done = step * self._slot_bytes
        return Extent(extent.offset + share.offset + done, min(self._slot_bytes, share.nbytes - done))

    def _num_pieces(self, extent: Extent) -> int:
        share = part(extent.nbytes, self.lane, self._num_lanes)
        return max(num_pieces(share.nbytes, self._slot_bytes), self._min_pieces)


def host_lanes(group: Group, op: str, plan: MovePlan, min_pieces: int = 0) -> Iterator[HostLane]:
    """The lanes a call uses, in the order they run."""
    return (HostLane(group, op, plan, lane, min_pieces) for lane in range(plan.num_lanes(group.config)))


def wait_for_copies(group: Group, op: str, copies: Sequence[Copy]) -> None:
    """Return when copies of this rank's own have landed.

    Through a slow link this is a wait like any other: it has the group's deadline, and ends where a peer has given up.
    """
    if copies and group.traits.link is not None:
        landed = torch.zeros(1, dtype=torch.int32)
        group.copy_async(landed[:0], landed[:0], signal=FlagWrite(landed, 1))  # copies go in order: this one is last
        group.guard.wait(HostWords(landed), 0, 1, group.rank, op)
    for copy in copies:
        copy.wait()


def move(group: Group, op: str, x: torch.Tensor, out: torch.Tensor, plan: MovePlan, *, min_pieces: int = 0) -> None:
    """Carry out ``plan`` from ``x`` to ``out``."""
    x, out = x.view(-1).view(torch.uint8), out.view(-1).view(torch.uint8)
    own, target = plan.send[group.rank], plan.recv[group.rank]
    if x.data_ptr() + own.offset != out.data_ptr() + target.offset:
        out[target.offset : target.offset + own.nbytes].copy_(x[own.offset : own.offset + own.nbytes])
    for lane in host_lanes(group, op, plan, min_pieces):
        for step in range(lane.num_steps):
            lane.send(x, step)
            for peer in lane.sources:
                piece = lane.piece(plan.recv[peer], step)
                if piece is not None:
                    slot = lane.channels.receive(lane.lane, peer, op)
                    out[piece.offset : piece.offset + piece.nbytes].copy_(slot[: piece.nbytes])
                    lane.channels.release(lane.lane, peer)
        lane.wait_until_sent()
