"""All-gather: every rank's rows, on every rank.

    x    [m_r, ...] on rank r       rank r brings m_r rows (all the same, or given by ``sizes``)
    out  [sum m_r, ...] everywhere

    out[sum(m[:r]) : sum(m[:r+1])] = x of rank r

Rank r stores its rows into a slot of every peer's mailbox and raises that peer's data flag; each rank waits for
its peers' data flags, copies the slots out and raises their ack flags. Any element type, since only bytes move.
The gradient is ``reduce_scatter``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tileflux.kernels.copy import move
from tileflux.kernels.plan import gather_plan
from tileflux.ops._call import as_bytes, begin, check_out, check_sizes, check_tensor, dense, guarded
from tileflux.ops._library import eager_only, register
from tileflux.symm.group import Group, group_by_name

__all__ = ["all_gather", "all_gather_reference"]


def all_gather(
    x: torch.Tensor, *, group: Group, sizes: Sequence[int] | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows of all ranks in rank order. ``sizes``: rows per rank where they differ; every rank passes the same list."""
    check_tensor("all_gather", "x", x, group)
    if x.dim() == 0:
        raise ValueError("all_gather: x is a scalar; give it a row dimension with x[None]")
    rows = [x.shape[0]] * group.world_size if sizes is None else check_sizes("all_gather", "sizes", sizes, group)
    if rows[group.rank] != x.shape[0]:
        raise ValueError(f"all_gather: x has {x.shape[0]} rows but sizes[{group.rank}] is {rows[group.rank]}")
    if out is None:
        return torch.ops.tileflux.all_gather(x, group.name, list(rows))  # type: ignore[no-any-return]
    return _run(x, group, list(rows), out)


@eager_only
def _run(x: torch.Tensor, group: Group, rows: list[int], out: torch.Tensor | None) -> torch.Tensor:
    row_bytes = x.shape[1:].numel() * x.element_size()
    out = check_out("all_gather", out, (sum(rows), *x.shape[1:]), x, sum(rows[: group.rank]) * row_bytes)
    begin("all_gather", group, (rows, tuple(x.shape[1:]), x.dtype, x.requires_grad))
    with guarded(group):
        plan = gather_plan(group.rank, tuple(count * row_bytes for count in rows))
        move(group, "all_gather", dense(x), out, plan)
    return out


def _implementation(x: torch.Tensor, group: str, rows: list[int]) -> torch.Tensor:
    return _run(x, group_by_name(group), rows, None)


def _fake(x: torch.Tensor, group: str, rows: list[int]) -> torch.Tensor:
    return x.new_empty((sum(rows), *x.shape[1:]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.group, ctx.rows = inputs


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return torch.ops.tileflux.reduce_scatter(grad, ctx.group, ctx.rows), None, None


register("all_gather(Tensor x, str group, SymInt[] rows) -> Tensor", _implementation, _fake, _setup_context, _backward)


def all_gather_reference(
    x: torch.Tensor, process_group: dist.ProcessGroup | None = None, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """The same over ``torch.distributed``: rows padded to the longest, gathered as bytes, and cut again."""
    world_size = dist.get_world_size(process_group)
    rows = [x.shape[0]] * world_size if sizes is None else list(sizes)
    padded = x.new_zeros((max(rows), *x.shape[1:]))
    padded[: x.shape[0]] = x
    parts = [torch.empty_like(padded) for _ in rows]
    dist.all_gather([as_bytes(part) for part in parts], as_bytes(padded), group=process_group)
    return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])
