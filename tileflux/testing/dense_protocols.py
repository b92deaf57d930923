"""Calls of the dense ops, and of those of experts, that put their protocol to the test under the simulator.

A protocol is a few calls in a row on one group: so many that a rank can be a call ahead of another, that both halves
of a buffer are used and used again, and that regions grow between calls. Shapes are the smallest that do it: what the
simulator looks for is in the order of events, and a schedule of few events is tried in more variations per second.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from tileflux import CommConfig, GemmConfig, ag_gemm, gemm_ar, gemm_rs, moe_ag_gemm, moe_gemm_rs, route
from tileflux.kernels import combine, dense, direct, gemm_launch, scatter
from tileflux.ops.routing import Routing
from tileflux.symm.group import Group
from tileflux.testing.dense import DenseCase, Scales, ag_case, expected, gathered, ragged_sizes, reduction, rs_case
from tileflux.testing.moe import Kind, MoeCase, expected_ag, expected_rs, moe_ag_case, moe_routing, moe_rs_case
from tileflux.testing.numerics import assert_close, poisoned
from tileflux.testing.simulated_streams import on_streams, simulated_streams
from tileflux.testing.simulator import simulate

__all__ = [
    "BY_COPIES",
    "COMM",
    "PROTOCOLS",
    "Call",
    "CombineCall",
    "MoeCall",
    "calls",
    "run_protocol",
    "simulate_protocol",
]

COMM = CommConfig(num_lanes=2, slot_bytes=256, min_lane_bytes=64)
TILES = GemmConfig(16, 16, 16, group_m=2, num_warps=4, num_sms=4, num_feeders=2)
"""Two programs that feed and two that multiply: the fewest that can get in each other's way."""
SLABS = replace(TILES, num_chunks=2)
APART = replace(TILES, sums_apart=True)
TALL = replace(TILES, block_m=512, num_chunks=2)
"""For shards of more than 256 rows, which is what a chunk holds at least; a tile is cut off at the end of its chunk."""


FEW = replace(TILES, num_sms=3, num_feeders=1, span=2, alone=1)
"""For calls with several tiles to a program; those of two ranks are computed side by side."""


@dataclass(frozen=True)
class Call:
    """One call of an op; the numbers are those of one rank, so that its size does not depend on the world's.

    With no columns to a rank there is one for rank 0.
    """

    op: str
    rows: int
    columns: int = 16
    depth: int = 16
    strategy: str = "fused"
    algorithm: str = "auto"
    dtype: torch.dtype = torch.float32
    scales: Scales = "none"
    ragged: bool = False
    num_weights: int = 1
    returns_rows: bool = False
    config: GemmConfig = TILES

    def case(self, world_size: int, seed: int) -> DenseCase:
        """The problem, the same on every rank."""
        return _case(self, world_size, seed)

    def run(self, group: Group, seed: int) -> None:
        """Make the call on this rank, and compare what it returns with the exact result."""
        case, rank = self.case(group.world_size, seed), group.rank
        arguments = case.arguments(self.op, rank) | {"group": group, "strategy": self.strategy, "config": self.config}
        right = expected(case, self.op, rank)
        out = poisoned(right.shape, case.out_dtype)
        what = f"{self.op} {self.strategy} {self.algorithm} on rank {rank}"
        terms = reduction(case, self.op)
        if self.num_weights > 1 or self.returns_rows:
            self._run_many(case, arguments, right, what)
            return
        if self.op == "ag_gemm":
            ag_gemm(**arguments, out=out)
        elif self.op == "gemm_rs":
            gemm_rs(**arguments, out=out)
        else:
            gemm_ar(**arguments, algorithm=self.algorithm, out=out)
        group.synchronize()
        assert_close(out, right, dtype=case.out_dtype, reduction=terms, what=what)

    def _run_many(self, case: DenseCase, arguments: dict[str, Any], right: torch.Tensor, what: str) -> None:
        """Over rows that are gathered once: the weight, the weight in other orders, and the rows themselves."""
        weight = arguments.pop("weight")
        orders = [torch.arange(len(weight)).roll(shift) for shift in range(self.num_weights)]
        for name in {"bias", "scale_weight"} & arguments.keys():
            arguments[name] = [_reordered(arguments[name], order) for order in orders]
        outs = [poisoned(right.shape, case.out_dtype) for _ in orders]
        weights = [weight[order].contiguous() for order in orders]
        result = ag_gemm(weight=weights, **arguments, out=outs, return_gathered=self.returns_rows)
        if self.returns_rows:
            assert torch.equal(result[1], gathered(case)), f"{what}: the gathered rows"
        for out, order in zip(outs, orders, strict=True):
            assert_close(out, right[:, order], dtype=case.out_dtype, reduction=reduction(case, self.op), what=what)


