"""Rows by expert: how the rows of a grouped product are sorted, and cut into tiles, on the device.

Nothing here is known to the host but sizes: who goes where stays on the device, so that a CUDA graph may be replayed
with other routings. On a GPU it is the work of kernels (``index.py``, ``lists.py``, ``choices.py``). What is here in
torch's own functions, with results of fixed sizes, is what the host does, and what tests compare the kernels with.

A *slot* is one choice of one token: token ``t``'s choice ``j`` is slot ``t * top_k + j``. Sorted rows are slots, in the
order of experts, and within an expert in that in which tokens arrive: this rank's own first, then those of the next
rank. So the first tiles of every expert can start early.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tileflux.config import GROUPS
from tileflux.kernels.choices import SUMMED, launch_choices
from tileflux.kernels.index import launch_route
from tileflux.kernels.launch import on_host
from tileflux.kernels.lists import launch_cut, launch_stages
from tileflux.symm.group import Group

__all__ = [
    "Groups",
    "SortedRows",
    "cut_counts",
    "cut_tiles",
    "max_tiles",
    "num_missing",
    "offsets_of",
    "route_rows",
    "sort_rows",
    "sources_of",
    "sum_choices",
]


@dataclass(frozen=True, eq=False)
class SortedRows:
    """Slots sorted by expert and by arrival. All tensors are int32, and on the device."""

    slots: torch.Tensor
    """``[capacity]``: which slot each row is. Beyond the last row, anything."""
    positions: torch.Tensor
    """``[num_slots]``: the row of each slot, or -1 if this rank has no such row."""
    starts: torch.Tensor
    """``[num_experts * num_stages + 1]``: where the rows of an expert that arrive at a stage begin; then the end."""
    num_experts: int
    num_stages: int
    own_offsets: torch.Tensor | None = None
    """``offsets``, where somebody has stored them beside each other."""

    @property
    def offsets(self) -> torch.Tensor:
        """``[num_experts + 1]``: where each expert's rows begin; then the end."""
        return self.starts[:: self.num_stages] if self.own_offsets is None else self.own_offsets


@dataclass(frozen=True, eq=False)
class Groups:
    """The rows of a grouped product as a kernel takes them."""

    index: torch.Tensor
    """int32, see ``config.GroupsLayout``: tiles in the order in which they are computed; and, if rows are those of
    tokens, the token of each sorted row, and the row and the weight of each choice of a token."""
    num_experts: int
    block_m: int
    capacity: int
    """Sorted rows that there is room for; how many there are is on the device."""
    num_tokens: int = 0
    top_k: int = 0
    picks_rows: bool = False
    """Rows of x are tokens, and picked; else they are sorted."""

    @property
    def max_tiles(self) -> int:
        """Room in the list."""
        return max_tiles(self.capacity, self.num_experts, self.block_m)

    @property
    def tokens(self) -> torch.Tensor:
        """``[capacity]``: the token of each sorted row."""
        return self._part(GROUPS.tiles + GROUPS.tile_words * self.max_tiles, self.capacity)

    @property
    def positions(self) -> torch.Tensor:
        """``[num_tokens, top_k]``: the sorted row of each choice, or -1 where there is none."""
        first = len(self.index) - 2 * self.num_tokens * self.top_k
        return self._part(first, self.num_tokens * self.top_k).view(self.num_tokens, self.top_k)

    @property
    def weights(self) -> torch.Tensor:
        """``[num_tokens, top_k]``: what each choice is multiplied with."""
        first = len(self.index) - self.num_tokens * self.top_k
        words = self._part(first, self.num_tokens * self.top_k)
        return words.view(torch.float32).view(self.num_tokens, self.top_k)

    def _part(self, first: int, count: int) -> torch.Tensor:
        return self.index[first : first + count]

    def of_stages(self, begin: int, end: int) -> Groups:
        """Those tiles alone whose last rows arrive at a stage from ``begin`` on, before ``end``.

        In the order of rows: tiles of one expert are beside each other, and read its weight together.
        """
        return self.by_stages([range(begin, end)])[0]

    def by_stages(self, bands: Sequence[range]) -> list[Groups]:
        """``of_stages`` of each of them."""
        if _by_kernels(self.index):
            lists = launch_stages(self.index, self.max_tiles, bands)
        else:
            lists = [self._taken_out(band) for band in bands]
        return [dataclasses.replace(self, index=index) for index in lists]

    def _taken_out(self, band: range) -> torch.Tensor:
        header, rest = self.index[: GROUPS.tiles].clone(), self.index[GROUPS.tiles :]
        tiles = rest[: GROUPS.tile_words * self.max_tiles].view(-1, GROUPS.tile_words)
        stages = tiles[:, GROUPS.stage]
        is_wanted = (stages >= band.start) & (stages < band.stop)
        header[GROUPS.num_tiles] = is_wanted.sum()
        # Others go behind them.
        behind = torch.iinfo(torch.int32).max
        wanted = tiles[torch.sort(torch.where(is_wanted, tiles[:, GROUPS.first], behind), stable=True).indices]
        return torch.cat((header, wanted.reshape(-1), rest[GROUPS.tile_words * self.max_tiles :]))


