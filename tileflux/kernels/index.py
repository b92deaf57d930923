"""Rows by expert, worked out by kernels: what ``kernels/groups.py`` says in torch's functions, in a few launches.

A counting sort. Choices are looked at in blocks, in the order in which tokens arrive: this rank's own, then the next
rank's. Sorted by expert alone, without changing that order within an expert, they are in the order wanted. One launch
counts each block's choices by expert, a second adds the counts up over blocks, and in the third every block knows
where its rows go. No block has choices of two ranks: counts at the beginning of a rank's first block say where the
expert's rows of that stage begin, and with it how many of its tiles come before.

Grids depend on shapes alone, and nothing synchronises. Kernels take addresses (docs/decisions/0003); their variants are
by number of ranks, by number of experts in powers of two, and by types.
"""

import functools
import itertools
import weakref

import torch
import triton
import triton.language as tl

from tileflux.config import GROUPS
from tileflux.kernels.launch import DeviceTables, on_host
from tileflux.kernels.lists import INTEGERS, TILES, end_list, list_stage, load_stages, num_parts, padded, store_header
from tileflux.kernels.loading import launching, load_once
from tileflux.kernels.prepared import launch_step
from tileflux.lang.remote import typed
from tileflux.symm.group import Group

__all__ = ["WEIGHT_TYPES", "chosen", "launch_pack", "launch_route", "load_route", "num_before"]

_BLOCK = 256
"""Choices that one program places: each is compared with all before it."""
_SCAN_ROWS, _SCAN_COLUMNS = 128, 16
_COPY = 1024
_NUM_WARPS = 8

WEIGHT_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

_TILES_BEGIN, _TILE_WORDS = tl.constexpr(GROUPS.tiles), tl.constexpr(GROUPS.tile_words)

