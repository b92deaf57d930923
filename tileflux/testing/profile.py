"""What ``tileflux profile`` does on a rank: time the op as ``bench`` does, then record one call from inside."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tileflux import device as device_info
from tileflux import ops
from tileflux.kernels.plan import split_rows
from tileflux.kernels.recording import Launch, recording
from tileflux.kernels.roles import SCATTER, SPREAD
from tileflux.kernels.steps import read_clock
from tileflux.perf.timeline import RankTimeline, TileSpan, Timeline, Transfer
from tileflux.symm.group import Group
from tileflux.testing.bench import BenchCase, RankTimes, make_suite, measure
from tileflux.testing.contenders import Suite
from tileflux.testing.ghost import Stamp
from tileflux.testing.ghost_contenders import ghosts_of
from tileflux.testing.timing import HEAD_START_S, Stopwatch, head_start, time_rounds

__all__ = ["CallRecord", "RankProfile", "merge", "profile"]

_NUM_COST_ROUNDS = 10
_SUMMING = (SCATTER.name, SPREAD.name)


@dataclass(frozen=True)
class CallRecord:
    """One call as one rank recorded it; times in nanoseconds of the machine's clock."""

    strategy: str
    begin: float
    end: float
    tiles: tuple[TileSpan, ...]
    transfers: tuple[Transfer, ...]
    cost: float
    """How much longer a recorded call takes than a plain one: 0.01 for one percent."""
    sums_tiles: bool = True
    """As a ``Timeline`` has it."""


@dataclass(frozen=True)
class RankProfile:
    """All that one rank has to tell."""

    rank: int
    num_units: int
    device_name: str
    times: RankTimes
    calls: tuple[CallRecord, ...]


def profile(group: Group, case: BenchCase, strategies: Sequence[str]) -> RankProfile:
    """Time ``case``, then record one call in each of ``strategies``."""
    (times,) = measure(group, (case,), None)
    calls = tuple(_record(group, case, strategy) for strategy in strategies) if not times.problem else ()
    on_gpu = group.device.type == "cuda"
    name = torch.cuda.get_device_name(group.device) if on_gpu else "CPU"
    return RankProfile(group.rank, device_info.num_sms(group.device) if on_gpu else 1, name, times, calls)


def _record(group: Group, case: BenchCase, strategy: str) -> CallRecord:
    suite = make_suite(group, case)
    name = "pipelined" if strategy == "pipelined" and group.transport != "ghost" else f"ours {strategy}"
    (call,) = (contender.run for contender in suite.contenders if contender.name == name)
    watch = Stopwatch(group.device, lambda: _meet(group))

    def recorded() -> None:
        with recording():
            call()

    rounds = time_rounds(watch, {"plain": call, "recorded": recorded}, _NUM_COST_ROUNDS)
    cost = statistics.median(rounds["recorded"]) / statistics.median(rounds["plain"]) - 1
    return _record_call(group, case, strategy, suite, call, cost)


def _record_call(
    group: Group, case: BenchCase, strategy: str, suite: Suite, call: Callable[[], object], cost: float
) -> CallRecord:
    on_gpu = group.device.type == "cuda"
    ghosts = ghosts_of(group) if group.transport == "ghost" else None
    stamps: list[Stamp] = []
    if ghosts is not None:
        ghosts.stamps = stamps
    read_clock(group.device)  # loads it: what the host needs for that must not show in the recording
    group.synchronize()
    base = torch.cuda.Event(enable_timing=True) if on_gpu else None
    with recording() as recorder:
        if on_gpu:
            head_start(5 * HEAD_START_S)
        _meet(group)
        begin = read_clock(group.device)
        if base is not None:
            base.record()
        call()
        end = read_clock(group.device)
    group.synchronize()
    if ghosts is not None:
        ghosts.stamps = None
    start, stop = float(begin.item()), float(end.item())
    launches = recorder.launches()
    tiles = _tiles(launches, case, group.world_size, suite.tile_rows)
    transfers = [transfer for launch in launches for transfer in launch.transfers]
    if base is not None:
        transfers += [_of_ghost(stamp, base, start, group.rank) for stamp in stamps]
    if strategy == "sequential" and case.op == "ag_gemm" and tiles:
        transfers += _gathered_before(group, case, start, min(tile.begin for tile in tiles))
    sums_tiles = any(launch.role in _SUMMING for launch in launches)
    return CallRecord(strategy, start, stop, tiles, tuple(transfers), cost, sums_tiles)


def _meet(group: Group) -> None:
    if group.world_size > 1 and group.transport != "ghost":
        ops.barrier(group=group)


def _of_ghost(stamp: Stamp, base: torch.cuda.Event, start: float, target: int) -> Transfer:
    begin, end = (start + 1e6 * base.elapsed_time(event) for event in (stamp.begin, stamp.end))
    return Transfer(stamp.source, target, stamp.chunk, begin, end, stamp.nbytes)


def _gathered_before(group: Group, case: BenchCase, begin: float, end: float) -> list[Transfer]:
    """The collective of the sequential strategy: all rows are there when the product begins."""
    rows = split_rows(case.m, group.world_size)
    itemsize = getattr(torch, case.dtype).itemsize
    return [
        Transfer(source, group.rank, 0, begin, end, rows[source] * case.k * itemsize)
        for source in range(group.world_size)
        if source != group.rank
    ]


def _tiles(launches: Sequence[Launch], case: BenchCase, world_size: int, tile_rows: int) -> tuple[TileSpan, ...]:
    tiles = []
    for launch in launches:
        for tile in launch.tiles:
            # A plain product knows no shards; whose rows it multiplies can be told from where they are.
            owner = _owner(tile, case, world_size, tile_rows) if launch.role == "gemm" else tile.owner
            tiles.append(dataclasses.replace(tile, owner=owner))
    return tuple(tiles)


def _owner(tile: TileSpan, case: BenchCase, world_size: int, tile_rows: int) -> int:
    last_rows = itertools.accumulate(split_rows(case.m, world_size))
    return next((rank for rank, end in enumerate(last_rows) if tile.row * tile_rows < end), world_size - 1)


def merge(case: BenchCase, where: str, profiles: Sequence[RankProfile], world_size: int) -> list[Timeline]:
    """One timeline per strategy, in microseconds from when the first rank began."""
    timelines = []
    for number, call in enumerate(profiles[0].calls):
        calls = [each.calls[number] for each in profiles]
        zero = min(each.begin for each in calls)

        def since(time_ns: float, zero: float = zero) -> float:
            return (time_ns - zero) / 1e3

        ranks = tuple(
            RankTimeline(
                each.rank, each.num_units, tuple(_tile_since(tile, since) for tile in record.tiles), since(record.end)
            )
            for each, record in zip(profiles, calls, strict=True)
        )
        transfers = tuple(
            dataclasses.replace(transfer, begin=since(transfer.begin), end=since(transfer.end))
            for record in calls
            for transfer in record.transfers
        )
        timelines.append(
            Timeline(
                case.op, case.m, case.n, case.k, world_size, case.dtype, call.strategy, where,
                profiles[0].device_name, ranks, transfers, call.sums_tiles,
            )
        )  # fmt: skip
    return timelines


def _tile_since(tile: TileSpan, since: Callable[[float], float]) -> TileSpan:
    return dataclasses.replace(
        tile, begin=since(tile.begin), ready=since(tile.ready), computed=since(tile.computed),
        finished=since(tile.finished),
    )  # fmt: skip
