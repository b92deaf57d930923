"""Timelines as a GPU or the CPU would record them, made by a small model: for tests, and to look at pages."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from tileflux.lang.schedule import arrival_order, departure_order, replay
from tileflux.perf.figures import CaseResult, Timing
from tileflux.perf.timeline import RankTimeline, TileSpan, Timeline, Transfer

H200_SMS = 132


def gathered(
    world: int = 8, num_sms: int = H200_SMS, num_chunks: int = 2, shard_us: float = 250.0, rows: int = 8
) -> Timeline:
    """ag_gemm in a ghost world: rank 0 is real, a peer's shard arrives every ``shard_us``, some of it by chunks."""
    chance = random.Random()
    transfers = []
    for hop in range(1, world):
        for chunk in range(num_chunks):
            end = (hop - 1 + (chunk + 1) / num_chunks) * shard_us * chance.uniform(0.97, 1.03) + 4
            begin = end - shard_us / num_chunks * chance.uniform(0.9, 0.98)
            transfers.append(Transfer(hop, 0, chunk, max(0.0, begin), end, 1024 // num_chunks * 8192 * 2))
    arrived = {(t.source, t.chunk): t.end for t in transfers}
    num_feeders, columns = 4, 16
    sizes = (world, num_chunks, rows, columns)
    tile_us = shard_us * (num_sms - num_feeders) / (rows * columns * num_chunks) * 0.82
    tiles = _programs(
        replay(arrival_order), 0, sizes, range(num_feeders, num_sms),
        ready=lambda t, owner, chunk: max(t + 0.3, arrived.get((owner, chunk), 0.0) + chance.uniform(0.8, 3)),
        compute=lambda: tile_us * chance.gauss(1, 0.03), finish=lambda own: tile_us * chance.uniform(0.04, 0.07),
    )  # fmt: skip
    return _ghost("ag_gemm", tiles, tuple(transfers), world, num_sms)


def scattered(
    world: int = 8, num_sms: int = H200_SMS, num_chunks: int = 2, shard_us: float = 250.0, rows: int = 8
) -> Timeline:
    """gemm_rs in a ghost world: tiles leave for their owners, own tiles come last and wait for those of the peers."""
    chance = random.Random()
    columns = 16
    sizes = (world, num_chunks, rows, columns)
    tile_us = shard_us * num_sms / (rows * columns * num_chunks) * 0.82
    last = (world - 1) * shard_us
    tiles = _programs(
        replay(departure_order), 0, sizes, range(num_sms),
        ready=lambda t, owner, chunk: t + chance.uniform(0.2, 0.6),
        compute=lambda: tile_us * chance.gauss(1, 0.03),
        finish=lambda own: tile_us * (chance.uniform(0.2, 0.45) if own else chance.uniform(0.06, 0.14)),
    )  # fmt: skip
    transfers = [
        Transfer(source, 0, chunk, at - shard_us / num_chunks, at, 1024 // num_chunks * 8192 * 2)
        for source in range(1, world)
        for chunk in range(num_chunks)
        for at in [last * (world - source) / (world - 1) * chance.uniform(0.95, 1) + shard_us * chunk / num_chunks]
    ]
    return _ghost("gemm_rs", tiles, tuple(transfers), world, num_sms)


def on_cpu(strategy: str, world: int = 4, num_chunks: int = 2, shard_us: float = 1500.0, columns: int = 6) -> Timeline:
    """ag_gemm of real CPU ranks with a thread each: either all rows first, or each chunk when it is there."""
    chance = random.Random()
    transfers, ranks = [], []
    for rank in range(world):
        arrived = {}
        for hop in range(1, world):
            for chunk in range(num_chunks):
                begin = (hop - 1 + chunk / num_chunks) * shard_us * 0.8 + chance.uniform(10, 90)
                end = begin + shard_us / num_chunks * chance.uniform(0.6, 0.75)
                source = (rank + hop) % world
                transfers.append(Transfer(source, rank, chunk, begin, end, 256 // num_chunks * 1024 * 4))
                arrived[source, chunk] = end
        everything = max(arrived.values())
        tiles = _programs(
            replay(arrival_order), rank, (world, num_chunks, 2, columns), range(1),
            ready=lambda t, owner, chunk, arrived=arrived, everything=everything: max(
                t + 1, everything if strategy == "sequential" else arrived.get((owner, chunk), 0.0)),
            compute=lambda: shard_us / (2 * columns * num_chunks) * chance.gauss(1, 0.08),
            finish=lambda own: chance.uniform(3, 9),
        )  # fmt: skip
        ranks.append(RankTimeline(rank, 1, tiles, tiles[-1].finished + chance.uniform(5, 30)))
    return Timeline(
        "ag_gemm", 1024, 3072, 1024, world, "float32", strategy, f"{world} processes", "CPU", tuple(ranks),
        tuple(transfers),
    )  # fmt: skip


def without_tiles() -> Timeline:
    """Nothing was recorded at all."""
    return Timeline("ag_gemm", 0, 0, 0, 1, "bfloat16", "fused", "nowhere", "no device", (), ())


def silent() -> Timeline:
    """A rank without a single tile."""
    return replace(without_tiles(), ranks=(RankTimeline(0, 4, (), 0.0),))


def measured(timeline: Timeline) -> CaseResult:
    """A bench of the same problem."""
    total = timeline.end * 1e-6
    gemm, comm = total * 0.93, total * 0.82
    contenders = {"sequential": 1.78, "pipelined": 1.21, "torch": 1.3, "ours pipelined": 1.17, "ours fused": 0.985}
    return CaseResult(
        timeline.op, timeline.m, timeline.n, timeline.k, timeline.world_size, timeline.dtype,
        Timing("gemm", gemm, 0.004), Timing("comm", comm, 0.011), Timing("beside", gemm * 1.02, 0.006),
        tuple(Timing(name, total * factor, 0.01 / factor) for name, factor in contenders.items()),
        (("ours sequential", "the rows do not fit"),), "fused",
    )  # fmt: skip


def _programs(
    order: Callable[..., tuple[int, int, int, int, int]],
    rank: int,
    sizes: tuple[int, int, int, int],
    units: range,
    *,
    ready: Callable[[float, int, int], float],
    compute: Callable[[], float],
    finish: Callable[[bool], float],
) -> tuple[TileSpan, ...]:
    """Program p takes tile p, then every P-th, one after the other."""
    chance = random.Random()
    shards, chunks, rows, columns = sizes
    tiles = []
    for program, unit in enumerate(units):
        time = chance.uniform(0, 6)
        for step in range(program, shards * chunks * rows * columns, len(units)):
            owner, chunk, row, column, turn = order(step, rank, shards, chunks, rows, columns, 8, (1, 0))
            begin = time
            there = ready(begin, owner, chunk)
            computed = there + compute()
            time = computed + finish(owner == rank)
            tiles.append(TileSpan(unit, program, owner, chunk, row, column, turn, begin, there, computed, time))
    return tuple(tiles)


def _ghost(op: str, tiles: tuple[TileSpan, ...], transfers: tuple[Transfer, ...], world: int, num_sms: int) -> Timeline:
    end = max(tile.finished for tile in tiles) + 4
    return Timeline(
        op, 8192, 28672, 8192, world, "bfloat16", "fused", "ghost world", "NVIDIA H200",
        (RankTimeline(0, num_sms, tiles, end),), transfers,
    )  # fmt: skip
