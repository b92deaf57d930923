"""The reducer on the CPU: the loops of ``kernels/reduce.py`` in Python, over the same mailboxes and flags."""

from __future__ import annotations

import torch

from tileflux.kernels.copy_host import HostPass
from tileflux.kernels.plan import Extent, MovePlan
from tileflux.symm.group import Group

__all__ = ["reduce"]


def reduce(group: Group, op: str, x: torch.Tensor, out: torch.Tensor, plan: MovePlan) -> None:
    """Sum what ``plan`` brings of every rank's ``x`` into ``out``, in fp32, in rank order."""
    x_bytes, out_bytes = x.view(-1).view(torch.uint8), out.view(-1).view(torch.uint8)
    work = HostPass(group, op, plan)
    own = plan.send[group.rank]
    for step in range(work.num_steps):
        work.send(x_bytes, step)
        for lane in work.lanes:
            piece = work.piece(plan.recv[group.rank], lane, step)
            if piece is not None:
                mine = Extent(own.offset + piece.offset, piece.nbytes)
                _sum_piece(work, lane, x_bytes, mine, out_bytes, piece, x.dtype)


def _sum_piece(
    work: HostPass, lane: int, x: torch.Tensor, mine: Extent, out: torch.Tensor, piece: Extent, dtype: torch.dtype
) -> None:
    pieces = {work.rank: x[mine.offset : mine.offset + mine.nbytes]}
    for peer in work.sources:
        pieces[peer] = work.channels.receive(lane, peer, work.op)[: piece.nbytes]
    total = torch.zeros(piece.nbytes // dtype.itemsize, dtype=torch.float32)
    for peer in sorted(pieces):
        total += pieces[peer].view(dtype)
    out[piece.offset : piece.offset + piece.nbytes].view(dtype).copy_(total)
    for peer in work.sources:
        work.channels.release(lane, peer)
