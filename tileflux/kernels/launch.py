"""What the movers' launchers share: which backend runs, and a plan as a kernel takes it."""

from __future__ import annotations

import weakref

import torch

from tileflux import env
from tileflux.kernels.plan import MovePlan
from tileflux.symm.group import Group

__all__ = ["BLOCK_BYTES", "NUM_WARPS", "extents_table", "on_host"]

NUM_WARPS = 8
BLOCK_BYTES = 16 * 1024
"""Bytes a program of 8 warps has in flight: four 16-byte loads a thread."""

_MAX_TABLES = 1024
_tables: weakref.WeakKeyDictionary[Group, dict[MovePlan, torch.Tensor]] = weakref.WeakKeyDictionary()
_captured: weakref.WeakKeyDictionary[Group, dict[MovePlan, torch.Tensor]] = weakref.WeakKeyDictionary()


def on_host(group: Group) -> bool:
    """Whether the host twin of a kernel is to run, rather than the kernel."""
    return group.device.type == "cpu" and env.cpu_backend() == "host"


def extents_table(group: Group, plan: MovePlan) -> tuple[int, torch.Tensor]:
    """(1, the plan as a device table) if the plan is ragged, kept for the next call with the same sizes.

    For an even plan (0, any tensor): the kernel gets lengths and strides as arguments and reads no table.
    """
    if plan.even is not None:
        return 0, group.guard.table
    tables = _tables.setdefault(group, {})
    capturing = group.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if plan not in tables:
        if capturing:
            raise ValueError("these per-rank sizes are new: make the call once before capturing it in a CUDA graph")
        while len(tables) >= _MAX_TABLES:
            del tables[next(iter(tables))]
        tables[plan] = _upload(group, plan)
    if capturing:
        # A replay reads the table long after it has been pushed out of the cache.
        _captured.setdefault(group, {})[plan] = tables[plan]
    return 1, tables[plan]


def _upload(group: Group, plan: MovePlan) -> torch.Tensor:
    table = torch.tensor(plan.table, dtype=torch.int64)
    if group.device.type == "cpu":
        return table
    # Pinned: a pageable copy would hold the host until this stream has run dry.
    return table.pin_memory().to(group.device, non_blocking=True)
