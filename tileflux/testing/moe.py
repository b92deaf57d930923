"""Problems for the ops of mixtures of experts, with their exact results: ``route``, ``moe_ag_gemm``, ``moe_gemm_rs``.

A case is drawn from a seed on the CPU, for all ranks at once, as in ``testing/dense.py``. Every rank draws it again by
itself and computes in fp64, row by row in Python, what it must receive: nothing of the library that is checked.

Letters: W ranks are TP x EP; T tokens of k choices each; E experts; H columns of a token, F of a row between layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from tileflux.testing.dense import SCALED_DTYPES, Activation, DenseCase, Scale, expected_gemm, gemm_case, reduction

__all__ = [
    "ROUTING_KINDS",
    "MoeCase",
    "MoeRouting",
    "Row",
    "expected_ag",
    "expected_rs",
    "moe_ag_case",
    "moe_routing",
    "moe_rs_case",
]

Kind = Literal["uniform", "skewed", "one_expert", "some_empty", "dropped"]
Scales = Literal["none", "tensor", "expert", "channel"]

ROUTING_KINDS: tuple[Kind, ...] = ("uniform", "skewed", "one_expert", "some_empty", "dropped")
"""``uniform``: different experts for each token. ``skewed``: few get most, and a token may choose one twice.
``one_expert``: all choose the same. ``some_empty``: half the experts get nothing. ``dropped``: some choices are -1."""

_MIN_SIGNED, _MIN_SIGNED_COLUMNS = 32, 8  # see testing/dense.py: results of fewer elements are sums of positive numbers
_DROPPED = 0.3


class Row(NamedTuple):
    """A row on a rank: a token's choice of one of its experts. Rows are in the order of these."""

    expert: int
    stage: int
    """When its token arrives."""
    slot: int
    """Token times k, and the number of the choice."""


