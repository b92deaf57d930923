"""Grouped GEMM: rows that belong to experts, each multiplied with its expert's weight.

    x       [M, K]                      sorted by expert
    weight  [E, N, K], N or K contiguous                ("swiglu": [E, 2 F, K], gate then up, and N = F)
    counts  [E], on the device          rows of each expert; together at most M
    out     [M, N]                      rows behind the last expert's are not written

    out[row] = activation(x[row] @ weight[e].T * scale_x[row] * scale_weight[e] + bias[e])     for a row of expert e

One rank's work: nobody else writes, nobody waits. How the rows are shared out among experts is never known to the host:
a list of tiles is made on the device, and programs take them from it.
"""

from __future__ import annotations

from typing import Any

import torch

from tileflux.config import GemmConfig
from tileflux.kernels.groups import cut_counts, offsets_of
from tileflux.kernels.library import multiply_tiles
from tileflux.ops import _dense, _moe
from tileflux.ops._call import check_out
from tileflux.ops._library import eager_only, register
from tileflux.ops.gemm import gemm_reference
from tileflux.tune.lookup import problem_for

__all__ = ["grouped_gemm", "grouped_gemm_reference"]


def grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    scale_x: torch.Tensor | float | None = None,
    scale_weight: torch.Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    config: GemmConfig | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``activation(x @ weight[e].T * scales + bias[e])`` of every row, ``e`` being its expert.

    ``counts``: how many rows each expert has, as integers on the device of ``x``; what they add up to beyond M is left
    out. ``scale_weight`` may be one number, one per expert, or one per expert and column.
    """
    _moe.check_experts("grouped_gemm", x, weight, bias, scale_x, scale_weight, activation)
    _check_counts(counts, weight)
    _dense.check_strategy("grouped_gemm", "auto", config)
    kind = _dense.out_type("grouped_gemm", x, out_dtype)
    _dense.refuse_gradient("grouped_gemm", x, activation, weight, bias, scale_x, scale_weight)
    arguments = (
        x, weight, counts, bias, _dense.as_scale(scale_x, x), _dense.as_scale(scale_weight, x), activation or "", kind,
        _dense.config_text(config),
    )  # fmt: skip
    result: torch.Tensor = torch.ops.tileflux.grouped_gemm(*arguments) if out is None else _run(*arguments, out)
    return result


def _check_counts(counts: torch.Tensor, weight: torch.Tensor) -> None:
    if not isinstance(counts, torch.Tensor):
        raise ValueError(f"grouped_gemm: counts should be a tensor of integers, not {type(counts).__name__}")
    if counts.dtype not in (torch.int32, torch.int64) or tuple(counts.shape) != weight.shape[:1]:
        raise ValueError(
            f"grouped_gemm: counts should be int32 or int64 of shape ({weight.shape[0]},), one per expert, "
            f"not {counts.dtype} {tuple(counts.shape)}"
        )
    if counts.device != weight.device:
        raise ValueError(f"grouped_gemm: counts is on {counts.device} but weight is on {weight.device}; move it there")


@eager_only
def _run(
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: torch.Tensor,
    bias: torch.Tensor | None,
    scale_x: torch.Tensor | None,
    scale_weight: torch.Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
    config: str,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    num_rows, num_columns = x.shape[0], _moe.num_columns(weight, activation)
    others = (weight, counts, bias, scale_x, scale_weight)
    out = check_out("grouped_gemm", out, (num_rows, num_columns), x, dtype=out_dtype, others=others)
    rows = _moe.rows_for_tiles(num_rows, weight.shape[0])
    problem = problem_for("gemm", rows, num_columns, x.shape[1], x.dtype, x.device, None, activation)
    tiles = _dense.choose(problem, "auto", _dense.config_from(config)).config
    with torch.cuda.device(x.device if x.is_cuda else -1):
        if out.numel():
            groups = cut_counts(counts.resolve_neg(), num_rows, tiles.block_m)
            experts = _dense.Inputs(x, weight, bias, scale_x, scale_weight)
            multiply_tiles(_moe.grouped_operands(experts, out, groups, activation), tiles)
    return out


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: torch.Tensor,
    bias: torch.Tensor | None,
    scale_x: torch.Tensor | None,
    scale_weight: torch.Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
    config: str,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], _moe.num_columns(weight, activation)), dtype=out_dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, counts, bias, *_ = inputs
    ctx.save_for_backward(x, weight, counts)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight, counts = ctx.saved_tensors
    needs_x, needs_weight, _, needs_bias = ctx.needs_input_grad[:4]
    offsets = offsets_of(counts, x.shape[0])
    # Rows of no expert are in no result: whatever stands in their place has no gradient.
    is_used = _moe.is_used(offsets, len(x))
    grad = torch.where(is_used, grad, 0)
    typed = grad.to(x.dtype)
    grad_x = grad_weight = grad_bias = None
    if needs_x:
        turned = weight.transpose(1, 2)
        grad_x = torch.ops.tileflux.grouped_gemm(typed, turned, counts, None, None, None, "", x.dtype, "")
        grad_x = torch.where(is_used, grad_x, 0)
    if needs_weight:
        grad_weight = _moe.by_expert(typed, torch.where(is_used, x, 0), offsets).to(weight.dtype)
    if needs_bias:
        grad_bias = _moe.bias_gradient(grad, offsets, ctx.bias_dtype)
    return grad_x, grad_weight, None, grad_bias, *([None] * 5)


register(
    "grouped_gemm(Tensor x, Tensor weight, Tensor counts, Tensor? bias, Tensor? scale_x, Tensor? scale_weight, "
    "str activation, ScalarType out_dtype, str config) -> Tensor",
    _run,
    _fake,
    _setup_context,
    _backward,
)


def grouped_gemm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    scale_x: torch.Tensor | float | None = None,
    scale_weight: torch.Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The same in plain torch, expert by expert. Asks the device for the counts. Rows of no expert are 0."""
    results, first = [], 0
    for expert, count in enumerate(counts.tolist()):
        rows = slice(first, first := min(len(x), first + max(0, count)))
        scales = [scale_x, scale_weight]
        if isinstance(scale_x, torch.Tensor) and scale_x.dim():
            scales[0] = scale_x[rows]
        if isinstance(scale_weight, torch.Tensor) and scale_weight.dim():
            scales[1] = scale_weight[expert]
        own = None if bias is None else bias[expert]
        results.append(
            gemm_reference(
                x[rows], weight[expert], own,
                activation=activation, scale_x=scales[0], scale_weight=scales[1], out_dtype=out_dtype,
            )
        )  # fmt: skip
    rest = results[0].new_zeros((len(x) - first, results[0].shape[1]))
    return torch.cat([*results, rest])
