"""Broadcast: the root's tensor, on every rank.

    x    the same shape on every rank; only the root's values count
    out  = x of rank ``root``

The root stores x into a slot of every peer's mailbox and raises their data flags; they copy it out and acknowledge. Any
element type. The gradient is the sum of all ranks' gradients on the root, zero elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tileflux.kernels.copy import move
from tileflux.kernels.plan import spread_plan
from tileflux.ops._call import as_bytes, begin, check_out, check_tensor, dense, guarded
from tileflux.ops._library import eager_only, register
from tileflux.symm.group import Group, group_by_name

__all__ = ["broadcast", "broadcast_reference"]


def broadcast(x: torch.Tensor, *, group: Group, root: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
    """The root's ``x``. Other ranks pass a tensor of the same shape and type; ``out`` may be ``x`` itself."""
    check_tensor("broadcast", "x", x, group)
    if not 0 <= root < group.world_size:
        raise ValueError(f"broadcast: root={root} is not a rank of a group of {group.world_size}")
    if out is None:
        return torch.ops.tileflux.broadcast(x, group.name, root)  # type: ignore[no-any-return]
    return _run(x, group, root, out)


@eager_only
def _run(x: torch.Tensor, group: Group, root: int, out: torch.Tensor | None) -> torch.Tensor:
    out = check_out("broadcast", out, tuple(x.shape), x, own_place=0)
    begin("broadcast", group, (tuple(x.shape), x.dtype, root, x.requires_grad))
    with guarded(group):
        plan = spread_plan(group.rank, group.world_size, root, x.nbytes)
        move(group, "broadcast", dense(x), out, plan)
    return out


def _implementation(x: torch.Tensor, group: str, root: int) -> torch.Tensor:
    return _run(x, group_by_name(group), root, None)


def _fake(x: torch.Tensor, group: str, root: int) -> torch.Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.group, ctx.root = inputs


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    total = torch.ops.tileflux.all_reduce(grad, ctx.group, "auto")
    is_root = group_by_name(ctx.group).rank == ctx.root
    return total if is_root else torch.zeros_like(total), None, None


register("broadcast(Tensor x, str group, int root) -> Tensor", _implementation, _fake, _setup_context, _backward)


def broadcast_reference(x: torch.Tensor, process_group: dist.ProcessGroup | None = None, root: int = 0) -> torch.Tensor:
    """The same over ``torch.distributed``, as bytes. ``root`` is a rank of the group."""
    out = x.clone(memory_format=torch.contiguous_format)
    source = root if process_group is None else dist.get_global_rank(process_group, root)
    dist.broadcast(as_bytes(out), src=source, group=process_group)
    return out
