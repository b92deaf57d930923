"""The mover on the CPU: the loops of ``kernels/copy.py`` in Python, over the same mailboxes and flags.

Lanes run one after the other, each to its end, like the programs of an interpreted kernel: a rank that began a second
lane before the first was done would wait for a peer that does not.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tileflux.kernels.plan import Extent, MovePlan, num_pieces, part
from tileflux.symm.group import Group

__all__ = ["HostLane", "host_lanes", "move"]


class HostLane:
    """One lane of one collective call: sends and takes pieces, step by step."""

    def __init__(self, group: Group, op: str, plan: MovePlan, lane: int, min_pieces: int) -> None:
        self.channels, self.op, self.rank, self.lane = group.channels, op, group.rank, lane
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
                slot = self.channels.acquire(self.lane, peer, self.op)
                slot[: piece.nbytes].copy_(x[piece.offset : piece.offset + piece.nbytes])
                self.channels.publish(self.lane, peer)

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
