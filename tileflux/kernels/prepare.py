"""Load every mover before the first of them can wait.

Loading a kernel's module synchronises the GPU. A rank that shares its GPU with a peer would then sit in the load until
the peer's kernel ends, which waits for this rank: so everything a group may launch is launched once, with
nothing to do, before its first collective.
"""

from __future__ import annotations

import weakref

import torch

from tileflux.kernels.copy import launch_move
from tileflux.kernels.fill import load_fill
from tileflux.kernels.loading import lock, settle_keys
from tileflux.kernels.plan import permute_plan, reduce_plan
from tileflux.kernels.reduce import ELEMENTS, launch_reduce
from tileflux.symm.group import Group

__all__ = ["prepare"]

_prepared: weakref.WeakSet[Group] = weakref.WeakSet()


def prepare(group: Group) -> None:
    """Compile and load the movers for ``group``, once. Only GPUs need it."""
    if group.device.type != "cuda" or group in _prepared:
        return
    with torch.cuda.device(group.device):
        capturing = torch.cuda.is_current_stream_capturing()
    if capturing:
        raise ValueError("the first collective of a group loads kernels: make one before capturing a CUDA graph")
    with lock, torch.cuda.device(group.device):
        settle_keys()
        _launch_all(group)
    _prepared.add(group)


def _launch_all(group: Group) -> None:
    nothing = (0,) * group.world_size
    empty = torch.empty(0, dtype=torch.uint8, device=group.device)
    load_fill(group.guard.table)
    launch_move(group, "prepare", empty, empty, permute_plan(group.rank, nothing, nothing, True), 0)
    for dtype in ELEMENTS:
        empty = torch.empty(0, dtype=dtype, device=group.device)
        launch_reduce(group, "prepare", empty, empty, reduce_plan(group.rank, nothing, scatter=False))
    torch.cuda.current_stream(group.device).synchronize()
