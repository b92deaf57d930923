"""The dense ops on one GPU: virtual ranks, processes under MPS, graphs, a lost rank, and a thousand calls in a row."""

from __future__ import annotations

import random

import pytest
import torch

import tileflux
from tileflux import GemmConfig
from tileflux.config import SWAPPED_BYTES
from tileflux.errors import PeerTimeout
from tileflux.kernels.plan import split_rows
from tileflux.symm.group import Group
from tileflux.testing import assert_close, poisoned, run_ranks
from tileflux.testing.dense import DENSE_DTYPES, expected, gemm_case, reduction

from .dense_gpu import HOPPER_DTYPES, SMALL, activations, problems, run, tiles

pytestmark = pytest.mark.gpu


HOPPER = tiles(torch.bfloat16, hopper=True)
BOTH_LOOPS = pytest.mark.parametrize("config", [SMALL, HOPPER], ids=["triton", "hopper"])


def _all_problems(group: Group, hopper: bool) -> None:
    for dtype in HOPPER_DTYPES if hopper else DENSE_DTYPES:
        for problem in problems(group.world_size, dtype, hopper):
            for strategy in problem.strategies:
                run(group, problem, strategy)


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("hopper", [False, True], ids=["triton", "hopper"])
def test_virtual_ranks(world_size: int, hopper: bool) -> None:
    run_ranks(_all_problems, world_size, args=(hopper,), where="virtual", device="cuda", timeout_s=300)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("hopper", [False, True], ids=["triton", "hopper"])
def test_processes_sharing_one_gpu(world_size: int, hopper: bool) -> None:
    run_ranks(_all_problems, world_size, args=(hopper,), where="mps", timeout_s=300)


def _activations(group: Group) -> None:
    for problem in activations(group.world_size):
        for strategy in problem.strategies:
            run(group, problem, strategy)


def test_activations() -> None:
    run_ranks(_activations, 4, where="virtual", device="cuda", timeout_s=120)


@pytest.mark.parametrize("dtype", DENSE_DTYPES, ids=str)
def test_gemm_alone(dtype: torch.dtype) -> None:
    shapes = [(300, 200, 136), (300, 208, 144), (1, 1, 1), (17, 33, 65), (640, 384, 0)]
    for seed, shape in enumerate(shapes):
        scales = "channel" if dtype.itemsize == 1 else "none"
        case = gemm_case(shape, dtype, seed, bias=True, scales=scales, transposed_weight=seed % 2 == 1)
        given = case.arguments("gemm", 0, "cuda")
        out = poisoned((shape[0], shape[1]), case.out_dtype, "cuda")
        tileflux.gemm(**given, out=out)
        assert_close(out.cpu(), expected(case, "gemm"), reduction=reduction(case, "gemm"), what=f"{shape} {dtype}")


def _large(group: Group) -> None:
    """The tiles that lookup picks for large problems, checked in fp32 on the GPU."""
    m, n, k, world_size, rank = 2048, 4096, 512, group.world_size, group.rank
    draw = torch.Generator(group.device).manual_seed(0)
    x = torch.randn(m, k, generator=draw, device=group.device).bfloat16()
    weight = torch.randn(n, k, generator=draw, device=group.device).bfloat16()
    exact = x.float() @ weight.float().t()
    rows = m // world_size
    y = poisoned((m, n), torch.bfloat16, group.device)
    # Before anything waits: its kernel has to be loaded, which takes until those that wait have ended.
    own = tileflux.gemm(x, weight, config=GemmConfig(128, 256, 64, num_warps=8, num_stages=4))
    group.synchronize()
    group.barrier()
    tileflux.ag_gemm(x[rank * rows :][:rows], weight, group=group, strategy="fused", out=y)
    group.synchronize()
    assert_close(y, exact, reduction=k, what="ag_gemm")
    assert torch.equal(y, own), "ag_gemm differs from gemm on the gathered rows"
    depth = k // world_size
    part = slice(rank * depth, (rank + 1) * depth)
    results = []
    for _ in range(3):
        group.barrier()
        out = poisoned((rows, n), torch.bfloat16, group.device)
        tileflux.gemm_rs(x[:, part], weight[:, part].contiguous(), group=group, strategy="fused", out=out)
        results.append(out)
        group.synchronize()
    assert_close(results[0], exact[rank * rows :][:rows], reduction=k, what="gemm_rs")
    assert all(torch.equal(result, results[0]) for result in results), "gemm_rs does not repeat bit for bit"


@pytest.mark.parametrize("where", ["virtual", "mps"])
def test_large_tiles(where: str) -> None:
    run_ranks(_large, 4, where=where, device="cuda", timeout_s=180)  # type: ignore[arg-type]