@dataclass(frozen=True)
class MoeCall(Call):
    """One call of an op of experts; ``rows`` are tokens.

    Experts are so few that a tile has tokens of several ranks, and some ranks' experts may get none.
    """

    kind: Kind = "uniform"
    num_experts: int = 2
    spreads: bool = False
    """Every rank has experts of its own, as many as ``num_experts``; else a part of all."""

    def moe_case(self, world_size: int, seed: int) -> MoeCase:
        """The problem, the same on every rank."""
        return _moe_case(self, world_size, seed)

    def routed(self, group: Group, seed: int) -> Routing:
        """What the call needs. Collective: between two calls it would keep ranks from being ahead of each other."""
        arguments = self.moe_case(group.world_size, seed).routing.arguments(group.rank)
        return route(**arguments, group=group, block_m=self.config.block_m)

    def run(self, group: Group, seed: int, routing: Routing | None = None) -> None:
        """Make the call, and compare the rows with the exact ones, and what is behind them with what was there."""
        strategy = ("fused", "pipelined")[group.rank % 2] if self.strategy == "either" else self.strategy
        case, rank = self.moe_case(group.world_size, seed), group.rank
        routing = routing or self.routed(group, seed)
        given, right = case.arguments(rank), expected_ag(case, rank)
        weight = given.pop("weight")
        orders = [torch.arange(weight.shape[1]).roll(shift) for shift in range(self.num_weights)]
        for name in {"bias", "scale_weight"} & given.keys():
            given[name] = [given[name][:, order] for order in orders]
        outs = [poisoned((routing.capacity, right.shape[1]), case.out_dtype) for _ in orders]
        result = moe_ag_gemm(
            weight=[weight[:, order].contiguous() for order in orders], routing=routing, **given, out=outs,
            strategy=strategy, config=self.config, return_gathered=self.returns_rows,
        )  # fmt: skip
        what = f"{self.op} {strategy} on rank {rank}"
        if self.returns_rows:
            assert torch.equal(result[1], torch.cat(case.xs)), f"{what}: the gathered rows"
        for out, order in zip(outs, orders, strict=True):
            rows, rest = out[: len(right)], out[len(right) :]
            assert_close(rows, right[:, order], dtype=case.out_dtype, reduction=case.num_terms, what=what)
            assert rest.isnan().all(), f"{what}: written behind the last row"


