"""What the ops of mixtures of experts share: checking weights of many experts, and turning them into operands."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tileflux.config import GemmConfig, GemmProblem
from tileflux.kernels.groups import Groups
from tileflux.kernels.operands import Operands
from tileflux.ops import _dense
from tileflux.ops.routing import MAX_EXPERTS, Routing
from tileflux.symm.group import Group
from tileflux.tune.lookup import grouped_tiles

__all__ = [
    "bias_gradient",
    "by_expert",
    "by_masks",
    "check_config",
    "check_experts",
    "check_number",
    "check_routing",
    "grouped_operands",
    "is_used",
    "num_columns",
    "of_tokens",
    "routing_arguments",
    "rows_for_tiles",
    "tiles_for",
]


def check_experts(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale_x: torch.Tensor | float | None,
    scale_weight: torch.Tensor | float | None,
    activation: str | None,
    group: Group | None = None,
) -> None:
    """Refuse what no kernel takes, with what would be right: as ``check_dense``, for one expert after the other."""
    if not isinstance(weight, torch.Tensor) or weight.dim() != 3:
        shape = tuple(weight.shape) if isinstance(weight, torch.Tensor) else type(weight).__name__
        raise ValueError(f"{op}: weight should be a tensor [E, N, K], one matrix per expert, not {shape}")
    num_experts, num_rows, _ = weight.shape
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"{op}: weight has {num_experts} experts; there should be from 1 to {MAX_EXPERTS}")
    if isinstance(bias, torch.Tensor) and tuple(bias.shape) != (num_experts, num_rows):
        raise ValueError(f"{op}: bias should have shape ({num_experts}, {num_rows}), not {tuple(bias.shape)}")
    if isinstance(scale_weight, torch.Tensor) and scale_weight.dim():
        if tuple(scale_weight.shape) not in ((num_experts,), (num_experts, num_rows)):
            raise ValueError(
                f"{op}: scale_weight should be a number, or float32 of shape (), ({num_experts},) or "
                f"({num_experts}, {num_rows}), not {tuple(scale_weight.shape)}"
            )
        scale_weight = scale_weight.new_empty(num_rows)  # what is right for one expert
    first = bias[0] if isinstance(bias, torch.Tensor) else bias
    _dense.check_dense(op, x, weight[0], first, scale_x, scale_weight, activation, group)


def num_columns(weight: torch.Tensor, activation: str) -> int:
    """Columns of the result."""
    return weight.shape[1] // 2 if activation == "swiglu" else weight.shape[1]


def check_routing(op: str, routing: object) -> None:
    """Refuse what ``route`` has not made."""
    if not isinstance(routing, Routing):
        raise ValueError(f"{op}: routing should be what tileflux.route gives, not {type(routing).__name__}")


def check_number(op: str, weight: torch.Tensor, routing: Routing) -> None:
    """Refuse weights of another number of experts than the rank has."""
    if len(weight) != len(routing.experts):
        raise ValueError(
            f"{op}: weight has {len(weight)} experts, but rank {routing.group.rank} has {len(routing.experts)} "
            f"of {routing.num_experts}"
        )


def check_config(op: str, config: GemmConfig | None, groups: Groups) -> None:
    """Refuse tiles of another height than the routing has been cut into."""
    if config is not None and config.block_m != groups.block_m:
        raise ValueError(
            f"{op}: config has block_m={config.block_m}, but rows were routed with {groups.block_m}; "
            f"route with block_m={config.block_m}"
        )


def tiles_for(usual: GemmConfig, given: str, block_m: int, problem: GemmProblem) -> GemmConfig:
    """The configuration asked for; else what the product alone would take with tiles of ``block_m`` rows."""
    return dataclasses.replace(usual, block_m=block_m) if given else grouped_tiles(problem, usual, block_m)


def routing_arguments(routing: Routing) -> tuple[Any, ...]:
    """A routing as torch's dispatcher takes it."""
    groups, rows = routing.groups, routing.rows
    return (
        groups.index, rows.offsets.contiguous(), routing.group.name, list(routing.sizes), routing.capacity,
        routing.top_k, groups.block_m,
    )  # fmt: skip


def is_used(offsets: torch.Tensor, num_rows: int) -> torch.Tensor:
    """``[num_rows, 1]``: which rows are some expert's. What stands in the place of others is nobody's."""
    return (torch.arange(num_rows, device=offsets.device) < offsets[-1])[:, None]


def of_tokens(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """``[rows, ...]``: of every row, what its token has. Without any token there may still be room for rows."""
    return values[tokens.long()] if len(values) else values.new_zeros((len(tokens), *values.shape[1:]))


def bias_gradient(grad: torch.Tensor, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[E, N]``: the sum over each expert's rows, rounded once."""
    ones = torch.ones((len(grad), 1), dtype=torch.float32, device=grad.device)
    return by_expert(grad.float(), ones, offsets)[:, :, 0].to(dtype)


def by_expert(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """``left[rows of e].T @ right[rows of e]`` for every expert, ``[E, ...]``."""
    if left.is_cuda:
        return by_masks(left, right, offsets)
    bounds = offsets.tolist()
    pairs = zip(bounds[:-1], bounds[1:], strict=True)
    return torch.stack([left[first:end].float().t() @ right[first:end].float() for first, end in pairs])


def by_masks(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The same where nobody but the device knows which rows are whose: every expert's product goes over all of them."""
    rows, products = torch.arange(len(left), device=left.device), []
    for expert in range(len(offsets) - 1):
        is_own = ((rows >= offsets[expert]) & (rows < offsets[expert + 1]))[:, None]
        # On both sides: of another expert's infinity times 0 there would come a NaN.
        products.append(torch.where(is_own, left, 0).t() @ torch.where(is_own, right, 0))
    return torch.stack(products)


def rows_for_tiles(num_rows: int, num_experts: int) -> int:
    """Rows that tiles are chosen for: all; but no larger tiles than an expert fills, if all have the same."""
    each = -(-num_rows // num_experts)
    return num_rows if each >= 128 else each


def grouped_operands(experts: _dense.Inputs, out: torch.Tensor, groups: Groups, activation: str) -> Operands:
    """Operands as kernels want them: the experts' weights, biases and scales, of all of them, as one matrix's."""
    x, weight, bias, scale_x, scale_weight = experts
    if scale_weight is not None and scale_weight.dim():
        whole = scale_weight[:, None].expand(weight.shape[:2]) if scale_weight.dim() == 1 else scale_weight
        scale_weight = whole.reshape(-1)
    flat = None if bias is None else bias.reshape(-1)
    inputs = _dense.Inputs(x, _one_matrix(weight), flat, scale_x, scale_weight)
    return _dense.make_operands(inputs, out, activation, groups=groups)


def _one_matrix(weight: torch.Tensor) -> torch.Tensor:
    """``[E N, K]``; where N is contiguous ``[N, E K]``. Without a copy if experts lie behind each other."""
    num_experts, num_rows, depth = weight.shape
    if num_rows == 1:
        weight = weight.contiguous()  # of a copy made below nobody could tell which dimension is contiguous
    if weight.stride(2) == 1 or 1 in (num_rows, depth):
        return weight.reshape(num_experts * num_rows, depth)
    return weight.transpose(1, 2).reshape(num_experts * depth, num_rows).t()
