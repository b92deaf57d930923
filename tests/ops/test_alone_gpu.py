"""Ops on one rank alone, which waits for nobody: what compute-sanitizer runs over the kernels of experts.

It lets no kernel start while another waits for it, so ranks that wait for each other cannot run under it; in
``tests/kernels/test_gang.py`` and ``test_by_hand.py`` they need not. Without the sanitizer these are ordinary tests.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tileflux
from tileflux.symm.group import Group
from tileflux.testing import assert_close, poisoned
from tileflux.testing.dense import expected, gemm_case, reduction
from tileflux.testing.moe import ROUTING_KINDS, expected_ag, expected_rs, moe_ag_case, moe_routing, moe_rs_case

from .dense_gpu import HOPPER_DTYPES, tiles
from .ep_cases import check_dispatched, drawn_case, drawn_rows, with_room
from .moe_gpu import AG_STRATEGIES, RS_STRATEGIES, TOP_KS, combine, gather, routed
from .test_ep_gpu import STRATEGIES, on_cpu

pytestmark = pytest.mark.gpu

SHAPES = ((130, 72, 80), (64, 64, 64), (33, 131, 208), (5, 16, 16))
"""With tails in every dimension; what TMA takes."""


@pytest.fixture
def alone() -> Iterator[Group]:
    """One virtual rank, on its stream."""
    (group,) = tileflux.local_groups(1, "cuda", timeout_s=60)
    with torch.cuda.stream(group.stream):
        yield group
        group.synchronize()
    group.close()


@pytest.mark.parametrize("dtype", HOPPER_DTYPES, ids=str)
def test_the_product_on_hoppers_loop(dtype: torch.dtype) -> None:
    for seed, shape in enumerate(SHAPES):
        scales: Any = "tensor" if dtype.itemsize == 1 else "none"
        case = gemm_case(shape, dtype, seed, bias=True, scales=scales)
        out = poisoned(shape[:2], case.out_dtype, "cuda")
        tileflux.gemm(**case.arguments("gemm", 0, "cuda"), config=tiles(dtype, hopper=True), out=out)
        assert_close(out.cpu(), expected(case, "gemm"), reduction=reduction(case, "gemm"), what=f"{shape}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_both_layers_of_experts(alone: Group, dtype: torch.dtype) -> None:
    scales: Any = "channel" if dtype.itemsize == 1 else "none"
    for seed, (kind, top_k) in enumerate(zip(ROUTING_KINDS, TOP_KS, strict=True)):
        routing = moe_routing([70], 8, top_k, seed, kind=kind)
        case = moe_ag_case(routing, 64, 72, dtype, seed, bias=True, scales=scales)
        right = expected_ag(case, 0)
        for strategy in AG_STRATEGIES:
            result = gather(alone, case, strategy).cpu()[: len(right)]
            assert_close(result, right, dtype=case.out_dtype, reduction=case.num_terms, what=f"{kind} {strategy}")
        case = moe_rs_case(routing, 72, 64, dtype, seed, scales=scales)
        right = expected_rs(case, 0)
        for strategy in RS_STRATEGIES:
            (result,) = combine(alone, case, strategy, routed(alone, case))
            assert_close(result.cpu(), right, dtype=case.out_dtype, reduction=case.num_terms, what=f"{kind} {strategy}")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tokens_there_and_back(alone: Group, strategy: str) -> None:
    draws = random.Random(1)
    for kind, top_k in zip(ROUTING_KINDS, TOP_KS, strict=True):
        case = drawn_case(1, torch.bfloat16, draws, 40, kind, top_k)
        found = tileflux.ep_dispatch(**case.arguments(0, alone.device), group=alone, strategy=strategy)
        rows = drawn_rows(case, torch.bfloat16, 3, 72)
        padded = with_room(rows[0], found.capacity * found.top_k).to(alone.device)
        result = tileflux.ep_combine(padded, found, strategy=strategy)
        alone.synchronize()
        check_dispatched(alone, case, on_cpu(found))
        assert_close(result.cpu(), case.combined(0, rows), dtype=torch.bfloat16, reduction=top_k, what=f"{kind}")