def _stress(group: Group, num_calls: int, config: GemmConfig) -> None:
    """Calls queued without a look, rows from a shared seed; then every result."""
    world_size, rank, device = group.world_size, group.rank, group.device
    draws, random_numbers = random.Random(5), torch.Generator(device).manual_seed(11)
    weights = torch.randn(96, 64 * world_size, generator=random_numbers, device=device).bfloat16()
    x = torch.randn(400, 64 * world_size, generator=random_numbers, device=device).bfloat16()
    mine = slice(64 * rank, 64 * rank + 64)
    own_x, own_weight = x[:, mine].contiguous(), weights[:, mine].contiguous()
    whole = x.float() @ weights.float().t()
    gathered = [x[:, :64].contiguous().float() @ own_weight.float().t()]
    calls = []
    for _ in range(num_calls):
        op = draws.choice(("ag_gemm", "gemm_rs", "gemm_ar"))
        m = draws.randrange(1, 400 // world_size) * world_size if op == "ag_gemm" else draws.randrange(1, 400)
        rows = split_rows(m, world_size)
        first = sum(rows[:rank])
        size = (m if op != "gemm_rs" else rows[rank], 96)
        calls.append((op, m, first, rows[rank], poisoned(size, torch.bfloat16, device)))
    shared = x[:, :64].contiguous()
    group.synchronize()
    group.barrier()
    for op, m, first, count, out in calls:
        if op == "ag_gemm":
            rows_of_mine = shared[first : first + count]
            tileflux.ag_gemm(rows_of_mine, own_weight, group=group, strategy="fused", config=config, out=out)
        elif op == "gemm_rs":
            tileflux.gemm_rs(own_x[:m], own_weight, group=group, strategy="fused", config=config, out=out)
        else:
            how = {"strategy": "fused", "algorithm": "one_shot", "config": config}
            tileflux.gemm_ar(own_x[:m], own_weight, group=group, out=out, **how)
    group.synchronize()
    for number, (op, m, first, count, out) in enumerate(calls):
        exact = {
            "ag_gemm": gathered[0][:m], "gemm_rs": whole[first : first + count], "gemm_ar": whole[:m]
        }[op]  # fmt: skip
        assert_close(out, exact, reduction=64 * world_size, what=f"call {number}: {op} with {m} rows on rank {rank}")


@BOTH_LOOPS
@pytest.mark.parametrize("where", ["virtual", "mps"])
def test_a_thousand_calls_back_to_back(where: str, config: GemmConfig) -> None:
    run_ranks(_stress, 4, args=(1000, config), where=where, device="cuda", timeout_s=200)  # type: ignore[arg-type]


def _in_sequence(group: Group, num_calls: int) -> None:
    """Calls of the same shape, which are made again by what the first have launched; then every result."""
    world_size, rank, device = group.world_size, group.rank, group.device
    m, n, k, mine = 64 * world_size, 128, 256, slice(64 * rank, 64 * rank + 64)
    draw = torch.Generator(device).manual_seed(3)
    xs = [torch.randn(m, k, generator=draw, device=device).bfloat16() for _ in range(num_calls)]
    weight = torch.randn(n, k, generator=draw, device=device).bfloat16()
    exact = [x.float() @ weight.float().t() for x in xs]
    results = [(poisoned((m, n), x.dtype, device), poisoned((64, n), x.dtype, device)) for x in xs]
    rows = [x[mine].contiguous() for x in xs]
    group.synchronize()
    group.barrier()
    how = {"group": group, "strategy": "sequential"}
    for x, own, (gathered, summed) in zip(xs, rows, results, strict=True):
        tileflux.ag_gemm(own, weight, out=gathered, **how)
        tileflux.gemm_rs(x, weight, out=summed, **how)
    group.synchronize()
    for number, (gathered, summed) in enumerate(results):
        assert_close(gathered, exact[number], reduction=k, what=f"ag_gemm {number}")
        assert_close(summed, world_size * exact[number][mine], reduction=k * world_size, what=f"gemm_rs {number}")


def test_sequential_calls_in_a_row() -> None:
    run_ranks(_in_sequence, 4, args=(50,), where="mps", timeout_s=120)


def _swapped(group: Group) -> None:
    """As many bytes as are swapped in a single launch: its programs must leave room for a product that comes late."""
    m, n, k = 512, 2048, 64
    draw = torch.Generator(group.device).manual_seed(group.rank)
    x, weight = (torch.randn(size, k, generator=draw, device=group.device).bfloat16() for size in (m, n))
    out = poisoned((m, n), torch.bfloat16, group.device)
    exact = torch.zeros(m, n, device=group.device)
    for rank in range(group.world_size):
        draw = torch.Generator(group.device).manual_seed(rank)
        theirs = [torch.randn(size, k, generator=draw, device=group.device).bfloat16().float() for size in (m, n)]
        exact += theirs[0] @ theirs[1].t()
    group.synchronize()
    group.barrier()
    for _ in range(20):
        tileflux.gemm_ar(x, weight, group=group, strategy="sequential", algorithm="one_shot", out=out)
    group.synchronize()
    assert_close(out, exact, reduction=k * group.world_size, what=f"rank {group.rank}")


@pytest.mark.parametrize(("where", "world_size"), [("virtual", 4), ("virtual", 8), ("mps", 4)])
def test_sums_are_swapped(where: str, world_size: int) -> None:
    assert SWAPPED_BYTES == 512 * 2048 * 2
    run_ranks(_swapped, world_size, where=where, device="cuda", timeout_s=120)  # type: ignore[arg-type]


def _replay(group: Group, strategy: str, num_replays: int, config: GemmConfig) -> None:
    world_size, rank, device = group.world_size, group.rank, group.device
    m, n, k = 64 * world_size, 96, 64
    x, partial = (torch.zeros(size, device=device, dtype=torch.bfloat16) for size in ((64, k), (m, k)))
    weight = torch.zeros(n, k, device=device, dtype=torch.bfloat16)

    def call() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        how = {"group": group, "strategy": strategy, "config": config}
        y = tileflux.ag_gemm(x, weight, **how)
        return y, tileflux.gemm_rs(partial, weight, **how), tileflux.gemm_ar(partial[:32], weight, **how)

    call()
    group.synchronize()
    group.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=group.stream, capture_error_mode="thread_local"):
        results = call()
    for replay in range(num_replays):
        draw = torch.Generator().manual_seed(replay)
        xs = torch.randn(m, k, generator=draw).bfloat16()
        partials = torch.randn(world_size, m, k, generator=draw).bfloat16()
        shared = torch.randn(n, k, generator=draw).bfloat16()
        x.copy_(xs[64 * rank : 64 * rank + 64])
        partial.copy_(partials[rank])
        weight.copy_(shared)
        graph.replay()
        group.synchronize()
        total = partials.float().sum(0) @ shared.float().t()
        assert_close(results[0].cpu(), xs.float() @ shared.float().t(), reduction=k, what=f"ag_gemm, replay {replay}")
        assert_close(results[1].cpu(), total[64 * rank : 64 * rank + 64], reduction=k * world_size, what="gemm_rs")
        assert_close(results[2].cpu(), total[:32], reduction=k * world_size, what="gemm_ar")


