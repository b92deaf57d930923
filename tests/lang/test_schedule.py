"""Tile orders: every tile once, ranks out of each other's way, and the device's order is the replayed one."""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from tileflux import env
from tileflux.lang.schedule import (
    arrival_order,
    departure_order,
    grouped,
    replay,
    slab_order,
    twice_order,
)

NUM_TURNS = {arrival_order: 1, departure_order: 1, twice_order: 2}
ORDERS = {order.fn.__name__: order for order in NUM_TURNS}

worlds = st.integers(1, 16)
counts = st.integers(1, 5)


@pytest.mark.parametrize("name", ORDERS)
@settings(max_examples=60, deadline=None)
@given(
    world_size=worlds, num_chunks=counts, num_m=counts, num_n=counts, group_m=st.integers(1, 8),
    span=st.integers(1, 6), alone=st.integers(-1, 5), data=st.data(),
)  # fmt: skip
def test_every_tile_comes_once_in_every_turn(
    name: str,
    world_size: int,
    num_chunks: int,
    num_m: int,
    num_n: int,
    group_m: int,
    span: int,
    alone: int,
    data: st.DataObject,
) -> None:
    order, rank = replay(ORDERS[name]), data.draw(st.integers(0, world_size - 1))
    num_tiles = world_size * num_chunks * num_m * num_n
    seen = [
        order(step, rank, world_size, num_chunks, num_m, num_n, group_m, (span, alone))
        for step in range(num_tiles * NUM_TURNS[ORDERS[name]])
    ]
    wanted = {
        (shard, chunk, m, n)
        for shard in range(world_size)
        for chunk in range(num_chunks)
        for m in range(num_m)
        for n in range(num_n)
    }
    for turn in range(NUM_TURNS[ORDERS[name]]):
        tiles = seen[turn * num_tiles : (turn + 1) * num_tiles]
        assert all(tile[4] == turn for tile in tiles)
        assert len(tiles) == len(wanted) and {tile[:4] for tile in tiles} == wanted


@settings(max_examples=100, deadline=None)
@given(num_m=st.integers(1, 40), num_n=st.integers(1, 12), group_m=st.integers(1, 10))
def test_tiles_go_down_a_band_before_they_go_to_the_next_column(num_m: int, num_n: int, group_m: int) -> None:
    tiles = [replay(grouped)(index, num_m, num_n, group_m) for index in range(num_m * num_n)]
    bands = [range(first, min(num_m, first + group_m)) for first in range(0, num_m, group_m)]
    assert tiles == [(m, n) for band in bands for n in range(num_n) for m in band]


def _shards(
    order: object, rank: int, world_size: int, num_chunks: int, tiles: int, bands: tuple[int, int] = (1, 0)
) -> list[tuple[int, int]]:
    """(shard, chunk) of every step, with chunks of ``tiles`` rows of tiles."""
    replayed = replay(order)
    steps = range(world_size * num_chunks * tiles)
    return [replayed(step, rank, world_size, num_chunks, tiles, 1, 2, bands)[:2] for step in steps]


@settings(max_examples=60, deadline=None)
@given(world_size=worlds, num_chunks=counts, tiles=counts)
def test_ranks_start_at_their_own_rows_or_end_there(world_size: int, num_chunks: int, tiles: int) -> None:
    for rank in range(world_size):
        around = [(rank + hop) % world_size for hop in range(world_size)]
        in_order = [(shard, chunk) for shard in around for chunk in range(num_chunks) for _ in range(tiles)]
        assert _shards(arrival_order, rank, world_size, num_chunks, tiles) == in_order
        own = num_chunks * tiles
        assert _shards(departure_order, rank, world_size, num_chunks, tiles) == in_order[own:] + in_order[:own]


def _columns(order: object, world_size: int, num_chunks: int, num_m: int, bands: tuple[int, int]) -> list[list[int]]:
    """By column of tiles, in order: of which chunk, counted from the first, each tile is. Bands are of any height."""
    replayed, rank, num_n = replay(order), 0, 3
    first = 1 if order is departure_order else 0
    found: list[list[int]] = [[] for _ in range(num_n)]
    for step in range(world_size * num_chunks * num_m * num_n):
        shard, chunk, _, n, _ = replayed(step, rank, world_size, num_chunks, num_m, num_n, 10**6, bands)
        found[n].append((shard - first) % world_size * num_chunks + chunk)
    return found


def _bands(chunks: list[int], span: int, alone: int, departs: bool) -> list[list[int]]:
    """Some alone, then ``span`` at a time; those that are left over join a neighbour."""
    heights = [1] * min(max(0, alone), len(chunks))
    while (left := len(chunks) - sum(heights)) > 0:
        heights.append(span if left >= 2 * span else left)
    cuts = [0, *itertools.accumulate(reversed(heights) if departs else heights)]
    return [chunks[begin:end] for begin, end in itertools.pairwise(cuts)]


def test_bands_of_seven_peers() -> None:
    peers = list(range(7))
    assert [len(band) for band in _bands(peers, 2, 0, False)] == [2, 2, 3]
    assert [len(band) for band in _bands(peers, 2, 1, False)] == [1, 2, 2, 2]
    assert [len(band) for band in _bands(peers, 2, 3, True)] == [2, 2, 1, 1, 1]
    assert [len(band) for band in _bands(peers, 8, 0, False)] == [7]
    assert [len(band) for band in _bands([*peers, 7], 2, -1, False)] == [2, 2, 2, 2]


