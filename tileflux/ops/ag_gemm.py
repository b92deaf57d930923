"""All-gather + GEMM: every rank's rows times this rank's columns of the weight.

    x       [m_r, K] on rank r          rank r brings m_r rows (all the same, or given by ``sizes``; also none)
    weight  [N_r, K] on rank r          its columns of the whole weight, and only it reads them; or a sequence of such
    out     [sum m_r, N_r] on rank r

    out = activation(all_gather(x) @ weight.T * scales + bias)

fused: some programs of the kernel store this rank's rows into every peer's buffer, chunk by chunk, and raise a flag
there; the others multiply own rows first, then those of the next rank, each tile waiting for its chunk's flag. The last
program tells the peers that the buffer may be written again. The gradient is ``gemm_rs`` and a product with the
gathered rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tileflux.config import GemmConfig
from tileflux.kernels.dense import run_gather
from tileflux.kernels.library import multiply_tiles
from tileflux.kernels.prepared import Kept
from tileflux.ops import _dense
from tileflux.ops._call import begin, check_apart, check_out, check_sizes, dense, guarded
from tileflux.ops._library import eager_only, register
from tileflux.ops.all_gather import all_gather_reference
from tileflux.ops.gemm import gemm_reference
from tileflux.symm.group import Group, group_by_name
from tileflux.tune.lookup import problem_for

__all__ = ["ag_gemm", "ag_gemm_reference"]

Tensors = Sequence[torch.Tensor]


def ag_gemm(
    x: torch.Tensor,
    weight: torch.Tensor | Tensors,
    bias: torch.Tensor | Tensors | None = None,
    *,
    group: Group,
    sizes: Sequence[int] | None = None,
    activation: str | None = None,
    scale_x: torch.Tensor | float | None = None,
    scale_weight: torch.Tensor | float | Sequence[torch.Tensor | float] | None = None,
    out_dtype: torch.dtype | None = None,
    strategy: str = "auto",
    return_gathered: bool = False,
    config: GemmConfig | None = None,
    out: torch.Tensor | Tensors | None = None,
) -> Any:
    """``activation(all_gather(x) @ weight.T * scales + bias)``.

    A sequence of weights (then ``bias``, ``scale_weight`` and ``out`` are sequences too) shares one gather and gives a
    tuple. ``sizes``: rows per rank where they differ; every rank passes the same list. ``scale_x`` belongs to this
    rank's rows and is gathered with them. ``return_gathered=True``: (result, all ranks' rows).
    """
    single = isinstance(weight, torch.Tensor)
    sizes = None if sizes is None else tuple(sizes)
    options = (sizes, activation, out_dtype, strategy, config, return_gathered)
    given: Any = (x, weight, bias, scale_x, scale_weight)
    if single:
        key = _dense.call_key(given, group, *options)
        known = None if key is None else _known.find(key)  # the compiler would guard all that is kept
        result = _dense.call_again("ag_gemm", known, group, given, out)
        if result is not None:
            return result
    weights = [weight] if isinstance(weight, torch.Tensor) else list(weight)
    lists = _dense.as_lists("ag_gemm", weights, single, bias=bias, scale_weight=scale_weight, out=out)
    biases, scales, outs = lists["bias"], lists["scale_weight"], lists["out"]
    if not single:
        given = (x, scale_x, *weights, *biases, *scales)
        key = _dense.call_key(given, group, *options, len(weights), len(biases))
        known = None if key is None else _known.find(key)
    if known is None:
        rows = _check(x, weights, biases, scale_x, scales, group, sizes, activation)
        _dense.check_strategy("ag_gemm", strategy, config)
        kind = _dense.out_type("ag_gemm", x, out_dtype)
    scale_list: list[Any] = [_dense.as_scale(scale, x) for scale in scales]
    inputs = _Inputs(x, weights, biases, _dense.as_scale(scale_x, x), scale_list, activation or "")
    if known is None:
        arguments = (
            *inputs[:-1], group.name, list(rows), inputs.activation, kind, strategy, return_gathered,
            _dense.config_text(config),
        )  # fmt: skip
        results = torch.ops.tileflux.ag_gemm(*arguments) if not outs else _run(*arguments, outs)
        if key is not None:
            decided = _decide(inputs, group, rows, kind, strategy, config)
            _known.keep(key, _dense.Known(decided, rows, _dense.has_numbers(scale_x, *scales)))
    else:
        results = _multiply(inputs, group, known, return_gathered, outs)
    gathered = results[len(weights) :]
    values = results[0] if single else tuple(results[: len(weights)])
    return (values, gathered[0]) if return_gathered else values


class _Inputs(NamedTuple):
    x: torch.Tensor
    weights: list[torch.Tensor]
    biases: list[torch.Tensor]
    scale_x: torch.Tensor | None
    scale_weights: list[torch.Tensor]
    activation: str

    def part(self, index: int) -> _dense.Inputs:
        """Of one weight."""
        bias = self.biases[index] if self.biases else None
        return _dense.Inputs(
            self.x, self.weights[index], bias, self.scale_x, self.scale_weights[index] if self.scale_weights else None
        )

    def num_columns(self, index: int) -> int:
        """Of one weight's result."""
        return _width(self.weights[index], self.activation)


