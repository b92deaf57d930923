"""All collectives together: every shape and type, every kind of world, back to back."""

from __future__ import annotations

import gc
import random
import resource

import pytest
import torch

import tileflux
from tileflux import CommConfig
from tileflux.symm.group import Group
from tileflux.testing import MESSAGE_SHAPES, run_ranks
from tileflux.testing.collectives import COLLECTIVES, check_collectives, random_inputs

SHAPES = [message.shape for message in MESSAGE_SHAPES]
SUMMED = (torch.float32, torch.float16, torch.bfloat16)
MOVED = (*SUMMED, torch.float8_e4m3fn, torch.int64, torch.bool)
SMALL_SLOTS = CommConfig(num_lanes=3, slot_bytes=256, min_lane_bytes=64)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_processes(world_size: int) -> None:
    dtypes = MOVED if world_size < 8 else (torch.bfloat16,)
    run_ranks(check_collectives, world_size, args=(SHAPES, dtypes))


@pytest.mark.parametrize("world_size", [2, 3])
def test_virtual_ranks_on_the_cpu(world_size: int) -> None:
    run_ranks(check_collectives, world_size, args=(SHAPES, MOVED), where="virtual")


def test_several_lanes_and_pieces_on_the_host() -> None:
    run_ranks(check_collectives, 3, args=(SHAPES[:7], MOVED), group_kwargs={"config": SMALL_SLOTS})


def test_uneven_calls_are_uneven() -> None:
    """The check is worth little if its sizes happen to be equal."""
    xs = random_inputs(3, (48, 128), torch.float32, 0)
    by_name = {collective.name: collective for collective in COLLECTIVES}
    assert len({len(x) for x in by_name["all_gather, uneven"].prepare(xs)}) == 3
    received = by_name["all_to_all, uneven"].expect(xs, 0)
    assert not torch.equal(received, by_name["all_to_all"].expect(xs, 0))


def _soak(group: Group, num_calls: int) -> tuple[int, int, int]:
    """Mixed collectives of random sizes, each checked. Returns memory (KiB) half-way and at the end, and heap bytes."""
    draws = random.Random(7)
    early = 0
    for call in range(num_calls):
        collective = draws.choice(COLLECTIVES)
        dtype = draws.choice(SUMMED)
        shape = (draws.randrange(0, 40), draws.randrange(1, 40))
        drawn = collective.prepare(random_inputs(group.world_size, shape, dtype, call))
        expected = collective.expect(drawn, group.rank)
        out = torch.full(tuple(expected.shape), float("nan"), dtype=dtype)
        collective.run(group, drawn, out)
        assert torch.equal(out, expected), f"call {call}: {collective.name} of {shape} {dtype} on rank {group.rank}"
        if call == num_calls // 2:
            gc.collect()
            early = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return early, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, group.memory_summary().heap_bytes


def test_ten_thousand_mixed_calls_over_four_processes() -> None:
    for early, late, heap in run_ranks(_soak, 4, args=(10_000,), timeout_s=300):
        assert late - early < 8 * 1024, f"memory grew from {early} to {late} KiB over the second half"
        assert heap < 4 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_virtual_ranks_on_one_gpu(world_size: int) -> None:
    run_ranks(check_collectives, world_size, args=(SHAPES, MOVED), where="virtual", device="cuda", timeout_s=180)


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_sharing_one_gpu(world_size: int) -> None:
    run_ranks(check_collectives, world_size, args=(SHAPES, MOVED), where="mps", timeout_s=180)


@pytest.mark.gpu
def test_several_lanes_and_pieces_on_one_gpu() -> None:
    run_ranks(
        check_collectives, 4, args=(SHAPES, MOVED), where="virtual", device="cuda", group_kwargs={"config": SMALL_SLOTS}
    )


@pytest.mark.gpu
def test_one_thread_drives_all_virtual_ranks() -> None:
    groups = tileflux.local_groups(4, "cuda", timeout_s=10)
    xs = [torch.randn(1000, device="cuda") for _ in groups]
    torch.cuda.synchronize()
    outs = []
    for group in groups:
        with torch.cuda.stream(group.stream):
            outs.append(tileflux.all_reduce(xs[group.rank], group=group))
    torch.cuda.synchronize()
    for group, out in zip(groups, outs, strict=True):
        with torch.cuda.stream(group.stream):
            group.synchronize()
        assert torch.equal(out, ((xs[0] + xs[1]) + xs[2]) + xs[3])
        group.close()


def _replay(group: Group, num_replays: int) -> None:
    """Capture three collectives once, replay with new inputs, and compare each time."""
    world_size, rank = group.world_size, group.rank
    x = torch.zeros(37, 16, device="cuda")
    sizes = [37] * world_size

    def call() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        total = tileflux.all_reduce(x, group=group, algorithm="two_shot")
        return (
            tileflux.all_gather(total + x, group=group, sizes=sizes),
            tileflux.broadcast(x, group=group, root=1),
            total,
        )

    call()
    group.synchronize()
    graph = torch.cuda.CUDAGraph()
    assert group.stream is not None
    with torch.cuda.graph(graph, stream=group.stream, capture_error_mode="thread_local"):
        gathered, spread, total = call()
    for replay in range(num_replays):
        xs = [each.cuda() for each in random_inputs(world_size, (37, 16), torch.float32, replay)]
        x.copy_(xs[rank])
        graph.replay()
        group.synchronize()
        expected = torch.zeros_like(x)
        for each in xs:
            expected += each
        assert torch.equal(total, expected)
        assert torch.equal(spread, xs[1])
        assert torch.equal(gathered, torch.cat([expected + each for each in xs]))


@pytest.mark.gpu
def test_cuda_graph_replays_count_on() -> None:
    run_ranks(_replay, 2, args=(100,), where="virtual", device="cuda", timeout_s=120)


def _soak_gpu(group: Group, num_calls: int) -> None:
    """Many calls queued without a look, random sizes from a shared seed; then every result."""
    draws = random.Random(3)
    calls = []
    for call in range(num_calls):
        collective = draws.choice(COLLECTIVES)
        shape = (draws.randrange(0, 300), draws.randrange(1, 200))
        drawn = collective.prepare(random_inputs(group.world_size, shape, torch.bfloat16, call))
        expected = collective.expect(drawn, group.rank)
        out = torch.full(tuple(expected.shape), float("nan"), dtype=torch.bfloat16, device=group.device)
        calls.append((collective, [x.to(group.device) for x in drawn], out, expected))
    group.barrier()
    for collective, xs, out, _ in calls:
        collective.run(group, xs, out)
    group.synchronize()
    for call, (collective, _, out, expected) in enumerate(calls):
        assert torch.equal(out.cpu(), expected), f"call {call}: {collective.name} on rank {group.rank}"


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["virtual", "mps"])
def test_soak_on_one_gpu(where: str) -> None:
    run_ranks(_soak_gpu, 4, args=(400,), where=where, device="cuda", timeout_s=180)  # type: ignore[arg-type]