@dataclass(frozen=True, eq=False)
class MoeRouting:
    """Who chose what, on all ranks."""

    sizes: tuple[int, ...]
    """Tokens of each rank."""
    num_experts: int
    ep_size: int
    expert_ids: tuple[torch.Tensor, ...]
    """``[T_r, k]`` of each rank."""
    weights: tuple[torch.Tensor, ...]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.sizes)

    @property
    def top_k(self) -> int:
        """Choices of a token."""
        return self.expert_ids[0].shape[1]

    @property
    def tp_size(self) -> int:
        """Ranks that share experts."""
        return self.world_size // self.ep_size

    def experts(self, rank: int) -> range:
        """Those of a rank: ranks next to each other share them."""
        count, place = self.num_experts // self.ep_size, rank // self.tp_size
        return range(place * count, (place + 1) * count)

    def rows(self, rank: int) -> list[Row]:
        """The rows of a rank, in order."""
        found, experts, top_k = [], self.experts(rank), self.top_k
        sources = [source for source, size in enumerate(self.sizes) for _ in range(size)]
        for slot, expert in enumerate(torch.cat(self.expert_ids).flatten().tolist()):
            if expert in experts:
                found.append(Row(expert, (sources[slot // top_k] - rank) % self.world_size, slot))
        return sorted(found)

    def counts(self, rank: int) -> list[int]:
        """Rows of each of a rank's experts."""
        chosen = [row.expert for row in self.rows(rank)]
        return [chosen.count(expert) for expert in self.experts(rank)]

    def arguments(self, rank: int, device: torch.device | str = "cpu") -> dict[str, Any]:
        """What ``rank`` passes to ``route``, by name, less its group."""
        given = {"expert_ids": self.expert_ids[rank].to(device), "weights": self.weights[rank].to(device)}
        return given | {"num_experts": self.num_experts, "ep_size": self.ep_size, "sizes": list(self.sizes)}


@dataclass(frozen=True, eq=False)
class MoeCase:
    """One layer's product as all ranks see it, on the CPU. Everything that differs by rank is indexed by it."""

    op: str
    routing: MoeRouting
    xs: tuple[torch.Tensor, ...]
    """``moe_ag_gemm``: tokens ``[T_r, H]``. ``moe_gemm_rs``: rows ``[rows of the rank, F / TP]``, in order."""
    weights: tuple[torch.Tensor, ...]
    """``moe_ag_gemm``: ``[E / EP, F / TP, H]``, with swiglu ``2 F / TP``. ``moe_gemm_rs``: ``[E / EP, H, F / TP]``."""
    biases: tuple[torch.Tensor | None, ...]
    scales_x: tuple[Scale, ...]
    scales_weight: tuple[Scale, ...]
    activation: Activation | None
    out_dtype: torch.dtype
    num_terms: int
    """Summed into a result, as ``assert_close`` wants to know."""

    def arguments(self, rank: int, device: torch.device | str = "cpu") -> dict[str, Any]:
        """What ``rank`` passes to the op, by name, less its routing; only what is not the default."""
        given: dict[str, Any] = {
            "x": self.xs[rank], "weight": self.weights[rank], "bias": self.biases[rank],
            "scale_x": self.scales_x[rank], "scale_weight": self.scales_weight[rank], "activation": self.activation,
        }  # fmt: skip
        dtype = self.xs[rank].dtype
        if self.out_dtype != (torch.bfloat16 if dtype in SCALED_DTYPES else dtype):
            given["out_dtype"] = self.out_dtype
        return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in given.items() if v is not None}


def moe_routing(
    sizes: Sequence[int], num_experts: int, top_k: int, seed: int, *, ep_size: int = 1, kind: Kind = "uniform"
) -> MoeRouting:
    """Draw what tokens choose, and with which weights: positive, those of a token of sum 1."""
    draws, total = torch.Generator().manual_seed(seed), sum(sizes)
    if kind in ("uniform", "dropped") and top_k <= num_experts:
        ids = torch.rand(total, num_experts, generator=draws).argsort(dim=1)[:, :top_k]
    elif kind == "one_expert":
        ids = torch.randint(num_experts, (), generator=draws).expand(total, top_k)
    else:
        shares = torch.rand(num_experts, generator=draws) + 0.1
        if kind == "skewed":
            shares = shares**8
        elif kind == "some_empty":
            shares[torch.randperm(num_experts, generator=draws)[: num_experts // 2]] = 0.0
        ids = torch.multinomial(shares.expand(max(1, total), -1), top_k, replacement=True, generator=draws)[:total]
    if kind == "dropped":
        ids = torch.where(torch.rand(total, top_k, generator=draws) < _DROPPED, -1, ids)
    weights = torch.rand(total, top_k, generator=draws) + 0.5
    weights = weights / weights.sum(dim=1, keepdim=True)
    own_ids, own_weights = (tuple(p.clone() for p in whole.split(list(sizes))) for whole in (ids, weights))
    return MoeRouting(tuple(sizes), num_experts, ep_size, own_ids, own_weights)


def moe_ag_case(
    routing: MoeRouting,
    hidden: int,
    ffn: int,
    dtype: torch.dtype,
    seed: int,
    *,
    bias: bool = False,
    activation: Activation | None = None,
    scales: Scales = "none",
    weight_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> MoeCase:
    """For ``moe_ag_gemm``. ``ffn``: columns of a whole expert's result. ``scales``: of x one per rank or (``channel``)
    per token, of the weight one per rank, expert, or expert and column."""
    columns = ffn // routing.tp_size
    results = [(len(routing.rows(rank)), columns) for rank in range(routing.world_size)]
    drawn = _drawn(
        (sum(routing.sizes), routing.num_experts * ffn, hidden), results, dtype, seed,
        bias=bias, activation=activation, scales="channel" if scales == "expert" else scales,
        weight_dtype=weight_dtype, out_dtype=out_dtype,
    )  # fmt: skip
    num_parts = 2 if activation == "swiglu" else 1

    def own(whole: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's part of what there is per row of the weight: its experts, and of each its share of every half."""
        split = whole.unflatten(0, (num_parts, routing.num_experts, ffn)).transpose(0, 1)
        share = rank % routing.tp_size
        part = split[routing.experts(rank).start : routing.experts(rank).stop, :, share * columns :][:, :, :columns]
        found: torch.Tensor = part.flatten(1, 2).clone(memory_format=torch.contiguous_format)
        return found

    ranks = range(routing.world_size)
    scales_weight: list[Scale] = [drawn.scales_weight[0]] * routing.world_size
    if isinstance(drawn.scales_weight[0], torch.Tensor):
        scales_weight = [own(drawn.scales_weight[0], rank) for rank in ranks]
        if scales == "expert":
            scales_weight = [each[:, 0].clone() for each in scales_weight if isinstance(each, torch.Tensor)]
    given_bias = drawn.biases[0]
    return MoeCase(
        "moe_ag_gemm", routing,
        tuple(part.clone() for part in drawn.xs[0].split(list(routing.sizes))),
        tuple(own(drawn.weights[0], rank) for rank in ranks),
        tuple(None if given_bias is None else own(given_bias, rank) for rank in ranks),
        _scales_of_tokens(drawn.scales_x[0], routing),
        tuple(scales_weight), activation, drawn.out_dtype, reduction(drawn, "gemm"),
    )  # fmt: skip


def moe_rs_case(
    routing: MoeRouting, hidden: int, ffn: int, dtype: torch.dtype, seed: int, *, scales: Scales = "none", **how: Any
) -> MoeCase:
    """For ``moe_gemm_rs``: rows of the width of a rank's part of an expert. ``how``: dtypes as of ``moe_ag_case``."""
    width, num_slots = ffn // routing.tp_size, sum(routing.sizes) * routing.top_k
    shape = (num_slots, routing.num_experts * hidden, ffn)
    # Two choices of one expert with a row of one number each all but cancel in all columns at once, or in none.
    results = [(size, min(hidden, width)) for size in routing.sizes]
    drawn = _drawn(shape, results, dtype, seed, scales="channel" if scales == "expert" else scales, **how)
    xs, weights, scales_x, scales_weight = [], [], [], []
    for rank in range(routing.world_size):
        slots = torch.tensor([row.slot for row in routing.rows(rank)], dtype=torch.long)
        share = slice((rank % routing.tp_size) * width, (rank % routing.tp_size + 1) * width)
        experts = slice(routing.experts(rank).start, routing.experts(rank).stop)
        whole = drawn.weights[0].unflatten(0, (routing.num_experts, hidden))
        xs.append(drawn.xs[0][slots][:, share].clone(memory_format=torch.contiguous_format))
        weights.append(whole[experts, :, share].clone(memory_format=torch.contiguous_format))
        scale_x, scale_weight = drawn.scales_x[0], drawn.scales_weight[0]
        if isinstance(scale_x, torch.Tensor) and scale_x.dim():
            scale_x = scale_x[slots]
        if isinstance(scale_weight, torch.Tensor):
            scale_weight = scale_weight.view(routing.num_experts, hidden)[experts]
            scale_weight = (scale_weight[:, 0] if scales == "expert" else scale_weight).clone()
        scales_x.append(scale_x)
        scales_weight.append(scale_weight)
    return MoeCase(
        "moe_gemm_rs", routing, tuple(xs), tuple(weights), (None,) * routing.world_size, tuple(scales_x),
        tuple(scales_weight), None, drawn.out_dtype, reduction(drawn, "gemm") * routing.top_k,
    )  # fmt: skip


def expected_ag(case: MoeCase, rank: int) -> torch.Tensor:
    """What ``moe_ag_gemm`` should return on ``rank`` before it is rounded: fp64, as many rows as it has."""
    routing = case.routing
    with_sizes = zip(case.scales_x, routing.sizes, strict=True)
    scales = torch.cat([torch.as_tensor(1.0 if s is None else s).double().expand(size) for s, size in with_sizes])
    tokens = torch.tensor([row.slot // routing.top_k for row in routing.rows(rank)], dtype=torch.long)
    return _by_expert(case, rank, torch.cat(case.xs)[tokens], scales[tokens])


def expected_rs(case: MoeCase, rank: int) -> torch.Tensor:
    """What ``moe_gemm_rs`` should return on ``rank``: ``[T_r, H]``, rounded where the op promises to round."""
    routing = case.routing
    first, size, hidden = sum(routing.sizes[:rank]), routing.sizes[rank], case.weights[0].shape[1]
    gates = torch.cat(routing.weights).flatten()
    total = torch.zeros(size, hidden)
    for source in range(routing.world_size):
        scale = case.scales_x[source]
        rows = _by_expert(case, source, case.xs[source], None if scale is None else torch.as_tensor(scale).double())
        rows, of_tokens = rows.to(case.out_dtype).float(), torch.zeros(size, hidden)
        in_order = sorted(enumerate(routing.rows(source)), key=lambda pair: pair[1].slot)
        for number, row in in_order:
            token = row.slot // routing.top_k - first
            if 0 <= token < size:
                of_tokens[token] += rows[number] * gates[row.slot]
        total += of_tokens.to(case.out_dtype).float()
    return total.to(case.out_dtype)


def _by_expert(case: MoeCase, rank: int, rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """The product of a rank's rows, each with its expert's weight, in fp64."""
    weight, bias, scale_weight = case.weights[rank], case.biases[rank], case.scales_weight[rank]
    columns = weight.shape[1] // (2 if case.activation == "swiglu" else 1)
    result, first = torch.empty(len(rows), columns, dtype=torch.float64), 0
    for expert, count in enumerate(case.routing.counts(rank)):
        part = slice(first, first := first + count)
        by_expert = isinstance(scale_weight, torch.Tensor) and scale_weight.dim()
        result[part] = expected_gemm(
            rows[part], weight[expert], None if bias is None else bias[expert], activation=case.activation,
            scale_x=scales if scales is None or scales.dim() == 0 else scales[part],
            scale_weight=scale_weight[expert] if by_expert else scale_weight,  # type: ignore[index]
        )  # fmt: skip
    return result


def _drawn(
    shape: tuple[int, int, int], results: Sequence[tuple[int, int]], dtype: torch.dtype, seed: int, **how: Any
) -> DenseCase:
    """Whole matrices; of positive numbers if a rank's result is so small that its sums might all but cancel."""
    case = gemm_case(shape, dtype, seed, **how)
    min_columns = 1 if how.get("activation") is None else _MIN_SIGNED_COLUMNS
    if all(r * c >= _MIN_SIGNED and c >= min_columns for r, c in results if r * c):
        return case
    for tensor in (case.xs[0], case.weights[0], case.biases[0]):
        if tensor is not None:
            tensor.copy_(tensor.float().abs())
    return case


def _scales_of_tokens(scale: Scale, routing: MoeRouting) -> tuple[Scale, ...]:
    """Each rank's; where each has one, they differ, since they travel with the tokens."""
    if isinstance(scale, torch.Tensor) and scale.dim():
        return tuple(part.clone() for part in scale.split(list(routing.sizes)))
    if scale is None:
        return (None,) * routing.world_size
    return tuple(scale * (1 + rank / 8) for rank in range(routing.world_size))