@dataclass(frozen=True)
class CombineCall(MoeCall):
    """One call of ``moe_gemm_rs``: ``columns`` of a token, and ``depth`` of a rank's part of an expert."""

    def moe_case(self, world_size: int, seed: int) -> MoeCase:
        """The problem, the same on every rank."""
        return _combine_case(self, world_size, seed)

    def run(self, group: Group, seed: int, routing: Routing | None = None) -> None:
        """Make the call, and compare this rank's tokens with the exact ones."""
        case, rank = self.moe_case(group.world_size, seed), group.rank
        routing = routing or self.routed(group, seed)
        given, right = case.arguments(rank), expected_rs(case, rank)
        rows, scales = given.pop("x"), given.pop("scale_x", None)
        h = rows.new_zeros((routing.capacity, rows.shape[1]))
        h[: len(rows)] = rows
        if scales is not None:
            given["scale_h"] = torch.full((routing.capacity,), torch.nan)
            given["scale_h"][: len(rows)] = scales
        out = poisoned(right.shape, case.out_dtype)
        moe_gemm_rs(h, routing=routing, **given, out=out, strategy=self.strategy, config=self.config)
        group.synchronize()
        what = f"{self.op} {self.strategy} on rank {rank}"
        assert_close(out, right, dtype=case.out_dtype, reduction=case.num_terms * group.world_size, what=what)


def _reordered(values: float | torch.Tensor, order: torch.Tensor) -> float | torch.Tensor:
    return values[order] if isinstance(values, torch.Tensor) and values.dim() else values


@functools.lru_cache(maxsize=64)
def _case(call: Call, world_size: int, seed: int) -> DenseCase:
    rows = call.rows * world_size
    if call.op == "ag_gemm":
        shape = (rows, max(1, call.columns * world_size), call.depth)
        return ag_case(world_size, shape, call.dtype, seed, ragged=call.ragged, scales=call.scales, bias=True)
    shape = (rows if call.op == "gemm_rs" else call.rows, call.columns, call.depth * world_size)
    return rs_case(world_size, shape, call.dtype, seed, ragged=call.ragged, scales=call.scales, bias=True)


@functools.lru_cache(maxsize=64)
def _moe_case(call: MoeCall, world_size: int, seed: int) -> MoeCase:
    sizes = ragged_sizes(call.rows * world_size, world_size, seed) if call.ragged else (call.rows,) * world_size
    ep_size = world_size if call.spreads else 1
    routing = moe_routing(sizes, call.num_experts * ep_size, 2, seed, ep_size=ep_size, kind=call.kind)
    ffn = call.columns * routing.tp_size
    return moe_ag_case(routing, call.depth, ffn, call.dtype, seed, scales=call.scales, bias=True)


@functools.lru_cache(maxsize=64)
def _combine_case(call: CombineCall, world_size: int, seed: int) -> MoeCase:
    routing = _moe_case(call, world_size, seed).routing
    return moe_rs_case(routing, call.columns, call.depth * routing.tp_size, call.dtype, seed, scales=call.scales)