_known: Kept[_dense.Known] = Kept()


def _check(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    scale_x: torch.Tensor | float | None,
    scales: list[torch.Tensor | float],
    group: Group,
    sizes: tuple[int, ...] | None,
    activation: str | None,
) -> tuple[int, ...]:
    """Rows by rank of a call that is in order."""
    for index, each in enumerate(weights):
        pair = (biases[index] if biases else None, scale_x, scales[index] if scales else None)
        _dense.check_dense("ag_gemm", x, each, *pair, activation, group)
    rows = (x.shape[0],) * group.world_size if sizes is None else check_sizes("ag_gemm", "sizes", sizes, group)
    if rows[group.rank] != x.shape[0]:
        raise ValueError(f"ag_gemm: x has {x.shape[0]} rows but sizes[{group.rank}] is {rows[group.rank]}")
    _dense.refuse_gradient("ag_gemm", x, activation, *weights, *biases, scale_x, *scales)
    return rows


@eager_only
def _run(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    scale_x: torch.Tensor | None,
    scale_weights: list[torch.Tensor],
    group_name: str,
    rows: list[int],
    activation: str,
    out_dtype: torch.dtype,
    strategy: str,
    return_gathered: bool,
    config: str,
    outs: list[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    group, shards = group_by_name(group_name), tuple(rows)
    inputs = _Inputs(x, weights, biases, scale_x, scale_weights, activation)
    decided = _decide(inputs, group, shards, out_dtype, strategy, _dense.config_from(config))
    return _multiply(inputs, group, _dense.Known(decided, shards), return_gathered, outs or [])


def _decide(
    inputs: _Inputs,
    group: Group,
    rows: tuple[int, ...],
    out_dtype: torch.dtype,
    strategy: str,
    config: GemmConfig | None,
) -> _dense.Decided:
    x, widest = inputs.x, max(map(inputs.num_columns, range(len(inputs.weights))))
    problem = problem_for("ag_gemm", sum(rows), widest, x.shape[1], x.dtype, x.device, group, inputs.activation)
    return _dense.Decided(problem, _dense.choose(problem, strategy, config), out_dtype)


def _multiply(
    inputs: _Inputs,
    group: Group,
    known: _dense.Known,
    return_gathered: bool,
    outs: list[torch.Tensor],
) -> list[torch.Tensor]:
    (problem, choice, kind), rows = known.decided, known.rows
    given = inputs.part(0)
    x, scale_x = inputs.x, inputs.scale_x
    num_rows, depth = problem.m, problem.k
    results, others = [], (*inputs.weights, *inputs.biases, scale_x, *inputs.scale_weights)
    for i in range(len(inputs.weights)):
        shape = (num_rows, inputs.num_columns(i))
        results.append(check_out("ag_gemm", outs[i] if outs else None, shape, x, dtype=kind, others=others))
    if len(outs) > 1:
        check_apart("ag_gemm", outs)
    gathered = x.new_empty((num_rows, depth)) if return_gathered else None
    same = (rows, depth, x.dtype, choice.strategy, choice.config.num_chunks, scale_x is None, return_gathered)
    begin("ag_gemm", group, same)
    x = dense(x)
    if depth == 0 or num_rows == 0:
        x, scale_x = x.new_empty((num_rows, depth)), None
    elif scale_x is not None and scale_x.dim() == 0 and group.world_size > 1:
        scale_x = scale_x.reshape(1).repeat(len(x))  # ranks may differ in it: it travels with the rows
    inputs = inputs._replace(x=x, scale_x=scale_x)
    parts = [_dense.make_operands(inputs.part(i), result, inputs.activation) for i, result in enumerate(results)]
    with guarded(group):
        if depth == 0 or num_rows == 0:
            for part in parts:
                multiply_tiles(part, choice.config)
        else:
            launched = run_gather(group, parts, rows, choice.strategy, choice.config, gathered)
            known.keep(launched, group, given, parts[0])
    return results if gathered is None else [*results, gathered]


def _width(weight: torch.Tensor, activation: str) -> int:
    return weight.shape[0] // 2 if activation == "swiglu" else weight.shape[0]


def _fake(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    scale_x: torch.Tensor | None,
    scale_weights: list[torch.Tensor],
    group: str,
    rows: list[int],
    activation: str,
    out_dtype: torch.dtype,
    strategy: str,
    return_gathered: bool,
    config: str,
) -> list[torch.Tensor]:
    results = [x.new_empty((sum(rows), _width(weight, activation)), dtype=out_dtype) for weight in weights]
    return [*results, x.new_empty((sum(rows), x.shape[1]))] if return_gathered else results


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, weights, biases, _, _, ctx.group, ctx.rows, _, _, ctx.strategy, ctx.return_gathered, _ = inputs
    ctx.save_for_backward(x, *weights)
    ctx.bias_dtypes = [bias.dtype for bias in biases]


def _backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    typed = [grad.to(x.dtype) for grad in grads[: len(weights)]]
    grad, weight = (typed[0], weights[0]) if len(weights) == 1 else (torch.cat(typed, dim=1), torch.cat(weights))
    # All ranks make the same calls, whatever each of them needs.
    grad_x = torch.ops.tileflux.gemm_rs(
        grad, weight.t(), None, None, None, ctx.group, ctx.rows, x.dtype, ctx.strategy, ""
    )
    if ctx.return_gathered:
        grad_x = grad_x + torch.ops.tileflux.reduce_scatter(grads[-1], ctx.group, ctx.rows)
    gathered = torch.ops.tileflux.all_gather(x, ctx.group, ctx.rows)
    grad_weights = [
        _dense.product(each.t(), gathered, weight.dtype) for each, weight in zip(typed, weights, strict=True)
    ]
    grad_biases = [grads[i].float().sum(0).to(dtype) for i, dtype in enumerate(ctx.bias_dtypes)]
    return grad_x, grad_weights, grad_biases, None, [], *([None] * 7)


register(
    "ag_gemm(Tensor x, Tensor[] weights, Tensor[] biases, Tensor? scale_x, Tensor[] scale_weights, str group, "
    "SymInt[] rows, str activation, ScalarType out_dtype, str strategy, bool return_gathered, str config) "
    "-> Tensor[]",
    _run,
    _fake,
    _setup_context,
    _backward,
)


def ag_gemm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    sizes: Sequence[int] | None = None,
    activation: str | None = None,
    scale_x: torch.Tensor | float | None = None,
    scale_weight: torch.Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The same over ``torch.distributed``: gather the rows and their scales, then multiply."""
    gathered = all_gather_reference(x, process_group, sizes)
    if scale_x is not None:
        scales = torch.as_tensor(scale_x, dtype=torch.float32, device=x.device).expand(len(x)).contiguous()
        scale_x = all_gather_reference(scales, process_group, sizes)
    return gemm_reference(
        gathered, weight, bias, activation=activation, scale_x=scale_x, scale_weight=scale_weight, out_dtype=out_dtype
    )
