"""moe_gemm_rs against the fp64 oracle and torch.distributed: types, strategies, calls in a row, gradients, refusals."""

from __future__ import annotations

import dataclasses
import random
import time
from typing import Any

import pytest
import torch

import tileflux
from tileflux.ops import moe_gemm_rs_reference
from tileflux.ops._moe import routing_arguments
from tileflux.symm.group import Group
from tileflux.testing import assert_close, run_ranks
from tileflux.testing.dense import DENSE_DTYPES
from tileflux.testing.moe import MoeRouting, expected_rs, moe_routing

from .cases import check_registration
from .dense_cases import (
    SMALL,
    check_compiled_alike,
    drawn_factors,
    gradients,
    install_interpreter,
    needs_interpreter,
    weighted,
)
from .moe_cases import CONFIGS, EVEN_WIDTHS, WIDTHS, check_rs_call, drawn_room, drawn_rs_case, on, routed, rs_arguments

STRATEGIES = ("sequential", "fused", "pipelined")


def _every_type(group: Group, seed: int, backend: str, rounds: int = 1, tokens: int = 24) -> int:
    draws, num_calls = random.Random(seed), 0
    for _ in range(rounds):
        for dtype in DENSE_DTYPES:
            for strategy in (*STRATEGIES, "auto") if backend == "host" else STRATEGIES[1:]:
                widths = EVEN_WIDTHS if strategy == "pipelined" and draws.random() < 0.7 else WIDTHS
                case = drawn_rs_case(group.world_size, dtype, draws, tokens, widths)
                config = draws.choice(CONFIGS)
                if backend != "host":
                    config = dataclasses.replace(SMALL, num_chunks=draws.randrange(1, 4))
                check_rs_call(group, case, draws, backend, strategy=strategy, config=config)
                num_calls += 1
    return num_calls


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_type_and_strategy(world_size: int) -> None:
    seed = int(torch.randint(2**30, ()))
    assert run_ranks(_every_type, world_size, args=(seed, "host", 2)) == [2 * 4 * len(DENSE_DTYPES)] * world_size


