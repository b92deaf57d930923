"""Combine: what experts have made of tokens goes back to the tokens' ranks, and is added up.

    rows        [capacity * k, H]       sorted by expert, one for each choice, as ``ep_dispatch`` has sorted them
    dispatched  of ``ep_dispatch``
    out         [T_r, H] on rank r      its tokens

    out = sum over ranks d of round(sum over choices j of weights[token, j] * rows[row of token, j])

A token's choices on one rank are weighted and added up there, in fp32, in their order, and rounded to the type of
``rows``; one row goes back per token and rank. The owner adds them up in fp32, d = 0, 1, 2, ..., and rounds once:
bitwise repeatable. A token without choices gets 0.

Every rank stores the sums of its peers' tokens into their mailboxes and raises their data flags; then it waits for
theirs of its own tokens, step by step, and adds up. One launch. The gradient is ``ep_dispatch``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tileflux.kernels.groups import sum_choices
from tileflux.ops._call import REDUCIBLE, begin, check_out, check_reducible, check_tensor, guarded, sum_in_rank_order
from tileflux.ops._ep import Dispatched, check_strategy, combine
from tileflux.ops._library import eager_only, register
from tileflux.symm.group import group_by_name

__all__ = ["ep_combine", "ep_combine_reference"]


def ep_combine(
    rows: torch.Tensor, dispatched: Dispatched, *, strategy: str = "auto", out: torch.Tensor | None = None
) -> torch.Tensor:
    """This rank's tokens: what all ranks have made of their choices, weighted and added up. Collective."""
    if not isinstance(dispatched, Dispatched):
        raise ValueError(
            f"ep_combine: dispatched should be what tileflux.ep_dispatch gives, not {type(dispatched).__name__}"
        )
    check_tensor("ep_combine", "rows", rows, dispatched.group)
    check_strategy("ep_combine", strategy)
    num_rows = dispatched.capacity * dispatched.top_k
    if rows.dim() != 2 or len(rows) != num_rows:
        raise ValueError(
            f"ep_combine: rows should be [{num_rows}, H], one for each choice of each token that there is room for, "
            f"not {tuple(rows.shape)}"
        )
    check_reducible("ep_combine", rows)
    dispatched.ensure_fits()
    arguments: list[Any] = [
        rows, dispatched.weights, dispatched.positions, dispatched.row_tokens, dispatched.counts, dispatched.arrived,
        dispatched.sent, dispatched.group.name, list(dispatched.sizes), strategy,
    ]  # fmt: skip
    result: torch.Tensor = torch.ops.tileflux.ep_combine(*arguments) if out is None else _run(*arguments, *[out])
    return result


@eager_only
def _run(
    rows: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    row_tokens: torch.Tensor,
    counts: torch.Tensor,
    arrived: torch.Tensor,
    sent: torch.Tensor,
    group_name: str,
    sizes: list[int],
    strategy: str,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    group = group_by_name(group_name)
    out = check_out("ep_combine", out, (sizes[group.rank], rows.shape[1]), rows, others=(weights,))
    needs_gradient = rows.requires_grad or weights.requires_grad
    begin("ep_combine", group, (sizes, rows.shape[1], rows.dtype, positions.shape[1], strategy, needs_gradient))
    with guarded(group):
        combine(group, "ep_combine", rows, weights, positions, arrived, sent, tuple(sizes), strategy, out)
    return out


def _fake(
    rows: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    row_tokens: torch.Tensor,
    counts: torch.Tensor,
    arrived: torch.Tensor,
    sent: torch.Tensor,
    group: str,
    sizes: list[int],
    strategy: str,
) -> torch.Tensor:
    return rows.new_empty((sizes[group_by_name(group).rank], rows.shape[1]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.group, ctx.sizes, ctx.strategy = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    rows, weights, positions, row_tokens, counts, arrived, sent = ctx.saved_tensors
    capacity, num_rows = positions.shape[0], rows.shape[0]
    how = (arrived, sent, ctx.group, ctx.sizes, capacity, ctx.strategy)
    tokens = torch.ops.tileflux.ep_spread(grad.to(rows.dtype), *how)
    # What stands in rows of no expert is nobody's, and so is what stands behind the last token.
    is_used = (torch.arange(num_rows, device=rows.device) < counts.sum())[:, None]
    of_row = torch.where(is_used, tokens[row_tokens.long()], 0).float()
    # Of every row, the weight of the choice that it is; choices that are not here go behind the last row.
    places = torch.where(positions < 0, num_rows, positions).long().reshape(-1)
    shares = torch.zeros(num_rows + 1, dtype=torch.float32, device=rows.device)
    shares = shares.scatter(0, places, weights.reshape(-1))
    grad_rows = (of_row * shares[:-1, None]).to(rows.dtype)
    # Of every choice, how much its row would add to the loss.
    worth = (torch.where(is_used, rows, 0).float() * of_row).sum(1)
    grad_weights = torch.cat((worth, worth.new_zeros(1)))[places].view(positions.shape)
    return grad_rows, grad_weights, *([None] * 8)


register(
    "ep_combine(Tensor rows, Tensor weights, Tensor positions, Tensor row_tokens, Tensor counts, Tensor arrived, "
    "Tensor sent, str group, SymInt[] sizes, str strategy) -> Tensor",
    _run,
    _fake,
    _setup_context,
    _backward,
)


def ep_combine_reference(
    rows: torch.Tensor, dispatched: Dispatched, process_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """The same over ``torch.distributed``: add up by token, gather the sums, add up in rank order."""
    assert rows.dtype in REDUCIBLE
    world_size, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    place, is_here = dispatched.arrived.clamp(min=0).long(), dispatched.arrived >= 0
    sums = rows.new_zeros((len(place), rows.shape[1]))
    if len(dispatched.positions):
        picked = torch.where(is_here[:, None], dispatched.positions[place], -1)
        sums = sum_choices(rows, picked, dispatched.weights.detach()[place], rows.dtype)
    gathered = [torch.empty_like(sums) for _ in range(world_size)]
    dist.all_gather(gathered, sums, group=process_group)
    return sum_in_rank_order([each.split(list(dispatched.sizes))[rank] for each in gathered])
