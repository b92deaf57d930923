"""GEMM: the product the fused ops are made of, by itself.

    x       [M, K]
    weight  [N, K], either dimension contiguous         ("swiglu": [2 F, K], gate then up, and N = F)
    out     [M, N]

    out = activation(x @ weight.T * scale_x[:, None] * scale_weight[None, :] + bias)

Accumulated in fp32, int8 in int32, rounded once. One rank's work: nobody else writes, nobody waits. The gradient of
an fp32, fp16 or bf16 product without activation is two products.
"""

from __future__ import annotations

from typing import Any

import torch

from tileflux.config import GemmConfig
from tileflux.kernels.again import Launched
from tileflux.kernels.library import multiply_tiles
from tileflux.kernels.prepared import Kept
from tileflux.ops import _dense
from tileflux.ops._call import check_out
from tileflux.ops._library import eager_only, register
from tileflux.tune.lookup import problem_for

__all__ = ["gemm", "gemm_reference"]


def gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    scale_x: torch.Tensor | float | None = None,
    scale_weight: torch.Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    config: GemmConfig | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``activation(x @ weight.T * scales + bias)``, by our own main loop.

    ``activation``: relu, gelu, silu, or swiglu over a packed weight. Scales go with fp8 and int8 and are numbers,
    scalar tensors, or fp32 vectors over rows of ``x`` and of ``weight``.
    """
    tensors = (x, weight, bias, scale_x, scale_weight)
    key = _dense.call_key(tensors, None, activation, out_dtype, config)
    known = None if key is None else _known.find(key)  # the compiler would guard all that is kept
    result = _dense.call_again("gemm", known, None, tensors, out)
    if result is not None:
        return result
    if known is not None:
        return _multiply(_dense.make_inputs(*tensors), activation or "", known, out)
    _dense.check_dense("gemm", x, weight, bias, scale_x, scale_weight, activation)
    _dense.check_strategy("gemm", "auto", config)
    kind = _dense.out_type("gemm", x, out_dtype)
    _dense.refuse_gradient("gemm", x, activation, weight, bias, scale_x, scale_weight)
    inputs = _dense.make_inputs(x, weight, bias, scale_x, scale_weight)
    arguments = (*inputs, activation or "", kind, _dense.config_text(config))
    result = torch.ops.tileflux.gemm(*arguments) if out is None else _run(*arguments, out)
    if key is not None:
        decided, takes_numbers = _decide(inputs, activation or "", kind, config), _dense.has_numbers(*tensors[3:])
        _known.keep(key, _dense.Known(decided, takes_numbers=takes_numbers))
    return result


_known: Kept[_dense.Known] = Kept()


@eager_only
def _run(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale_x: torch.Tensor | None,
    scale_weight: torch.Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
    config: str,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    inputs = _dense.Inputs(x, weight, bias, scale_x, scale_weight)
    decided = _decide(inputs, activation, out_dtype, _dense.config_from(config))
    return _multiply(inputs, activation, _dense.Known(decided), out)


def _decide(
    inputs: _dense.Inputs, activation: str, out_dtype: torch.dtype, config: GemmConfig | None
) -> _dense.Decided:
    x, weight = inputs.x, inputs.weight
    num_columns = weight.shape[0] // 2 if activation == "swiglu" else weight.shape[0]
    problem = problem_for("gemm", x.shape[0], num_columns, x.shape[1], x.dtype, x.device, None, activation)
    return _dense.Decided(problem, _dense.choose(problem, "auto", config), out_dtype)


def _multiply(inputs: _dense.Inputs, activation: str, known: _dense.Known, out: torch.Tensor | None) -> torch.Tensor:
    x, (problem, choice, kind) = inputs.x, known.decided
    out = check_out("gemm", out, (problem.m, problem.n), x, dtype=kind, others=inputs[1:])
    operands = _dense.make_operands(inputs, out, activation)
    with torch.cuda.device(x.device if x.is_cuda else -1):
        launch = multiply_tiles(operands, choice.config)
    known.keep(None if launch is None else Launched(launch), None, inputs, operands)
    return out


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale_x: torch.Tensor | None,
    scale_weight: torch.Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
    config: str,
) -> torch.Tensor:
    num_columns = weight.shape[0] // 2 if activation == "swiglu" else weight.shape[0]
    return x.new_empty((x.shape[0], num_columns), dtype=out_dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, *_ = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    typed = grad.to(x.dtype)
    grad_x = torch.ops.tileflux.gemm(typed, weight.t(), None, None, None, "", x.dtype, "") if needs_x else None
    grad_weight = _dense.product(typed.t(), x, weight.dtype) if needs_weight else None
    grad_bias = grad.float().sum(0).to(ctx.bias_dtype) if needs_bias else None
    return grad_x, grad_weight, grad_bias, None, None, None, None, None


register(
    "gemm(Tensor x, Tensor weight, Tensor? bias, Tensor? scale_x, Tensor? scale_weight, str activation, "
    "ScalarType out_dtype, str config) -> Tensor",
    _run,
    _fake,
    _setup_context,
    _backward,
)


def gemm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    scale_x: torch.Tensor | float | None = None,
    scale_weight: torch.Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The same in plain torch, in fp32 (int8 exactly, in fp64)."""
    exact = torch.float64 if x.dtype == torch.int8 else torch.float32
    value = (x.to(exact) @ weight.to(exact).t()).float()
    if scale_x is not None:
        value = value * (scale_x[:, None] if isinstance(scale_x, torch.Tensor) and scale_x.dim() else scale_x)
    if scale_weight is not None:
        value = value * scale_weight
    if bias is not None:
        value = value + bias.float()
    if activation == "swiglu":
        gate, up = value.chunk(2, dim=1)
        value = torch.nn.functional.silu(gate) * up
    elif activation is not None:
        value = getattr(torch.nn.functional, activation)(value)
    return value.to(_dense.out_type("gemm", x, out_dtype))
