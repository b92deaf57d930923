"""What the movers' launchers share: which backend, which element type, and the plan as a kernel takes it."""

from __future__ import annotations

import math

import torch

from tileflux import env
from tileflux.kernels.plan import GRAIN, MovePlan
from tileflux.symm.group import Group

__all__ = ["BLOCK_BYTES", "element_type", "extents_table", "on_host", "plan_arguments"]

BLOCK_BYTES = 16 * 1024
"""Bytes a program of 8 warps has in flight: four 16-byte loads a thread."""

_MAX_TABLES = 1024
_ELEMENTS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def on_host(group: Group) -> bool:
    """Whether the host twin of a kernel is to run, rather than the kernel."""
    return group.device.type == "cpu" and env.cpu_backend() == "host"


def element_type(plan: MovePlan, x: torch.Tensor, out: torch.Tensor) -> tuple[torch.dtype, bool]:
    """The widest element all runs are made of, and whether all start on 16 bytes (then accesses are 16 bytes wide)."""
    addresses = math.gcd(x.data_ptr(), out.data_ptr(), GRAIN)
    width = math.gcd(plan.alignment, addresses, 8)
    return _ELEMENTS[width], plan.offsets_aligned and addresses == GRAIN


def plan_arguments(plan: MovePlan) -> tuple[int, int, int, int]:
    """(send bytes, send stride, recv bytes, recv stride); not looked at for a ragged plan."""
    return plan.even or (0, 0, 0, 0)


def extents_table(group: Group, plan: MovePlan) -> torch.Tensor:
    """The ragged plan as a device table, kept for the next call with the same sizes; any tensor for an even plan."""
    if plan.even is not None:
        return group.guard.table
    tables = group.plan_tables
    table = tables.get(plan)
    if table is None:
        if group.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError("these per-rank sizes are new: make the call once before capturing it in a CUDA graph")
        rows = torch.tensor(plan.table, dtype=torch.int64)
        if group.device.type == "cuda":
            # Pinned: a pageable copy would hold the host until this stream has run dry.
            rows = rows.pin_memory().to(group.device, non_blocking=True)
        while len(tables) >= _MAX_TABLES:
            tables.pop(next(iter(tables)))
        table = tables[plan] = rows
    return table