_tables: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def launch_pack(group: Group, expert_ids: torch.Tensor, weights: torch.Tensor, num_experts: int) -> torch.Tensor:
    """``[tokens, 2 k]``, int32: choices, with -1 or ``num_experts`` for those that are nobody's; then weights' bits."""
    num_tokens, top_k = expert_ids.shape
    weights = weights.detach().resolve_neg()
    if weights.dtype not in WEIGHT_TYPES:
        weights = weights.float()
    packed = torch.empty((num_tokens, 2 * top_k), dtype=torch.int32, device=expert_ids.device)
    arguments = (
        expert_ids.data_ptr(), weights.data_ptr(), *expert_ids.stride(), *weights.stride(),
        expert_ids.numel(), top_k, num_experts, packed,
    )  # fmt: skip
    with launching(group):
        _pack(-(-expert_ids.numel() // _COPY), arguments, expert_ids.dtype, weights.dtype)
    return packed


def launch_route(
    group: Group,
    packed: torch.Tensor,
    sizes: tuple[int, ...],
    experts: range,
    num_sets: int,
    capacity: int,
    block_m: int,
    max_tiles: int,
    missing: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """(index, slots, starts, offsets), all int32, of all ranks' packed choices: see ``Groups`` and ``SortedRows``.

    ``missing``, int64, gets the number of rows too many of the set of ``len(experts)`` experts that has the most.
    """
    num_experts, top_k, num_slots = len(experts), packed.shape[1] // 2, packed.numel() // 2
    num_blocks, stages = _stages(group, sizes, top_k)
    num_columns = num_experts + num_sets
    counts = torch.empty((num_blocks + 1, num_columns), dtype=torch.int32, device=packed.device)
    num_words = GROUPS.tiles + GROUPS.tile_words * max_tiles + capacity + 2 * num_slots
    parts = (capacity, num_experts * group.world_size + 1, num_experts + 1)
    # The index has memory of its own: ops take it and offsets, and a compiler would ask whether they overlap.
    index = torch.empty(num_words, dtype=torch.int32, device=packed.device)
    results = (index, *torch.empty(sum(parts), dtype=torch.int32, device=packed.device).split(parts))
    constants = (group.world_size, padded(num_experts), _BLOCK)
    addresses = (packed.data_ptr(), counts.data_ptr())
    with launching(group):
        _count(num_blocks, (*addresses, top_k, experts.start, num_experts, num_sets, stages), constants)
        _scan(-(-num_columns // _SCAN_COLUMNS), (num_blocks, num_columns, counts))
        arguments = (
            *addresses, *(part.data_ptr() for part in results), 0 if missing is None else missing.data_ptr(),
            top_k, experts.start, num_experts, num_sets, num_blocks, num_slots, capacity, block_m, stages,
        )  # fmt: skip
        _place(num_blocks + num_parts(max_tiles), arguments, constants)
    return results


def load_route(
    group: Group, sizes: tuple[int, ...], num_experts: int, expert_ids: torch.Tensor, weights: torch.Tensor
) -> None:
    """What must not happen later: loading, and telling the device how many tokens each rank has."""
    if on_host(group):
        return
    constants = (group.world_size, padded(num_experts), _BLOCK)
    kind = weights.dtype if weights.dtype in WEIGHT_TYPES else torch.float32
    table = group.guard.table  # any of the device
    words = table.view(torch.int32)

    def load() -> None:
        _pack(0, (*[0] * 9, words), expert_ids.dtype, kind)
        _count(0, (*[0] * 6, table), constants)
        _scan(0, (0, 0, words))
        _place(0, (*[0] * 15, table), constants)

    load_once(group.device, ("route", *constants, expert_ids.dtype, kind), load, group)
    load_stages(words, group)
    _stages(group, sizes, expert_ids.shape[1])


def _pack(grid, arguments, id_type, weight_type):
    launch_step(_pack_kernel, grid, arguments, (INTEGERS[id_type], WEIGHT_TYPES[weight_type], _COPY), _NUM_WARPS)


def _count(grid, arguments, constants):
    launch_step(_count_kernel, grid, arguments, constants, _NUM_WARPS)


def _scan(grid, arguments):
    launch_step(_scan_kernel, grid, arguments, (_SCAN_ROWS, _SCAN_COLUMNS), _NUM_WARPS)


def _place(grid, arguments, constants):
    launch_step(_place_kernel, grid, arguments, (*constants, TILES), _NUM_WARPS)


def _stages(group: Group, sizes: tuple[int, ...], top_k: int) -> tuple[int, torch.Tensor]:
    """Blocks of all stages, and a device table: the first block of each and the end, first slots, ends of slots."""
    words = _stage_words(sizes, group.rank, top_k, _BLOCK)
    tables = _tables.get(group)
    if tables is None:
        tables = _tables[group] = DeviceTables(group.device, len(words))
    return words[len(sizes)], tables.find(words, lambda: words)


@functools.lru_cache(maxsize=256)
def _stage_words(sizes: tuple[int, ...], rank: int, top_k: int, block: int) -> tuple[int, ...]:
    ends = [top_k * tokens for tokens in itertools.accumulate(sizes)]
    sources = [(rank + hop) % len(sizes) for hop in range(len(sizes))]
    firsts = [ends[source] - top_k * sizes[source] for source in sources]
    num_blocks = [-(-top_k * sizes[source] // block) for source in sources]
    return (0, *itertools.accumulate(num_blocks), *firsts, *(ends[source] for source in sources))


@triton.jit(
    do_not_specialize=(
        "ids", "weights", "ids_row", "ids_column", "weights_row", "weights_column", "num_slots", "top_k",
        "num_experts", "packed_ptr",
    )
)  # fmt: skip
def _pack_kernel(
    ids: tl.int64,
    weights: tl.int64,
    ids_row: tl.int64,
    ids_column: tl.int64,
    weights_row: tl.int64,
    weights_column: tl.int64,
    num_slots: tl.int32,
    top_k: tl.int32,
    num_experts: tl.int32,
    packed_ptr,
    ID: tl.constexpr,
    WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slots < num_slots
    token = (slots // top_k).to(tl.int64)
    choice = slots % top_k
    chosen = tl.load(typed(ids, ID, False) + token * ids_row + choice * ids_column, mask=inside, other=0)
    # Clamped before it is cut: in 32 bits a number that is no expert's might become that of one.
    chosen = tl.minimum(tl.maximum(chosen, -1), num_experts).to(tl.int32)
    share = typed(weights, WEIGHT, False) + token * weights_row + choice * weights_column
    bits = tl.load(share, mask=inside, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
    to = packed_ptr + token * (2 * top_k) + choice
    tl.store(to, chosen, mask=inside)
    tl.store(to + top_k, bits, mask=inside)


@triton.jit
def _block_of(block, stages_ptr, WORLD: tl.constexpr):
    """(first slot of a block, end of the slots of its stage)."""
    hop = tl.arange(0, triton.next_power_of_2(WORLD))
    ends = tl.load(stages_ptr + 1 + hop, mask=hop < WORLD, other=0)
    stage = tl.sum(((ends <= block) & (hop < WORLD)).to(tl.int32), 0)
    begin = block - tl.load(stages_ptr + stage)
    first = tl.load(stages_ptr + WORLD + 1 + stage)
    return begin.to(tl.int32), first.to(tl.int32), tl.load(stages_ptr + 2 * WORLD + 1 + stage).to(tl.int32)


@triton.jit
def chosen(packed, pitch, slots, end, top_k):
    """The experts of slots before ``end``; of others -1. ``pitch``: words of a token."""
    at = (slots // top_k).to(tl.int64) * pitch + slots % top_k
    return tl.load(typed(packed, tl.int32, False) + at, mask=slots < end, other=-1)


@triton.jit
def num_before(packed, pitch, ids, first, end, top_k, BLOCK: tl.constexpr):
    """Of each of a block's choices ``ids``, how many before it in the block are of the same expert."""
    PART: tl.constexpr = 32
    lanes = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, BLOCK, PART):
        others = begin + tl.arange(0, PART)
        theirs = chosen(packed, pitch, first + others, end, top_k)
        is_before = (theirs[None, :] == ids[:, None]) & (others[None, :] < lanes[:, None])
        before += tl.sum(is_before.to(tl.int32), 1)
    return before


@triton.jit(do_not_specialize=("packed", "counts", "top_k", "first_expert", "num_experts", "num_sets", "stages_ptr"))
def _count_kernel(
    packed: tl.int64,
    counts: tl.int64,
    top_k: tl.int32,
    first_expert: tl.int32,
    num_experts: tl.int32,
    num_sets: tl.int32,
    stages_ptr,
    WORLD: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of each block, choices of each of this rank's experts; then those of each set of experts, whosever it is."""
    block = tl.program_id(0)
    number, first, end = _block_of(block, stages_ptr, WORLD)
    slots = first + number * BLOCK + tl.arange(0, BLOCK)
    ids = chosen(packed, 2 * top_k, slots, end, top_k)
    local = ids - first_expert
    row = typed(counts, tl.int32, False) + block.to(tl.int64) * (num_experts + num_sets)
    experts = tl.arange(0, EXPERTS)
    is_here = (local >= 0) & (local < num_experts)
    tl.store(row + experts, tl.histogram(local, EXPERTS, mask=is_here), mask=experts < num_experts)
    sets = tl.arange(0, triton.next_power_of_2(WORLD))
    of_set = tl.where(ids >= 0, ids // num_experts, -1)
    in_set = tl.sum((of_set[:, None] == sets[None, :]).to(tl.int32), 0)
    tl.store(row + num_experts + sets, in_set, mask=sets < num_sets)


@triton.jit(do_not_specialize=("num_blocks", "num_columns", "counts_ptr"))
def _scan_kernel(num_blocks: tl.int32, num_columns: tl.int32, counts_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Replace each block's counts by what comes before it; behind the last block, by all."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.int32)
    for begin in range(0, num_blocks, ROWS):
        rows = begin + tl.arange(0, ROWS)
        at = counts_ptr + rows[:, None].to(tl.int64) * num_columns + columns[None, :]
        inside = (rows < num_blocks)[:, None] & (columns < num_columns)[None, :]
        values = tl.load(at, mask=inside, other=0)
        tl.store(at, total[None, :] + tl.cumsum(values, 0) - values, mask=inside)
        total += tl.sum(values, 0)
    tl.store(counts_ptr + num_blocks.to(tl.int64) * num_columns + columns, total, mask=columns < num_columns)


@triton.jit(
    do_not_specialize=(
        "packed", "counts", "index", "slots", "starts", "offsets", "missing", "top_k", "first_expert", "num_experts",
        "num_sets", "num_blocks", "num_slots", "capacity", "block_m", "stages_ptr",
    )
)  # fmt: skip
def _place_kernel(
    packed: tl.int64,
    counts: tl.int64,
    index: tl.int64,
    slots: tl.int64,
    starts: tl.int64,
    offsets: tl.int64,
    missing: tl.int64,
    top_k: tl.int32,
    first_expert: tl.int32,
    num_experts: tl.int32,
    num_sets: tl.int32,
    num_blocks: tl.int32,
    num_slots: tl.int32,
    capacity: tl.int32,
    block_m: tl.int32,
    stages_ptr,
    WORLD: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """First programs place the rows of a block each, others make a part of the list of tiles each."""
    program = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    counts_ptr = typed(counts, tl.int32, False)
    num_columns = num_experts + num_sets
    last_row = counts_ptr + num_blocks.to(tl.int64) * num_columns
    totals = tl.load(last_row + experts, mask=experts < num_experts, other=0)
    firsts = tl.cumsum(totals, 0) - totals
    num_rows = tl.minimum(tl.sum(totals, 0), capacity)
    max_tiles = tl.cdiv(capacity, block_m) + tl.minimum(num_experts, capacity)
    index_ptr = typed(index, tl.int32, False)
    slots_ptr = typed(slots, tl.int32, False)
    tokens_begin = _TILES_BEGIN + _TILE_WORDS * max_tiles
    positions_begin = tokens_begin + capacity
    weights_begin = positions_begin + num_slots
    if program < num_blocks:
        number, first, end = _block_of(program, stages_ptr, WORLD)
        of_block = counts_ptr + program.to(tl.int64) * num_columns
        _place_rows(
            packed, of_block, firsts, index_ptr + tokens_begin, index_ptr + positions_begin,
            index_ptr + weights_begin, slots_ptr, first + number * BLOCK, end, top_k, first_expert, num_experts,
            capacity, BLOCK,
        )  # fmt: skip
    else:
        number = program - num_blocks
        begins = tl.minimum(firsts, capacity)
        sizes = tl.minimum(firsts + totals, capacity) - begins
        listed = _list_stages(
            index_ptr, starts, counts_ptr, number, firsts, begins, sizes, num_experts, num_columns, capacity, block_m,
            stages_ptr, WORLD, EXPERTS, TILES,
        )  # fmt: skip
        end_list(index_ptr, number, listed, begins, sizes, num_experts, block_m, max_tiles, WORLD, EXPERTS, TILES)
        if number == 0:
            header = (top_k, tokens_begin, positions_begin, weights_begin)
            store_header(index_ptr, listed, header)
            offsets_ptr = typed(offsets, tl.int32, False)
            tl.store(offsets_ptr + experts, begins, mask=experts < num_experts)
            tl.store(offsets_ptr + num_experts, num_rows)
            tl.store(typed(starts, tl.int32, False) + num_experts * WORLD, num_rows)
            if missing != 0:
                sets = tl.arange(0, triton.next_power_of_2(WORLD))
                of_sets = tl.load(last_row + num_experts + sets, mask=sets < num_sets, other=0)
                tl.store(typed(missing, tl.int64, False), tl.maximum(tl.max(of_sets, 0) - capacity, 0).to(tl.int64))
    # Behind the last row kernels may look, and must find numbers of tokens.
    for begin in range(program * BLOCK, capacity, tl.num_programs(0) * BLOCK):
        rows = begin + tl.arange(0, BLOCK)
        is_free = (rows >= num_rows) & (rows < capacity)
        nothing = tl.zeros((BLOCK,), tl.int32)
        tl.store(slots_ptr + rows, nothing, mask=is_free)
        tl.store(index_ptr + tokens_begin + rows, nothing, mask=is_free)


@triton.jit
def _place_rows(
    packed, of_block, firsts, tokens_ptr, positions_ptr, weights_ptr, slots_ptr, first, end, top_k, first_expert,
    num_experts, capacity, BLOCK: tl.constexpr,
):  # fmt: skip
    """The rows of a block's choices: behind those of earlier blocks, and of earlier choices of the same expert."""
    slots = first + tl.arange(0, BLOCK)
    ids = chosen(packed, 2 * top_k, slots, end, top_k)
    before = num_before(packed, 2 * top_k, ids, first, end, top_k, BLOCK)
    local = ids - first_expert
    is_here = (local >= 0) & (local < num_experts)
    expert = tl.where(is_here, local, 0)
    rows = tl.gather(firsts, expert, 0) + tl.load(of_block + expert) + before
    fits = is_here & (rows < capacity)
    token = slots // top_k
    tl.store(slots_ptr + rows, slots, mask=fits)
    tl.store(tokens_ptr + rows, token, mask=fits)
    tl.store(positions_ptr + slots, tl.where(fits, rows, -1), mask=slots < end)
    at = typed(packed, tl.int32, False) + token.to(tl.int64) * (2 * top_k) + top_k + slots % top_k
    tl.store(weights_ptr + slots, tl.load(at, mask=slots < end, other=0), mask=slots < end)


@triton.jit
def _list_stages(
    index_ptr, starts, counts_ptr, number, firsts, begins, sizes, num_experts, num_columns, capacity, block_m,
    stages_ptr, WORLD: tl.constexpr, EXPERTS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The ``number``-th part of the list, stage by stage; returns how many tiles there are. First part: ``starts``."""
    experts = tl.arange(0, EXPERTS)
    is_one = experts < num_experts
    starts_ptr = typed(starts, tl.int32, False)
    num_tiles = tl.cdiv(sizes, block_m)
    start = begins
    before = tl.zeros((EXPERTS,), tl.int32)
    listed = number * 0
    for stage in range(WORLD):
        if number == 0:
            tl.store(starts_ptr + experts * WORLD + stage, start, mask=is_one)
        following = counts_ptr + tl.load(stages_ptr + 1 + stage) * num_columns
        start = tl.minimum(firsts + tl.load(following + experts, mask=is_one, other=0), capacity)
        # A tile is of this stage or an earlier one if its last row is; the last tile need not be full.
        rows = start - begins
        after = tl.where(rows == sizes, num_tiles, rows // block_m)
        listed = list_stage(index_ptr, number, listed, stage, before, after, begins, sizes, block_m, EXPERTS, TILES)
        before = after
    return listed
