"""Who goes where, and who has come, worked out by kernels: what ``ops/_ep.py`` says in torch's functions.

Before an exchange one launch counts, for every rank, which tokens go there, and packs what is said of each. After it
received choices are sorted by expert, a counting sort as that of ``index.py`` with one stage: every program places the
rows of a block of choices. Few choices it counts itself, all that come before its own; for many, a launch before it
counts block by block. How many tokens have come only the device knows: what stands behind them is not looked at.

Grids depend on shapes alone, and nothing synchronises. Kernels take addresses (docs/decisions/0003); variants are by
number of ranks, by number of experts in powers of two, and by types.
"""

import torch
import triton
import triton.language as tl

from tileflux.kernels.index import WEIGHT_TYPES, chosen, num_before
from tileflux.kernels.launch import on_host
from tileflux.kernels.lists import INTEGERS, padded
from tileflux.kernels.loading import launching, launching_on, load_once
from tileflux.kernels.prepared import launch_step
from tileflux.lang.remote import typed
from tileflux.lang.rows import copy_row
from tileflux.symm.group import Group

__all__ = ["launch_addresses", "launch_arrivals", "launch_pick", "load_arrivals"]

_TOKENS, _CHOICES = 512, 8
"""Looked at together by the one program that counts for a rank."""
_PACK = 1024
_BLOCK = 256
_CHUNK = 2048
"""Choices that a program counts at a time."""
_MAX_CHUNKS = 4
"""Up to so many it counts all of them itself: quicker than a launch more."""
_COPY = 1024
_NUM_WARPS = 8