def route_rows(
    group: Group,
    packed: torch.Tensor,
    sizes: tuple[int, ...],
    experts: range,
    num_sets: int,
    capacity: int,
    block_m: int,
) -> tuple[SortedRows, Groups, torch.Tensor | None]:
    """Sort and cut what all ranks have chosen: ``packed [tokens, 2 top_k]``, int32, experts and the bits of weights.

    The last is, where rows may not fit, how many too many the set of experts with the most has: int64, on the device.
    """
    num_experts, num_tokens, top_k = len(experts), len(packed), packed.shape[1] // 2
    may_miss = capacity < num_tokens * top_k
    if not _by_kernels(packed):
        ids, bits = packed.split(top_k, dim=1)
        rows = sort_rows(ids, sources_of(sizes, group.rank, packed.device), experts, len(sizes), capacity)
        groups = cut_tiles(rows, capacity, block_m, bits.contiguous().view(torch.float32))
        return rows, groups, num_missing(ids, num_experts, num_sets, capacity) if may_miss else None
    packed = packed.contiguous()
    missing = torch.empty((), dtype=torch.int64, device=packed.device) if may_miss else None
    room = max_tiles(capacity, num_experts, block_m)
    index, slots, starts, offsets = launch_route(
        group, packed, sizes, experts, num_sets, capacity, block_m, room, missing
    )
    groups = Groups(index, num_experts, block_m, capacity, num_tokens, top_k, picks_rows=True)
    rows = SortedRows(slots, groups.positions.view(-1), starts, num_experts, len(sizes), offsets)
    return rows, groups, missing


def num_missing(ids: torch.Tensor, num_each: int, num_sets: int, capacity: int) -> torch.Tensor:
    """Rows too many of the set of ``num_each`` experts with the most. Not of one rank's: all come to the same end."""
    sets = torch.arange(num_sets, dtype=ids.dtype, device=ids.device)
    counts = (ids.div(num_each, rounding_mode="floor")[None] == sets[:, None, None]).sum((1, 2))
    return (counts.max() - capacity).clamp_(min=0)


def cut_counts(counts: torch.Tensor, num_rows: int, block_m: int) -> Groups:
    """Tiles of rows that are sorted already: ``counts`` of each expert; what is beyond ``num_rows`` is left out."""
    if _by_kernels(counts):
        room = max_tiles(num_rows, len(counts), block_m)
        return Groups(launch_cut(counts, num_rows, block_m, room), len(counts), block_m, num_rows)
    starts = offsets_of(counts, num_rows)
    nothing = starts[:0]
    return cut_tiles(SortedRows(nothing, nothing, starts, len(counts), 1), num_rows, block_m)


def offsets_of(counts: torch.Tensor, num_rows: int) -> torch.Tensor:
    """``[E + 1]``, int32: where the rows of each expert begin, of which there are ``counts``; then the end."""
    # Each by itself first: counts that are garbage must not add up to a negative number, which would be an address.
    ends = counts.clamp(0, num_rows).cumsum(0).clamp_(max=num_rows)
    return torch.cat((ends.new_zeros(1), ends)).to(torch.int32)


def _by_kernels(where: torch.Tensor) -> bool:
    return where.is_cuda or (where.device.type == "cpu" and not on_host(where))


_read_by_graphs: dict[tuple[tuple[int, ...], int, torch.device], torch.Tensor] = {}
"""A graph reads what it was captured with whenever it is replayed: these are never given back."""


