"""The protocol in single steps: rows fed and awaited, shards pushed and summed, under random schedules."""

from __future__ import annotations

import pytest
import torch

from tileflux import env
from tileflux.config import CONTROL, GemmConfig
from tileflux.errors import Deadlock
from tileflux.kernels import steps
from tileflux.kernels.shards import combine_shards, gather_shards, scatter_shards
from tileflux.kernels.turns import turn
from tileflux.symm.group import Group
from tileflux.testing import poisoned

pytestmark = pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")

CONFIG = GemmConfig(block_m=1024, block_n=1024)


def simulate(function: object, world_size: int, seed: int, *args: object) -> list:
    """As the simulator's, which cannot be imported where kernels are compiled."""
    from tileflux.testing import simulator

    return simulator.simulate(function, world_size, seed=seed, args=args)


def _gather(group: Group, rows: tuple[int, ...], depth: int, num_chunks: int, num_feeders: int, seed: int) -> None:
    """Two calls: the second must not overwrite what the first still reads."""
    world_size, rank = group.world_size, group.rank
    here = turn(group, gather_shards("ag_gemm", rows, 2 * depth, True, num_chunks))
    for call in range(2):
        generator = torch.Generator().manual_seed(seed + call)
        xs = [torch.randn(count, depth, generator=generator).to(torch.bfloat16) for count in rows]
        scales = [torch.rand(count, generator=generator) for count in rows]
        steps.launch_feed(here, xs[rank], scales[rank], num_feeders, world_size)
        for source in range(world_size):
            for chunk in range(here.plan.num_chunks):
                if source != rank and here.plan.chunk(source, chunk):
                    steps.launch_await(here, source, chunk, world_size)
            first = here.plan.first_rows[source]
            if source != rank:
                arrived = here.gathered(torch.bfloat16, depth)[first : first + rows[source]]
                assert torch.equal(arrived, xs[source])
                assert torch.equal(here.gathered_scales()[first : first + rows[source]], scales[source])
        steps.launch_release(here, world_size)
        assert here.epoch() == call + 1


@pytest.mark.parametrize(
    ("rows", "num_chunks", "num_feeders"), [((5, 3), 1, 1), ((300, 0, 260), 2, 2), ((1, 7, 2, 4), 1, 3)]
)
def test_rows_that_are_fed_can_be_awaited(rows: tuple[int, ...], num_chunks: int, num_feeders: int) -> None:
    for seed in range(3):
        simulate(_gather, len(rows), seed, rows, 3, num_chunks, num_feeders, seed)


def _scatter(group: Group, rows: tuple[int, ...], width: int, dtype: torch.dtype, num_programs: int, seed: int) -> None:
    """Three calls: the third comes back to the half of the first."""
    world_size, rank = group.world_size, group.rank
    here = turn(group, scatter_shards("gemm_rs", rows, width, dtype.itemsize, CONFIG))
    for call in range(3):
        generator = torch.Generator().manual_seed(seed + call)
        partials = torch.randn(world_size, sum(rows), width, generator=generator).to(dtype)
        for owner in range(world_size):
            place = slice(here.plan.first_rows[owner], here.plan.first_rows[owner] + rows[owner])
            steps.launch_push(here, partials[rank][place], owner, num_programs, world_size)
        total = torch.zeros(sum(rows), width)
        for partial in partials:
            total += partial.float()
        out = poisoned((rows[rank], width), dtype)
        steps.launch_sum(here, out, num_programs, world_size)
        first = here.plan.first_rows[rank]
        assert torch.equal(out, total[first : first + rows[rank]].to(dtype))
        assert here.epoch() == call + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "width", "num_programs"), [((5, 3), 7, 1), ((0, 700, 2), 3, 2), ((2, 2, 2, 2), 8, 3)])
def test_shards_that_are_pushed_are_summed_in_rank_order(
    dtype: torch.dtype, rows: tuple[int, ...], width: int, num_programs: int
) -> None:
    for seed in range(2):
        simulate(_scatter, len(rows), seed, rows, width, dtype, num_programs, seed)


def _scatter_slabs(
    group: Group,
    rows: tuple[int, ...],
    width: int,
    dtype: torch.dtype,
    num_slabs: int,
    num_programs: int,
    mostly_whole: bool,
    seed: int,
) -> None:
    """Two calls of shards that come slab by slab, as copies would bring them; or whole but for the next rank's."""
    world_size, rank = group.world_size, group.rank
    config = GemmConfig(block_m=16, block_n=16, num_chunks=num_slabs)
    plan = combine_shards("moe_gemm_rs", rows, 1, width, dtype.itemsize, config, by_copies=True)
    here = turn(group, plan)
    for call in range(2):
        generator = torch.Generator().manual_seed(seed + call)
        partials = torch.randn(world_size, sum(rows), width, generator=generator).to(dtype)
        steps.launch_open(here, world_size)
        for index, columns in enumerate(plan.slabs(width)):
            for owner in range(world_size):
                place = slice(plan.first_rows[owner], plan.first_rows[owner] + rows[owner])
                slab = here.slabs_at(owner, rank, range(index, index + 1), dtype, width)
                slab.copy_(partials[rank][place, columns.start : columns.stop])
                if not mostly_whole or owner == (rank - 1) % world_size:
                    here.raise_flag(owner, index)
        if mostly_whole:
            for owner in range(world_size):
                if owner != (rank - 1) % world_size:
                    here.raise_flag(owner, 0)
        total = torch.zeros(sum(rows), width)
        for partial in partials:
            total += partial.float()
        room = poisoned((rows[rank] + 2, width), dtype)
        steps.launch_sum_slabs(here, room[1:-1], num_programs, world_size, mostly_whole=mostly_whole)
        first = plan.first_rows[rank]
        assert torch.equal(room[1:-1], total[first : first + rows[rank]].to(dtype))
        assert room[0].isnan().all() and room[-1].isnan().all(), "wrote beside the result"
        assert here.epoch() == call + 1


