"""Grouped GEMM + sum of a token's choices + reduce-scatter: the second product of a layer of experts.

    h        [capacity, F / TP]         rows in the order of ``routing``, as ``moe_ag_gemm`` gives them
    weight   [E / EP, H, F / TP]        this rank's experts, and its part of each
    routing  of ``route``
    out      [T_r, H] on rank r         its tokens

    y[row] = round(h[row] @ weight[e].T * scales)                               for a row of expert e
    out    = sum over ranks s of round(sum over choices j of weights[token, j] * y[row of token, j])

Products are accumulated in fp32 and rounded to the result's type; a token's choices are weighted and added up in fp32,
in their order, and rounded; ranks are added up in fp32, s = 0, 1, 2, ..., and rounded once: bitwise repeatable.

pipelined: columns are cut into slabs. Of each there is a product, and a kernel that adds up all tokens' choices; then
it is sent, by the copy engine or by SMs, while the next slab is multiplied. A kernel at the end adds up all ranks'.

fused: slabs, too, in one launch. While one slab is multiplied, the rows of the slab before are added up by token, and
stored into this rank's slot at the token's owner, with a flag; sums of one's own tokens come last, and wait for the
flags of all peers. The last program of the launch tells the peers that it has read. Where copies need no SM, sums stay
in memory of this rank's own, counted by owner and slab, and the copy engine carries each such part when it is complete;
a kernel at the end adds up all ranks'. The gradient, of rows, weights and what choices are weighted with, goes back
through ``all_gather`` and ``grouped_gemm``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tileflux.config import GemmConfig, GemmProblem
from tileflux.kernels.combine import run_combine
from tileflux.kernels.groups import Groups, sum_choices
from tileflux.ops import _dense, _moe
from tileflux.ops._call import begin, check_out, guarded
from tileflux.ops._library import eager_only, register
from tileflux.ops.grouped_gemm import grouped_gemm_reference
from tileflux.ops.reduce_scatter import reduce_scatter_reference
from tileflux.ops.routing import Routing
from tileflux.symm.group import group_by_name
from tileflux.tune.lookup import problem_for, stage_span, usual_slabs

__all__ = ["moe_gemm_rs", "moe_gemm_rs_reference", "slab_tiles"]


def moe_gemm_rs(
    h: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    *,
    scale_h: torch.Tensor | float | None = None,
    scale_weight: torch.Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    strategy: str = "auto",
    config: GemmConfig | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's tokens: the products of all their choices, on whatever rank, weighted and added up.

    ``config.num_chunks`` is the number of slabs that columns are cut into; pipelined, where all are equally wide, the
    most that there may be.
    """
    _check(h, weight, scale_h, scale_weight, routing)
    _dense.check_strategy("moe_gemm_rs", strategy, config)
    _moe.check_config("moe_gemm_rs", config, routing.groups)
    routing.ensure_fits()
    arguments: list[Any] = [
        h, weight, routing.own_weights, _dense.as_scale(scale_h, h), _dense.as_scale(scale_weight, h),
        *_moe.routing_arguments(routing), _dense.out_type("moe_gemm_rs", h, out_dtype), strategy,
        _dense.config_text(config),
    ]  # fmt: skip
    result: torch.Tensor = torch.ops.tileflux.moe_gemm_rs(*arguments) if out is None else _run(*arguments, *[out])
    return result


def _check(
    h: torch.Tensor,
    weight: torch.Tensor,
    scale_h: torch.Tensor | float | None,
    scale_weight: torch.Tensor | float | None,
    routing: Routing,
) -> None:
    _moe.check_routing("moe_gemm_rs", routing)
    _moe.check_experts("moe_gemm_rs", h, weight, None, scale_h, scale_weight, None, routing.group)
    _moe.check_number("moe_gemm_rs", weight, routing)
    if len(h) != routing.capacity:
        raise ValueError(f"moe_gemm_rs: h has {len(h)} rows, but there is room for {routing.capacity} in the routing")
    _dense.refuse_gradient("moe_gemm_rs", h, None, weight, scale_h, scale_weight, routing.own_weights)


