"""What the tests of the ops of experts share: problems with everything drawn, and a call that is checked."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from typing import Any

import torch

import tileflux
from tileflux import GemmConfig
from tileflux.ops.routing import Routing
from tileflux.symm.group import Group
from tileflux.testing import assert_close
from tileflux.testing.dense import ACTIVATIONS, SCALED_DTYPES
from tileflux.testing.moe import (
    ROUTING_KINDS,
    MoeCase,
    MoeRouting,
    expected_ag,
    expected_rs,
    moe_ag_case,
    moe_routing,
    moe_rs_case,
)
from tileflux.testing.numerics import poisoned

from .dense_cases import FP8, OUT_DTYPES, SMALL, drawn_layout, interpreted

CONFIGS = (SMALL, GemmConfig(16, 32, 32, num_warps=4, num_chunks=3, sums_apart=True), None)

EVEN_WIDTHS = (48, 96)
"""Those that can be cut into slabs of one width, and of whole units."""
WIDTHS = (1, 5, 33, 70, *EVEN_WIDTHS)


def on(backend: str) -> contextlib.AbstractContextManager[Any]:
    """Run ops by the host's loops (``host``), or by the kernels (``interpret``)."""
    return interpreted() if backend == "interpret" else contextlib.nullcontext()


def drawn_case(world_size: int, dtype: torch.dtype, draws: random.Random, tokens: int = 24) -> MoeCase:
    """A problem of this type, with everything else drawn. All ranks draw alike."""
    sizes = [draws.choice((0, 1, tokens // 2, tokens)) for _ in range(world_size)]
    ep_size = draws.choice([size for size in range(1, world_size + 1) if world_size % size == 0])
    num_experts, top_k = ep_size * draws.randrange(1, 5), draws.choice((1, 2, 3, 5, 8))
    kind = draws.choice(ROUTING_KINDS)
    routing = moe_routing(sizes, num_experts, top_k, draws.randrange(2**32), ep_size=ep_size, kind=kind)
    is_scaled = dtype in SCALED_DTYPES
    options: dict[str, Any] = {
        "bias": draws.random() < 0.5,
        "activation": draws.choice([None, *ACTIVATIONS]),
        "scales": draws.choice(["none", "tensor", "expert", "channel"]) if is_scaled else "none",
        "weight_dtype": draws.choice(FP8) if dtype in FP8 else None,
        "out_dtype": draws.choice(OUT_DTYPES),
    }
    if options["activation"] == "swiglu" and is_scaled and options["scales"] == "none":
        options["activation"] = "silu"  # two unscaled sums multiplied do not fit into fp16
    hidden, ffn = draws.choice((1, 5, 16, 33, 40)), routing.tp_size * draws.choice((1, 8, 17, 24))
    case = moe_ag_case(routing, hidden, ffn, dtype, draws.randrange(2**32), **options)
    if draws.random() < 0.5:
        turned = tuple(weight.transpose(1, 2).contiguous().transpose(1, 2) for weight in case.weights)
        case = dataclasses.replace(case, weights=turned)
    return case


def drawn_rs_case(
    world_size: int, dtype: torch.dtype, draws: random.Random, tokens: int = 24, widths: tuple[int, ...] = WIDTHS
) -> MoeCase:
    """The same for the second layer, with one of these widths of a token."""
    first = drawn_case(world_size, dtype, draws, tokens).routing
    is_scaled = dtype in SCALED_DTYPES
    options: dict[str, Any] = {
        "scales": draws.choice(["none", "tensor", "expert", "channel"]) if is_scaled else "none",
        "weight_dtype": draws.choice(FP8) if dtype in FP8 else None,
        "out_dtype": draws.choice(OUT_DTYPES),
    }
    hidden, ffn = draws.choice(widths), first.tp_size * draws.choice((1, 8, 17, 24))
    case = moe_rs_case(first, hidden, ffn, dtype, draws.randrange(2**32), **options)
    if draws.random() < 0.5:
        turned = tuple(weight.transpose(1, 2).contiguous().transpose(1, 2) for weight in case.weights)
        case = dataclasses.replace(case, weights=turned)
    return case


def drawn_room(routing: MoeRouting, draws: random.Random) -> int:
    """Room for the rows of any rank: just enough, a little more, or for the worst case."""
    most = max(len(routing.rows(rank)) for rank in range(routing.world_size))
    return draws.choice((most, most + 3, sum(routing.sizes) * routing.top_k))


def routed(group: Group, case: MoeCase, config: GemmConfig | None = None, **options: Any) -> Routing:
    if config is not None:
        options["block_m"] = config.block_m
    return tileflux.route(**case.routing.arguments(group.rank), group=group, **options)


def check_call(
    group: Group, case: MoeCase, draws: random.Random, backend: str = "host", **settings: Any
) -> torch.Tensor:
    """One call; its rows compared with the exact ones, what is behind them with what was there before.

    Whatever the backend, routes on the host: there is nothing to be seen in gathering a few numbers.
    """
    right = expected_ag(case, group.rank)
    room = drawn_room(case.routing, draws)
    routing = routed(group, case, settings.get("config"), capacity=room)
    arguments = case.arguments(group.rank)
    arguments["x"] = drawn_layout(arguments["x"], draws)
    out = poisoned((room, right.shape[1]), case.out_dtype) if draws.random() < 0.7 else None
    with on(backend):
        result = tileflux.moe_ag_gemm(**arguments, routing=routing, **settings, out=out)
    assert result.shape == (room, right.shape[1]) and (out is None or result is out)
    sizes, dtype = case.routing.sizes, case.xs[0].dtype
    what = f"rank {group.rank}, {dtype} {tuple(case.weights[0].shape)}, ep {case.routing.ep_size}, {sizes}, {settings}"
    assert_close(result[: len(right)], right, dtype=case.out_dtype, reduction=case.num_terms, what=what)
    assert out is None or out[len(right) :].isnan().all(), f"{what}: written behind the last row"
    return result[: len(right)]


def rs_arguments(case: MoeCase, rank: int, room: int) -> dict[str, Any]:
    """What ``rank`` passes to ``moe_gemm_rs``: behind the last row is nothing that anybody may look at."""
    given = case.arguments(rank)
    rows, scale = given.pop("x"), given.pop("scale_x", None)
    given["h"] = torch.cat((rows, poisoned((room - len(rows), rows.shape[1]), torch.float32).to(rows.dtype)))
    if isinstance(scale, torch.Tensor) and scale.dim():
        scale = torch.cat((scale, torch.full((room - len(rows),), torch.nan)))
    return given if scale is None else given | {"scale_h": scale}


def check_rs_call(
    group: Group, case: MoeCase, draws: random.Random, backend: str = "host", op: str = "moe_gemm_rs", **settings: Any
) -> torch.Tensor:
    """One call of the second layer, compared with the exact tokens."""
    right = expected_rs(case, group.rank)
    if op == "moe_gemm_ar":
        right = torch.cat([expected_rs(case, rank) for rank in range(group.world_size)])
    room = drawn_room(case.routing, draws)
    routing = routed(group, case, settings.get("config"), capacity=room)
    if op == "moe_gemm_rs" and draws.random() < 0.7:
        settings["out"] = poisoned(right.shape, case.out_dtype)
    with on(backend):
        result: torch.Tensor = getattr(tileflux, op)(
            **rs_arguments(case, group.rank, room), routing=routing, **settings
        )
    settings.pop("out", None)
    what = f"rank {group.rank}, {case.xs[0].dtype} {tuple(case.weights[0].shape)}, {case.routing.sizes}, {settings}"
    assert result.shape == right.shape
    assert_close(result, right, dtype=case.out_dtype, reduction=case.num_terms * group.world_size, what=what)
    return result