@pytest.mark.parametrize("mostly_whole", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "width", "num_slabs", "num_programs"),
    [((5, 3), 40, 2, 1), ((1, 20, 2), 300, 1, 2), ((9, 9), 7, 4, 3), ((2, 11), 600, 2, 2), ((3, 8, 17), 272, 3, 1)],
)
def test_shards_that_come_slab_by_slab_are_summed_in_rank_order(
    dtype: torch.dtype, rows: tuple[int, ...], width: int, num_slabs: int, num_programs: int, mostly_whole: bool
) -> None:
    for seed in range(2):
        simulate(
            _scatter_slabs, len(rows), seed, rows, width, dtype, num_slabs, num_programs, mostly_whole, seed
        )  # fmt: skip


def _one_slab_is_missing(group: Group) -> None:
    config = GemmConfig(block_m=16, block_n=16, num_chunks=3)
    here = turn(group, combine_shards("moe_gemm_rs", (2, 2), 1, 48, 4, config, by_copies=True))
    if group.rank == 1:
        for index in (0, 1):
            here.raise_flag(0, index)
    else:
        steps.launch_sum_slabs(here, torch.zeros(2, 48), 1, 2)


def test_a_sum_waits_for_every_slab() -> None:
    with pytest.raises(Deadlock, match=r"rank 0 moe_gemm_rs\.flags\.2 of rank 1 to reach 1; it stands at 0"):
        simulate(_one_slab_is_missing, 2, 0)


def _one_does_not_push(group: Group) -> None:
    here = turn(group, scatter_shards("gemm_rs", (2, 2), 4, 4, CONFIG))
    if group.rank == 0:
        steps.launch_push(here, torch.zeros(2, 4), 0, 1, 2)
        steps.launch_sum(here, torch.zeros(2, 4), 1, 2)


def test_a_sum_waits_for_every_source() -> None:
    with pytest.raises(Deadlock, match=r"rank 0 gemm_rs\.flags\.0 of rank 1 to reach 1; it stands at 0"):
        simulate(_one_does_not_push, 2, 0)


def _one_does_not_feed(group: Group) -> None:
    here = turn(group, gather_shards("ag_gemm", (2, 2), 8, False, 1))
    if group.rank == 0:
        steps.launch_await(here, 1, 0, 2)


def test_an_await_waits_for_the_chunk() -> None:
    with pytest.raises(Deadlock, match=r"rank 0 ag_gemm\.flags\.0 of rank 1 to reach 1; it stands at 0"):
        simulate(_one_does_not_feed, 2, 0)


def _one_is_not_released(group: Group) -> None:
    here = turn(group, gather_shards("ag_gemm", (2, 2), 8, False, 1))
    for _ in range(2):
        steps.launch_feed(here, torch.zeros(2, 2), None, 1, 2)
        if group.rank == 0:
            steps.launch_release(here, 2)


def test_feeding_waits_until_the_peer_has_finished_the_call_before() -> None:
    with pytest.raises(Deadlock, match=r"rank 0 ag_gemm\.control\.ack\[rank 1\] to reach 1; it stands at 0"):
        simulate(_one_is_not_released, 2, 0)


def _load(group: Group) -> None:
    scattered = turn(group, scatter_shards("gemm_rs", (4, 4), 8, 2, CONFIG))
    x = torch.zeros(4, 8, dtype=torch.bfloat16)
    steps.load(scattered, x, torch.zeros(4), x, group.world_size)
    steps.load(scattered, x, None, x, group.world_size)
    combined = turn(group, combine_shards("moe_gemm_rs", (4, 4), 1, 8, 2, CONFIG, by_copies=True))
    for mostly_whole in (False, True):
        steps.load_for_slabs(combined, x, group.world_size, mostly_whole)
    for made in (scattered, combined):
        for region in (made._control, made._flags, made._data):
            assert region.view().eq(0).all(), "a launch with nothing to do did something"
    assert scattered._control.view(dtype=torch.int32)[CONTROL.epoch] == 0


def test_loading_does_nothing() -> None:
    simulate(_load, 2, 0)
