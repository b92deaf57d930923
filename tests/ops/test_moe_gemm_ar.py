"""moe_gemm_ar: moe_gemm_rs, gathered."""

from __future__ import annotations

import random

import pytest
import torch

import tileflux
from tileflux.ops import moe_gemm_ar_reference
from tileflux.symm.group import Group
from tileflux.testing import assert_close, run_ranks
from tileflux.testing.dense import DENSE_DTYPES

from .moe_cases import check_rs_call, drawn_room, drawn_rs_case, routed, rs_arguments


def _every_type(group: Group, seed: int) -> None:
    draws = random.Random(seed)
    for dtype in DENSE_DTYPES:
        for strategy in ("sequential", "pipelined", "fused", "auto"):
            case = drawn_rs_case(group.world_size, dtype, draws)
            check_rs_call(group, case, draws, op="moe_gemm_ar", strategy=strategy)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_type_and_strategy(world_size: int) -> None:
    run_ranks(_every_type, world_size, args=(int(torch.randint(2**30, ())),))


def _against_reference(group: Group) -> None:
    draws = random.Random(group.world_size)
    case = drawn_rs_case(group.world_size, torch.bfloat16, draws)
    room = drawn_room(case.routing, draws)
    routing, arguments = routed(group, case, capacity=room), rs_arguments(case, group.rank, room)
    result = tileflux.moe_gemm_ar(**arguments, routing=routing)
    right = moe_gemm_ar_reference(**arguments, routing=routing)
    assert_close(result, right, reduction=case.num_terms * group.world_size)


def test_equals_torch_distributed() -> None:
    run_ranks(_against_reference, 2)


def _gradient(group: Group) -> None:
    """Every rank's result is its own, and the losses of all ranks count: a row's gradient is that of W copies."""
    ids, gates = torch.tensor([[0], [1]]), torch.ones(2, 1)
    routing = tileflux.route(ids, gates, num_experts=2, group=group)
    h = torch.randn(routing.capacity, 3, requires_grad=True)
    weight = torch.randn(2, 4, 3)
    tileflux.moe_gemm_ar(h, weight, routing).sum().backward()
    assert h.grad is not None
    right = torch.repeat_interleave(weight.sum(1), group.world_size, dim=0) * group.world_size
    assert_close(h.grad, right, reduction=4 * group.world_size)


def test_gradient() -> None:
    run_ranks(_gradient, 2)