@settings(max_examples=60, deadline=None)
@given(world_size=worlds, num_chunks=counts, num_m=counts, span=st.integers(1, 6), alone=st.integers(-1, 5))
def test_chunks_that_go_together_are_next_to_each_other_in_every_column_and_ones_own_are_apart(
    world_size: int, num_chunks: int, num_m: int, span: int, alone: int
) -> None:
    for order, split in ((arrival_order, num_chunks), (departure_order, (world_size - 1) * num_chunks)):
        if alone < 0 and order is arrival_order:
            split = 0  # then they are not
        regions = (range(split), range(split, world_size * num_chunks))
        bands = [band for each in regions for band in _bands(list(each), span, alone, order is departure_order)]
        in_order = [chunk for band in bands for chunk in band for _ in range(num_m)]
        assert _columns(order, world_size, num_chunks, num_m, (span, alone)) == [in_order] * 3
        # A band goes through all columns before the next one begins.
        replayed = replay(order)
        steps = range(world_size * num_chunks * num_m * 3)
        first = 1 if order is departure_order else 0
        seen = []
        for step in steps:
            shard, chunk, _, n, _ = replayed(step, 0, world_size, num_chunks, num_m, 3, 10**6, (span, alone))
            seen.append(((shard - first) % world_size * num_chunks + chunk, n))
        numbers = [(next(i for i, band in enumerate(bands) if chunk in band), n) for chunk, n in seen]
        assert numbers == sorted(numbers), "and through each of them but once"


@pytest.mark.parametrize("order", [arrival_order, departure_order], ids=lambda order: order.fn.__name__)
@settings(max_examples=60, deadline=None)
@given(world_size=worlds, num_chunks=counts, tiles=counts, span=st.integers(1, 6), alone=st.integers(-1, 5))
def test_no_two_ranks_work_on_one_shard_at_the_same_step(
    order: object, world_size: int, num_chunks: int, tiles: int, span: int, alone: int
) -> None:
    sequences = [_shards(order, rank, world_size, num_chunks, tiles, (span, alone)) for rank in range(world_size)]
    for at_once in zip(*sequences, strict=True):
        assert len({shard for shard, _ in at_once}) == world_size
        assert len({chunk for _, chunk in at_once}) == 1


@triton.jit
def _order_kernel(
    out_ptr, rank, num_shards, num_chunks, num_m, num_n, num_steps, ORDER: tl.constexpr, GROUP_M: tl.constexpr,
    SPAN: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    for step in range(num_steps):
        shard, chunk, m, n, turn = ORDER(step, rank, num_shards, num_chunks, num_m, num_n, GROUP_M, (SPAN, ALONE))
        tl.store(out_ptr + step * 5, shard)
        tl.store(out_ptr + step * 5 + 1, chunk)
        tl.store(out_ptr + step * 5 + 2, m)
        tl.store(out_ptr + step * 5 + 3, n)
        tl.store(out_ptr + step * 5 + 4, turn)


@pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")
@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize(("rank", "sizes"), [(0, (1, 1, 1, 1, 1, 1)), (2, (3, 2, 5, 3, 2, 1)), (1, (4, 1, 3, 2, 8, 2))])
@pytest.mark.parametrize("alone", [-1, 0, 2])
def test_a_kernel_takes_tiles_in_the_replayed_order(name: str, rank: int, sizes: tuple[int, ...], alone: int) -> None:
    from tileflux.testing import interpreter

    interpreter.install()
    num_shards, num_chunks, num_m, num_n, group_m, span = sizes
    num_steps = NUM_TURNS[ORDERS[name]] * num_shards * num_chunks * num_m * num_n
    out = torch.full((num_steps, 5), -1, dtype=torch.int32)
    _order_kernel[(1,)](out, rank, num_shards, num_chunks, num_m, num_n, num_steps, ORDERS[name], group_m, span, alone)
    replayed = replay(ORDERS[name])
    assert out.tolist() == [list(replayed(step, rank, *sizes[:5], (span, alone))) for step in range(num_steps)]


@given(
    world_size=st.integers(2, 16), num_slabs=st.integers(1, 5), num_m=st.integers(0, 6), num_n=st.integers(1, 3),
    num_blocks=st.integers(1, 3), data=st.data(),
)  # fmt: skip
def test_slabs_are_multiplied_once_and_added_up_once_behind_the_next(
    world_size: int, num_slabs: int, num_m: int, num_n: int, num_blocks: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    num_steps = num_slabs * num_n * (num_m + world_size * num_blocks)
    order = replay(slab_order)
    found = [order(step, rank, world_size, num_slabs, num_m, num_n, num_blocks, (1, 0)) for step in range(num_steps)]
    columns = range(num_slabs * num_n)
    tiles = [(m, n) for _, _, m, n, turn in found if turn == 0]
    sums = [(shard, m, n) for shard, _, m, n, turn in found if turn == 1]
    assert sorted(tiles) == [(m, n) for m in range(num_m) for n in columns]
    assert sorted(sums) == [(s, m, n) for s in range(world_size) for m in range(num_blocks) for n in columns]
    assert all(slab == n // num_n for _, slab, _, n, _ in found)
    for step, (shard, slab, _, _, turn) in enumerate(found):
        if turn == 1 and num_m:
            behind = min(slab + 1, num_slabs - 1)
            last = max(place for place, (_, other, _, _, kind) in enumerate(found) if kind == 0 and other == behind)
            assert last < step, "the next slab is multiplied meanwhile"
        if turn == 1 and shard == rank:
            assert step >= num_steps - num_slabs * num_n * num_blocks, "one's own come last"
    firsts = list(dict.fromkeys(shard for shard, _, _, _, turn in found if turn == 1))
    assert firsts == [(rank + 1 + hop) % world_size for hop in range(world_size)], "no two ranks begin with one peer"
