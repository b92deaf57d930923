"""One call of a fused op, tile by tile: what the kernels recorded, in microseconds from the call's first event."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["RankTimeline", "Shares", "TileSpan", "Timeline", "Transfer", "place"]

_COMPUTING, _FINISHING, _WAITING = range(3)
"""What a unit does, the more useful first: a unit with several programs does the best of what they do."""


@dataclass(frozen=True)
class TileSpan:
    """One tile: where it ran, what it waited for, and when it passed from one state to the next."""

    unit: int
    """The SM it ran on; on the CPU 0, the rank's thread."""
    program: int
    owner: int
    """Whose rows these are (ag_gemm: who sent them; gemm_rs: to whom the tile goes)."""
    chunk: int
    row: int
    column: int
    """Numbers of the tile among the tiles of its chunk and among the column tiles."""
    turn: int
    """1 where a tile is only summed."""
    begin: float
    """It asked for what it waits for."""
    ready: float
    """What it waited for was there."""
    computed: float
    """Its product was in registers."""
    finished: float
    """It was stored, sent or summed."""

    @property
    def waited(self) -> float:
        """Microseconds spent waiting."""
        return self.ready - self.begin


@dataclass(frozen=True)
class Transfer:
    """A chunk on its way from one rank to another: sent from ``begin``, announced at ``end``."""

    source: int
    target: int
    chunk: int
    begin: float
    end: float
    nbytes: int


@dataclass(frozen=True)
class Shares:
    """What became of the time of a rank's units: each a share of all of it."""

    computing: float
    finishing: float
    waiting: float

    @property
    def idle(self) -> float:
        """No tile recorded: before the first, after the last, or on a unit that does something else, as feeders do."""
        return max(0.0, 1.0 - self.computing - self.finishing - self.waiting)


@dataclass(frozen=True)
class RankTimeline:
    """Everything one rank recorded."""

    rank: int
    num_units: int
    """SMs, or threads, that the call could use."""
    tiles: tuple[TileSpan, ...]
    end: float
    """The rank's call was over."""

    @property
    def units(self) -> tuple[int, ...]:
        """The numbers of its units. Those that recorded nothing have the lowest numbers that are free."""
        recorded = {tile.unit for tile in self.tiles}
        free = (unit for unit in range(self.num_units) if unit not in recorded)
        silent = [unit for unit, _ in zip(free, range(self.num_units - len(recorded)), strict=False)]
        return tuple(sorted([*recorded, *silent]))

    @property
    def first_tile(self) -> float | None:
        """When the first product began; None if there was none."""
        return min((tile.ready for tile in self.tiles if not tile.turn), default=None)

    def lanes(self) -> list[int]:
        """For every tile the lane of its unit: 0, and more only where programs share a unit at the same time."""
        lanes = [0] * len(self.tiles)
        ends: dict[int, list[float]] = defaultdict(list)
        for number, tile in sorted(enumerate(self.tiles), key=lambda item: item[1].begin):
            lanes[number] = place(ends[tile.unit], tile.begin, tile.finished)
        return lanes

    def shares(self) -> Shares:
        """What its units did from the call's first event to the rank's end."""
        return self.shares_over_time(1)[0]

    def shares_over_time(self, num_bins: int, end: float | None = None) -> tuple[Shares, ...]:
        """The same for ``num_bins`` equal parts of the time up to ``end``, which is the rank's own where not given."""
        end = self.end if end is None else end
        width = end / num_bins
        spent = [[0.0] * num_bins for _ in range(3)]
        for begin, until, state in self._states() if width > 0 else ():
            for number in range(max(0, int(begin / width)), min(num_bins, int(until / width) + 1)):
                overlap = min(until, (number + 1) * width) - max(begin, number * width)
                spent[state][number] += max(0.0, overlap)
        whole = width * len(self.units) or 1.0
        return tuple(
            Shares(spent[_COMPUTING][i] / whole, spent[_FINISHING][i] / whole, spent[_WAITING][i] / whole)
            for i in range(num_bins)
        )

    def waits(self) -> dict[tuple[int, int], float]:
        """Microseconds that all units together waited, by (owner, chunk) of the tile that had to wait."""
        waited: dict[tuple[int, int], float] = defaultdict(float)
        for tile in self.tiles:
            waited[tile.owner, tile.chunk] += tile.waited
        return dict(waited)

    def _states(self) -> Iterator[tuple[float, float, int]]:
        """(begin, end, state) of every unit, without overlaps."""
        tiles_of: dict[int, list[TileSpan]] = defaultdict(list)
        for tile in self.tiles:
            tiles_of[tile.unit].append(tile)
        for tiles in tiles_of.values():
            yield from _without_overlaps(tiles)


def _without_overlaps(tiles: Sequence[TileSpan]) -> Iterator[tuple[float, float, int]]:
    changes: list[tuple[float, int, int]] = []
    for tile in tiles:
        edges = (tile.begin, tile.ready, tile.computed, tile.finished)
        for state, begin, end in zip((_WAITING, _COMPUTING, _FINISHING), edges, edges[1:], strict=False):
            if end > begin:
                changes += [(begin, state, 1), (end, state, -1)]
    programs = [0, 0, 0]
    last = 0.0
    for time, state, change in sorted(changes):
        if time > last and any(programs):
            yield last, time, next(state for state in range(3) if programs[state])
        programs[state] += change
        last = time


def place(ends: list[float], begin: float, end: float) -> int:
    """The first lane that is free at ``begin``, taken until ``end``: ``ends`` says until when each lane is taken."""
    lane = next((lane for lane, taken in enumerate(ends) if taken <= begin), len(ends))
    ends[lane:] = [end, *ends[lane + 1 :]]
    return lane


@dataclass(frozen=True)
class Timeline:
    """One call of ``op`` by all recorded ranks (in a ghost world only one is real)."""

    op: str
    m: int
    n: int
    k: int
    world_size: int
    dtype: str
    strategy: str
    where: str
    device_name: str
    ranks: tuple[RankTimeline, ...]
    transfers: tuple[Transfer, ...]
    sums_tiles: bool = True
    """Whether tiles of one's own rows are summed as they are finished; otherwise by what comes behind the product."""

    @property
    def end(self) -> float:
        """Microseconds from the first event to the last rank's end."""
        return max((rank.end for rank in self.ranks), default=0.0)

    @property
    def unit_word(self) -> str:
        """What a unit is called."""
        return "SM" if any(rank.num_units > 1 for rank in self.ranks) else "thread"

    @property
    def sends_tiles(self) -> bool:
        """Whether finished tiles travel to their owner, as in gemm_rs; otherwise rows travel before they are needed."""
        return self.op.startswith("gemm_")

    def arrivals(self, rank: int) -> tuple[Transfer, ...]:
        """What came to ``rank``, in the order of arrival."""
        return tuple(sorted((t for t in self.transfers if t.target == rank), key=lambda t: (t.end, t.source, t.chunk)))

    def departures(self, rank: int) -> tuple[Transfer, ...]:
        """What ``rank`` sent, in the order of arrival."""
        return tuple(sorted((t for t in self.transfers if t.source == rank), key=lambda t: (t.end, t.target, t.chunk)))

    def shares(self) -> Shares:
        """What all units of all recorded ranks did up to the end of the last rank."""
        each = [(len(rank.units), rank.shares_over_time(1, self.end)[0]) for rank in self.ranks]
        num_units = sum(units for units, _ in each) or 1
        return Shares(
            sum(units * shares.computing for units, shares in each) / num_units,
            sum(units * shares.finishing for units, shares in each) / num_units,
            sum(units * shares.waiting for units, shares in each) / num_units,
        )