@eager_only
def _run(
    h: torch.Tensor,
    weight: torch.Tensor,
    own_weights: torch.Tensor,
    scale_h: torch.Tensor | None,
    scale_weight: torch.Tensor | None,
    index: torch.Tensor,
    offsets: torch.Tensor,
    group_name: str,
    rows: list[int],
    capacity: int,
    top_k: int,
    block_m: int,
    out_dtype: torch.dtype,
    strategy: str,
    config: str,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    group, num_tokens, num_columns = group_by_name(group_name), sum(rows), weight.shape[1]
    others = (weight, own_weights, scale_h, scale_weight)
    out = check_out("moe_gemm_rs", out, (rows[group.rank], num_columns), h, dtype=out_dtype, others=others)
    problem = problem_for("moe_gemm_rs", num_tokens, num_columns, h.shape[1], h.dtype, h.device, group)
    choice = _dense.choose(problem, strategy, _dense.config_from(config))
    tiles = slab_tiles(choice.config, config, block_m, problem, choice.strategy, capacity, len(weight))
    num_slabs = tiles.num_chunks if choice.strategy == "pipelined" else 0
    same = (rows, num_columns, h.dtype, out_dtype, choice.strategy, tiles.block_m, tiles.block_n, top_k, num_slabs)
    begin("moe_gemm_rs", group, same)
    if 0 in (num_tokens, num_columns):
        return out
    groups = Groups(index, len(weight), block_m, capacity, num_tokens, top_k)
    operands = _moe.grouped_operands(_dense.Inputs(h, weight, None, scale_h, scale_weight), out, groups, "")
    with guarded(group):
        run_combine(group, operands, tuple(rows), choice.strategy, tiles)
    return out


def slab_tiles(
    usual: GemmConfig, given: str, block_m: int, problem: GemmProblem, strategy: str, num_rows: int, num_experts: int
) -> GemmConfig:
    """As ``_moe.tiles_for``, and how many slabs columns are cut into; of one, how many ranks' rows go together."""
    tiles = _moe.tiles_for(usual, given, block_m, problem)
    if given:
        return tiles
    span = stage_span(problem, num_rows, num_experts) if strategy == "pipelined" else tiles.span
    return dataclasses.replace(tiles, num_chunks=usual_slabs(problem, strategy, tiles.block_n), span=span)


def _fake(
    h: torch.Tensor,
    weight: torch.Tensor,
    own_weights: torch.Tensor,
    scale_h: torch.Tensor | None,
    scale_weight: torch.Tensor | None,
    index: torch.Tensor,
    offsets: torch.Tensor,
    group: str,
    rows: list[int],
    capacity: int,
    top_k: int,
    block_m: int,
    out_dtype: torch.dtype,
    strategy: str,
    config: str,
) -> torch.Tensor:
    return h.new_empty((rows[group_by_name(group).rank], weight.shape[1]), dtype=out_dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    h, weight, own, _, _, index, offsets, ctx.group, ctx.rows, ctx.capacity, ctx.top_k, ctx.block_m, *_ = inputs
    ctx.save_for_backward(h, weight, own, index, offsets)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    h, weight, own, index, offsets = ctx.saved_tensors
    num_tokens, counts = sum(ctx.rows), offsets.diff()
    groups = Groups(index, len(weight), ctx.block_m, ctx.capacity, num_tokens, ctx.top_k)
    # All ranks make the same calls, whatever each of them needs.
    gathered = torch.ops.tileflux.all_gather(grad.to(h.dtype), ctx.group, ctx.rows)
    is_used = _moe.is_used(offsets, ctx.capacity)
    of_row = torch.where(is_used, _moe.of_tokens(gathered, groups.tokens), 0).float()
    # Of every row, the weight of the choice that it is; choices that are not here go behind the last row.
    shares = torch.zeros(ctx.capacity + 1, dtype=torch.float32, device=h.device)
    places = torch.where(groups.positions < 0, ctx.capacity, groups.positions).long()
    shares = shares.scatter(0, places.reshape(-1), _gates(ctx, own, groups).reshape(-1))
    typed = (of_row * shares[:-1, None]).to(h.dtype)
    turned = weight.transpose(1, 2)
    grad_h = torch.ops.tileflux.grouped_gemm(typed, turned, counts, None, None, None, "", h.dtype, "")
    grad_weight = _moe.by_expert(typed, torch.where(is_used, h, 0), offsets).to(weight.dtype)
    # Of every choice, how much its row would add to the loss.
    products = torch.ops.tileflux.grouped_gemm(h, weight, counts, None, None, None, "", torch.float32, "")
    worth = (torch.where(is_used, products, 0) * of_row).sum(1, keepdim=True)
    worth = torch.cat((worth, worth.new_zeros(1, 1)))[places.reshape(-1), 0].view(num_tokens, ctx.top_k)
    grad_own = torch.ops.tileflux.reduce_scatter(worth, ctx.group, ctx.rows).to(own.dtype)
    return torch.where(is_used, grad_h, 0), grad_weight, grad_own, *([None] * 12)


def _gates(ctx: Any, own: torch.Tensor, groups: Groups) -> torch.Tensor:
    """``[T, top_k]``: what the routing has of them; where a gradient of the gradient is asked for, as its function."""
    if not torch.is_grad_enabled():
        return groups.weights
    gathered: torch.Tensor = torch.ops.tileflux.all_gather(own.float(), ctx.group, ctx.rows)
    return gathered


register(
    "moe_gemm_rs(Tensor h, Tensor weight, Tensor own_weights, Tensor? scale_h, Tensor? scale_weight, Tensor index, "
    "Tensor offsets, str group, SymInt[] rows, SymInt capacity, int top_k, int block_m, ScalarType out_dtype, "
    "str strategy, str config) -> Tensor",
    _run,
    _fake,
    _setup_context,
    _backward,
)


def moe_gemm_rs_reference(
    h: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    *,
    process_group: Any = None,
    scale_h: torch.Tensor | float | None = None,
    scale_weight: torch.Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The same over ``torch.distributed``: multiply expert by expert, add up by token, reduce-scatter."""
    products = grouped_gemm_reference(
        h, weight, routing.counts, scale_x=scale_h, scale_weight=scale_weight, out_dtype=out_dtype
    )
    sums = sum_choices(products, routing.groups.positions, routing.weights).to(products.dtype)
    return reduce_scatter_reference(sums, process_group, routing.sizes)
