"""Collectives of the sequential strategy without mailboxes, where SMs copy.

Through a mailbox everything is copied twice, into a slot and out of it, and a slot holds little. Here

    gather   rows go straight into the peers' buffers, those of ``ag_gemm``, and the product reads them there
    pull     partial sums stay where the product leaves them, in symmetric memory, and whoever needs them reads them
    swap     few partial sums go into slots of all peers, in the same launch that adds them up: one launch behind the
             product, where a pull has two, and one before it

Who writes and who waits, beside what ``lang/turn.py`` says: before a product writes what peers may still be reading,
``open_call`` waits until all of them have finished the call before. Whoever waits is a single program, so that it holds
no SM that a rank which shares the GPU needs; those of a swap are few, and small.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from tileflux.kernels import steps
from tileflux.kernels.gemm_shared import sms_for
from tileflux.kernels.loading import launching, load_once
from tileflux.kernels.operands import ELEMENTS
from tileflux.kernels.prepared import OUT, Repeat, launch_step
from tileflux.kernels.shards import gather_shards, pull_shards, swap_shards
from tileflux.kernels.steps import add_up, await_everyone
from tileflux.kernels.turns import Turn, turn
from tileflux.lang.hopper import lanes
from tileflux.lang.policy import await_word, slot
from tileflux.lang.remote import copy_run, part, typed
from tileflux.lang.signal import arrive
from tileflux.lang.turn import (
    RANK,
    SCALES,
    confirm_call,
    counter_word,
    current_epoch,
    data,
    flag_word,
    raise_flags,
    release,
    release_silently,
    shard,
    word,
)
from tileflux.symm.group import Group

__all__ = ["Steps", "gather", "open_pull", "pull", "pull_turn", "swap", "swap_turn"]

_BLOCK = 2048
_NUM_WARPS = 8
_SWAP_BLOCK = 4096
_SWAP_WARPS = 16
Steps = tuple[Repeat | None, ...]
"""What repeats launches, of each that can be."""

_SWAP_PROGRAMS = 128  # of all ranks together: fewer than there are SMs, so that who comes late finds room beside them


def gather(
    group: Group, op: str, x: torch.Tensor, scale_x: torch.Tensor | None, rows: tuple[int, ...]
) -> tuple[Turn, Steps]:
    """All ranks' rows into ``Turn.gathered``, one's own among them, and their scales; the caller releases the turn."""
    row_bytes, scaled, world_size = x.shape[1] * x.element_size(), scale_x is not None, group.world_size
    here = turn(group, gather_shards(op, rows, row_bytes, scaled, 1))
    load = functools.partial(_load_gather, here, scaled, world_size)
    load_once(group.device, ("gather directly", world_size, scaled), load, group)
    return here, (
        steps.launch_open(here, world_size),
        steps.launch_feed(here, x, scale_x, 2 * sms_for(group), world_size, _feed_all_kernel),
    )


def pull_turn(group: Group, op: str, rows: tuple[int, ...], num_columns: int, dtype: torch.dtype) -> Turn:
    """Whose ``gathered`` has room for partial sums of all rows, that peers will pull."""
    # Regions of their own: those of the fused op have two halves, into which a rank that is a call ahead may write.
    return turn(group, pull_shards(f"{op}, sequential", rows, num_columns * dtype.itemsize))


def open_pull(group: Group, here: Turn, dtype: torch.dtype) -> Steps:
    """Wait until that room is free."""
    world_size = group.world_size
    load = functools.partial(_load_pull, here, dtype, world_size)
    load_once(group.device, ("pull", world_size, dtype), load, group)
    return (steps.launch_open(here, world_size),)


def pull(group: Group, here: Turn, out: torch.Tensor, first_row: int) -> Steps:
    """When all ranks have their partial sums, add up those of the rows from ``first_row`` on; ends the call."""
    meet = steps.launch_alone(_meet_kernel, here, group.world_size)
    if out.numel():
        return meet, _launch_pull(here, out, first_row, 2 * sms_for(group), group.world_size)
    return meet, steps.launch_release(here, group.world_size)


def swap_turn(group: Group, op: str, out: torch.Tensor) -> Turn:
    """Whose ``own_rows`` have room for the partial sums of ``out``, which has few bytes."""
    num_programs = _num_swappers(group, out)
    here = turn(group, swap_shards(f"{op}, swapped", group.world_size, out.nbytes, num_programs))
    load = functools.partial(_load_swap, here, out.dtype)
    load_once(group.device, ("swap", group.world_size, out.dtype), load, group)
    return here


def swap(group: Group, here: Turn, out: torch.Tensor) -> Steps:
    """All ranks' ``own_rows``, added up into ``out`` on every rank."""
    partial = here.own_rows(out.dtype, out.shape[1])
    aligned = (partial.data_ptr() | out.data_ptr()) % 16 == 0
    arguments = (partial.data_ptr(), out.data_ptr(), out.numel(), here.table)
    with launching(group):
        return (_launch_swap(_num_swappers(group, out), arguments, out.dtype, aligned, group.world_size),)