@BOTH_LOOPS
@pytest.mark.parametrize("strategy", ["fused", "pipelined", "sequential"])
def test_cuda_graph_replays_count_on(strategy: str, config: GemmConfig) -> None:
    run_ranks(_replay, 2, args=(strategy, 100, config), where="virtual", device="cuda", timeout_s=180)


@BOTH_LOOPS
@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
def test_a_rank_that_never_signals(op: str, config: GemmConfig) -> None:
    """The others get an error, and the context lives on."""
    for attempt in range(2):
        groups = tileflux.local_groups(2, "cuda", timeout_s=1.0 if attempt == 0 else 30.0)
        x, weight = (torch.randn(256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        torch.cuda.synchronize()
        for group in groups[: 1 + attempt]:
            with torch.cuda.stream(group.stream):
                getattr(tileflux, op)(x, weight, group=group, strategy="fused", config=config)
        with torch.cuda.stream(groups[0].stream):
            if attempt == 0:
                with pytest.raises(PeerTimeout, match=f"{op}: rank 0 waited .* for rank 1"):
                    groups[0].synchronize()
            else:
                groups[0].synchronize()
        for group in groups:
            with torch.cuda.stream(group.stream):
                group.close()
    assert torch.ones(4, device="cuda").sum().item() == 4.0


def _two_streams(group: Group) -> None:
    draw = torch.Generator(group.device).manual_seed(group.rank)
    x, weight = (torch.randn(256, 64, generator=draw, device=group.device).bfloat16() for _ in range(2))
    first = tileflux.ag_gemm(x, weight, group=group, strategy="fused", config=SMALL)
    group.synchronize()
    group.barrier()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for call in range(40):
        with torch.cuda.stream(streams[call % 2]):
            results.append(tileflux.ag_gemm(x, weight, group=group, strategy="fused", config=SMALL))
    torch.cuda.synchronize()
    group.synchronize()
    assert all(torch.equal(result, first) for result in results)


def test_calls_on_two_streams_are_ordered() -> None:
    run_ranks(_two_streams, 2, where="mps", timeout_s=120)
