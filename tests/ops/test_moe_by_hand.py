"""Fused ops of experts rank by rank, with what peers would have sent put there by hand: nothing has to wait.

For compute-sanitizer, as ``tests/kernels/test_by_hand.py``; interpreted, an ordinary test.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch

import tileflux
from tileflux import GemmConfig
from tileflux.kernels.shards import ShardPlan, combine_shards, gather_shards
from tileflux.kernels.turns import Turn, turn
from tileflux.ops.routing import Routing, route_gathered
from tileflux.symm.group import Group
from tileflux.testing import assert_close, poisoned
from tileflux.testing.moe import ROUTING_KINDS, MoeCase, expected_ag, expected_rs, moe_ag_case, moe_routing, moe_rs_case

from .dense_cases import install_interpreter, interpreted, needs_interpreter
from .moe_gpu import SMALL, TOP_KS, combine_arguments

CONFIG = dataclasses.replace(SMALL, block_m=32, block_n=32, block_k=32)
SIZES = (40, 0, 25)
HIDDEN, FFN = 48, 40 * len(SIZES)

EVERYWHERE = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=needs_interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
CASES = tuple(enumerate(zip(ROUTING_KINDS, TOP_KS, strict=True)))


@contextlib.contextmanager
def on_its_stream(group: Group) -> Any:
    """As kernels run where the group is; what was done there is done when it ends."""
    if group.device.type == "cpu":
        with interpreted():
            yield
        return
    torch.cuda.synchronize()
    with torch.cuda.stream(group.stream):
        yield
    torch.cuda.synchronize()


def routed(group: Group, case: MoeCase) -> Routing:
    ids, gates = (torch.cat(each).to(group.device) for each in (case.routing.expert_ids, case.routing.weights))
    return route_gathered(
        ids, gates, num_experts=case.routing.num_experts, group=group, sizes=SIZES, block_m=CONFIG.block_m
    )


def raise_flags(here: Turn, plan: ShardPlan, number: int) -> None:
    """Of all peers, as in call ``number``."""
    for source in (source for source in range(len(SIZES)) if source != here.rank):
        for index in range(plan.num_flags):
            here.flag(here.rank, index, source).fill_(number + 1)


@EVERYWHERE
def test_tokens_that_are_there(device: str) -> None:
    if device == "cpu":
        install_interpreter()
    groups = tileflux.local_groups(len(SIZES), device, timeout_s=60)
    for number, (kind, top_k) in CASES:
        case = moe_ag_case(moe_routing(SIZES, 4, top_k, number, kind=kind), HIDDEN, FFN, torch.bfloat16, number)
        plan = gather_shards("moe_ag_gemm", SIZES, 2 * HIDDEN, False, CONFIG.num_chunks)
        whole = torch.cat(case.xs)
        for group in groups:
            with on_its_stream(group):
                here = turn(group, plan)
                here.gathered(torch.bfloat16, HIDDEN).copy_(whole)
                raise_flags(here, plan, number)
                routing, given = routed(group, case), case.arguments(group.rank, group.device)
                out = poisoned((routing.capacity, given["weight"].shape[1]), torch.bfloat16, group.device)
                tileflux.moe_ag_gemm(**given, routing=routing, strategy="fused", config=CONFIG, out=out)
            right = expected_ag(case, group.rank)
            what = f"{kind} on rank {group.rank}"
            assert_close(out.cpu()[: len(right)], right, dtype=torch.bfloat16, reduction=case.num_terms, what=what)
    for group in groups:
        group.close()


@EVERYWHERE
def test_sums_of_what_is_there(device: str) -> None:
    if device == "cpu":
        install_interpreter()
    groups = tileflux.local_groups(len(SIZES), device, timeout_s=60)
    config: GemmConfig = dataclasses.replace(CONFIG, sums_apart=False)
    for number, (kind, top_k) in CASES:
        case = moe_rs_case(moe_routing(SIZES, 4, top_k, number, kind=kind), HIDDEN, FFN, torch.bfloat16, number)
        for group in groups:
            with on_its_stream(group):
                routing = routed(group, case)
                plan = combine_shards("moe_gemm_rs", SIZES, routing.capacity, HIDDEN, 2, config)
                here = turn(group, plan)
                for source in (source for source in range(len(SIZES)) if source != group.rank):
                    only = tuple(x if rank == source else torch.zeros_like(x) for rank, x in enumerate(case.xs))
                    part = expected_rs(dataclasses.replace(case, xs=only), group.rank)
                    here.slot(group.rank, source, torch.bfloat16, HIDDEN, number)[: len(part)].copy_(part)
                raise_flags(here, plan, number)
                given = combine_arguments(group, case, routing)
                out = poisoned((SIZES[group.rank], HIDDEN), torch.bfloat16, group.device)
                tileflux.moe_gemm_rs(**given, routing=routing, strategy="fused", config=config, out=out)
            right, reduction = expected_rs(case, group.rank), case.num_terms * len(SIZES)
            assert_close(
                out.cpu(), right, dtype=torch.bfloat16, reduction=reduction, what=f"{kind} on rank {group.rank}"
            )
    for group in groups:
        group.close()
