"""GEMM + all-reduce: the product summed over ranks, on every rank.

    x       [M, K_r] on rank r
    weight  [N, K_r] on rank r
    out     [M, N] everywhere

    out = sum over s of round(x_s @ weight_s.T * scales (+ bias, on rank 0))

Sums are those of ``gemm_rs``: fp32, s = 0, 1, 2, ..., rounded once, the same bits on every rank.

``one_shot``, fused: a finished tile goes to this rank's slot on every rank, with a flag; then every rank waits, tile by
tile, for all ranks' and sums. One step, W times the bytes: for decoding. ``two_shot``: ``gemm_rs``, then all-gather of
the sums: two steps, twice the bytes. Nobody overwrites a slot before its owner has read it. The gradient is an
all-reduce and two products.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from tileflux.config import SWAPPED_BYTES, GemmConfig
from tileflux.kernels.again import Launched
from tileflux.kernels.dense import copies_by_sms, gather_rows, multiply
from tileflux.kernels.operands import Operands
from tileflux.kernels.plan import split_rows
from tileflux.kernels.prepared import Kept
from tileflux.kernels.scatter import pull_sums, run_scatter, run_spread, swap_sums
from tileflux.ops import _dense
from tileflux.ops._call import begin, check_out, guarded
from tileflux.ops._library import eager_only, register
from tileflux.ops.all_reduce import ALGORITHMS, all_reduce_reference, sum_everywhere
from tileflux.ops.gemm import gemm_reference
from tileflux.symm.group import Group, group_by_name
from tileflux.tune.lookup import Choice, problem_for

__all__ = ["gemm_ar", "gemm_ar_reference"]


def gemm_ar(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: Group,
    algorithm: str = "auto",
    scale_x: torch.Tensor | float | None = None,
    scale_weight: torch.Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    strategy: str = "auto",
    config: GemmConfig | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``sum over ranks of x @ weight.T * scales``, plus the bias, once (rank 0's), on every rank.

    ``algorithm``: auto, one_shot or two_shot. The pipelined strategy goes in two shots.
    """
    tensors = (x, weight, bias, scale_x, scale_weight)
    key = _dense.call_key(tensors, group, algorithm, out_dtype, strategy, config)
    known = None if key is None else _known.find(key)  # the compiler would guard all that is kept
    again = _dense.call_again("gemm_ar", known, group, tensors, out)
    if again is not None:
        return again
    if known is not None:
        return _multiply(_dense.make_inputs(*tensors), group, known, out)
    _dense.check_dense("gemm_ar", x, weight, bias, scale_x, scale_weight, None, group)
    _dense.check_strategy("gemm_ar", strategy, config)
    _dense.refuse_gradient("gemm_ar", x, None, weight, bias, scale_x, scale_weight)
    if algorithm not in ALGORITHMS:
        raise ValueError(f"gemm_ar: algorithm={algorithm!r} is not one of {', '.join(ALGORITHMS)}")
    if strategy == "pipelined" and algorithm == "one_shot":
        raise ValueError("gemm_ar: strategy='pipelined' sends finished shards, which is two_shot; leave algorithm away")
    kind = _dense.out_type("gemm_ar", x, out_dtype)
    inputs = _dense.make_inputs(*tensors)
    arguments = (*inputs, group.name, algorithm, kind, strategy, _dense.config_text(config))
    result: torch.Tensor = torch.ops.tileflux.gemm_ar(*arguments) if out is None else _run(*arguments, out)
    if key is not None:
        decided = _decide(inputs, group, algorithm, kind, strategy, config)
        _known.keep(key, _dense.Known(decided, takes_numbers=_dense.has_numbers(scale_x, scale_weight)))
    return result


_known: Kept[_dense.Known] = Kept()


