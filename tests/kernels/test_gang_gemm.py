"""All virtual ranks of a fused GEMM in one launch, for compute-sanitizer; see ``test_gang.py`` for why.

Descriptors cannot be looked up by rank, so these launches load through pointers; ``gemm`` alone covers TMA.
"""

import pytest
import torch
import triton
import triton.language as tl

import tileflux
from tileflux import GemmConfig
from tileflux.kernels.gemm import _gemm_kernel
from tileflux.kernels.operands import Operands, Role, make_spec
from tileflux.kernels.plan import split_rows
from tileflux.kernels.roles import GATHER, SCATTER, SPREAD
from tileflux.kernels.shards import gather_shards, scatter_shards, spread_shards
from tileflux.kernels.turns import turn
from tileflux.testing import assert_close, poisoned

pytestmark = pytest.mark.gpu

CONFIG = GemmConfig(32, 32, 32, num_warps=4, num_stages=2, num_feeders=2, num_chunks=2)
NUM_MULTIPLIERS = 3


@triton.jit
def _gang_gemm_kernel(
    rows,
    M: tl.int32,
    N: tl.int32,
    K: tl.int32,
    ORDER: tl.constexpr,
    WAIT: tl.constexpr,
    FINISH: tl.constexpr,
    SPEC: tl.constexpr,
):
    row = rows + tl.program_id(1) * 6
    zero = tl.load(row) * 0
    table = tl.load(row + 5).to(tl.pointer_type(tl.int64))
    _gemm_kernel(
        tl.load(row), tl.load(row + 1), tl.load(row + 2), zero, zero, zero, M, N, K,
        tl.load(row + 3), tl.load(row + 4), None, None, None, zero, table, ORDER, WAIT, FINISH, SPEC,
    )  # fmt: skip


def _launch(groups, role: Role, operands: list[Operands], turns, num_rows: int, fetches: bool) -> None:
    """One launch that does on all ranks what ``launch_gemm`` does on one."""
    num_feeders = CONFIG.num_feeders if role.feeds else 0
    spec = make_spec(
        operands[0], role, CONFIG,
        world_size=len(groups), num_feeders=num_feeders, releases=True, use_tma=False, plain=True, fetches=fetches,
    )  # fmt: skip
    rows = [
        [each.x.data_ptr(), each.weight.data_ptr(), each.out.data_ptr(), each.x.stride(0), each.weight_stride,
         here.table.data_ptr()]
        for each, here in zip(operands, turns, strict=True)
    ]  # fmt: skip
    torch.cuda.synchronize()
    _gang_gemm_kernel[(num_feeders + NUM_MULTIPLIERS, len(groups))](
        torch.tensor(rows, device="cuda"), num_rows, operands[0].num_columns, operands[0].depth,
        ORDER=role.order, WAIT=role.wait, FINISH=role.finish, SPEC=spec, num_warps=4, num_stages=2,
    )  # fmt: skip
    torch.cuda.synchronize()
    for group in groups:
        with torch.cuda.stream(group.stream):
            group.ensure_usable()


@pytest.mark.parametrize("fetches", [False, True], ids=["dealt", "fetched"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_gather(world_size: int, fetches: bool) -> None:
    groups = tileflux.local_groups(world_size, "cuda", timeout_s=60)
    for call, (m, n, k) in enumerate([(70, 40, 48), (33, 64, 31), (200, 33, 64)]):
        rows = split_rows(m, world_size)
        whole = torch.randn(m, k, device="cuda").bfloat16()
        weights = [torch.randn(n, k, device="cuda").bfloat16() for _ in groups]
        turns = [turn(group, gather_shards("ag_gemm", rows, 2 * k, False, CONFIG.num_chunks)) for group in groups]
        operands = [
            Operands(x.contiguous(), weight, poisoned((m, n), torch.bfloat16, "cuda"))
            for x, weight in zip(whole.split(rows), weights, strict=True)
        ]
        _launch(groups, GATHER, operands, turns, m, fetches)
        for each in operands:
            assert_close(each.out, whole.float() @ each.weight.float().t(), reduction=k, what=f"call {call}")
    for group in groups:
        group.close()


@pytest.mark.parametrize("fetches", [False, True], ids=["dealt", "fetched"])
@pytest.mark.parametrize("role", [SCATTER, SPREAD], ids=["scatter", "spread"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_sums(world_size: int, role: Role, fetches: bool) -> None:
    groups = tileflux.local_groups(world_size, "cuda", timeout_s=60)
    for call, (m, n, k) in enumerate([(70, 40, 48), (33, 64, 31), (100, 33, 64)]):
        rows = split_rows(m, world_size)
        xs = [torch.randn(m, k, device="cuda").bfloat16() for _ in groups]
        weights = [torch.randn(n, k, device="cuda").bfloat16() for _ in groups]
        exact = sum(x.float() @ weight.float().t() for x, weight in zip(xs, weights, strict=True))
        if role is SCATTER:
            plan, parts = scatter_shards("gemm_rs", rows, n, 2, CONFIG), exact.split(rows)
        else:
            plan, parts = spread_shards("gemm_ar", world_size, m, n, 2, CONFIG), [exact] * world_size
        turns = [turn(group, plan) for group in groups]
        operands = [
            Operands(x, weight, poisoned(part.shape, torch.bfloat16, "cuda"))
            for x, weight, part in zip(xs, weights, parts, strict=True)
        ]
        _launch(groups, role, operands, turns, m, fetches)
        for each, part in zip(operands, parts, strict=True):
            assert_close(each.out, part, reduction=k * world_size, what=f"call {call}")
    for group in groups:
        group.close()


def test_descriptors() -> None:
    """``gemm`` with TMA, tails in every dimension."""
    for m, n, k in ((130, 72, 80), (33, 136, 200)):
        x, weight = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16()
        out = poisoned((m, n), torch.bfloat16, "cuda")
        tileflux.gemm(x, weight, config=CONFIG, out=out)
        assert_close(out, x.float() @ weight.float().t(), reduction=k)