_INT8: dict[str, Any] = {"dtype": torch.int8, "scales": "channel"}
_GATHER = (
    Call("ag_gemm", 9, ragged=True, returns_rows=True),
    Call("ag_gemm", 9, depth=32, ragged=True, num_weights=2, **_INT8),
    Call("ag_gemm", 3, columns=0, **_INT8),
    Call("ag_gemm", 2),
)
"""A rank without columns multiplies nothing, and might give its buffer back before all rows have come."""
_EXPERTS = (
    MoeCall("moe_ag_gemm", 9, ragged=True, returns_rows=True, kind="dropped"),
    MoeCall("moe_ag_gemm", 3, kind="one_expert", spreads=True),
    MoeCall("moe_ag_gemm", 9, depth=32, ragged=True, num_weights=2, spreads=True, **_INT8),
)
"""All tokens to one expert: whose experts get none multiplies nothing, and might give its buffer back too early. The
largest is the first: where a region grows, ranks meet."""
_COMBINE = (
    CombineCall("moe_gemm_rs", 9, columns=40, ragged=True, kind="dropped", config=SLABS),
    CombineCall("moe_gemm_rs", 3, columns=32, kind="one_expert", spreads=True, config=SLABS),
    CombineCall("moe_gemm_rs", 9, columns=32, ragged=True, spreads=True, config=SLABS, **_INT8),
    CombineCall("moe_gemm_rs", 5, columns=32, config=SLABS),
)
"""Two slabs, of which the last may have fewer columns; ranks that multiply nothing still add up, and are added up."""
_SCATTER = (
    Call("gemm_rs", 2),
    Call("gemm_rs", 9, columns=32, ragged=True),
    Call("gemm_rs", 9, ragged=True),
    Call("gemm_rs", 3, **_INT8),
)
"""A rank without rows sums nothing, and waits for nobody: that is who comes round to a half that is still read."""
_SPREAD = (
    Call("gemm_ar", 17, algorithm="one_shot"),
    Call("gemm_ar", 3, algorithm="one_shot", **_INT8),
    Call("gemm_ar", 17, columns=32, algorithm="one_shot"),
)
_MANY_TILES = (
    Call("gemm_rs", 20, columns=32, config=FEW),
    Call("ag_gemm", 20, ragged=True, num_weights=2, config=FEW),
    Call("gemm_ar", 20, columns=32, algorithm="one_shot", config=FEW),
    Call("gemm_rs", 20, columns=32, config=FEW, **_INT8),
    Call("gemm_ar", 20, columns=32, algorithm="one_shot", config=FEW, **_INT8),
)
"""Three programs do not divide the tiles: dealt out beforehand, a tile to be summed waits for another program's."""
_MIXED = (
    Call("gemm_rs", 3, ragged=True),
    Call("ag_gemm", 2, strategy="pipelined", **_INT8),
    Call("gemm_ar", 5, algorithm="one_shot"),
    Call("ag_gemm", 9, ragged=True, num_weights=2, returns_rows=True),
    Call("gemm_ar", 9, algorithm="two_shot", **_INT8),
    Call("gemm_rs", 2, strategy="pipelined"),
    Call("gemm_ar", 17, algorithm="one_shot", **_INT8),
    Call("gemm_rs", 9, ragged=True, **_INT8),
)


def _with(given: Sequence[Call], **changes: Any) -> tuple[Call, ...]:
    return tuple(replace(call, **changes) for call in given)


_TWO_SHOT = _with(_SPREAD, algorithm="two_shot")
PROTOCOLS: dict[str, tuple[Call, ...]] = {
    "ag_gemm fused": _GATHER,
    "ag_gemm fused, chunks": _with(_GATHER[::2], rows=130, columns=16, ragged=True, config=TALL),
    "ag_gemm fused, one weight": (Call("ag_gemm", 9, depth=32, ragged=True, **_INT8), *_GATHER[2:], Call("ag_gemm", 9)),
    "ag_gemm fused, own rows with the next rank's": _with(_GATHER, config=replace(FEW, alone=-1)),
    "ag_gemm pipelined": _with(_GATHER, strategy="pipelined"),
    "ag_gemm sequential": _with(_GATHER, strategy="sequential"),
    "moe_ag_gemm fused": _EXPERTS,
    "moe_ag_gemm pipelined": _with(_EXPERTS[1:], strategy="pipelined"),
    "moe_ag_gemm fused by some, pipelined by others": _with(_EXPERTS, strategy="either"),
    "moe_ag_gemm sequential": _with(_EXPERTS[1:], strategy="sequential"),
    "moe_gemm_rs fused": _COMBINE,
    "moe_gemm_rs sequential": _with(_COMBINE, strategy="sequential"),
    "moe_gemm_rs fused, summed apart": _with(_COMBINE, config=replace(APART, num_chunks=2)),
    "moe_gemm_rs pipelined": _with(_COMBINE, strategy="pipelined"),
    "moe_gemm_rs pipelined, one slab": _with(_COMBINE, strategy="pipelined", config=replace(SLABS, num_chunks=1)),
    "gemm_rs fused": _SCATTER,
    "gemm_rs fused, summed apart": _with(_SCATTER, config=APART),
    "gemm_rs fused, in slabs": _with(_SCATTER, columns=40, config=replace(SLABS, span=2, alone=1)),
    "gemm_rs pipelined": _with(_SCATTER, strategy="pipelined"),
    "gemm_rs sequential": _with(_SCATTER, strategy="sequential"),
    "gemm_ar one_shot": _SPREAD,
    "gemm_ar sequential": _with(_SPREAD, strategy="sequential"),
    "gemm_ar two_shot": (_TWO_SHOT[0], replace(_TWO_SHOT[1], strategy="pipelined"), _TWO_SHOT[2]),
    "many tiles": _MANY_TILES,
    "mixed": _MIXED,
}
"""What is simulated, by name."""

