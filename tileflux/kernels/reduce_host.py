"""The reducer on the CPU: the loops of ``kernels/reduce.py`` in Python, over the same mailboxes and flags."""

from __future__ import annotations

import torch

from tileflux.kernels.copy_host import HostLane, host_lanes
from tileflux.kernels.plan import Extent, MovePlan
from tileflux.symm.group import Group

__all__ = ["reduce"]


def reduce(group: Group, op: str, x: torch.Tensor, out: torch.Tensor, plan: MovePlan) -> None:
    """Sum what ``plan`` brings of every rank's ``x`` into ``out``, in fp32, in rank order."""
    x_bytes, out_bytes = x.view(-1).view(torch.uint8), out.view(-1).view(torch.uint8)
    own, target = plan.send[group.rank], plan.recv[group.rank]
    for lane in host_lanes(group, op, plan):
        for step in range(lane.num_steps):
            lane.send(x_bytes, step)
            piece = lane.piece(target, step)
            if piece is not None:
                mine = Extent(own.offset + piece.offset, piece.nbytes)
                _sum_piece(lane, _cut(x_bytes, mine), _cut(out_bytes, piece).view(out.dtype))
        lane.wait_until_sent()


def _sum_piece(lane: HostLane, mine: torch.Tensor, out: torch.Tensor) -> None:
    pieces = {lane.rank: mine}
    for peer in lane.sources:
        pieces[peer] = lane.channels.receive(lane.lane, peer, lane.op)[: mine.numel()]
    total = torch.zeros(out.numel(), dtype=torch.float32)
    for peer in sorted(pieces):
        total += pieces[peer].view(out.dtype)
    lane.wait_until_sent()  # out may be x itself
    out.copy_(total)
    for peer in lane.sources:
        lane.channels.release(lane.lane, peer)


def _cut(flat: torch.Tensor, extent: Extent) -> torch.Tensor:
    return flat[extent.offset : extent.offset + extent.nbytes]
