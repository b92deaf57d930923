"""All-to-all: every rank sends each peer its own run of rows.

    x    [sum s_r, ...]     s: rows for each rank, ``input_sizes`` (default: as many for each)
    out  [sum t_r, ...]     t: rows from each rank, ``output_sizes``; t_r here is s_here on rank r

    out run r = x run (this rank) of rank r

Rank r stores run q of its rows into a slot of q's mailbox and raises q's data flag; q copies it out and
acknowledges. No rank needs to know the sizes between two others. Any element type. The gradient is the same
exchange backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tileflux.kernels.copy import move
from tileflux.kernels.plan import permute_plan
from tileflux.ops._call import as_bytes, begin, check_out, check_sizes, check_tensor, dense, guarded
from tileflux.ops._library import eager_only, register
from tileflux.symm.group import Group, group_by_name

__all__ = ["all_to_all", "all_to_all_reference"]


def all_to_all(
    x: torch.Tensor,
    *,
    group: Group,
    input_sizes: Sequence[int] | None = None,
    output_sizes: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs from all ranks in rank order. Without sizes, x is cut into W equal runs; else give both lists of rows.

    All ranks give sizes, or none does: with sizes a rank cannot know the longest message, and cuts messages otherwise.
    """
    check_tensor("all_to_all", "x", x, group)
    if x.dim() == 0:
        raise ValueError("all_to_all: x is a scalar and has no rows to send")
    if (input_sizes is None) != (output_sizes is None):
        raise ValueError("all_to_all: give both input_sizes and output_sizes, or neither")
    if input_sizes is None or output_sizes is None:
        if x.shape[0] % group.world_size:
            raise ValueError(
                f"all_to_all: {x.shape[0]} rows do not divide among {group.world_size} ranks; "
                "give input_sizes and output_sizes"
            )
        send = recv = (x.shape[0] // group.world_size,) * group.world_size
    else:
        send = check_sizes("all_to_all", "input_sizes", input_sizes, group, total=x.shape[0])
        recv = check_sizes("all_to_all", "output_sizes", output_sizes, group)
        if send[group.rank] != recv[group.rank]:
            raise ValueError(
                f"all_to_all: rank {group.rank} sends itself {send[group.rank]} rows "
                f"but expects {recv[group.rank]} from itself"
            )
    even = input_sizes is None
    if out is None:
        return torch.ops.tileflux.all_to_all(x, group.name, list(send), list(recv), even)  # type: ignore[no-any-return]
    return _run(x, group, list(send), list(recv), even, out)


@eager_only
def _run(
    x: torch.Tensor, group: Group, send: list[int], recv: list[int], even: bool, out: torch.Tensor | None
) -> torch.Tensor:
    claims = {f"rows from rank {group.rank} to {peer}": count for peer, count in enumerate(send)}
    claims |= {f"rows from rank {peer} to {group.rank}": count for peer, count in enumerate(recv)}
    out = check_out("all_to_all", out, (sum(recv), *x.shape[1:]), x)
    same = (tuple(x.shape[1:]), x.dtype, "even" if even else "per-rank sizes", x.requires_grad)
    begin("all_to_all", group, same, claims)
    row_bytes = x.shape[1:].numel() * x.element_size()
    sizes = [tuple(count * row_bytes for count in counts) for counts in (send, recv)]
    with guarded(group):
        move(group, "all_to_all", dense(x), out, permute_plan(group.rank, *sizes, even))
    return out


def _implementation(x: torch.Tensor, group: str, send: list[int], recv: list[int], even: bool) -> torch.Tensor:
    return _run(x, group_by_name(group), send, recv, even, None)


def _fake(x: torch.Tensor, group: str, send: list[int], recv: list[int], even: bool) -> torch.Tensor:
    return x.new_empty((sum(recv), *x.shape[1:]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.group, ctx.send, ctx.recv, ctx.even = inputs


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
    return torch.ops.tileflux.all_to_all(grad, ctx.group, ctx.recv, ctx.send, ctx.even), None, None, None, None


register(
    "all_to_all(Tensor x, str group, SymInt[] send, SymInt[] recv, bool even) -> Tensor",
    _implementation,
    _fake,
    _setup_context,
    _backward,
)


def all_to_all_reference(
    x: torch.Tensor,
    process_group: dist.ProcessGroup | None = None,
    input_sizes: Sequence[int] | None = None,
    output_sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """The same over ``torch.distributed``, as bytes."""
    world_size = dist.get_world_size(process_group)
    send = [x.shape[0] // world_size] * world_size if input_sizes is None else list(input_sizes)
    recv = send if output_sizes is None else list(output_sizes)
    row_bytes = x.shape[1:].numel() * x.element_size()
    out = x.new_empty((sum(recv), *x.shape[1:]))
    dist.all_to_all_single(
        as_bytes(out),
        as_bytes(x.contiguous()),
        [count * row_bytes for count in recv],
        [count * row_bytes for count in send],
        group=process_group,
    )
    return out