def launch_addresses(
    group: Group, expert_ids: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor | None, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``sent [W, T + 1]``: tokens before each that go to each rank; ``notes [T, 2 k or 2 k + 1]``: what goes along."""
    num_tokens, top_k = expert_ids.shape
    weights = weights.detach().resolve_neg()
    if weights.dtype not in WEIGHT_TYPES:
        weights = weights.float()
    scale = None if scale is None else scale.detach().resolve_neg().expand(num_tokens)
    words = 2 * top_k + (scale is not None)
    sent = torch.empty((group.world_size, num_tokens + 1), dtype=torch.int32, device=expert_ids.device)
    notes = torch.empty((num_tokens, words), dtype=torch.int32, device=expert_ids.device)
    arguments = (
        expert_ids.data_ptr(), weights.data_ptr(), 0 if scale is None else scale.data_ptr(), notes.data_ptr(),
        *expert_ids.stride(), *weights.stride(), 0 if scale is None else scale.stride(0),
        num_tokens, top_k, words, num_experts, sent,
    )  # fmt: skip
    with launching(group):
        grid = group.world_size + -(-num_tokens * top_k // _PACK)
        _addresses(grid, arguments, (expert_ids.dtype, weights.dtype, group.world_size))
    return sent, notes


def launch_arrivals(
    group: Group, notes: torch.Tensor, received: torch.Tensor, top_k: int, num_experts: int
) -> tuple[torch.Tensor, ...]:
    """``weights``, ``scales``, ``counts``, ``row_tokens``, ``positions`` of the tokens here, and how many do not fit.

    ``notes [capacity, words]`` of those that ``received [W, W]`` says have come. See ``Dispatched``.
    """
    capacity, words = notes.shape
    num_slots, num_each, device = capacity * top_k, num_experts // group.world_size, notes.device
    num_blocks = max(1, -(-num_slots // _BLOCK))
    is_counted = num_slots > _MAX_CHUNKS * _CHUNK
    table = torch.empty((num_blocks if is_counted else 0, num_each), dtype=torch.int32, device=device)
    shares = torch.empty((capacity, top_k), dtype=torch.float32, device=device)
    scales = torch.empty(capacity if words > 2 * top_k else 0, dtype=torch.float32, device=device)
    counts, row_tokens = (torch.empty(n, dtype=torch.int32, device=device) for n in (num_each, num_slots))
    positions = torch.empty((capacity, top_k), dtype=torch.int32, device=device)
    missing = torch.empty((), dtype=torch.int64, device=device)
    numbers = (group.rank, words, top_k, num_each, capacity, received)
    constants = (group.world_size, padded(num_each))
    with launching(group):
        if is_counted:
            _count(num_blocks, (notes.data_ptr(), table.data_ptr(), *numbers), constants)
        results = (shares, scales, counts, row_tokens, positions, missing)
        addresses = (each.data_ptr() for each in (notes, table, *results))
        _arrive(num_blocks, (*addresses, *numbers), (is_counted, *constants))
    return results


def load_arrivals(group: Group, num_experts: int, expert_ids: torch.Tensor, weights: torch.Tensor) -> None:
    """What must not happen later, when a peer may wait."""
    if on_host(group):
        return
    kind = weights.dtype if weights.dtype in WEIGHT_TYPES else torch.float32
    types, constants = (expert_ids.dtype, kind, group.world_size), (group.world_size, padded(num_experts))
    where = group.guard.table.view(torch.int32)  # any of the device

    def load() -> None:
        _addresses(0, (*[0] * 13, where), types)
        _count(0, (*[0] * 7, where), constants)
        for is_counted in (False, True):
            _arrive(0, (*[0] * 13, where), (is_counted, *constants))

    load_once(group.device, ("arrivals", *types, *constants), load, group)
    _load_pick(where, group)


def launch_pick(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The rows of ``x``, which lie beside each other, that ``index``, int32, names."""
    out = torch.empty((len(index), *x.shape[1:]), dtype=x.dtype, device=x.device)
    _load_pick(index)
    with launching_on(x.device):
        row_bytes = x.shape[1:].numel() * x.element_size()
        _pick(len(index), (x.data_ptr(), out.data_ptr(), row_bytes, index))
    return out


def _load_pick(where: torch.Tensor, group: Group | None = None) -> None:
    load_once(where.device, "rows picked", lambda: _pick(0, (0, 0, 0, where)), group)


def _addresses(grid, arguments, types):
    id_type, weight_type, world_size = types
    constants = (INTEGERS[id_type], WEIGHT_TYPES[weight_type], world_size, _TOKENS, _CHOICES, _PACK)
    launch_step(_addresses_kernel, grid, arguments, constants, _NUM_WARPS)


def _count(grid, arguments, constants):
    launch_step(_count_kernel, grid, arguments, (*constants, _BLOCK), _NUM_WARPS)


def _arrive(grid, arguments, constants):
    launch_step(_arrive_kernel, grid, arguments, (*constants, _BLOCK, _CHUNK), _NUM_WARPS)


def _pick(grid, arguments):
    launch_step(_pick_kernel, grid, arguments, (_COPY,), _NUM_WARPS)


@triton.jit(
    do_not_specialize=(
        "ids", "weights", "scales", "notes", "ids_row", "ids_column", "weights_row", "weights_column", "scales_row",
        "num_tokens", "top_k", "words", "num_experts", "sent_ptr",
    )
)  # fmt: skip
def _addresses_kernel(
    ids: tl.int64,
    weights: tl.int64,
    scales: tl.int64,
    notes: tl.int64,
    ids_row: tl.int64,
    ids_column: tl.int64,
    weights_row: tl.int64,
    weights_column: tl.int64,
    scales_row: tl.int64,
    num_tokens: tl.int32,
    top_k: tl.int32,
    words: tl.int32,
    num_experts: tl.int32,
    sent_ptr,
    ID: tl.constexpr,
    WEIGHT: tl.constexpr,
    WORLD: tl.constexpr,
    TOKENS: tl.constexpr,
    CHOICES: tl.constexpr,
    PACK: tl.constexpr,
):
    """First programs count the tokens for a rank each, others pack some choices each."""
    program = tl.program_id(0)
    ids_ptr = typed(ids, ID, False)
    if program < WORLD:
        first_expert = program * (num_experts // WORLD)
        sent_to = sent_ptr + program.to(tl.int64) * (num_tokens + 1)
        tl.store(sent_to, 0)
        total = program * 0
        for begin in range(0, num_tokens, TOKENS):
            tokens = begin + tl.arange(0, TOKENS)
            goes = tl.zeros((TOKENS,), tl.int32)
            for done in range(0, top_k, CHOICES):
                choices = done + tl.arange(0, CHOICES)
                inside = (tokens < num_tokens)[:, None] & (choices < top_k)[None, :]
                at = tokens[:, None].to(tl.int64) * ids_row + choices[None, :].to(tl.int64) * ids_column
                local = tl.load(ids_ptr + at, mask=inside, other=-1)
                # Compared before anything is subtracted: choices may be any numbers.
                is_there = (local >= first_expert) & (local < first_expert + num_experts // WORLD)
                goes = tl.maximum(goes, tl.max((is_there & inside).to(tl.int32), 1))
            tl.store(sent_to + 1 + tokens, total + tl.cumsum(goes, 0), mask=tokens < num_tokens)
            total += tl.sum(goes, 0)
    else:
        slots = (program - WORLD) * PACK + tl.arange(0, PACK)
        inside = slots < num_tokens * top_k
        token = (slots // top_k).to(tl.int64)
        choice = slots % top_k
        expert = tl.load(ids_ptr + token * ids_row + choice * ids_column, mask=inside, other=0)
        # Clamped before it is cut: in 32 bits a number that is no expert's might become that of one.
        expert = tl.minimum(tl.maximum(expert, -1), num_experts).to(tl.int32)
        share = typed(weights, WEIGHT, False) + token * weights_row + choice * weights_column
        bits = tl.load(share, mask=inside, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
        to = typed(notes, tl.int32, False) + token * words + choice
        tl.store(to, expert, mask=inside)
        tl.store(to + top_k, bits, mask=inside)
        if scales != 0:
            is_first = inside & (choice == 0)
            scale = tl.load(typed(scales, tl.int32, False) + token * scales_row, mask=is_first, other=0)
            tl.store(to + 2 * top_k, scale, mask=is_first)


@triton.jit
def _num_here(received_ptr, rank, capacity, WORLD: tl.constexpr):
    """Tokens that have come to ``rank``, and have found room."""
    sources = tl.arange(0, triton.next_power_of_2(WORLD))
    return tl.minimum(
        tl.sum(tl.load(received_ptr + sources * WORLD + rank, mask=sources < WORLD, other=0), 0), capacity
    )


@triton.jit
def _histogram(ids, first_expert, num_experts, mask, EXPERTS: tl.constexpr):
    """How many of ``ids`` each of this rank's experts is."""
    local = ids - first_expert
    return tl.histogram(local, EXPERTS, mask=mask & (local >= 0) & (local < num_experts))


@triton.jit(
    do_not_specialize=(
        "notes", "table", "rank", "words", "top_k", "num_experts", "capacity", "received_ptr",
    )
)  # fmt: skip
def _count_kernel(
    notes: tl.int64,
    table: tl.int64,
    rank: tl.int32,
    words: tl.int32,
    top_k: tl.int32,
    num_experts: tl.int32,
    capacity: tl.int32,
    received_ptr,
    WORLD: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of each block, choices of each of this rank's experts."""
    program = tl.program_id(0)
    end = _num_here(received_ptr, rank, capacity, WORLD) * top_k
    slots = program * BLOCK + tl.arange(0, BLOCK)
    ids = chosen(notes, words, slots, end, top_k)
    found = _histogram(ids, rank * num_experts, num_experts, slots < end, EXPERTS)
    experts = tl.arange(0, EXPERTS)
    row = typed(table, tl.int32, False) + program.to(tl.int64) * num_experts
    tl.store(row + experts, found, mask=experts < num_experts)


@triton.jit(
    do_not_specialize=(
        "notes", "table", "shares", "scales", "counts", "row_tokens", "positions", "missing", "rank", "words", "top_k",
        "num_experts", "capacity", "received_ptr",
    )
)  # fmt: skip
def _arrive_kernel(
    notes: tl.int64,
    table: tl.int64,
    shares: tl.int64,
    scales: tl.int64,
    counts: tl.int64,
    row_tokens: tl.int64,
    positions: tl.int64,
    missing: tl.int64,
    rank: tl.int32,
    words: tl.int32,
    top_k: tl.int32,
    num_experts: tl.int32,
    capacity: tl.int32,
    received_ptr,
    COUNTED: tl.constexpr,
    WORLD: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Every program places the rows of a block of choices; the first one says how many there are."""
    program = tl.program_id(0)
    num_tokens = _num_here(received_ptr, rank, capacity, WORLD)
    end, first_expert, begin = num_tokens * top_k, rank * num_experts, program * BLOCK
    if COUNTED:
        earlier, totals = _add_counts(table, program, tl.cdiv(end, BLOCK), num_experts, EXPERTS)
    else:
        earlier, totals = _count_all(notes, words, begin, end, top_k, first_expert, num_experts, EXPERTS, CHUNK)
    firsts = tl.cumsum(totals, 0) - totals
    slots = begin + tl.arange(0, BLOCK)
    inside = slots < capacity * top_k
    ids = chosen(notes, words, slots, end, top_k)
    before = num_before(notes, words, ids, begin, end, top_k, BLOCK)
    is_here = (ids >= first_expert) & (ids < first_expert + num_experts) & (slots < end)
    rows = tl.gather(firsts + earlier, tl.where(is_here, ids - first_expert, 0), 0) + before
    token = slots // top_k
    row_tokens_ptr = typed(row_tokens, tl.int32, False)
    tl.store(row_tokens_ptr + rows, token, mask=is_here)
    tl.store(typed(positions, tl.int32, False) + slots, tl.where(is_here, rows, -1), mask=inside)
    note = typed(notes, tl.int32, False) + token.to(tl.int64) * words + top_k + slots % top_k
    tl.store(typed(shares, tl.int32, False) + slots, tl.load(note, mask=is_here, other=0), mask=inside)
    # Behind the last row kernels may look, and must find numbers of tokens.
    is_free = inside & (slots >= tl.sum(totals, 0))
    tl.store(row_tokens_ptr + slots, tl.zeros((BLOCK,), tl.int32), mask=is_free)
    if words > 2 * top_k:
        scale = typed(notes, tl.int32, False) + slots.to(tl.int64) * words + 2 * top_k
        bits = tl.load(scale, mask=slots < num_tokens, other=-1)
        tl.store(typed(scales, tl.int32, False) + slots, bits, mask=slots < capacity)
    if program == 0:
        experts = tl.arange(0, EXPERTS)
        tl.store(typed(counts, tl.int32, False) + experts, totals, mask=experts < num_experts)
        tl.store(typed(missing, tl.int64, False), _num_missing(received_ptr, capacity, WORLD))


@triton.jit
def _count_all(notes, words, begin, end, top_k, first_expert, num_experts, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """(choices of each expert before slot ``begin``, all of them)."""
    earlier = tl.zeros((EXPERTS,), tl.int32)
    totals = tl.zeros((EXPERTS,), tl.int32)
    for chunk in range(0, end, CHUNK):
        slots = chunk + tl.arange(0, CHUNK)
        ids = chosen(notes, words, slots, end, top_k)
        totals += _histogram(ids, first_expert, num_experts, slots < end, EXPERTS)
        if chunk < begin:
            earlier += _histogram(ids, first_expert, num_experts, (slots < end) & (slots < begin), EXPERTS)
    return earlier, totals


@triton.jit
def _add_counts(table, program, num_blocks, num_experts, EXPERTS: tl.constexpr):
    """The same from what is known of blocks."""
    ROWS: tl.constexpr = max(1, 4096 // EXPERTS)
    experts = tl.arange(0, EXPERTS)
    earlier = tl.zeros((EXPERTS,), tl.int32)
    totals = tl.zeros((EXPERTS,), tl.int32)
    for begin in range(0, num_blocks, ROWS):
        blocks = begin + tl.arange(0, ROWS)
        at = typed(table, tl.int32, False) + blocks[:, None].to(tl.int64) * num_experts + experts[None, :]
        found = tl.load(at, mask=(blocks < num_blocks)[:, None] & (experts < num_experts)[None, :], other=0)
        totals += tl.sum(found, 0)
        earlier += tl.sum(tl.where((blocks < program)[:, None], found, 0), 0)
    return earlier, totals


@triton.jit
def _num_missing(received_ptr, capacity, WORLD: tl.constexpr):
    """Tokens too many for the rank with the most."""
    ranks = tl.arange(0, triton.next_power_of_2(WORLD))
    is_one = (ranks < WORLD)[:, None] & (ranks < WORLD)[None, :]
    come = tl.sum(tl.load(received_ptr + ranks[:, None] * WORLD + ranks[None, :], mask=is_one, other=0), 0)
    return tl.maximum(tl.max(come, 0) - capacity, 0).to(tl.int64)


@triton.jit(do_not_specialize=("x", "out", "row_bytes", "index_ptr"))
def _pick_kernel(x: tl.int64, out: tl.int64, row_bytes: tl.int64, index_ptr, BLOCK: tl.constexpr):
    """One row per program."""
    row = tl.program_id(0)
    copy_row(
        out + row.to(tl.int64) * row_bytes, x + tl.load(index_ptr + row).to(tl.int64) * row_bytes, row_bytes, BLOCK
    )
