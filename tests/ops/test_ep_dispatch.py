"""ep_dispatch against a plain oracle: types, worlds, routings, capacity, calls in a row, gradients, refusals."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

import tileflux
from tileflux.ops import ep_dispatch_reference
from tileflux.symm.group import Group
from tileflux.testing import assert_close, run_ranks
from tileflux.testing.moe import ROUTING_KINDS, MoeRouting

from .cases import check_registration
from .dense_cases import (
    check_compiled_alike,
    drawn_factors,
    gradients,
    install_interpreter,
    needs_interpreter,
    weighted,
)
from .ep_cases import FLOATS, NARROW, SCALED, EpCase, bits, check_dispatched, dispatch, drawn_case
from .moe_cases import on

STRATEGIES = ("fused", "sequential")


def _every_type(group: Group, seed: int, backend: str, tokens: int = 24) -> int:
    draws, num_calls = random.Random(seed), 0
    for number, dtype in enumerate((*FLOATS, *SCALED)):
        for strategy in (*STRATEGIES, "auto") if backend == "host" else STRATEGIES[:1]:
            kind = ROUTING_KINDS[(number + num_calls) % len(ROUTING_KINDS)]
            case = drawn_case(group.world_size, dtype, draws, tokens, kind)
            room = draws.choice((None, case.most, case.most + 3))
            with on(backend):
                found = dispatch(group, case, draws, capacity=room, strategy=strategy)
            assert found.capacity == (sum(case.routing.sizes) if room is None else room)
            check_dispatched(group, case, found)
            num_calls += 1
    return num_calls


@pytest.mark.parametrize("config", [None, NARROW], ids=["", "narrow"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_against_the_oracle(world_size: int, config: Any) -> None:
    args = (int(torch.randint(2**30, ())), "host")
    counts = run_ranks(_every_type, world_size, args=args, group_kwargs={"config": config})
    assert counts == [3 * len((*FLOATS, *SCALED))] * world_size


@needs_interpreter
@pytest.mark.parametrize(("world_size", "config"), [(1, NARROW), (2, NARROW), (4, None)])
def test_interpreted(world_size: int, config: Any) -> None:
    install_interpreter()
    args = (int(torch.randint(2**30, ())), "interpret", 16 // world_size)
    run_ranks(_every_type, world_size, args=args, group_kwargs={"config": config}, timeout_s=150)


def test_virtual_ranks() -> None:
    run_ranks(_every_type, 3, args=(int(torch.randint(2**30, ())), "host"), where="virtual")


def _against_reference(group: Group) -> None:
    draws = random.Random(group.world_size)
    for dtype in (*FLOATS, *SCALED):
        case = drawn_case(group.world_size, dtype, draws)
        given = case.arguments(group.rank)
        found = tileflux.ep_dispatch(**given, group=group)
        del given["sizes"], given["scale_x"]
        tokens, ids, weights = ep_dispatch_reference(**given)
        assert len(tokens) == len(case.tokens(group.rank))
        assert torch.equal(bits(found.tokens[: len(tokens)]), bits(tokens))
        assert torch.equal(found.weights[: len(tokens)], weights)
        assert found.counts.tolist() == [int((ids == expert).sum()) for expert in found.experts]


@pytest.mark.parametrize("world_size", [1, 3])
def test_equals_torch_distributed(world_size: int) -> None:
    run_ranks(_against_reference, world_size)


def _back_to_back(group: Group, backend: str, num_calls: int) -> None:
    """Nobody meets anybody between calls, and no two are alike: ranks run ahead by as much as they can."""
    draws, waiting = random.Random(11), []
    for call in range(num_calls):
        case = drawn_case(group.world_size, draws.choice(FLOATS), draws, 10 if backend == "interpret" else 24)
        if call % group.world_size == group.rank:
            time.sleep(0.003)
        with on(backend):
            found = dispatch(group, case, strategy=draws.choice(("fused", "fused", "sequential")))
            y = tileflux.ep_combine(found.rows(), found) if call % 3 == 0 else None
        waiting.append((case, found, y))
    for case, found, y in waiting:
        check_dispatched(group, case, found)
        if y is not None:
            rows = [case.xs[0].new_zeros((0, case.xs[0].shape[1]))] * group.world_size
            for rank in range(group.world_size):
                picked = [case.tokens(rank)[number] for _, number, _ in case.sorted_rows(rank)]
                if picked:
                    rows[rank] = torch.stack([case.xs[source][token] for source, token in picked])
            assert torch.equal(y, case.combined(group.rank, rows))


@pytest.mark.parametrize("config", [None, NARROW], ids=["", "narrow"])
def test_calls_in_a_row_with_other_routings(config: Any) -> None:
    run_ranks(_back_to_back, 3, args=("host", 24), group_kwargs={"config": config})


@needs_interpreter
def test_calls_in_a_row_with_other_routings_interpreted() -> None:
    install_interpreter()
    run_ranks(_back_to_back, 2, args=("interpret", 5), group_kwargs={"config": NARROW}, timeout_s=120)


def _nothing(group: Group) -> None:
    for strategy in STRATEGIES:
        none = torch.zeros(0, 2, dtype=torch.long)
        found = tileflux.ep_dispatch(
            torch.zeros(0, 3), none, none.float(), num_experts=4, group=group, strategy=strategy, capacity=2
        )
        assert (
            found.tokens.shape == (2, 3)
            and found.rows().shape == (4, 3)
            and found.counts.tolist() == [0] * len(found.experts)
        )
        assert tileflux.ep_combine(found.rows(), found, strategy=strategy).shape == (0, 3)
        # Choices that were all dropped; a number of no expert is one, also where 32 bits are not enough for it.
        for number in (-1, -7, 4, 2**32 + 1, -(2**32) + 1, 2**63 - 1):
            ids = torch.full((3, 2), number)
            found = tileflux.ep_dispatch(
                torch.ones(3, 5), ids, torch.ones(3, 2), num_experts=4, group=group, strategy=strategy
            )
            assert found.counts.sum() == 0 and (found.positions == -1).all() and (found.arrived == -1).all()
            y = tileflux.ep_combine(torch.full((6 * group.world_size, 5), torch.nan), found, strategy=strategy)
            assert_close(y, torch.zeros(3, 5), reduction=0)
            ids[:, 0] = 0  # goes, and the other choice with it
            found = tileflux.ep_dispatch(
                torch.ones(3, 5), ids, torch.ones(3, 2), num_experts=4, group=group, strategy=strategy
            )
            assert found.counts.sum() == (3 * group.world_size if group.rank == 0 else 0)
        # Tokens without columns are counted all the same.
        found = tileflux.ep_dispatch(
            torch.ones(3, 0), torch.zeros(3, 1).long(), torch.ones(3, 1), num_experts=4, group=group, strategy=strategy
        )
        assert found.counts.sum() == (3 * group.world_size if group.rank == 0 else 0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_to_send(world_size: int) -> None:
    run_ranks(_nothing, world_size)


def _overflow(group: Group, backend: str) -> None:
    """Every rank sends three tokens to rank 0: all ranks are told, and can go on with the next call."""
    with on(backend):
        for strategy in STRATEGIES:
            given: dict[str, Any] = {
                "x": torch.ones(3, 4), "expert_ids": torch.zeros(3, 2).long(), "weights": torch.ones(3, 2),
                "num_experts": 4, "group": group, "strategy": strategy,
            }  # fmt: skip
            with pytest.raises(
                tileflux.CapacityExceeded, match="1 of 6 tokens for a rank did not fit: capacity=5 should be at least 6"
            ):
                tileflux.ep_dispatch(**given, capacity=5)
            found = tileflux.ep_dispatch(**given, capacity=6)
            assert found.counts.sum() == (12 if group.rank == 0 else 0)
            assert_close(tileflux.ep_combine(found.rows(), found), torch.full((3, 4), 2.0), reduction=0)


@pytest.mark.parametrize("backend", ["host", pytest.param("interpret", marks=needs_interpreter)])
def test_more_tokens_than_there_is_room_for(backend: str) -> None:
    if backend == "interpret":
        install_interpreter()
    run_ranks(_overflow, 2, args=(backend,))


def _gradient(group: Group, dtype: torch.dtype, strategy: str) -> None:
    """Of tokens and weights, through a layer of experts, against fp64 autograd of the whole on one rank."""
    rank, world_size = group.rank, group.world_size
    draws = random.Random(5)
    case = drawn_case(world_size, dtype, draws, 9, "dropped", 3)
    torch.manual_seed(3)
    hidden, num_each = case.xs[0].shape[1], case.routing.num_experts // world_size
    xs = [drawn_factors(*x.shape).to(dtype) for x in case.xs]
    ups = drawn_factors(case.routing.num_experts, 6, hidden).to(dtype)
    factors = [drawn_factors(size, 6) for size in case.routing.sizes]
    others = [drawn_factors(sum(case.routing.sizes), case.routing.top_k) for _ in xs]

    def loss(x: torch.Tensor, gates: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        given = {**case.arguments(rank), "x": x, "weights": gates}
        found = tileflux.ep_dispatch(**given, group=group, strategy=strategy)
        y = tileflux.ep_combine(tileflux.grouped_gemm(found.rows(), up, found.counts), found, strategy=strategy)
        # Weights that have come are a result of their own.
        return weighted(y, factors[rank]) + (found.weights * others[rank]).sum()

    own = ups[num_each * rank : num_each * (rank + 1)]
    found = gradients(loss, (xs[rank], case.routing.weights[rank], own))
    leaves = [[t.double().requires_grad_() for t in each] for each in (xs, case.routing.weights, (ups,))]
    exact: Any = sum((0 * leaf).sum() for each in leaves for leaf in each)  # also of who has no tokens
    for source, ids in enumerate(case.routing.expert_ids):
        for token, chosen in enumerate(ids.tolist()):
            for choice, expert in enumerate(chosen):
                if expert >= 0:
                    y = leaves[0][source][token] @ leaves[2][0][expert].t()
                    gate = leaves[1][source][token, choice]
                    place = case.tokens(expert // num_each).index((source, token))
                    exact = exact + gate * (y @ factors[source][token].double())
                    exact = exact + gate * others[expert // num_each][place, choice]
    exact.backward()
    rights: list[Any] = [leaves[0][rank].grad, leaves[1][rank].grad, leaves[2][0].grad]
    assert_close(found[0], rights[0], dtype=dtype, reduction=6 * 3)
    assert_close(found[1].to(dtype), rights[1], dtype=dtype, reduction=6 * hidden)
    right = rights[2][num_each * rank : num_each * (rank + 1)]
    assert_close(found[2], right, dtype=dtype, reduction=3 * sum(case.routing.sizes))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("world_size", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (3, torch.float32)])
def test_gradients(world_size: int, dtype: torch.dtype, strategy: str) -> None:
    run_ranks(_gradient, world_size, args=(dtype, strategy))


def _second_gradient(group: Group) -> None:
    """Each is the other's gradient, so that there is a gradient's gradient too."""
    ids, factors = torch.randint(-1, 4, (7, 2)), drawn_factors(7, 5)

    def curved(result: torch.Tensor, leaves: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        loss = (result * result * factors.to(result.dtype)).sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        return *first, *torch.autograd.grad(sum((each * each).sum() for each in first), leaves)  # type: ignore[arg-type]

    x, gates = torch.rand(7, 5, requires_grad=True), torch.rand(7, 2, requires_grad=True)
    found = tileflux.ep_dispatch(x, ids, gates, num_experts=4, group=group)
    results = curved(tileflux.ep_combine(found.rows() ** 2, found), (x, gates))
    exact = (x.detach().double().requires_grad_(), gates.detach().double().requires_grad_())
    rights = curved(exact[0] ** 2 * torch.where(ids >= 0, exact[1], 0.0).sum(1, keepdim=True), exact)
    for result, right in zip(results, rights, strict=True):
        assert_close(result, right, reduction=64)


def test_a_gradients_gradient() -> None:
    run_ranks(_second_gradient, 2)


def _compiled(group: Group) -> None:
    ids, gates = torch.tensor([[0, 3], [1, 1], [2, 0]]), torch.rand(3, 2) + 0.5
    up, factors = torch.randn(4 // group.world_size, 5, 6), drawn_factors(3, 5)

    def loss(x: torch.Tensor, gates: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        found = tileflux.ep_dispatch(2 * x, ids, gates, num_experts=4, group=group)
        return weighted(tileflux.ep_combine(tileflux.grouped_gemm(found.rows(), up, found.counts), found), factors)

    check_compiled_alike(loss, (torch.randn(3, 6), gates, up))


def test_compiled() -> None:
    run_ranks(_compiled, 2, timeout_s=120)


def _registration(group: Group) -> None:
    ids = torch.tensor([[0, 1], [1, 1], [0, -1]])
    x, gates = torch.randn(3, 4, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    how = (group.name, [3], 3, 2, "auto")
    check_registration(group, torch.ops.tileflux.ep_dispatch.default, x, ids, gates, None, *how)
    found = tileflux.ep_dispatch(x.detach(), ids, gates.detach(), num_experts=2, group=group)
    rows = (found.tokens.requires_grad_(), found.row_tokens, found.positions)
    check_registration(group, torch.ops.tileflux.ep_rows.default, *rows)
    again = (x, found.arrived, found.sent, group.name, [3], 3, "auto")
    check_registration(group, torch.ops.tileflux.ep_spread.default, *again)


def test_registration() -> None:
    run_ranks(_registration, 1, timeout_s=120)


def _odd_weights(group: Group) -> None:
    """Every bit of a weight arrives, and every type of choices and weights is taken."""
    odd = torch.tensor([[float("nan"), -0.0], [1e-45, float("inf")], [3e38, -1.0]])
    for dtype in (torch.int32, torch.int64):
        ids = torch.zeros(3, 2, dtype=dtype)
        found = tileflux.ep_dispatch(torch.ones(3, 1), ids, odd, num_experts=group.world_size, group=group)
        if group.rank == 0:
            assert torch.equal(bits(found.weights), bits(odd.repeat(group.world_size, 1)))
    half = torch.rand(3, 2).bfloat16()
    found = tileflux.ep_dispatch(
        torch.ones(3, 1), torch.zeros(3, 2).int(), half, num_experts=group.world_size, group=group
    )
    assert found.weights.dtype == torch.float32
    if group.rank == 0:
        assert torch.equal(found.weights[:3], half.float())


def test_weights_of_every_kind() -> None:
    run_ranks(_odd_weights, 2)


def test_a_slot_that_is_too_small_for_one_token_is_refused() -> None:
    (group,) = tileflux.local_groups(1, config=tileflux.CommConfig(slot_bytes=256))
    with pytest.raises(ValueError, match="slot_bytes=256 has no room for the counts of 1 ranks, 80 words of a token"):
        tileflux.ep_dispatch(torch.ones(1, 8), torch.zeros(1, 40).long(), torch.ones(1, 40), num_experts=1, group=group)
    group.close()


def test_refusals() -> None:
    (group,) = tileflux.local_groups(1)
    x, ids, gates = torch.ones(3, 4), torch.zeros(3, 2).long(), torch.ones(3, 2)
    small = {"x": x.to(torch.int8)}
    for message, given in (
        (r"x \(2, 4\) should be \[tokens, H\], and expert_ids has 3 tokens", {"x": x[:2]}),
        (r"x \(12,\) should be \[tokens, H\]", {"x": x.flatten()}),
        ("x should be a tensor, not list", {"x": [1.0]}),
        ("group should be a tileflux.Group", {"group": "world"}),
        (r"expert_ids \(3, 2\) and weights \(3, 1\) should both be \[tokens, k\]", {"weights": gates[:, :1]}),
        ("expert_ids should be int32 or int64 and weights floating", {"expert_ids": ids.short()}),
        ("num_experts=0 should be from 1 to 1024", {"num_experts": 0}),
        (r"expert_ids has 3 rows but sizes\[0\] is 4", {"sizes": [4]}),
        (r"sizes=\[3, 3\] has 2 entries for 1 ranks", {"sizes": [3, 3]}),
        ("capacity=-1 should not be negative", {"capacity": -1}),
        ("strategy='pipelined' is not one of auto, sequential, fused", {"strategy": "pipelined"}),
        ("scales belong to fp8 and int8; x is torch.float32", {"scale_x": 2.0}),
        (r"scale_x should be a number, or float32 on cpu of shape \(\) or \(3,\)", {**small, "scale_x": torch.ones(2)}),
        ("there is no gradient of scale_x; detach it", {**small, "scale_x": torch.ones(3).requires_grad_()}),
    ):
        arguments: dict[str, Any] = {"x": x, "expert_ids": ids, "weights": gates, "num_experts": 2, "group": group}
        with pytest.raises(ValueError, match=f"ep_dispatch: {message}"):
            tileflux.ep_dispatch(**(arguments | given))
    group.close()


def _uneven_experts(group: Group) -> None:
    with pytest.raises(ValueError, match="ep_dispatch: num_experts=3 should be a multiple of the 2 ranks"):
        tileflux.ep_dispatch(torch.ones(1, 1), torch.zeros(1, 1).long(), torch.ones(1, 1), num_experts=3, group=group)


def test_experts_that_do_not_divide() -> None:
    run_ranks(_uneven_experts, 2)


def test_the_oracle_finds_a_token_in_the_wrong_place() -> None:
    (group,) = tileflux.local_groups(1)
    routing = MoeRouting((2,), 1, 1, (torch.zeros(2, 1).long(),), (torch.ones(2, 1),))
    case = EpCase(routing, (torch.tensor([[1.0], [2.0]]),), (None,))
    found = dispatch(group, case)
    check_dispatched(group, case, found)
    found.tokens.copy_(found.tokens.flip(0))
    with pytest.raises(AssertionError, match="token 0"):
        check_dispatched(group, case, found)
    group.close()
