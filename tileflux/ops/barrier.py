"""Barrier: no rank's later work on the group starts before every rank's earlier work is done.

Every rank sends each peer an empty message and waits for theirs. On the CPU the call returns when all have come;
on a GPU it is queued on the stream like any collective, and the host goes on. ``Group.barrier`` makes the hosts
meet.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tileflux.kernels.copy import move
from tileflux.kernels.plan import permute_plan
from tileflux.ops._call import begin, guarded
from tileflux.ops._library import eager_only
from tileflux.symm.group import Group

__all__ = ["barrier", "barrier_reference"]


@eager_only
def barrier(*, group: Group) -> None:
    """Wait for all ranks: on the CPU here, on a GPU on the current stream. A compiled graph breaks here."""
    if not isinstance(group, Group):
        raise ValueError(f"barrier: group should be a tileflux.Group, not {type(group).__name__}")
    begin("barrier", group, None)
    nothing = torch.empty(0, dtype=torch.uint8, device=group.device)
    sizes = (0,) * group.world_size
    with guarded(group):
        move(group, "barrier", nothing, nothing, permute_plan(group.rank, sizes, sizes, True), min_pieces=1)


def barrier_reference(process_group: dist.ProcessGroup | None = None) -> None:
    """The same over ``torch.distributed``."""
    dist.barrier(group=process_group)