@eager_only
def _run(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale_x: torch.Tensor | None,
    scale_weight: torch.Tensor | None,
    group_name: str,
    algorithm: str,
    out_dtype: torch.dtype,
    strategy: str,
    config: str,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    group, inputs = group_by_name(group_name), _dense.Inputs(x, weight, bias, scale_x, scale_weight)
    decided = _decide(inputs, group, algorithm, out_dtype, strategy, _dense.config_from(config))
    return _multiply(inputs, group, _dense.Known(decided), out)


def _decide(
    inputs: _dense.Inputs,
    group: Group,
    algorithm: str,
    out_dtype: torch.dtype,
    strategy: str,
    config: GemmConfig | None,
) -> _dense.Decided:
    x, weight = inputs.x, inputs.weight
    problem = problem_for("gemm_ar", x.shape[0], weight.shape[0], x.shape[1], x.dtype, x.device, group)
    choice = _dense.choose(problem, strategy, config)
    if algorithm != "auto":
        choice = dataclasses.replace(choice, algorithm=algorithm)
    return _dense.Decided(problem, choice, out_dtype)


def _multiply(inputs: _dense.Inputs, group: Group, known: _dense.Known, out: torch.Tensor | None) -> torch.Tensor:
    x, _, bias, *_ = inputs
    problem, choice, kind = known.decided
    num_rows, num_columns = problem.m, problem.n
    out = check_out("gemm_ar", out, (num_rows, num_columns), x, dtype=kind, others=inputs[1:])
    tile = (choice.config.block_m, choice.config.block_n, choice.config.num_chunks)
    same = (num_rows, num_columns, x.dtype, kind, choice.strategy, choice.algorithm, tile, bias is None)
    begin("gemm_ar", group, same)
    if 0 not in (num_rows, num_columns):
        operands = _dense.make_operands(inputs, out, adds_bias=group.rank == 0)
        with guarded(group):
            known.keep(_sum_products(group, operands, choice), group, inputs, operands)
    return out


def _sum_products(group: Group, operands: Operands, choice: Choice) -> Launched | None:
    out = operands.out
    directly = choice.strategy == "sequential" and choice.algorithm == "one_shot" and copies_by_sms(group)
    if directly and out.nbytes <= SWAPPED_BYTES:
        return swap_sums(group, operands, choice.config, "gemm_ar")
    if directly:
        return pull_sums(group, operands, split_rows(len(out), group.world_size), choice.config, "gemm_ar", 0)
    if choice.strategy == "fused" and choice.algorithm == "one_shot" and group.world_size > 1:
        return run_spread(group, operands, choice.config)
    if choice.strategy == "sequential" or group.world_size == 1:
        partial = dataclasses.replace(operands, out=torch.empty_like(out))
        multiply(group, partial, choice.config)
        sum_everywhere(group, "gemm_ar", partial.out, out, choice.algorithm)
    else:
        rows = split_rows(len(out), group.world_size)
        first = sum(rows[: group.rank])
        mine = out[first : first + rows[group.rank]]
        run_scatter(group, dataclasses.replace(operands, out=mine), rows, choice.strategy, choice.config)
        gather_rows(group, "gemm_ar", mine, out, rows)
    return None


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale_x: torch.Tensor | None,
    scale_weight: torch.Tensor | None,
    group: str,
    algorithm: str,
    out_dtype: torch.dtype,
    strategy: str,
    config: str,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, _, _, ctx.group, *_ = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    # As of all_reduce: every rank's result is its own, and the losses of all ranks count.
    total = torch.ops.tileflux.all_reduce(grad.to(x.dtype), ctx.group, "auto")
    grad_x = torch.ops.tileflux.gemm(total, weight.t(), None, None, None, "", x.dtype, "")
    grad_weight = _dense.product(total.t(), x, weight.dtype) if ctx.needs_input_grad[1] else None
    grad_bias = total.float().sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
    return grad_x, grad_weight, grad_bias, *([None] * 7)


register(
    "gemm_ar(Tensor x, Tensor weight, Tensor? bias, Tensor? scale_x, Tensor? scale_weight, str group, str algorithm, "
    "ScalarType out_dtype, str strategy, str config) -> Tensor",
    _run,
    _fake,
    _setup_context,
    _backward,
)


def gemm_ar_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    scale_x: torch.Tensor | float | None = None,
    scale_weight: torch.Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The same over ``torch.distributed``: multiply, gather all partial sums, add them up in rank order."""
    own_bias = bias if dist.get_rank(process_group) == 0 else None
    partial = gemm_reference(x, weight, own_bias, scale_x=scale_x, scale_weight=scale_weight, out_dtype=out_dtype)
    return all_reduce_reference(partial, process_group)