BY_COPIES = (
    "ag_gemm fused, one weight", "gemm_rs fused", "gemm_rs fused, in slabs", "moe_gemm_rs fused",
    "moe_gemm_rs pipelined", "moe_gemm_rs pipelined, one slab",
)  # fmt: skip
"""Those of them that can be simulated with what is sent going by the copy engine."""

_ONE_OF_EACH_OP = {"many tiles": _MANY_TILES[:3], "mixed": (_MIXED[0], _MIXED[3], _MIXED[2])}
_LARGE_WORLD = 5
_SMALLEST = {"ag_gemm": 2, "moe_ag_gemm": 2, "moe_gemm_rs": 2, "gemm_rs": 2, "gemm_ar": 9}


def calls(protocol: str, world_size: int) -> tuple[Call, ...]:
    """The calls of a protocol; in a large world two of them, one tile per shard, since every rank talks to every other.

    Of a mix there is one of each op. Two calls are the fewest in which a rank can be ahead, and three those in which it
    can come back to the half of a buffer that a peer has not read.
    """
    given = PROTOCOLS[protocol]
    if world_size < _LARGE_WORLD:
        return given
    given = _ONE_OF_EACH_OP.get(protocol, given[:2])
    smallest: dict[str, Any] = {"columns": 16, "depth": 16, "num_weights": 1, "returns_rows": False}
    return tuple(replace(call, rows=40 if call.config is TALL else _SMALLEST[call.op], **smallest) for call in given)


def run_protocol(group: Group, protocol: str, seed: int) -> None:
    """What one rank does: all routing first, then call after call."""
    numbered = [(call, 1000 * seed + number) for number, call in enumerate(calls(protocol, group.world_size))]
    routings = [call.routed(group, each) if isinstance(call, MoeCall) else None for call, each in numbered]
    for (call, each), routing in zip(numbered, routings, strict=True):
        if isinstance(call, MoeCall):
            call.run(group, each, routing)
        else:
            call.run(group, each)


def _run_on_streams(group: Group, protocol: str, seed: int) -> None:
    with on_streams(group):
        run_protocol(group, protocol, seed)


def simulate_protocol(
    protocol: str,
    world_size: int,
    seed: int,
    *,
    fetches: bool = False,
    starved: bool = False,
    by_copies: bool = False,
) -> None:
    """One schedule of the whole world; ``seed`` draws the schedule and the numbers.

    As if every rank had four SMs, so that the kernels of the pipelined strategy have several programs, too. A GPU that
    ranks share: programs fetch their tiles (``fetches``), and some begin late (``starved``). GPUs of their own:
    what is sent goes ``by_copies``, in the protocols that are among ``BY_COPIES``.
    """
    with (
        simulated_streams() if by_copies else nullcontext(),
        mock.patch.object(dense, "sms_for", lambda group: TILES.num_sms),
        mock.patch.object(scatter, "sms_for", lambda group: TILES.num_sms),
        mock.patch.object(direct, "sms_for", lambda group: TILES.num_sms),
        mock.patch.object(combine, "sms_for", lambda group: TILES.num_sms),
        mock.patch.object(gemm_launch, "fetches_tiles", lambda group, config, role: fetches),
    ):
        run = _run_on_streams if by_copies else run_protocol
        simulate(run, world_size, seed=seed, args=(protocol, seed), config=COMM, starved=starved)
