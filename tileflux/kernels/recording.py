"""Recording calls from inside their kernels: who computed which tile where, and when.

Within ``with recording() as recorder:`` this thread's launches of the GEMM write their tiles down, on the GPU and on
the CPU alike; ``recorder.launches()`` says what they wrote. Outside nothing is compiled in, and nothing is written.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from tileflux.config import MAX_CHUNKS, TRACE, GemmConfig
from tileflux.kernels.operands import Operands, Role
from tileflux.kernels.turns import Turn
from tileflux.perf.timeline import TileSpan, Transfer

__all__ = ["HostRecording", "Launch", "Recorder", "current_recorder", "recording", "reserve"]

_thread = threading.local()
_LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class Launch:
    """What one launch wrote: times in nanoseconds of the clock that all ranks of a machine's GPU, or CPU, share."""

    role: str
    tiles: tuple[TileSpan, ...]
    transfers: tuple[Transfer, ...]


@dataclass
class HostRecording:
    """Filled by the host's main loop while it runs."""

    role: str
    tiles: list[TileSpan] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)


@dataclass
class _DeviceRecording:
    role: str
    rank: int
    world_size: int
    chunk_bytes: tuple[int, ...]
    words: torch.Tensor


class Recorder:
    """The recordings of one thread's launches."""

    def __init__(self) -> None:
        self._recordings: list[HostRecording | _DeviceRecording] = []

    def add(self, recording: HostRecording | _DeviceRecording) -> None:
        """Keep a recording that is being made."""
        self._recordings.append(recording)

    def launches(self) -> list[Launch]:
        """What was recorded, launch by launch. Synchronises."""
        return [
            Launch(each.role, tuple(each.tiles), tuple(each.transfers))
            if isinstance(each, HostRecording)
            else _read(each)
            for each in self._recordings
        ]


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Record what this thread launches within the ``with`` block."""
    before = current_recorder()
    _thread.recorder = recorder = Recorder()
    try:
        yield recorder
    finally:
        _thread.recorder = before


def current_recorder() -> Recorder | None:
    """Who records this thread's launches, if anybody."""
    return getattr(_thread, "recorder", None)


def reserve(
    role: Role, operands: Operands, config: GemmConfig, turn: Turn | None, device: torch.device
) -> torch.Tensor | None:
    """Memory for a launch to write to, if it is to be recorded. Room for every step of the tile order."""
    recorder = current_recorder()
    if recorder is None:
        return None
    num_rows, num_shards, num_chunks, world_size, rank = len(operands.out), 1, 1, 1, 0
    chunk_bytes: tuple[int, ...] = ()
    if turn is not None:
        plan = turn.plan
        num_rows, num_chunks, world_size, rank = plan.chunk_rows, plan.num_chunks, len(plan.rows), turn.rank
        num_shards = world_size if role.is_sharded else 1
        row_bytes = operands.depth * operands.x.element_size()
        chunk_bytes = tuple(len(plan.chunk(rank, chunk)) * row_bytes for chunk in range(num_chunks))
    num_m = -(-num_rows // config.block_m) if operands.groups is None else operands.groups.max_tiles
    num_tiles = num_m * max(1, -(-operands.num_columns // config.block_n))
    num_words = TRACE.num_words(world_size, role.num_turns * num_shards * num_chunks * num_tiles)
    words = torch.zeros(num_words, dtype=torch.int64, device=device)
    recorder.add(_DeviceRecording(role.name, rank, world_size, chunk_bytes, words))
    return words


def _read(recording: _DeviceRecording) -> Launch:
    words = recording.words.cpu()
    first = TRACE.first_tile(recording.world_size)
    tiles = []
    for finished, begin, ready, computed, *pairs in words[first:].view(-1, TRACE.tile_words).tolist():
        if finished:
            (unit, program), (owner, chunk), (row, column), (turn, _) = ((pair & _LOW, pair >> 32) for pair in pairs)
            tiles.append(TileSpan(unit, program, owner, chunk, row, column, turn, begin, ready, computed, finished))
    transfers = []
    for place, (begin, end) in enumerate(words[:first].view(-1, 2).tolist()):
        if end:
            target, chunk = divmod(place, MAX_CHUNKS)
            transfers.append(Transfer(recording.rank, target, chunk, begin, end, recording.chunk_bytes[chunk]))
    return Launch(recording.role, tuple(tiles), tuple(transfers))
