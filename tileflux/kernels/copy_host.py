"""The mover on the CPU: the loops of ``kernels/copy.py`` in Python, over the same mailboxes and flags."""

from __future__ import annotations

import torch

from tileflux.kernels.plan import Extent, MovePlan, num_pieces, part
from tileflux.symm.group import Group

__all__ = ["HostPass", "move"]


class HostPass:
    """One collective call of one rank: sends and takes pieces of its lanes, step by step."""

    def __init__(self, group: Group, op: str, plan: MovePlan, min_pieces: int = 0) -> None:
        self.channels, self.op, self.rank = group.channels, op, group.rank
        self._slot_bytes, self._min_pieces = group.config.slot_bytes, min_pieces
        self.lanes = range(plan.num_lanes(group.config))
        world_size = group.world_size
        self.targets = [(self.rank + hop) % world_size for hop in range(1, world_size)]
        self.sources = [(self.rank + world_size - hop) % world_size for hop in range(1, world_size)]
        self.plan = plan

    @property
    def num_steps(self) -> int:
        """Pieces of the longest part."""
        longest = max((extent.nbytes for extent in self.plan.send + self.plan.recv), default=0)
        return self._num_pieces(part(longest, 0, len(self.lanes)).nbytes)

    def send(self, x: torch.Tensor, step: int) -> None:
        """Put this step's piece into every peer's mailbox."""
        for lane in self.lanes:
            for peer in self.targets:
                piece = self.piece(self.plan.send[peer], lane, step)
                if piece is not None:
                    slot = self.channels.acquire(lane, peer, self.op)
                    slot[: piece.nbytes].copy_(x[piece.offset : piece.offset + piece.nbytes])
                    self.channels.publish(lane, peer)

    def piece(self, extent: Extent, lane: int, step: int) -> Extent | None:
        """What ``lane`` moves of a run in this step, or None if it has no more to move."""
        share = part(extent.nbytes, lane, len(self.lanes))
        if step >= self._num_pieces(share.nbytes):
            return None
        done = step * self._slot_bytes
        return Extent(extent.offset + share.offset + done, min(self._slot_bytes, share.nbytes - done))

    def _num_pieces(self, nbytes: int) -> int:
        return max(num_pieces(nbytes, self._slot_bytes), self._min_pieces)


def move(group: Group, op: str, x: torch.Tensor, out: torch.Tensor, plan: MovePlan, *, min_pieces: int = 0) -> None:
    """Carry out ``plan`` from ``x`` to ``out``."""
    x, out = x.view(-1).view(torch.uint8), out.view(-1).view(torch.uint8)
    own, target = plan.send[group.rank], plan.recv[group.rank]
    if x.data_ptr() + own.offset != out.data_ptr() + target.offset:
        out[target.offset : target.offset + own.nbytes].copy_(x[own.offset : own.offset + own.nbytes])
    work = HostPass(group, op, plan, min_pieces)
    for step in range(work.num_steps):
        work.send(x, step)
        for lane in work.lanes:
            for peer in work.sources:
                piece = work.piece(plan.recv[peer], lane, step)
                if piece is not None:
                    slot = work.channels.receive(lane, peer, op)
                    out[piece.offset : piece.offset + piece.nbytes].copy_(slot[: piece.nbytes])
                    work.channels.release(lane, peer)
