"""GEMM + reduce-scatter: the product summed over ranks, each rank keeping its rows.

    x       [M, K_r] on rank r          its columns of the whole x
    weight  [N, K_r] on rank r
    out     [m_r, N] on rank r          m: M split as evenly as it goes (``torch.tensor_split``), or ``sizes``

    out = sum over s of round(x_s @ weight_s.T * scales (+ bias, on rank 0))[rows of r]

Every partial sum is accumulated in fp32 and rounded to the result's type; then they are added in fp32, s = 0, 1, 2,
..., and rounded once: bitwise repeatable.

fused: tiles of the next rank's rows come first, one's own last. A finished tile is stored into this rank's slot at its
owner, with a flag; one's own tile waits for the flags of all peers' tiles of the same place and sums the slots. The
last program of the launch tells the peers that it has read. The gradient is ``ag_gemm`` and a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tileflux.config import GemmConfig
from tileflux.kernels.plan import split_rows
from tileflux.kernels.prepared import Kept
from tileflux.kernels.scatter import run_scatter
from tileflux.ops import _dense
from tileflux.ops._call import begin, check_out, check_sizes, guarded
from tileflux.ops._library import eager_only, register
from tileflux.ops.gemm import gemm_reference
from tileflux.ops.reduce_scatter import reduce_scatter_reference
from tileflux.symm.group import Group, group_by_name
from tileflux.tune.lookup import problem_for

__all__ = ["gemm_rs", "gemm_rs_reference"]


def gemm_rs(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: Group,
    sizes: Sequence[int] | None = None,
    scale_x: torch.Tensor | float | None = None,
    scale_weight: torch.Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    strategy: str = "auto",
    config: GemmConfig | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's rows of ``sum over ranks of x @ weight.T * scales``, plus the bias, once.

    Every rank passes the bias; rank 0's is used. ``sizes``: rows each rank gets; every rank passes the same list.
    """
    tensors = (x, weight, bias, scale_x, scale_weight)
    sizes = None if sizes is None else tuple(sizes)
    key = _dense.call_key(tensors, group, sizes, out_dtype, strategy, config)
    known = None if key is None else _known.find(key)  # the compiler would guard all that is kept
    result = _dense.call_again("gemm_rs", known, group, tensors, out)
    if result is not None:
        return result
    if known is not None:
        return _multiply(_dense.make_inputs(*tensors), group, known, out)
    _dense.check_dense("gemm_rs", x, weight, bias, scale_x, scale_weight, None, group)
    _dense.check_strategy("gemm_rs", strategy, config)
    _dense.refuse_gradient("gemm_rs", x, None, weight, bias, scale_x, scale_weight)
    if sizes is None:
        rows = split_rows(x.shape[0], group.world_size)
    else:
        rows = check_sizes("gemm_rs", "sizes", sizes, group, total=x.shape[0])
    kind = _dense.out_type("gemm_rs", x, out_dtype)
    inputs = _dense.make_inputs(*tensors)
    arguments = (*inputs, group.name, list(rows), kind, strategy, _dense.config_text(config))
    result = torch.ops.tileflux.gemm_rs(*arguments) if out is None else _run(*arguments, out)
    if key is not None:
        decided, takes_numbers = _decide(inputs, group, kind, strategy, config), _dense.has_numbers(*tensors[3:])
        _known.keep(key, _dense.Known(decided, rows, takes_numbers))
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
    rows: list[int],
    out_dtype: torch.dtype,
    strategy: str,
    config: str,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    group, inputs = group_by_name(group_name), _dense.Inputs(x, weight, bias, scale_x, scale_weight)
    decided = _decide(inputs, group, out_dtype, strategy, _dense.config_from(config))
    return _multiply(inputs, group, _dense.Known(decided, tuple(rows)), out)


def _decide(
    inputs: _dense.Inputs, group: Group, out_dtype: torch.dtype, strategy: str, config: GemmConfig | None
) -> _dense.Decided:
    x, weight = inputs.x, inputs.weight
    problem = problem_for("gemm_rs", x.shape[0], weight.shape[0], x.shape[1], x.dtype, x.device, group)
    return _dense.Decided(problem, _dense.choose(problem, strategy, config), out_dtype)


def _multiply(inputs: _dense.Inputs, group: Group, known: _dense.Known, out: torch.Tensor | None) -> torch.Tensor:
    x, _, bias, *_ = inputs
    (problem, choice, kind), rows = known.decided, known.rows
    num_columns = problem.n
    out = check_out("gemm_rs", out, (rows[group.rank], num_columns), x, dtype=kind, others=inputs[1:])
    tile = (choice.config.block_m, choice.config.block_n, choice.config.num_chunks)
    begin("gemm_rs", group, (rows, num_columns, x.dtype, kind, choice.strategy, tile, bias is None))
    if 0 not in (problem.m, num_columns):
        operands = _dense.make_operands(inputs, out, adds_bias=group.rank == 0)
        with guarded(group):
            launched = run_scatter(group, operands, rows, choice.strategy, choice.config)
        known.keep(launched, group, inputs, operands)
    return out


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale_x: torch.Tensor | None,
    scale_weight: torch.Tensor | None,
    group: str,
    rows: list[int],
    out_dtype: torch.dtype,
    strategy: str,
    config: str,
) -> torch.Tensor:
    return x.new_empty((rows[group_by_name(group).rank], weight.shape[0]), dtype=out_dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, _, _, ctx.group, ctx.rows, _, ctx.strategy, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    grad_x, gathered = torch.ops.tileflux.ag_gemm(
        grad.to(x.dtype), [weight.t()], [], None, [], ctx.group, ctx.rows, "", x.dtype, ctx.strategy, True, ""
    )
    grad_weight = _dense.product(gathered.t(), x, weight.dtype) if ctx.needs_input_grad[1] else None
    # Every rank holds a copy of the one bias, and all copies get its gradient, so that they stay alike.
    grad_bias = gathered.float().sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
    return grad_x, grad_weight, grad_bias, *([None] * 7)


register(
    "gemm_rs(Tensor x, Tensor weight, Tensor? bias, Tensor? scale_x, Tensor? scale_weight, str group, SymInt[] rows, "
    "ScalarType out_dtype, str strategy, str config) -> Tensor",
    _run,
    _fake,
    _setup_context,
    _backward,
)


def gemm_rs_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    sizes: Sequence[int] | None = None,
    scale_x: torch.Tensor | float | None = None,
    scale_weight: torch.Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The same over ``torch.distributed``: multiply, gather all partial sums, add them up in rank order."""
    own_bias = bias if dist.get_rank(process_group) == 0 else None
    partial = gemm_reference(x, weight, own_bias, scale_x=scale_x, scale_weight=scale_weight, out_dtype=out_dtype)
    return reduce_scatter_reference(partial, process_group, sizes)
