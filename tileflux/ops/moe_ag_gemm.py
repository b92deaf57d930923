"""All-gather + grouped GEMM: the first product of a layer of experts, on the tokens of all ranks.

    x        [T_r, H] on rank r         its tokens
    weight   [E / EP, F / TP, H]        this rank's experts, and its part of each; or a sequence of such
    routing  of ``route``               which rows there are, and in which order
    out      [capacity, F / TP]         one row for every choice of a token for one of this rank's experts

    out[row] = activation(x of the row's token @ weight[e].T * scales + bias[e])        for a row of expert e

Rows are sorted by expert (``routing.rows``); those behind the last are not written.

fused: tokens travel as in ``ag_gemm``. A tile picks the rows of its tokens from what has arrived, and waits for all
ranks that have one among them; tiles whose tokens arrive first are computed first. The last program tells the peers
that the buffer may be written again. The gradient goes back through ``grouped_gemm`` and ``reduce_scatter``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from tileflux.config import GemmConfig
from tileflux.kernels.dense import run_gather
from tileflux.kernels.groups import Groups, sum_choices
from tileflux.kernels.library import multiply_tiles
from tileflux.ops import _dense, _moe
from tileflux.ops._call import begin, check_apart, check_out, dense, guarded
from tileflux.ops._library import eager_only, register
from tileflux.ops.all_gather import all_gather_reference
from tileflux.ops.grouped_gemm import grouped_gemm_reference
from tileflux.ops.routing import Routing
from tileflux.symm.group import group_by_name
from tileflux.tune.lookup import problem_for, stage_span

__all__ = ["moe_ag_gemm", "moe_ag_gemm_reference"]

Tensors = Sequence[torch.Tensor]


def moe_ag_gemm(
    x: torch.Tensor,
    weight: torch.Tensor | Tensors,
    routing: Routing,
    bias: torch.Tensor | Tensors | None = None,
    *,
    activation: str | None = None,
    scale_x: torch.Tensor | float | None = None,
    scale_weight: torch.Tensor | float | Sequence[torch.Tensor | float] | None = None,
    out_dtype: torch.dtype | None = None,
    strategy: str = "auto",
    return_gathered: bool = False,
    config: GemmConfig | None = None,
    out: torch.Tensor | Tensors | None = None,
) -> Any:
    """``activation(x @ weight[e].T * scales + bias[e])`` of all ranks' tokens, for every choice of an expert here.

    A sequence of weights (then ``bias``, ``scale_weight`` and ``out`` are sequences too) shares one gather and gives a
    tuple. ``scale_x`` belongs to this rank's tokens and is gathered with them. ``return_gathered=True``: (result, all
    ranks' tokens).
    """
    single = isinstance(weight, torch.Tensor)
    weights = [weight] if isinstance(weight, torch.Tensor) else list(weight)
    lists = _dense.as_lists("moe_ag_gemm", weights, single, bias=bias, scale_weight=scale_weight, out=out)
    biases, scales, outs = lists["bias"], lists["scale_weight"], lists["out"]
    _check(x, weights, biases, scale_x, scales, routing, activation)
    _dense.check_strategy("moe_ag_gemm", strategy, config)
    _moe.check_config("moe_ag_gemm", config, routing.groups)
    routing.ensure_fits()
    arguments: list[Any] = [
        x, weights, biases, _dense.as_scale(scale_x, x), [_dense.as_scale(scale, x) for scale in scales],
        *_moe.routing_arguments(routing), activation or "", _dense.out_type("moe_ag_gemm", x, out_dtype), strategy,
        return_gathered, _dense.config_text(config),
    ]  # fmt: skip
    results = _run(*arguments, *[outs]) if outs else torch.ops.tileflux.moe_ag_gemm(*arguments)
    gathered = results[len(weights) :]
    values = results[0] if single else tuple(results[: len(weights)])
    return (values, gathered[0]) if return_gathered else values


def _check(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    scale_x: torch.Tensor | float | None,
    scales: list[torch.Tensor | float],
    routing: Routing,
    activation: str | None,
) -> None:
    _moe.check_routing("moe_ag_gemm", routing)
    for index, each in enumerate(weights):
        pair = (biases[index] if biases else None, scale_x, scales[index] if scales else None)
        _moe.check_experts("moe_ag_gemm", x, each, *pair, activation, routing.group)
        _moe.check_number("moe_ag_gemm", each, routing)
    if len(x) != routing.sizes[routing.group.rank]:
        raise ValueError(f"moe_ag_gemm: x has {len(x)} rows, but {routing.sizes[routing.group.rank]} were routed")
    _dense.refuse_gradient("moe_ag_gemm", x, activation, *weights, *biases, scale_x, *scales)


@eager_only
def _run(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    scale_x: torch.Tensor | None,
    scale_weights: list[torch.Tensor],
    index: torch.Tensor,
    offsets: torch.Tensor,
    group_name: str,
    rows: list[int],
    capacity: int,
    top_k: int,
    block_m: int,
    activation: str,
    out_dtype: torch.dtype,
    strategy: str,
    return_gathered: bool,
    config: str,
    outs: list[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    group, num_tokens, depth = group_by_name(group_name), sum(rows), x.shape[1]
    others, results = (*weights, *biases, scale_x, *scale_weights), []
    for number, weight in enumerate(weights):
        shape = (capacity, _moe.num_columns(weight, activation))
        given = outs[number] if outs else None
        results.append(check_out("moe_ag_gemm", given, shape, x, dtype=out_dtype, others=others))
    check_apart("moe_ag_gemm", outs or [])
    gathered = x.new_empty((num_tokens, depth)) if return_gathered else None
    widest = max(result.shape[1] for result in results)
    problem = problem_for("moe_ag_gemm", num_tokens, widest, depth, x.dtype, x.device, group, activation)
    choice = _dense.choose(problem, strategy, _dense.config_from(config), capacity)
    tiles = _moe.tiles_for(choice.config, config, block_m, problem)
    if not config:
        tiles = dataclasses.replace(tiles, span=stage_span(problem, capacity, len(weights[0])))
    begin(
        "moe_ag_gemm",
        group,
        (rows, depth, x.dtype, choice.strategy == "sequential", tiles.num_chunks, scale_x is None, return_gathered),
    )
    x = dense(x)
    if scale_x is not None and scale_x.dim() == 0 and group.world_size > 1:
        scale_x = scale_x.reshape(1).repeat(len(x))  # ranks may differ in it: it travels with the rows
    groups = Groups(index, len(weights[0]), block_m, capacity, num_tokens, top_k, picks_rows=True)
    parts = []
    for number, (weight, result) in enumerate(zip(weights, results, strict=True)):
        bias, scale = (each[number] if each else None for each in (biases, scale_weights))
        parts.append(_moe.grouped_operands(_dense.Inputs(x, weight, bias, scale_x, scale), result, groups, activation))
    with guarded(group):
        if depth == 0 or num_tokens == 0:
            for part in parts:
                multiply_tiles(dataclasses.replace(part, x=x.new_empty((num_tokens, depth)), scale_x=None), tiles)
        else:
            run_gather(group, parts, tuple(rows), choice.strategy, tiles, gathered)
    return results if gathered is None else [*results, gathered]


def _fake(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    scale_x: torch.Tensor | None,
    scale_weights: list[torch.Tensor],
    index: torch.Tensor,
    offsets: torch.Tensor,
    group: str,
    rows: list[int],
    capacity: int,
    top_k: int,
    block_m: int,
    activation: str,
    out_dtype: torch.dtype,
    strategy: str,
    return_gathered: bool,
    config: str,
) -> list[torch.Tensor]:
    results = [x.new_empty((capacity, _moe.num_columns(weight, activation)), dtype=out_dtype) for weight in weights]
    return [*results, x.new_empty((sum(rows), x.shape[1]))] if return_gathered else results


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, weights, biases, _, _, index, offsets, ctx.group, ctx.rows, ctx.capacity, ctx.top_k, ctx.block_m, *_ = inputs
    ctx.save_for_backward(x, index, offsets, *weights)
    ctx.return_gathered = inputs[-2]
    ctx.bias_dtypes = [bias.dtype for bias in biases]


def _backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    x, index, offsets, *weights = ctx.saved_tensors
    num_tokens, capacity, counts = sum(ctx.rows), ctx.capacity, offsets.diff()
    groups = Groups(index, len(weights[0]), ctx.block_m, capacity, num_tokens, ctx.top_k)
    is_used = _moe.is_used(offsets, capacity)
    of_rows = [torch.where(is_used, grad, 0) for grad in grads[: len(weights)]]
    typed = [grad.to(x.dtype) for grad in of_rows]
    by_row = torch.zeros((capacity, x.shape[1]), dtype=torch.float32, device=x.device)
    for grad, weight in zip(typed, weights, strict=True):
        turned = weight.transpose(1, 2)
        by_row += torch.ops.tileflux.grouped_gemm(grad, turned, counts, None, None, None, "", torch.float32, "")
    by_row = torch.where(is_used, by_row, 0)
    of_token = sum_choices(by_row, groups.positions).to(x.dtype)
    if ctx.return_gathered:
        of_token = of_token + grads[-1]
    grad_x = torch.ops.tileflux.reduce_scatter(of_token, ctx.group, ctx.rows)
    gathered = torch.ops.tileflux.all_gather(x, ctx.group, ctx.rows)
    picked = torch.where(is_used, _moe.of_tokens(gathered, groups.tokens), 0)
    grad_weights = [
        _moe.by_expert(grad, picked, offsets).to(weight.dtype) for grad, weight in zip(typed, weights, strict=True)
    ]
    grad_biases = [_moe.bias_gradient(of_rows[i], offsets, dtype) for i, dtype in enumerate(ctx.bias_dtypes)]
    return grad_x, grad_weights, grad_biases, None, [], *([None] * 12)


register(
    "moe_ag_gemm(Tensor x, Tensor[] weights, Tensor[] biases, Tensor? scale_x, Tensor[] scale_weights, Tensor index, "
    "Tensor offsets, str group, SymInt[] rows, SymInt capacity, int top_k, int block_m, "
    "str activation, ScalarType out_dtype, str strategy, bool return_gathered, str config) -> Tensor[]",
    _run,
    _fake,
    _setup_context,
    _backward,
)


def moe_ag_gemm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    bias: torch.Tensor | None = None,
    *,
    process_group: Any = None,
    activation: str | None = None,
    scale_x: torch.Tensor | float | None = None,
    scale_weight: torch.Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The same over ``torch.distributed``: gather tokens and their scales, pick the rows, multiply expert by expert."""
    tokens = routing.rows.slots // routing.top_k
    rows = _moe.of_tokens(all_gather_reference(x, process_group, routing.sizes), tokens)
    if scale_x is not None:
        scales = torch.as_tensor(scale_x, dtype=torch.float32, device=x.device).expand(len(x)).contiguous()
        scale_x = _moe.of_tokens(all_gather_reference(scales, process_group, routing.sizes), tokens)
    return grouped_gemm_reference(
        rows, weight, routing.counts, bias,
        activation=activation, scale_x=scale_x, scale_weight=scale_weight, out_dtype=out_dtype,
    )  # fmt: skip
