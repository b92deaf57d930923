"""Tile orders: which tile a program computes at which step. Plain integer arithmetic.

Rows are cut into *shards*, one per rank, and a shard into *chunks*; no tile reaches over the edge of either, so a
tile waits for one flag and belongs to one rank. Every chunk has room for the same number of tiles; those
beyond a shard's last row are skipped. The functions use nothing but ``//``, ``%``, ``min`` and ``max``, so that the
host can ``replay`` them with plain numbers.

An order maps (step, rank, num_shards, num_chunks, num_m, num_n, group_m, bands) to (shard, chunk, m, n, turn), where
``m`` and ``n`` count tiles within the chunk. ``turn`` is 0 for a tile to multiply, and 1 where it is only to be summed.

``bands`` is (span, alone): ``span`` chunks go through the columns together, as a band. One after the other, each would
have the whole weight read for its own few rows: 128 of them are about as few as the memory can keep up with. But where
rows arrive, tiles of the first of these chunks then stand behind some that wait for the last; so the first to arrive,
as many as ``alone``, go one by one, until the product has fallen behind the rows. Sums depart the other way round: the
last go one by one, so that little is left to send at the end. This rank's own chunks are not among others': where
rows arrive they need not be waited for, and where sums depart they wait for every peer, and must not keep from leaving
what a peer waits for. But where reading the weight for a chunk takes longer than the first peer's takes to come,
``alone`` is -1: of rows that arrive, one's own are then in the first band. Fewer than ``span`` chunks that are left
over join the band next to them rather than read the weight for themselves.
"""

import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import triton

__all__ = [
    "arrival_order",
    "departing_bands",
    "departure_order",
    "grouped",
    "replay",
    "slab_order",
    "twice_order",
]


@triton.jit
def grouped(index, num_m, num_n, group_m):
    """(m, n) of tile ``index``: columns within a band of ``group_m`` rows of tiles, which share the L2 cache."""
    band_size = group_m * num_n
    first = index // band_size * group_m
    height = min(num_m - first, group_m)
    within = index % band_size
    return first + within % height, within // height


@triton.jit
def arrival_order(step, rank, num_shards, num_chunks, num_m, num_n, group_m, bands):
    """My own rows first, then those of the next rank: the order in which the feeders of ``lang/turn.py`` send."""
    split = num_chunks
    if bands[1] < 0:
        split = num_chunks * 0
    return _shard_order(step, rank, num_shards, num_chunks, split, False, num_m, num_n, group_m, bands)


@triton.jit
def departure_order(step, rank, num_shards, num_chunks, num_m, num_n, group_m, bands):
    """The next rank's rows first and my own last: in every step the ranks send to different peers."""
    others = (num_shards - 1) * num_chunks
    return _shard_order(step, rank + 1, num_shards, num_chunks, others, True, num_m, num_n, group_m, bands)


@triton.jit
def twice_order(step, rank, num_shards, num_chunks, num_m, num_n, group_m, bands):
    """All tiles to multiply, then all again to be summed."""
    num_tiles = num_shards * num_chunks * num_m * num_n
    index = step % num_tiles
    shard, chunk, m, n, _ = _shard_order(
        index, 0, num_shards, num_chunks, num_chunks, False, num_m, num_n, group_m, bands
    )
    return shard, chunk, m, n, step // num_tiles


@triton.jit
def slab_order(step, rank, num_shards, num_slabs, num_m, num_n, num_blocks, bands):
    """Grouped rows that are added up by token: columns in slabs, and a slab's sums while the next one is multiplied.

    Of a slab, first the tiles of the list, turn 0. Its sums for the peers, turn 1, come after the next slab's tiles, so
    that nobody waits long for the last of its own; the next rank's tokens come first. The sums for one's own tokens
    come last, since they wait for everybody's. ``num_n`` counts columns of tiles in a slab, ``num_m`` tiles of the
    list, ``num_blocks`` blocks of tokens in a shard; the ``n`` that is returned counts columns of all slabs. Tiles wait
    for nobody's rows, and ``bands`` is not asked.
    """
    tiles = num_m * num_n
    block = num_blocks * num_n
    sums = (num_shards - 1) * block
    shard = rank
    slab = step * 0
    turn = slab
    index = step
    if step >= tiles:
        # From here on the tiles of a slab and the sums of the one before make a pair; the last slab's sums have none.
        pair = tiles + sums
        slab = min((step - tiles) // pair, num_slabs - 1) + 1
        index = step - tiles - (slab - 1) * pair
        if slab == num_slabs:
            index += tiles
        if index >= tiles:
            turn += 1
            slab -= 1
            index -= tiles
            if index < sums:
                shard = (rank + 1 + index // block) % num_shards
            else:
                slab = (index - sums) // block
                index -= sums
            index = index % block
    return shard, slab, index // num_n, slab * num_n + index % num_n, turn


@triton.jit
def _shard_order(step, first, num_shards, num_chunks, split, departs, num_m, num_n, group_m, bands):
    """Chunks from those of shard ``first`` on, band by band; the first ``split`` and the others apart."""
    chunk_tiles = num_m * num_n
    index = step
    begin = step * 0
    count = begin + split
    if step >= split * chunk_tiles:
        index = step - split * chunk_tiles
        begin += split
        count = num_shards * num_chunks - split
    span, alone = bands
    alone = max(alone, 0)
    place = index // chunk_tiles
    if departs:
        place = count - 1 - place
    # Counted from the side of those that go alone: ``below`` is what comes before the band.
    below = place
    height = begin * 0 + 1
    if place >= alone:
        num_bands = max((count - alone) // span, 1)
        band = min((place - alone) // span, num_bands - 1)
        below = alone + band * span
        height += span - 1
        if band == num_bands - 1:
            height = count - below
    if departs:
        below = count - below - height
    m, n = grouped(index - below * chunk_tiles, height * num_m, num_n, group_m)
    chunk = begin + below + m // num_m
    return (first + chunk // num_chunks) % num_shards, chunk % num_chunks, m % num_m, n, 0


def departing_bands(count: int, span: int, alone: int) -> list[range]:
    """The bands of ``departure_order``: which of ``count`` peers' chunks, in its order, are completed together."""
    rest = max(0, count - max(0, alone))
    num_bands = max(rest // span, 1) if rest else 0
    heights = [span] * (num_bands - 1)
    if rest:
        heights.insert(0, rest - sum(heights))
    firsts = list(itertools.accumulate([*heights, *[1] * (count - rest)], initial=0))
    return [range(begin, end) for begin, end in itertools.pairwise(firsts)]


def replay(order: Callable[..., Any]) -> Callable[..., Any]:
    """An order as a plain Python function of plain numbers, whether Triton compiles or interprets here."""
    function = order.fn
    called = {name: value for name, value in function.__globals__.items() if name in function.__code__.co_names}
    plain = {name: replay(value) for name, value in called.items() if hasattr(value, "fn")}
    return FunctionType(function.__code__, {**function.__globals__, **plain}, function.__name__)
