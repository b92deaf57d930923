"""The list of tiles of a grouped product, made by kernels: the device's twin of ``cut_tiles`` in ``kernels/groups.py``.

Programs make a part of the list each. A part begins at a place that the host knows; which tiles belong there, every
program finds out from the experts' numbers of tiles.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tileflux.config import GROUPS
from tileflux.kernels.loading import launching_on, load_once
from tileflux.kernels.prepared import launch_step
from tileflux.lang.remote import typed
from tileflux.symm.group import Group

__all__ = [
    "INTEGERS",
    "TILES",
    "end_list",
    "launch_cut",
    "launch_stages",
    "list_stage",
    "load_stages",
    "num_parts",
    "padded",
    "store_header",
]

TILES = 16
"""Entries of the list that one program finds: each is compared with the ends of all experts."""
INTEGERS = {torch.int32: tl.int32, torch.int64: tl.int64}
_COPY = 1024
_MOVED = 64
_ALIGNED = 32  # words, 128 bytes: what a list begins at
_NUM_WARPS = 8
_MIN_EXPERTS = 32

_HEADER_TOP_K, _HEADER_ROWS = tl.constexpr(GROUPS.top_k), tl.constexpr(GROUPS.rows)
_HEADER_POSITIONS, _HEADER_WEIGHTS = tl.constexpr(GROUPS.positions), tl.constexpr(GROUPS.weights)
_HEADER_NUM_TILES = tl.constexpr(GROUPS.num_tiles)
_TILES_BEGIN, _TILE_WORDS = tl.constexpr(GROUPS.tiles), tl.constexpr(GROUPS.tile_words)
_EXPERT, _FIRST = tl.constexpr(GROUPS.expert), tl.constexpr(GROUPS.first)
_END, _STAGE = tl.constexpr(GROUPS.end), tl.constexpr(GROUPS.stage)


def launch_cut(counts: torch.Tensor, num_rows: int, block_m: int, max_tiles: int) -> torch.Tensor:
    """The list of tiles of rows that are sorted already, ``counts`` of each expert, together at most ``num_rows``."""
    num_words = GROUPS.tiles + GROUPS.tile_words * max_tiles
    index = torch.empty(num_words, dtype=torch.int32, device=counts.device)
    constants = (INTEGERS[counts.dtype], padded(len(counts)), TILES)
    arguments = (counts.data_ptr(), counts.stride(0), len(counts), num_rows, block_m, index)
    launch = functools.partial(launch_step, _cut_kernel)
    load_once(counts.device, ("cut", *constants), lambda: launch(0, arguments, constants, _NUM_WARPS))
    with launching_on(counts.device):
        launch(num_parts(max_tiles), arguments, constants, _NUM_WARPS)
    return index


def launch_stages(index: torch.Tensor, max_tiles: int, bands: Sequence[range]) -> list[torch.Tensor]:
    """For each band the list with the tiles of its stages first, and their number in place of all's.

    These are in the order of their rows, so that tiles of one expert are beside each other. Lists are made in one
    launch, up to 8 of them: what multiplies the first waits for all, and one launch takes no longer than another.
    """
    load_stages(index)
    num_programs = max(-(-len(index) // _COPY), -(-max_tiles // _MOVED))
    pitch = -(-len(index) // _ALIGNED) * _ALIGNED
    results = index.new_empty((len(bands), pitch))
    bits = 8 if all(band.stop < 256 for band in bands) else 32
    with launching_on(index.device):
        for first in range(0, len(bands), 64 // bits):
            some = bands[first : first + 64 // bits]
            begins, ends = (_packed(numbers, bits) for numbers in zip(*((b.start, b.stop) for b in some), strict=True))
            size = (len(index), max_tiles)
            arguments = (index.data_ptr(), *size, begins, ends, bits, num_programs, pitch, results[first:])
            launch_step(_stages_kernel, num_programs * len(some), arguments, (_COPY, _MOVED), _NUM_WARPS)
    return [result[: len(index)] for result in results]


def _packed(numbers: Sequence[int], bits: int) -> int:
    """Numbers beside each other in one of 64 bits: the host has no other way to hand some over without memory."""
    total = sum(number << (place * bits) for place, number in enumerate(numbers))
    return total - (1 << 64) if total >> 63 else total


def load_stages(where: torch.Tensor, group: Group | None = None) -> None:
    """Load what ``launch_stages`` launches; ``where``, int32, is any tensor of the device."""

    def load() -> None:
        launch_step(_stages_kernel, 0, (0, 0, 0, 0, 0, 8, 1, 0, where), (_COPY, _MOVED), _NUM_WARPS)

    load_once(where.device, "stages of tiles", load, group)


def num_parts(max_tiles: int) -> int:
    """Programs that make a list; one at least, for its header."""
    return max(1, -(-max_tiles // TILES))


def padded(num_experts: int) -> int:
    """Experts as a program has them: few sizes, so that there are few variants."""
    return max(_MIN_EXPERTS, triton.next_power_of_2(num_experts))


@triton.jit
def list_stage(
    index_ptr, number, listed, stage, before, after, begins, sizes, block_m, EXPERTS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Of each expert the tiles from ``before`` up to ``after``, behind the ``listed`` ones; returns how many are."""
    ends = listed + tl.cumsum(after - before, 0)
    end = listed + tl.sum(after - before, 0)
    if (number * TILES < end) & ((number + 1) * TILES > listed):
        places = number * TILES + tl.arange(0, TILES)
        expert = tl.sum((ends[None, :] <= places[:, None]).to(tl.int32), 1)
        expert = tl.minimum(expert, EXPERTS - 1)
        tile = places - tl.gather(ends - after, expert, 0)
        first = tl.gather(begins, expert, 0)
        is_listed = (places >= listed) & (places < end)
        _store_tiles(
            index_ptr, places, expert, first + tile * block_m, first + tl.gather(sizes, expert, 0), stage, is_listed
        )
    return end


