"""moe_ag_gemm as torch knows it: gradients, compiled, registered; and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tileflux
from tileflux.ops._moe import by_expert, by_masks, routing_arguments
from tileflux.symm.group import Group
from tileflux.testing import assert_close, run_ranks
from tileflux.testing.moe import moe_routing

from .cases import check_registration
from .dense_cases import SMALL, check_compiled_alike, drawn_factors, gradients, weighted


def _gradient(group: Group, dtype: torch.dtype) -> None:
    """Against fp64 autograd of the whole layer; its loss is the sum of all ranks' losses."""
    rank, world_size = group.rank, group.world_size
    torch.manual_seed(17)
    ep_size = 2 if world_size % 2 == 0 else 1
    routing = moe_routing([5, 0, 7, 3][:world_size], 4, 2, 3, ep_size=ep_size, kind="dropped")
    hidden, columns, num_tokens, num_experts = 12, 9, sum(routing.sizes), 4 // ep_size
    xs = [torch.randn(n, hidden).to(dtype) for n in routing.sizes]
    weights, others = ([torch.randn(num_experts, columns, hidden).to(dtype) for _ in xs] for _ in range(2))
    biases = [torch.randn(num_experts, columns).to(dtype) for _ in xs]
    rows = [routing.rows(each) for each in range(world_size)]
    factors = [
        (*(drawn_factors(len(own), columns) for _ in range(2)), drawn_factors(num_tokens, hidden)) for own in rows
    ]
    here = tileflux.route(**routing.arguments(rank), group=group)

    def loss(x: torch.Tensor, weight: torch.Tensor, other: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        results, gathered = tileflux.moe_ag_gemm(x, [weight, other], here, [bias, bias], return_gathered=True)
        used = [*(result[: len(rows[rank])] for result in results), gathered]
        return torch.stack([weighted(part, factor) for part, factor in zip(used, factors[rank], strict=True)]).sum()

    found = gradients(loss, (xs[rank], weights[rank], others[rank], biases[rank]))
    leaves = [[t.double().requires_grad_() for t in each] for each in (xs, weights, others, biases)]
    whole = torch.cat(leaves[0])
    for r in range(world_size):
        tokens = whole[[row.slot // routing.top_k for row in rows[r]]]
        local = torch.tensor([row.expert - routing.experts(r).start for row in rows[r]], dtype=torch.long)
        ys = [torch.einsum("rh,rfh->rf", tokens, leaves[i][r][local]) + leaves[3][r][local] for i in (1, 2)]
        parts = zip((*ys, whole), factors[r], strict=True)
        torch.stack([(part * factor).sum() for part, factor in parts]).sum().backward(retain_graph=True)
    terms = 2 * columns * world_size * routing.top_k
    for actual, each, depth in zip(found, leaves, (terms, *[num_tokens * routing.top_k] * 3), strict=True):
        right = each[rank].grad
        assert right is not None
        assert_close(actual, right, dtype=dtype, reduction=depth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_gradients(world_size: int, dtype: torch.dtype) -> None:
    run_ranks(_gradient, world_size, args=(dtype,))


def _bias_gradient(group: Group) -> None:
    """Summed in fp32, not of gradients that were rounded to the type of x before."""
    routing = moe_routing((9,) * group.world_size, 2, 2, 1)
    x, weight = torch.ones(9, 3).bfloat16(), torch.ones(2, 5, 3).bfloat16()
    bias, factors = torch.zeros(2, 5, requires_grad=True), torch.randn(18 * group.world_size, 5)
    here = tileflux.route(**routing.arguments(group.rank), group=group)
    weighted(tileflux.moe_ag_gemm(x, weight, here, bias, out_dtype=torch.float32), factors).backward()
    right = torch.stack([part.double().sum(0) for part in factors.split(routing.counts(group.rank))])
    assert bias.grad is not None
    assert_close(bias.grad, right, dtype=torch.float32, reduction=len(factors))


def test_gradients_where_there_is_room_but_no_token() -> None:
    (group,) = tileflux.local_groups(1)
    none = torch.zeros(0, 2, dtype=torch.long)
    for capacity in (0, 4):
        routing = tileflux.route(none, none.float(), num_experts=2, group=group, capacity=capacity)
        x, weight = torch.ones(0, 3, requires_grad=True), torch.ones(2, 5, 3, requires_grad=True)
        y = tileflux.moe_ag_gemm(x, weight, routing)
        y.sum().backward()
        assert y.shape == (capacity, 5) and x.grad is not None and x.grad.shape == (0, 3)
        assert weight.grad is not None and not weight.grad.any()
    group.close()


def test_sums_over_the_rows_of_an_expert() -> None:
    """Of rows whose bounds only the device knows, too: what is not finite stays with the expert whose it is."""
    left, right = torch.randn(7, 4), torch.randn(7, 3)
    offsets = torch.tensor([0, 2, 2, 5])
    for rows in (left, right):
        rows[5:] = torch.nan
    assert_close(by_masks(left, right, offsets), by_expert(left, right, offsets).double(), reduction=7)
    for rows in (left, right):
        rows[1, 0] = torch.inf
    for found in (by_masks(left, right, offsets), by_expert(left, right, offsets)):
        assert found[1:].isfinite().all() and not found[0].isfinite().all()


def test_the_gradient_of_a_bias_is_rounded_once() -> None:
    run_ranks(_bias_gradient, 2)


def _needed_by_some(group: Group) -> None:
    """Only one rank needs a gradient of its weight: the others take part all the same."""
    weight, x = torch.randn(4, 5, 3, requires_grad=group.rank == 0), torch.randn(2, 3, requires_grad=True)
    routing = tileflux.route(torch.tensor([[0, 3], [1, 1]]), torch.ones(2, 2), num_experts=4, group=group)
    tileflux.moe_ag_gemm(x, weight, routing).sum().backward()
    assert x.grad is not None and (weight.grad is not None) == (group.rank == 0)


def test_gradients_that_only_some_ranks_need() -> None:
    run_ranks(_needed_by_some, 2)


def _compiled(group: Group) -> None:
    routing = tileflux.route(
        torch.tensor([[0, 3], [1, 1], [2, 0]]), torch.ones(3, 2), num_experts=4, group=group, block_m=16
    )
    num_rows = 6 * group.world_size
    factors = drawn_factors(num_rows, 5), drawn_factors(3 * group.world_size, 6)

    def loss(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        y = tileflux.moe_ag_gemm(x, weight, routing, bias)
        (z,), rows = tileflux.moe_ag_gemm(2 * x, [other], routing, return_gathered=True, strategy="fused", config=SMALL)
        return weighted(y, factors[0]) + weighted(z, factors[0]) + weighted(rows, factors[1])

    shapes = ((3, 6), (4, 5, 6), (4, 5), (4, 5, 6))
    check_compiled_alike(loss, tuple(torch.randn(shape) for shape in shapes))


def test_compiled() -> None:
    run_ranks(_compiled, 2, timeout_s=120)


def _registration(group: Group) -> None:
    routing = tileflux.route(
        torch.tensor([[0, 1], [1, 1], [0, 0], [1, 0]]), torch.ones(4, 2), num_experts=2, group=group
    )
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((4, 3), (2, 6, 3), (2, 6)))
    how = (*routing_arguments(routing), "", torch.float32, "auto", True, "")
    op = torch.ops.tileflux.moe_ag_gemm.default
    # Rows behind the last are not written, and two calls would differ in them; here are none.
    assert int(routing.counts.sum()) == routing.capacity
    check_registration(group, op, x, [weight, weight], [bias, bias], None, [], *how)


def test_registration() -> None:
    run_ranks(_registration, 1, timeout_s=120)


def test_refusals() -> None:
    (group,) = tileflux.local_groups(1)
    ids, x, weight, bias = torch.tensor([[0], [1], [0], [1]]), torch.ones(4, 3), torch.ones(2, 5, 3), torch.ones(2, 5)
    routing = tileflux.route(ids, torch.ones(4, 1), num_experts=2, group=group, block_m=32)
    small = {"x": x.to(torch.int8), "weight": weight.to(torch.int8)}
    two = small | {"weight": [small["weight"]] * 2}
    needs = weight.clone().requires_grad_()
    for message, given in (
        ("routing should be what tileflux.route gives, not Tensor", {"routing": ids}),
        ("routing should be what tileflux.route gives, not NoneType", {"routing": None}),
        ("x should be a tensor, not list", {"x": [1.0]}),
        ("x is on meta but the group is on cpu; move it there", {"x": x.to("meta")}),
        ("weight is on meta but the group is on cpu; move it there", {"weight": weight.to("meta")}),
        (r"weight should be a tensor \[E, N, K\], one matrix per expert, not \(5, 3\)", {"weight": weight[0]}),
        (r"weight should be a tensor \[E, N, K\], one matrix per expert, not int", {"weight": [3]}),
        ("weight has 3 experts, but rank 0 has 2 of 2", {"weight": torch.ones(3, 5, 3)}),
        ("weight has 0 experts; there should be from 1 to 1024", {"weight": torch.ones(0, 5, 3)}),
        ("weight has 1 experts, but rank 0 has 2 of 2", {"weight": [weight, weight[:1]]}),
        ("weight is an empty sequence; give at least one", {"weight": []}),
        ("x has 3 rows, but 4 were routed", {"x": x[:3]}),
        (r"x \(4, 2\) and weight \(5, 3\) differ in K", {"x": x[:, :2]}),
        (r"bias should have shape \(2, 5\), not \(5,\)", {"bias": bias[0]}),
        ("config has block_m=16, but rows were routed with 32; route with block_m=16", {"config": SMALL}),
        ("config should be a tileflux.GemmConfig, not dict", {"config": {}}),
        ("strategy='magic' is not one of auto, sequential, pipelined, fused", {"strategy": "magic"}),
        ("out_dtype=torch.int8 should be", {"out_dtype": torch.int8}),
        ("activation='tanh'", {"activation": "tanh"}),
        (r"scale_weight should be a number, or float32 of shape \(\), \(2,\) or \(2, 5\), not \(5,\)",
         {**small, "scale_weight": torch.ones(5)}),
        ("scales belong to fp8 and int8", {"scale_x": 2.0}),
        (r"out should be contiguous \(4, 5\) torch.float32 on cpu", {"out": torch.ones(3, 5)}),
        ("out overlaps the input; give them separate memory", {"weight": (room := torch.ones(30)).view(2, 5, 3),
                                                              "out": room[:20].view(4, 5)}),
        (r"out\[0\] and out\[1\] overlap; give them", {"weight": [weight] * 2, "out": [torch.ones(4, 5)] * 2}),
        ("out= records no gradient", {"weight": needs, "out": torch.ones(4, 5)}),
        ("there is no gradient through activation='relu'; do", {"weight": needs, "activation": "relu"}),
        ("there is no gradient through products of torch.int8", {**small, "bias": bias.clone().requires_grad_()}),
        *((f"{name} should be None or one for each of the 2 weights", two | {name: [bias]})
          for name in ("bias", "scale_weight", "out")),
        *((f"weight is a sequence, so {name} should be a list too, not Tensor", {"weight": [weight], name: bias})
          for name in ("bias", "scale_weight", "out")),
    ):  # fmt: skip
        arguments: dict[str, Any] = {"x": x, "weight": weight, "routing": routing} | given
        with pytest.raises(ValueError, match=f"moe_ag_gemm: {message}"):
            tileflux.moe_ag_gemm(**arguments)
    assert_close(tileflux.moe_ag_gemm(x, weight, routing), torch.full((4, 5), 3.0), reduction=0)
    group.close()
    with pytest.raises(tileflux.GroupClosed, match="was closed"):
        tileflux.moe_ag_gemm(x, weight, routing)
