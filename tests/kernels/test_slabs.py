"""A slab by itself: experts that are spaced, tokens' choices added up as they are sent, and slabs that are pushed."""

from __future__ import annotations

import random

import pytest
import torch

from tileflux import env
from tileflux.config import CONTROL, GROUPS, GemmConfig
from tileflux.kernels import slabs, steps
from tileflux.kernels.groups import Groups, cut_tiles, sort_rows, sum_choices
from tileflux.kernels.shards import slab_shards
from tileflux.kernels.turns import Turn, turn
from tileflux.symm.group import Group
from tileflux.testing import poisoned

pytestmark = pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")


def simulate(function: object, world_size: int, seed: int, *args: object) -> list:
    """As the simulator's, which cannot be imported where kernels are compiled."""
    from tileflux.testing import simulator

    return simulator.simulate(function, world_size, seed=seed, args=args)


def drawn_groups(num_tokens: int, top_k: int, capacity: int, seed: int) -> Groups:
    """Three experts; some choices are of none, and have a weight that is no number."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, 3, (num_tokens, top_k), generator=generator)
    weights = torch.randn(num_tokens, top_k, generator=generator)
    weights[ids < 0] = torch.nan
    rows = sort_rows(ids, torch.zeros(num_tokens, dtype=torch.int32), range(3), 1, capacity)
    return cut_tiles(rows, capacity, 16, weights)


def _space(group: Group, num_tokens: int) -> None:
    groups = drawn_groups(num_tokens, 2, 2 * num_tokens, 1)
    num_words = GROUPS.tiles + GROUPS.tile_words * groups.max_tiles
    spaced = torch.full((num_words,), -7, dtype=torch.int32)
    slabs.launch_spaced(group, groups.index, spaced, 5)
    right = groups.index[:num_words].clone()
    right[GROUPS.tiles :].view(-1, GROUPS.tile_words)[:, GROUPS.expert] *= 5
    assert torch.equal(spaced, right) and right[GROUPS.tiles :].max() > 4


@pytest.mark.parametrize("num_tokens", [3, 40, 3000])
def test_experts_numbers_are_multiplied_and_nothing_else(num_tokens: int) -> None:
    simulate(_space, 1, 0, num_tokens)


def _sum(
    group: Group,
    rows: tuple[int, ...],
    num_columns: int,
    num_slabs: int,
    dtype: torch.dtype,
    by_copies: bool,
    seed: int,
) -> None:
    """Three calls: the third comes back to the half of the first. All ranks' rows are one product's, and differ."""
    world_size, rank, top_k, capacity = group.world_size, group.rank, 3, 3 * sum(rows)
    config = GemmConfig(16, 16, 16, num_chunks=num_slabs)
    plan = slab_shards("moe_gemm_rs", rows, capacity, num_columns, dtype.itemsize, config, by_copies)
    here = turn(group, plan)
    for call in range(3):
        exact = []
        for source in range(world_size):
            groups = drawn_groups(sum(rows), top_k, capacity, 100 * seed + 10 * call + source)
            generator = torch.Generator().manual_seed(1000 * seed + 10 * call + source)
            products = torch.randn(capacity, num_columns, generator=generator).to(dtype)
            exact.append(sum_choices(products, groups.positions, groups.weights, dtype))
            if source == rank:
                mine = groups, products
        _send(group, here, *mine, exact[rank], by_copies)
        first, total = plan.first_rows[rank], torch.zeros(sum(rows), num_columns)
        for each in exact:
            total += each.float()
        out = poisoned((rows[rank], num_columns), dtype)
        if by_copies or not rows[rank]:
            steps.launch_release(here, world_size)
        else:
            steps.launch_sum_slabs(here, out, 2, world_size)
            assert torch.equal(out, total[first : first + rows[rank]].to(dtype))
        assert here.epoch() == call + 1


def _send(
    group: Group, here: Turn, groups: Groups, products: torch.Tensor, exact: torch.Tensor, by_copies: bool
) -> None:
    """Every slab, of which what is to be sent is looked at, and what is in one's own slot."""
    (_, num_columns), dtype, rank, world_size = products.shape, products.dtype, group.rank, group.world_size
    room = here.slab_rows(len(products), dtype, num_columns)
    for slab, columns in enumerate(here.plan.slabs(num_columns)):
        cut = slice(columns.start, columns.stop)
        room.copy_(products[:, cut])
        # Of all ranks at once, or of some and then of the others.
        for hops in (range(1, world_size + 1),) if slab % 2 else (range(1, world_size), range(1)):
            slabs.launch_sums(here, groups.index, room, slab, hops, world_size)
        for owner, count in enumerate(here.plan.rows):
            first = here.plan.first_rows[owner]
            to_send = here.slabs_to_send(owner, range(slab, slab + 1), dtype, num_columns)
            if owner != rank:
                assert torch.equal(to_send, exact[first : first + count, cut])
            elif by_copies:
                own = here.slabs_at(rank, rank, range(slab, slab + 1), dtype, num_columns)
                assert torch.equal(own, exact[first : first + count, cut])
        if not by_copies:
            slabs.launch_push_slab(here, room, slab, 2, world_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("by_copies", [False, True])
@pytest.mark.parametrize(
    ("rows", "num_columns", "num_slabs"), [((5, 3), 48, 3), ((0, 9, 2), 1056, 2), ((2, 2, 2), 40, 2), ((3, 4), 7, 2)]
)
def test_sums_lie_as_they_are_sent_and_come_as_they_lie(
    rows: tuple[int, ...], num_columns: int, num_slabs: int, by_copies: bool, dtype: torch.dtype
) -> None:
    seed = random.randrange(2**16)
    simulate(_sum, len(rows), seed, rows, num_columns, num_slabs, dtype, by_copies, seed)


def _load(group: Group) -> None:
    here = turn(group, slab_shards("moe_gemm_rs", (4, 4), 8, 32, 2, GemmConfig(16, 16, num_chunks=2)))
    index = drawn_groups(8, 1, 8, 3).index
    before = index.clone()
    slabs.load(here, index, here.slab_rows(8, torch.bfloat16, 32), group.world_size)
    for region in (here._control, here._flags, here._data):
        assert region.view().eq(0).all(), "a launch with nothing to do did something"
    assert torch.equal(index, before) and here._control.view(dtype=torch.int32)[CONTROL.epoch] == 0


def test_loading_does_nothing() -> None:
    simulate(_load, 2, 0)