def sources_of(num_tokens: tuple[int, ...], rank: int, device: torch.device) -> torch.Tensor:
    """``[sum of num_tokens]``: the stage at which each token arrives at ``rank``. Own tokens arrive at stage 0.

    Kept: it comes from the host, which a CUDA graph must not ask.
    """
    sources = _sources_of(num_tokens, rank, device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _read_by_graphs[num_tokens, rank, device] = sources
    return sources


@functools.lru_cache(maxsize=256)
def _sources_of(num_tokens: tuple[int, ...], rank: int, device: torch.device) -> torch.Tensor:
    world_size = len(num_tokens)
    stages = torch.tensor([(source - rank) % world_size for source in range(world_size)], dtype=torch.int32)
    return torch.repeat_interleave(stages, torch.tensor(num_tokens)).to(device)


def sort_rows(
    expert_ids: torch.Tensor, stages: torch.Tensor, experts: range, num_stages: int, capacity: int
) -> SortedRows:
    """Sort the slots of ``expert_ids [num_tokens, top_k]`` that choose one of ``experts``; ``stages`` is per token.

    Rows beyond ``capacity`` are left out, and their positions are -1. Slots of equal expert and stage stay in order.
    """
    num_tokens, top_k = expert_ids.shape
    num_keys = len(experts) * num_stages
    local = expert_ids.to(torch.int32) - experts.start
    is_here = (local >= 0) & (local < len(experts))
    keys = torch.where(is_here, local * num_stages + stages[:, None], num_keys).reshape(-1)
    in_order, slots = torch.sort(keys, stable=True)
    wanted = torch.arange(num_keys + 1, dtype=torch.int32, device=keys.device)
    starts = torch.searchsorted(in_order, wanted, out_int32=True).clamp_(max=capacity)
    rows = torch.arange(num_tokens * top_k, dtype=torch.int32, device=keys.device)
    rows = torch.where(rows < starts[-1], rows, -1)
    positions = torch.empty_like(rows).scatter_(0, slots, rows)
    room = torch.zeros(capacity, dtype=torch.int32, device=keys.device)
    room[: slots.numel()] = slots[:capacity]
    return SortedRows(room, positions, starts, len(experts), num_stages)


def max_tiles(capacity: int, num_experts: int, block_m: int) -> int:
    """Tiles of ``block_m`` rows that ``capacity`` rows have at most, however they are shared out among experts."""
    return -(-capacity // block_m) + min(num_experts, capacity)


def cut_tiles(rows: SortedRows, capacity: int, block_m: int, weights: torch.Tensor | None = None) -> Groups:
    """Cut each expert's rows into tiles, those that can start early first.

    Of one stage, tiles are in the order of experts, and those of an expert beside each other: they share its weight.
    With ``weights [num_tokens, top_k]`` rows are those of tokens: they are picked, and can be added up by token again.
    """
    num_experts, num_stages = rows.num_experts, rows.num_stages
    room = max_tiles(capacity, num_experts, block_m)
    device, offsets = rows.starts.device, rows.offsets
    counts = (offsets.diff() + (block_m - 1)).div_(block_m, rounding_mode="floor")
    ends = counts.cumsum(0, dtype=torch.int32)
    number = torch.arange(room, dtype=torch.int32, device=device)
    expert = torch.searchsorted(ends, number, right=True, out_int32=True).clamp_(max=num_experts - 1)
    first = offsets[expert] + (number - (ends - counts)[expert]) * block_m
    end = offsets[expert + 1]
    # The last row of a tile is the last to arrive; what arrives at one stage begins at one of ``starts``.
    last = torch.minimum(first + block_m, end) - 1
    stage = torch.searchsorted(rows.starts, last, right=True, out_int32=True) - 1 - expert * num_stages
    stage = torch.where(number < ends[-1], stage, num_stages)
    tiles = torch.stack((expert, first, end, stage), dim=1)[torch.sort(stage, stable=True).indices]
    parts = [tiles.reshape(-1)]
    places = [0] * GROUPS.tiles
    num_tokens, top_k = (0, 0) if weights is None else weights.shape
    if weights is not None:
        places[GROUPS.top_k] = top_k
        parts += [rows.slots // max(1, top_k), rows.positions, weights.reshape(-1).view(torch.int32)]
        place = GROUPS.tiles
        for name, part in zip(("rows", "positions", "weights"), parts, strict=False):
            place += part.numel()
            places[getattr(GROUPS, name)] = place
    header = _constant(tuple(places), device).clone()
    header[GROUPS.num_tiles] = ends[-1]
    index = torch.cat((header, *parts))
    return Groups(index, num_experts, block_m, capacity, num_tokens, top_k, picks_rows=weights is not None)


@functools.lru_cache(maxsize=256)
def _constant(words: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Kept, as ``sources_of``."""
    return torch.tensor(words, dtype=torch.int32).to(device)


def sum_choices(
    rows: torch.Tensor,
    positions: torch.Tensor,
    weights: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[num_tokens, ...]``: the rows at each token's ``positions [num_tokens, top_k]``, weighted, added up in fp32.

    In the order of choices; those that are not here are left out. The sum is rounded to ``dtype``, or goes into
    ``out``, which is contiguous and of that type.
    """
    records = torch.is_grad_enabled() and (rows.requires_grad or (weights is not None and weights.requires_grad))
    if not records and rows.dtype in SUMMED and dtype in SUMMED and _by_kernels(rows):
        return launch_choices(rows, positions, weights, dtype, out)
    total = torch.zeros((len(positions), *rows.shape[1:]), dtype=torch.float32, device=rows.device)
    for choice in range(positions.shape[1] if len(rows) else 0):
        place = positions[:, choice]
        value = rows[place.clamp(min=0).long()].float()
        if weights is not None:
            value = value * weights[:, choice, None]
        total += torch.where((place >= 0)[:, None], value, 0)
    return total.to(dtype) if out is None else out.copy_(total)
