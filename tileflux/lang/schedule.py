"""Tile orders: which tile a program computes at which step. Plain integer arithmetic.

Rows are cut into *shards*, one per rank, and a shard into *chunks*; no tile reaches over the edge of either, so a
tile waits for one flag and belongs to one rank. Every chunk has room for the same number of tiles; those
beyond a shard's last row are skipped. The functions use nothing but ``//``, ``%`` and ``min``, so that the host can
``replay`` them with plain numbers.

An order maps (step, rank, num_shards, num_chunks, num_m, num_n, group_m) to (shard, chunk, m, n, turn), where ``m`` and
``n`` count tiles within the chunk. ``turn`` is 0 for a tile to multiply, and 1 where it is only to be summed.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import triton

__all__ = ["arrival_order", "departure_order", "grouped", "replay", "twice_order"]


@triton.jit
def grouped(index, num_m, num_n, group_m):
    """(m, n) of tile ``index``: columns within a band of ``group_m`` rows of tiles, which share the L2 cache."""
    band_size = group_m * num_n
    first = index // band_size * group_m
    height = min(num_m - first, group_m)
    within = index % band_size
    return first + within % height, within // height


@triton.jit
def arrival_order(step, rank, num_shards, num_chunks, num_m, num_n, group_m):
    """My own rows first, then those of the next rank: the order in which the feeders of ``lang/turn.py`` send."""
    return _shard_order(step, rank, num_shards, num_chunks, num_m, num_n, group_m)


@triton.jit
def departure_order(step, rank, num_shards, num_chunks, num_m, num_n, group_m):
    """The next rank's rows first and my own last: in every step the ranks send to different peers."""
    return _shard_order(step, rank + 1, num_shards, num_chunks, num_m, num_n, group_m)


@triton.jit
def twice_order(step, rank, num_shards, num_chunks, num_m, num_n, group_m):
    """All tiles to multiply, then all again to be summed."""
    num_tiles = num_shards * num_chunks * num_m * num_n
    shard, chunk, m, n, _ = _shard_order(step % num_tiles, 0, num_shards, num_chunks, num_m, num_n, group_m)
    return shard, chunk, m, n, step // num_tiles


@triton.jit
def _shard_order(step, first, num_shards, num_chunks, num_m, num_n, group_m):
    chunk_tiles = num_m * num_n
    slab = step // chunk_tiles
    m, n = grouped(step % chunk_tiles, num_m, num_n, group_m)
    return (first + slab // num_chunks) % num_shards, slab % num_chunks, m, n, 0


def replay(order: Callable[..., Any]) -> Callable[..., Any]:
    """An order as a plain Python function of plain numbers, whether Triton compiles or interprets here."""
    function = order.fn
    called = {name: value for name, value in function.__globals__.items() if name in function.__code__.co_names}
    plain = {name: replay(value) for name, value in called.items() if hasattr(value, "fn")}
    return FunctionType(function.__code__, {**function.__globals__, **plain}, function.__name__)