@triton.jit
def end_list(
    index_ptr, number, listed, begins, sizes, num_experts, block_m, max_tiles, NUM_STAGES: tl.constexpr,
    EXPERTS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Behind the last tile, as if the last expert had more: tiles that are nobody's, of no stage."""
    places = number * TILES + tl.arange(0, TILES)
    is_last = tl.arange(0, EXPERTS) == num_experts - 1
    begin = tl.sum(tl.where(is_last, begins, 0), 0)
    size = tl.sum(tl.where(is_last, sizes, 0), 0)
    first = begin + (places - listed + tl.cdiv(size, block_m)) * block_m
    expert = places * 0 + num_experts - 1
    stage = number * 0 + NUM_STAGES
    is_behind = (places >= listed) & (places < max_tiles)
    _store_tiles(index_ptr, places, expert, first, places * 0 + begin + size, stage, is_behind)


@triton.jit
def _store_tiles(index_ptr, places, expert, first, end, stage, mask):
    tile = index_ptr + _TILES_BEGIN + _TILE_WORDS * places
    tl.store(tile + _EXPERT, expert, mask=mask)
    tl.store(tile + _FIRST, first, mask=mask)
    tl.store(tile + _END, end, mask=mask)
    tl.store(tile + _STAGE, places * 0 + stage, mask=mask)


@triton.jit
def store_header(index_ptr, num_tiles, places):
    top_k, rows, positions, weights = places
    words = tl.arange(0, _TILES_BEGIN)
    value = tl.where(words == _HEADER_NUM_TILES, num_tiles, 0)
    value = tl.where(words == _HEADER_TOP_K, top_k, value)
    value = tl.where(words == _HEADER_ROWS, rows, value)
    value = tl.where(words == _HEADER_POSITIONS, positions, value)
    tl.store(index_ptr + words, tl.where(words == _HEADER_WEIGHTS, weights, value))


@triton.jit(do_not_specialize=("counts", "stride", "num_experts", "num_rows", "block_m", "index_ptr"))
def _cut_kernel(
    counts: tl.int64,
    stride: tl.int64,
    num_experts: tl.int32,
    num_rows: tl.int32,
    block_m: tl.int32,
    index_ptr,
    COUNT: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILES: tl.constexpr,
):
    """The list of tiles of sorted rows, of one stage."""
    number = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    own = tl.load(typed(counts, COUNT, False) + experts * stride, mask=experts < num_experts, other=0)
    # Each by itself first: counts that are garbage must not add up to a negative number, which would be an address.
    own = tl.minimum(tl.maximum(own, 0), num_rows).to(tl.int64)
    ends = tl.cumsum(own, 0)
    begins = tl.minimum(ends - own, num_rows).to(tl.int32)
    sizes = tl.minimum(ends, num_rows).to(tl.int32) - begins
    num_tiles = tl.cdiv(sizes, block_m)
    nothing = number * 0
    listed = list_stage(
        index_ptr, number, nothing, nothing, num_tiles * 0, num_tiles, begins, sizes, block_m, EXPERTS, TILES
    )
    max_tiles = tl.cdiv(num_rows, block_m) + tl.minimum(num_experts, num_rows)
    end_list(index_ptr, number, listed, begins, sizes, num_experts, block_m, max_tiles, 1, EXPERTS, TILES)
    if number == 0:
        store_header(index_ptr, listed, (nothing, nothing, nothing, nothing))


@triton.jit
def _find_tiles(index_ptr, tiles, max_tiles, begin, end):
    """(first row, whether it is of a stage from ``begin`` on, before ``end``) of tiles, of which some are none."""
    inside = tiles < max_tiles
    tile = index_ptr + _TILES_BEGIN + _TILE_WORDS * tiles
    stage = tl.load(tile + _STAGE, mask=inside, other=0)
    return tl.load(tile + _FIRST, mask=inside, other=0), inside & (stage >= begin) & (stage < end)


@triton.jit
def _unpacked(numbers, place, bits):
    """One of those that ``_packed`` has packed."""
    one = bits.to(tl.int64) * 0 + 1
    return ((numbers >> (place * bits).to(tl.int64)) & ((one << bits.to(tl.int64)) - 1)).to(tl.int32)


@triton.jit(
    do_not_specialize=(
        "index", "num_words", "max_tiles", "begins", "ends", "bits", "num_programs", "pitch", "results_ptr",
    )
)  # fmt: skip
def _stages_kernel(
    index: tl.int64,
    num_words: tl.int32,
    max_tiles: tl.int32,
    begins: tl.int64,
    ends: tl.int64,
    bits: tl.int32,
    num_programs: tl.int32,
    pitch: tl.int32,
    results_ptr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """Copy the list; tiles of some stages go first, in the order of their rows, and the others behind, as they were.

    That is done once for each band of stages, by ``num_programs`` each. ``begins`` and ``ends`` have ``bits`` for one.
    """
    source = typed(index, tl.int32, False)
    band = tl.program_id(0) // num_programs
    program = tl.program_id(0) % num_programs
    result_ptr = results_ptr + band.to(tl.int64) * pitch
    begin = _unpacked(begins, band, bits)
    end = _unpacked(ends, band, bits)
    words = program * BLOCK + tl.arange(0, BLOCK)
    is_tile = (words >= _TILES_BEGIN) & (words < _TILES_BEGIN + _TILE_WORDS * max_tiles)
    value = tl.load(source + words, mask=words < num_words, other=0)
    tl.store(result_ptr + words, value, mask=(words < num_words) & (is_tile == 0) & (words != _HEADER_NUM_TILES))
    count = program * 0
    for some in range(0, max_tiles, BLOCK):
        _, are_counted = _find_tiles(source, some + tl.arange(0, BLOCK), max_tiles, begin, end)
        count += tl.sum(are_counted.to(tl.int32), 0)
    if program == 0:
        tl.store(result_ptr + _HEADER_NUM_TILES, count)
    for first in range(program * TILES, max_tiles, num_programs * TILES):
        tiles = first + tl.arange(0, TILES)
        row, is_wanted = _find_tiles(source, tiles, max_tiles, begin, end)
        place = tl.zeros((TILES,), tl.int32)
        for others in range(0, max_tiles, TILES):
            theirs = others + tl.arange(0, TILES)
            their_row, are_wanted = _find_tiles(source, theirs, max_tiles, begin, end)
            earlier = theirs[None, :] < tiles[:, None]
            by_row = (their_row[None, :] < row[:, None]) | ((their_row[None, :] == row[:, None]) & earlier)
            goes_before = tl.where(is_wanted[:, None], are_wanted[None, :] & by_row, are_wanted[None, :] | earlier)
            place += tl.sum((goes_before & (theirs < max_tiles)[None, :]).to(tl.int32), 1)
        for word in tl.static_range(_TILE_WORDS):
            moved = tl.load(source + _TILES_BEGIN + _TILE_WORDS * tiles + word, mask=tiles < max_tiles, other=0)
            tl.store(result_ptr + _TILES_BEGIN + _TILE_WORDS * place + word, moved, mask=tiles < max_tiles)
