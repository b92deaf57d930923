"""Reduce-scatter: the sum over ranks, each rank keeping its rows.

    x    [M, ...] on every rank
    out  [m_r, ...] on rank r       m: M split as evenly as it goes (``torch.tensor_split``), or ``sizes``

    out = sum over s of x_s[sum(m[:r]) : sum(m[:r+1])]      in fp32, s = 0, 1, 2, ..., rounded once

Rank s stores rank r's rows into a slot of r's mailbox and raises its data flag; r waits for all its peers, sums, and
raises their ack flags. fp32, fp16, bf16. The gradient is ``all_gather``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tileflux.kernels.plan import reduce_plan, split_rows
from tileflux.kernels.reduce import reduce
from tileflux.ops._call import (
    begin,
    check_out,
    check_reducible,
    check_sizes,
    check_tensor,
    dense,
    guarded,
    sum_in_rank_order,
)
from tileflux.ops._library import eager_only, register
from tileflux.symm.group import Group, group_by_name

__all__ = ["reduce_scatter", "reduce_scatter_reference"]


def reduce_scatter(
    x: torch.Tensor, *, group: Group, sizes: Sequence[int] | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """This rank's rows of the sum. ``sizes``: rows per rank; every rank passes the same list."""
    check_tensor("reduce_scatter", "x", x, group)
    if x.dim() == 0:
        raise ValueError("reduce_scatter: x is a scalar and has no rows to scatter; see all_reduce")
    if sizes is None:
        rows = split_rows(x.shape[0], group.world_size)
    else:
        rows = check_sizes("reduce_scatter", "sizes", sizes, group, total=x.shape[0])
    if out is None:
        return torch.ops.tileflux.reduce_scatter(x, group.name, list(rows))  # type: ignore[no-any-return]
    return _run(x, group, list(rows), out)


@eager_only
def _run(x: torch.Tensor, group: Group, rows: list[int], out: torch.Tensor | None) -> torch.Tensor:
    check_reducible("reduce_scatter", x)
    out = check_out("reduce_scatter", out, (rows[group.rank], *x.shape[1:]), x)
    begin("reduce_scatter", group, (rows, tuple(x.shape[1:]), x.dtype, x.requires_grad))
    row_bytes = x.shape[1:].numel() * x.element_size()
    with guarded(group):
        plan = reduce_plan(group.rank, tuple(count * row_bytes for count in rows), scatter=True)
        reduce(group, "reduce_scatter", dense(x), out, plan)
    return out


def _implementation(x: torch.Tensor, group: str, rows: list[int]) -> torch.Tensor:
    return _run(x, group_by_name(group), rows, None)


def _fake(x: torch.Tensor, group: str, rows: list[int]) -> torch.Tensor:
    return x.new_empty((rows[group_by_name(group).rank], *x.shape[1:]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.group, ctx.rows = inputs


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return torch.ops.tileflux.all_gather(grad, ctx.group, ctx.rows), None, None


register(
    "reduce_scatter(Tensor x, str group, SymInt[] rows) -> Tensor", _implementation, _fake, _setup_context, _backward
)


def reduce_scatter_reference(
    x: torch.Tensor, process_group: dist.ProcessGroup | None = None, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """The same over ``torch.distributed``: gather all inputs, sum in fp32 in rank order, keep this rank's rows."""
    world_size, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    rows = list(split_rows(x.shape[0], world_size) if sizes is None else sizes)
    inputs = [torch.empty_like(x) for _ in rows]
    dist.all_gather(inputs, x.contiguous(), group=process_group)
    return sum_in_rank_order([each.split(rows)[rank] for each in inputs])