@needs_interpreter
@pytest.mark.parametrize("world_size", [2, 4])
def test_interpreted(world_size: int) -> None:
    install_interpreter()
    args = (int(torch.randint(2**30, ())), "interpret", 1, 24 // world_size)
    run_ranks(_every_type, world_size, args=args, timeout_s=150)


def test_virtual_ranks() -> None:
    run_ranks(_every_type, 2, args=(int(torch.randint(2**30, ())), "host"), where="virtual")


def _against_reference(group: Group) -> None:
    draws = random.Random(group.world_size)
    for dtype in DENSE_DTYPES:
        case = drawn_rs_case(group.world_size, dtype, draws)
        room = drawn_room(case.routing, draws)
        routing, arguments = routed(group, case, capacity=room), rs_arguments(case, group.rank, room)
        result = tileflux.moe_gemm_rs(**arguments, routing=routing)
        right = moe_gemm_rs_reference(**arguments, routing=routing)
        assert_close(result, right, reduction=case.num_terms * group.world_size)


@pytest.mark.parametrize("world_size", [1, 3])
def test_equals_torch_distributed(world_size: int) -> None:
    run_ranks(_against_reference, world_size)


def _agree(group: Group, seed: int, backend: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """With any number of slabs, every time: sums have one order."""
    draws = random.Random(seed)
    for dtype in dtypes:
        case = drawn_rs_case(group.world_size, dtype, draws, 20, draws.choice((WIDTHS, EVEN_WIDTHS)))
        found = []
        ways = (("sequential", 1), ("fused", 1), ("fused", 2), ("fused", 5), ("fused", 2), ("pipelined", 1),
                ("pipelined", 3), ("fused", 2), ("pipelined", 4))  # fmt: skip
        for strategy, num_slabs in ways:
            config = dataclasses.replace(SMALL, num_chunks=num_slabs)
            found.append(check_rs_call(group, case, draws, backend, strategy=strategy, config=config))
        for other in found[1:]:
            assert_close(other, found[0], reduction=0, what=str(dtype))


@pytest.mark.parametrize(
    ("backend", "world_size"), [("host", 3), ("host", 4), pytest.param("interpret", 2, marks=needs_interpreter)]
)
def test_strategies_and_slabs_agree_bit_for_bit(backend: str, world_size: int) -> None:
    dtypes = DENSE_DTYPES
    if backend == "interpret":
        install_interpreter()
        dtypes = (torch.bfloat16,)
    run_ranks(_agree, world_size, args=(int(torch.randint(2**30, ())), backend, dtypes), timeout_s=120)


def _back_to_back(group: Group, strategy: str, backend: str) -> None:
    """Nobody meets anybody between calls, and no two calls are alike: ranks run ahead by as much as they can."""
    draws, waiting, is_slow = random.Random(7), [], backend == "interpret"
    for call in range(3 if is_slow else 12):
        case = drawn_rs_case(group.world_size, draws.choice((torch.float32, torch.int8)), draws, 10 if is_slow else 24)
        room = drawn_room(case.routing, draws)
        routing, arguments = routed(group, case, SMALL, capacity=room), rs_arguments(case, group.rank, room)
        if call % group.world_size == group.rank:
            time.sleep(0.005)
        with on(backend):
            for _ in range(3):
                result = tileflux.moe_gemm_rs(**arguments, routing=routing, strategy=strategy, config=SMALL)
                waiting.append((case, result))
    for number, (case, result) in enumerate(waiting):
        what, reduction = f"call {number} on rank {group.rank}", case.num_terms * group.world_size
        assert_close(result, expected_rs(case, group.rank), dtype=case.out_dtype, reduction=reduction, what=what)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_calls_in_a_row_with_other_routings(strategy: str) -> None:
    run_ranks(_back_to_back, 3, args=(strategy, "host"))


@needs_interpreter
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_calls_in_a_row_with_other_routings_interpreted(strategy: str) -> None:
    install_interpreter()
    run_ranks(_back_to_back, 2, args=(strategy, "interpret"), timeout_s=120)


def _nothing(group: Group) -> None:
    none = torch.zeros(0, 2, dtype=torch.long)
    for strategy in STRATEGIES:
        routing = tileflux.route(none, none.float(), num_experts=4, group=group, capacity=4, block_m=16)
        y = tileflux.moe_gemm_rs(torch.ones(4, 3), torch.ones(4, 5, 3), routing, strategy=strategy, config=SMALL)
        assert y.shape == (0, 5)
        h, weight, gates = (torch.ones(shape, requires_grad=True) for shape in ((4, 3), (4, 5, 3), (0, 2)))
        routing = tileflux.route(none, gates, num_experts=4, group=group, capacity=4)
        tileflux.moe_gemm_rs(h, weight, routing, strategy=strategy).sum().backward()
        for leaf in (h, weight, gates):
            assert leaf.grad is not None and leaf.grad.shape == leaf.shape and not leaf.grad.any()
        # Tokens of which every choice was dropped, and experts without columns or terms.
        ids = torch.full((3, 2), -1)
        routing = tileflux.route(ids, torch.ones(3, 2), num_experts=4, group=group, block_m=16)
        for depth, hidden in ((3, 5), (0, 5), (3, 0)):
            h, weight = torch.full((routing.capacity, depth), torch.nan), torch.ones(4, hidden, depth)
            y = tileflux.moe_gemm_rs(h, weight, routing, strategy=strategy, config=SMALL)
            assert_close(y, torch.zeros(3, hidden), reduction=0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_to_add_up(world_size: int) -> None:
    run_ranks(_nothing, world_size)


Leaves = list[torch.Tensor]


def exact(routing: MoeRouting, hs: Leaves, weights: Leaves, gates: Leaves) -> torch.Tensor:
    """What all ranks' tokens get, of what each rank has."""
    gate, hidden = torch.cat(gates).flatten(), weights[0].shape[1]
    total = torch.zeros(sum(routing.sizes), hidden, dtype=torch.float64)
    for rank, (h, weight) in enumerate(zip(hs, weights, strict=True)):
        rows = routing.rows(rank)
        local = torch.tensor([row.expert - routing.experts(rank).start for row in rows], dtype=torch.long)
        slots = torch.tensor([row.slot for row in rows], dtype=torch.long)
        products = torch.einsum("rk,rhk->rh", h, weight[local]) * gate[slots, None]
        total = total.index_add(0, slots // routing.top_k, products)
    return total


def _gradient(group: Group, dtype: torch.dtype) -> None:
    """Of rows, weights and gates, against fp64 autograd of the whole; its loss is the sum of all ranks' losses."""
    rank, world_size = group.rank, group.world_size
    torch.manual_seed(23)
    ep_size = 2 if world_size % 2 == 0 else 1
    routing = moe_routing([5, 0, 7, 3][:world_size], 4, 2, 3, ep_size=ep_size, kind="dropped")
    hidden, width, num_experts = 9, 12, 4 // ep_size
    rows = [routing.rows(each) for each in range(world_size)]
    hs = [torch.randn(len(own), width).to(dtype) for own in rows]
    weights = [torch.randn(num_experts, hidden, width).to(dtype) for _ in rows]
    gates = list(routing.weights)
    factors = [drawn_factors(size, hidden) for size in routing.sizes]
    room = max(map(len, rows))

    def loss(h: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        here = tileflux.route(**{**routing.arguments(rank), "weights": gate}, group=group, capacity=room)
        padded = torch.cat((h, h.new_full((room - len(h), width), torch.nan)))
        return weighted(tileflux.moe_gemm_rs(padded, weight, here), factors[rank])

    found = gradients(loss, (hs[rank], weights[rank], gates[rank]))
    leaves = [[t.double().requires_grad_() for t in each] for each in (hs, weights, gates)]
    (exact(routing, *leaves) * torch.cat(factors)).sum().backward()
    depths = (hidden, len(rows[rank]), hidden * width * world_size)
    for actual, each, depth in zip(found, leaves, depths, strict=True):
        right = each[rank].grad
        assert right is not None
        # Gates have a type of their own, and what their gradient is made of has that of the rows.
        assert_close(actual.to(dtype), right, dtype=dtype, reduction=depth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_gradients(world_size: int, dtype: torch.dtype) -> None:
    run_ranks(_gradient, world_size, args=(dtype,))


def curved(y: torch.Tensor, leaves: Leaves) -> tuple[torch.Tensor, ...]:
    """Gradients of how long the gradients of a square are."""
    first = torch.autograd.grad((y * y).sum(), leaves, create_graph=True)
    return torch.autograd.grad(sum((each * each).sum() for each in first), leaves)


def _second_gradient(group: Group) -> None:
    """Of rows, weights and gates; the squares are those of all ranks."""
    torch.manual_seed(29)
    routing = moe_routing([4, 3], 4, 2, 3, ep_size=2, kind="dropped")
    hs = [torch.randn(len(routing.rows(rank)), 5) for rank in range(2)]
    weights, gates = [torch.randn(2, 6, 5) for _ in hs], list(routing.weights)
    room = max(map(len, hs))
    own = [each[group.rank].clone().requires_grad_() for each in (hs, weights, gates)]
    here = tileflux.route(**{**routing.arguments(group.rank), "weights": own[2]}, group=group, capacity=room)
    padded = torch.cat((own[0], torch.zeros(room - len(own[0]), 5)))
    found = curved(tileflux.moe_gemm_rs(padded, own[1], here), own)
    leaves = [[t.double().requires_grad_() for t in each] for each in (hs, weights, gates)]
    right = curved(exact(routing, *leaves), [leaf for each in leaves for leaf in each])
    for index, actual in enumerate(found):
        assert_close(actual, right[2 * index + group.rank].float(), reduction=1000)


def test_a_gradients_gradient() -> None:
    run_ranks(_second_gradient, 2)


def _compiled(group: Group) -> None:
    routing = tileflux.route(
        torch.tensor([[0, 3], [1, 1], [2, 0]]), torch.ones(3, 2), num_experts=4, group=group, block_m=16
    )
    factors = drawn_factors(3, 5)

    def loss(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = tileflux.moe_gemm_rs(2 * h, weight, routing)
        return weighted(y + tileflux.moe_gemm_rs(h, weight, routing, strategy="fused", config=SMALL), factors)

    check_compiled_alike(loss, (torch.randn(routing.capacity, 6), torch.randn(4, 5, 6)))


def test_compiled() -> None:
    run_ranks(_compiled, 2, timeout_s=120)


def _registration(group: Group) -> None:
    routing = tileflux.route(torch.tensor([[0, 1], [1, 1], [0, -1]]), torch.ones(3, 2), num_experts=2, group=group)
    h, weight = torch.randn(6, 3, requires_grad=True), torch.randn(2, 4, 3, requires_grad=True)
    gates = routing.own_weights.requires_grad_()
    how = (None, None, *routing_arguments(routing), torch.float32, "auto", "")
    check_registration(group, torch.ops.tileflux.moe_gemm_rs.default, h, weight, gates, *how)


def test_registration() -> None:
    run_ranks(_registration, 1, timeout_s=120)


def test_refusals() -> None:
    (group,) = tileflux.local_groups(1)
    h, weight = torch.ones(4, 3), torch.ones(2, 5, 3)
    routing = tileflux.route(
        torch.tensor([[0], [1], [0], [1]]), torch.ones(4, 1), num_experts=2, group=group, block_m=32
    )
    gated = dataclasses.replace(routing, own_weights=torch.ones(4, 1, requires_grad=True))
    small = {"h": h.to(torch.int8), "weight": weight.to(torch.int8)}
    for message, given in (
        ("routing should be what tileflux.route gives, not Tensor", {"routing": h}),
        (r"weight should be a tensor \[E, N, K\], one matrix per expert, not \(5, 3\)", {"weight": weight[0]}),
        ("weight has 3 experts, but rank 0 has 2 of 2", {"weight": torch.ones(3, 5, 3)}),
        ("h has 3 rows, but there is room for 4 in the routing", {"h": h[:3]}),
        (r"x \(4, 2\) and weight \(5, 3\) differ in K", {"h": h[:, :2]}),
        ("config has block_m=16, but rows were routed with 32; route with block_m=16", {"config": SMALL}),
        ("strategy='magic' is not one of auto, sequential, pipelined, fused", {"strategy": "magic"}),
        ("out_dtype=torch.int8 should be", {"out_dtype": torch.int8}),
        (r"scale_weight should be a number, or float32 of shape", {**small, "scale_weight": torch.ones(5)}),
        ("scales belong to fp8 and int8", {"scale_h": 2.0}),
        (r"out should be contiguous \(4, 5\) torch.float32 on cpu", {"out": torch.ones(3, 5)}),
        ("there is no gradient through products of torch.int8", {**small, "scale_h": torch.ones(()).requires_grad_()}),
        ("there is no gradient through products of torch.int8", {**small, "routing": gated}),
        ("out= records no gradient", {"routing": gated, "out": torch.ones(4, 5)}),
    ):
        arguments: dict[str, Any] = {"h": h, "weight": weight, "routing": routing} | given
        with pytest.raises(ValueError, match=f"moe_gemm_rs: {message}"):
            tileflux.moe_gemm_rs(**arguments)
    tight = tileflux.route(torch.zeros(4, 1).long(), torch.ones(4, 1), num_experts=2, group=group, capacity=3)
    with pytest.raises(tileflux.CapacityExceeded, match="1 of 4 rows of a rank's experts did not fit"):
        tileflux.moe_gemm_rs(h[:3], weight, tight)
    assert_close(tileflux.moe_gemm_rs(h, weight, routing), torch.full((4, 5), 3.0), reduction=0)
