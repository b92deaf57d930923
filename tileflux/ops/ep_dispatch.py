"""Dispatch: tokens go to the ranks that own their experts.

    x           [T_r, H] on rank r      tokens
    expert_ids  [T_r, k] on rank r      the experts that each chose; -1 is a choice that was dropped
    weights     [T_r, k] on rank r      what the result of each choice is multiplied with
    result      a ``Dispatched``        tokens [capacity, H], and what is needed to multiply them and to send them back

Expert e is on rank e // (E / W). A token goes once to each rank that owns one of its experts or more, with its choices
and their weights; there the choices are sorted by expert. How many tokens come, from whom, and which expert gets them
is known to the device alone.

Every rank stores its tokens into its peers' mailboxes, each in a place that depends on the token's number and not on
who else goes there, with the number of rows that it sends to each rank in front; raises their data flags; then waits
for theirs, and copies rows out in the order of ranks. One launch. The gradient is ``ep_combine``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tileflux.ops._call import as_bytes, begin, check_tensor, dense, guarded
from tileflux.ops._dense import FLOATS, as_scale
from tileflux.ops._ep import TOKENS, Choices, Dispatched, check_strategy, identity, spread
from tileflux.ops._library import eager_only, register
from tileflux.ops.routing import check_choices, readable
from tileflux.symm.group import Group, group_by_name

__all__ = ["Dispatched", "ep_dispatch", "ep_dispatch_reference"]


def ep_dispatch(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    num_experts: int,
    group: Group,
    sizes: Sequence[int] | None = None,
    capacity: int | None = None,
    scale_x: torch.Tensor | float | None = None,
    strategy: str = "auto",
) -> Dispatched:
    """This rank's tokens to their experts' ranks, and those of all ranks that chose this rank's experts. Collective.

    ``sizes``: tokens per rank where they differ; every rank passes the same list. ``capacity``: tokens that a rank has
    room for; by default all ranks', which is the worst case. ``scale_x``: of fp8 or int8 tokens, goes with them.
    """
    rows = _check(x, expert_ids, weights, num_experts, group, sizes, scale_x)
    check_strategy("ep_dispatch", strategy)
    room = sum(rows) if capacity is None else capacity
    if room < 0:
        raise ValueError(f"ep_dispatch: capacity={room} should not be negative")
    scale = as_scale(scale_x, x)
    tokens, shares, scales, counts, row_tokens, positions, arrived, sent, missing = torch.ops.tileflux.ep_dispatch(
        x, expert_ids, weights, scale, group.name, list(rows), room, num_experts, strategy
    )
    found = Dispatched(
        group, num_experts, rows, room, tokens, None if scale is None else scales, shares, counts, row_tokens,
        positions, arrived, sent, readable(group, missing, room, TOKENS) if room < sum(rows) else None,
    )  # fmt: skip
    found.ensure_fits()
    return found


def _check(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    group: Group,
    sizes: Sequence[int] | None,
    scale_x: torch.Tensor | float | None,
) -> tuple[int, ...]:
    check_tensor("ep_dispatch", "x", x, group)
    if num_experts % group.world_size:
        raise ValueError(f"ep_dispatch: num_experts={num_experts} should be a multiple of the {group.world_size} ranks")
    rows = check_choices("ep_dispatch", expert_ids, weights, num_experts, group, group.world_size, sizes)
    if x.dim() != 2 or len(x) != len(expert_ids):
        raise ValueError(
            f"ep_dispatch: x {tuple(x.shape)} should be [tokens, H], and expert_ids has {len(expert_ids)} tokens"
        )
    if scale_x is not None and x.dtype in FLOATS:
        raise ValueError(f"ep_dispatch: scales belong to fp8 and int8; x is {x.dtype}, so multiply it beforehand")
    if isinstance(scale_x, torch.Tensor) and (
        scale_x.dtype != torch.float32 or scale_x.device != x.device or tuple(scale_x.shape) not in ((), (len(x),))
    ):
        raise ValueError(
            f"ep_dispatch: scale_x should be a number, or float32 on {x.device} of shape () or ({len(x)},), "
            f"not {tuple(scale_x.shape)} {scale_x.dtype} on {scale_x.device}"
        )
    if isinstance(scale_x, torch.Tensor) and scale_x.requires_grad and torch.is_grad_enabled():
        raise ValueError("ep_dispatch: there is no gradient of scale_x; detach it")
    if x.requires_grad and x.dtype not in FLOATS and torch.is_grad_enabled():
        raise ValueError(f"ep_dispatch: there is no gradient of {x.dtype} tokens; detach x, or use torch.no_grad()")
    return rows


@eager_only
def _run(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    scale_x: torch.Tensor | None,
    group_name: str,
    sizes: list[int],
    capacity: int,
    num_experts: int,
    strategy: str,
) -> tuple[torch.Tensor, ...]:
    group, top_k, rows = group_by_name(group_name), expert_ids.shape[1], tuple(sizes)
    needs_gradient = x.requires_grad or weights.requires_grad
    same = (sizes, x.shape[1], x.dtype, top_k, num_experts, capacity, scale_x is None, strategy, needs_gradient)
    begin("ep_dispatch", group, same)
    choices = Choices(group, num_experts, top_k, capacity, scale_x is not None)
    with guarded(group):
        choices.load(x, expert_ids, weights, rows, strategy)
        sent, notes = choices.address(expert_ids, weights, scale_x)
        moved = spread(group, "ep_dispatch", x, notes, sent, rows, capacity, strategy)
        *found, missing = choices.arrive(moved.notes, moved.received)
    return moved.tokens, *found, moved.arrived, sent, missing


def _fake(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    scale_x: torch.Tensor | None,
    group: str,
    sizes: list[int],
    capacity: int,
    num_experts: int,
    strategy: str,
) -> tuple[torch.Tensor, ...]:
    world_size, top_k = group_by_name(group).world_size, expert_ids.shape[1]
    shares = x.new_empty((capacity, top_k), dtype=torch.float32)
    words = (
        (num_experts // world_size,),
        (capacity * top_k,),
        (capacity, top_k),
        (sum(sizes),),
        (world_size, x.shape[0] + 1),
    )
    scales = x.new_empty((0 if scale_x is None else capacity,), dtype=torch.float32)
    numbers = (x.new_empty(shape, dtype=torch.int32) for shape in words)
    missing = x.new_empty((), dtype=torch.int64)
    return x.new_empty((capacity, x.shape[1])), shares, scales, *numbers, missing


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, _, weights, _, ctx.group, ctx.sizes, _, _, ctx.strategy = inputs
    ctx.x_dtype, ctx.weights_dtype = x.dtype, weights.dtype
    _, _, _, _, _, positions, arrived, sent, _ = output
    ctx.save_for_backward(positions, arrived, sent)


def _backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    of_tokens, of_shares = grads[:2]
    positions, arrived, sent = ctx.saved_tensors
    how = (*identity(positions, arrived), arrived, sent, ctx.group, ctx.sizes, ctx.strategy)
    # All ranks make the same calls, whatever each of them needs.
    grad_x = torch.ops.tileflux.ep_combine(of_tokens, *how) if ctx.x_dtype in FLOATS else None
    # Every choice is on one rank; elsewhere it has no weight, and no gradient.
    own = torch.where(positions >= 0, of_shares, 0.0)
    grad_weights = torch.ops.tileflux.ep_combine(own, *how).to(ctx.weights_dtype)
    return grad_x, None, grad_weights, *([None] * 6)


register(
    "ep_dispatch(Tensor x, Tensor expert_ids, Tensor weights, Tensor? scale_x, str group, SymInt[] sizes, "
    "SymInt capacity, int num_experts, str strategy) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
    _setup_context,
    _backward,
)


def ep_dispatch_reference(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    num_experts: int,
    process_group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same over ``torch.distributed``: received tokens, their choices of this rank's experts or -1, their weights.

    As many as there are. Every rank asks its device how many it sends to each other, and tells them.
    """
    world_size, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    num_each = num_experts // world_size
    owners = expert_ids.div(num_each, rounding_mode="floor")
    picked = [(owners == peer).any(1).nonzero()[:, 0] for peer in range(world_size)]
    send = torch.tensor([len(tokens) for tokens in picked])
    recv = torch.empty_like(send)
    dist.all_to_all_single(recv, send, group=process_group)
    order, found = torch.cat(picked), []
    for tensor in (x, expert_ids, weights.float()):
        rows = as_bytes(dense(tensor)).view(len(tensor), -1)[order] if tensor.numel() else None
        row_bytes = tensor.shape[1] * tensor.element_size()
        out = torch.empty(int(recv.sum()) * row_bytes, dtype=torch.uint8, device=x.device)
        sent = torch.empty(0, dtype=torch.uint8, device=x.device) if rows is None else rows.reshape(-1)
        come, go = ([count * row_bytes for count in counts] for counts in (recv.tolist(), send.tolist()))
        dist.all_to_all_single(out, sent, come, go, group=process_group)
        found.append(out.view(tensor.dtype).view(-1, tensor.shape[1]))
    tokens, ids, shares = found
    is_here = ids.div(num_each, rounding_mode="floor") == rank
    return tokens, torch.where(is_here, ids, -1), torch.where(is_here, shares, 0.0)