def _num_swappers(group: Group, out: torch.Tensor) -> int:
    # The same on all ranks, whatever share of a GPU each has.
    return max(1, min(_SWAP_PROGRAMS // group.world_size, out.numel() // _SWAP_BLOCK))


def _launch_swap(
    count: int, arguments: tuple[Any, ...], dtype: torch.dtype, aligned: bool, world_size: int
) -> Repeat | None:
    constants = (ELEMENTS[dtype], aligned, world_size, _SWAP_BLOCK)
    return launch_step(_swap_kernel, count, arguments, constants, _SWAP_WARPS, ((1, OUT),))


def _load_swap(here: Turn, dtype: torch.dtype) -> None:
    for aligned in (False, True):
        _launch_swap(0, (0, 0, 0, here.table), dtype, aligned, here.group.world_size)


def _launch_pull(here: Turn, out: torch.Tensor, first_row: int, count: int, world_size: int) -> Repeat | None:
    first = first_row * out.shape[1]
    is_aligned = out.data_ptr() % 16 == 0 and first * out.element_size() % 16 == 0
    constants = (ELEMENTS[out.dtype], is_aligned, world_size, _BLOCK)
    arguments = (out.data_ptr(), first, out.numel(), here.table)
    with launching(here.group):
        return launch_step(_pull_kernel, count, arguments, constants, _NUM_WARPS, ((0, OUT),))


def _load_gather(here: Turn, scaled: bool, world_size: int) -> None:
    steps.launch_open(here, world_size, 0)
    launch_step(_feed_all_kernel, 0, (0, 0, 0, here.table), (scaled, world_size, _BLOCK), _NUM_WARPS)
    steps.launch_release(here, world_size, 0)


def _load_pull(here: Turn, dtype: torch.dtype, world_size: int) -> None:
    steps.launch_open(here, world_size, 0)
    steps.launch_alone(_meet_kernel, here, world_size, 0)
    for is_aligned in (False, True):
        launch_step(
            _pull_kernel, 0, (0, 0, 0, here.table), (ELEMENTS[dtype], is_aligned, world_size, _BLOCK), _NUM_WARPS
        )
    steps.launch_release(here, world_size, 0)


@triton.jit(do_not_specialize=("x", "scale_x", "row_bytes", "table_ptr"))
def _feed_all_kernel(
    x: tl.int64,
    scale_x: tl.int64,
    row_bytes: tl.int64,
    table_ptr,
    SCALED: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows into the buffers of all ranks, this one's too; ends when all ranks' are here, for one product to read.

    As ``feed``; but that sends to one peer after the other, so that each can begin early. Here rows are loaded once.
    Buffers are free: ``open_call`` came before. Of all programs the last to send waits, so that it alone holds an SM.
    """
    rank = word(table_ptr, RANK)
    first_row, num_rows = shard(table_ptr, rank, WORLD)
    begin, length = part(num_rows.to(tl.int64) * row_bytes, tl.program_id(0), tl.num_programs(0))
    _copy_to_all(x + begin, first_row.to(tl.int64) * row_bytes + begin, length, table_ptr, WORLD, BLOCK)
    if SCALED:  # noqa: SIM102 - `and` does not keep the compiler from what follows
        if tl.program_id(0) == 0:
            place = tl.load(table_ptr + SCALES) + first_row.to(tl.int64) * 4
            for owner in range(WORLD):
                copy_run(data(table_ptr, owner, WORLD) + place, scale_x, num_rows.to(tl.int64) * 4, 256)
    waits = tl.program_id(0) == 0  # with nothing to send, any of them
    if num_rows > 0:
        waits = arrive(counter_word(table_ptr, rank, rank, 0, WORLD), tl.num_programs(0))
        if waits:
            raise_flags(table_ptr, 0, WORLD - 1, WORLD)
    if waits:
        _await_rows(table_ptr, WORLD)
    confirm_call(table_ptr)


@triton.jit
def _copy_to_all(source, place, nbytes, table, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """Copy ``nbytes`` to ``place`` in every rank's buffer: whole blocks are loaded once."""
    done = nbytes * 0
    if ((source | place) & 15) == 0:
        numbers = lanes(BLOCK, 2)
        num_blocks = nbytes // (BLOCK * 8)
        for block in range(num_blocks):
            offsets = block * BLOCK + numbers
            values = tl.load(typed(source, tl.int64, True) + offsets)
            for owner in range(WORLD):
                tl.store(typed(data(table, owner, WORLD) + place, tl.int64, True) + offsets, values)
        done = num_blocks * (BLOCK * 8)
    for owner in range(WORLD):
        copy_run(data(table, owner, WORLD) + place + done, source + done, nbytes - done, BLOCK)


@triton.jit
def _await_rows(table, WORLD: tl.constexpr):
    """Until the rows of every rank that has some are here."""
    rank = word(table, RANK)
    epoch = current_epoch(table, WORLD)
    for hop in range(1, WORLD):
        source = (rank + hop) % WORLD
        _, num_rows = shard(table, source, WORLD)
        if num_rows > 0:
            await_word(flag_word(table, rank, source, 0, WORLD), epoch + 1, source, table)


@triton.jit(do_not_specialize=("table_ptr",))
def _meet_kernel(table_ptr, WORLD: tl.constexpr):
    """Tell every peer that this rank's partial sums are there, and wait for theirs."""
    raise_flags(table_ptr, 0, WORLD - 1, WORLD)
    await_everyone(table_ptr, 0, WORLD)
    confirm_call(table_ptr)


@triton.jit
def _sum_ranks(given, offsets, mask, TYPE: tl.constexpr, ALIGNED: tl.constexpr, WORLD: tl.constexpr):
    """fp32 sum, from rank 0 on, of what lies at ``offsets`` behind ``first`` bytes of each rank's buffer."""
    first, table = given
    total = tl.zeros(offsets.shape, tl.float32)
    # Unrolled, so that the loads of all ranks are on their way at once.
    for source in tl.static_range(WORLD):
        partial = typed(data(table, source, WORLD) + first, TYPE, ALIGNED)
        total += tl.load(partial + offsets, mask=mask).to(tl.float32)
    return total


@triton.jit(do_not_specialize=("out", "first", "num_elements", "table_ptr"))
def _pull_kernel(
    out: tl.int64,
    first: tl.int64,
    num_elements: tl.int64,
    table_ptr,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up ``num_elements`` of all ranks' partial sums, from element ``first`` on."""
    skipped = first.to(tl.int64) * (TYPE.primitive_bitwidth // 8)
    add_up(out, num_elements, (skipped, table_ptr), _sum_ranks, TYPE, ALIGNED, WORLD, BLOCK)
    release(table_ptr, WORLD)


@triton.jit
def _sum_swapped(given, offsets, mask, TYPE: tl.constexpr, ALIGNED: tl.constexpr, WORLD: tl.constexpr):
    """fp32 sum, from rank 0 on, of what lies at ``offsets`` in my slots, and at ``x`` for this rank's own."""
    x, table = given
    rank = word(table, RANK)
    epoch = current_epoch(table, WORLD)
    total = tl.zeros(offsets.shape, tl.float32)
    for source in tl.static_range(WORLD):
        address = slot(table, rank, tl.full((), source, tl.int32), epoch, WORLD)
        if source == rank:
            address = x
        total += tl.load(typed(address, TYPE, ALIGNED) + offsets, mask=mask).to(tl.float32)
    return total


@triton.jit
def _send_swapped(x, offsets, mask, table, TYPE: tl.constexpr, ALIGNED: tl.constexpr, WORLD: tl.constexpr):
    """What lies at ``offsets`` of ``x`` into my slot at every peer."""
    rank = word(table, RANK)
    epoch = current_epoch(table, WORLD)
    value = tl.load(typed(x, TYPE, ALIGNED) + offsets, mask=mask)
    for hop in range(1, WORLD):
        to = slot(table, (rank + hop) % WORLD, rank, epoch, WORLD)
        tl.store(typed(to, TYPE, ALIGNED) + offsets, value, mask=mask)


@triton.jit(do_not_specialize=("x", "out", "num_elements", "table_ptr"))
def _swap_kernel(
    x: tl.int64,
    out: tl.int64,
    num_elements: tl.int64,
    table_ptr,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every program sends its blocks to all peers, waits for the same programs' of theirs, and adds up.

    Nobody waits for acks. Slots have two halves, used in turn, and whoever comes back to a half has had something from
    every peer in the call between, which that peer began after it had read all of the half.
    """
    program = tl.program_id(0)
    numbers = tl.arange(0, BLOCK)
    x = x.to(tl.int64)
    num_blocks = num_elements.to(tl.int64) // BLOCK
    for block in range(program.to(tl.int64), num_blocks, tl.num_programs(0)):
        _send_swapped(x, block * BLOCK + numbers, None, table_ptr, TYPE, ALIGNED, WORLD)
    if (program == 0) & (num_blocks * BLOCK < num_elements):
        rest = num_blocks * BLOCK + numbers
        _send_swapped(x, rest, rest < num_elements, table_ptr, TYPE, False, WORLD)
    raise_flags(table_ptr, program, WORLD - 1, WORLD)
    await_everyone(table_ptr, program, WORLD)
    add_up(out, num_elements, (x, table_ptr), _sum_swapped, TYPE, ALIGNED, WORLD, BLOCK)
    release_silently(table_ptr, WORLD)
