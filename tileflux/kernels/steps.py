"""The protocol of a fused op in single steps, for the pipelined strategy: send, wait, sum, give back.

Between them the library's GEMM runs, chunk by chunk. Flags and buffers are those of ``lang/turn.py``: an all-gather's
as the fused kernel uses them, while a reduce-scatter announces whole shards. The host twins are methods of
``kernels/turns.py``.
"""

import time

import torch
import triton
import triton.language as tl

from tileflux.kernels.loading import launching
from tileflux.kernels.operands import ELEMENTS
from tileflux.kernels.prepared import launch_step
from tileflux.kernels.turns import Turn
from tileflux.lang.policy import await_word, slot, sum_slots
from tileflux.lang.remote import typed
from tileflux.lang.signal import clock_ns
from tileflux.lang.turn import (
    RANK,
    SLOT_BYTES,
    ack_word,
    close_shard,
    confirm_call,
    counter_word,
    current_epoch,
    feed,
    flag_word,
    open_call,
    push_run,
    release,
    word,
)

__all__ = [
    "launch_await",
    "launch_close",
    "launch_feed",
    "launch_open",
    "launch_push",
    "launch_release",
    "launch_sum",
    "load",
    "read_clock",
]

_BLOCK = 2048
_NUM_WARPS = 8


def launch_feed(turn: Turn, x: torch.Tensor, scale_x: torch.Tensor | None, num_feeders: int, world_size: int) -> None:
    """Send ``x``, and the scales of its rows, to every peer."""
    scale = 0 if scale_x is None else scale_x.data_ptr()
    arguments = (x.data_ptr(), scale, x.shape[1] * x.element_size(), turn.table)
    with launching(turn.group):
        launch_step(_feed_kernel, num_feeders, arguments, (scale_x is not None, world_size, _BLOCK), _NUM_WARPS)


def launch_open(turn: Turn, world_size: int, num_programs: int = 1) -> None:
    """Before copies send this rank's rows: wait until every peer's buffer is free."""
    with launching(turn.group):
        launch_step(_open_kernel, num_programs, (turn.table,), (world_size,), 1)


def launch_await(turn: Turn, source: int, chunk: int, world_size: int, num_programs: int = 1) -> None:
    """Let the stream wait for a chunk of ``source``'s rows."""
    with launching(turn.group):
        launch_step(_await_kernel, num_programs, (source, chunk, turn.table), (world_size,), 1)


def launch_close(turn: Turn, owner: int, num_tiles: int, world_size: int, num_programs: int = 1) -> None:
    """Let the stream wait until so many tiles of ``owner``'s shard have been counted."""
    with launching(turn.group):
        launch_step(_close_kernel, num_programs, (owner, num_tiles, turn.table), (world_size,), 1)


def launch_push(turn: Turn, partial: torch.Tensor, owner: int, num_feeders: int, world_size: int) -> None:
    """Send a shard of partial sums to its owner."""
    arguments = (partial.data_ptr(), partial.nbytes, owner, turn.table)
    with launching(turn.group):
        launch_step(_push_kernel, num_feeders, arguments, (world_size, _BLOCK), _NUM_WARPS)


def launch_sum(turn: Turn, out: torch.Tensor, num_programs: int, world_size: int) -> None:
    """Wait for all ranks' partial sums of this rank's shard, and add them up."""
    address = out.data_ptr()
    constants = (ELEMENTS[out.dtype], address % 16 == 0, world_size, _BLOCK)
    with launching(turn.group):
        launch_step(_sum_kernel, num_programs, (address, out.numel(), turn.table), constants, _NUM_WARPS)


def launch_release(turn: Turn, world_size: int, num_programs: int = 1) -> None:
    """This rank has finished the call."""
    with launching(turn.group):
        launch_step(_release_kernel, num_programs, (turn.table,), (world_size,), 1)


def read_clock(device: torch.device) -> torch.Tensor:
    """The clock of recordings when the current stream comes to it: one int64, in nanoseconds."""
    if device.type == "cpu":
        return torch.tensor([time.perf_counter_ns()])
    time_ns = torch.zeros(1, dtype=torch.int64, device=device)
    _clock_kernel[(1,)](time_ns, num_warps=1)
    return time_ns


def load(turn: Turn, x: torch.Tensor, scale_x: torch.Tensor | None, out: torch.Tensor, world_size: int) -> None:
    """Compile and load all of them, with nothing to do."""
    launch_feed(turn, x, scale_x, 0, world_size)
    launch_push(turn, out, 0, 0, world_size)
    launch_open(turn, world_size, 0)
    launch_close(turn, 0, 0, world_size, 0)
    launch_await(turn, 0, 0, world_size, 0)
    launch_release(turn, world_size, 0)
    for aligned in (False, True):
        constants = (ELEMENTS[out.dtype], aligned, world_size, _BLOCK)
        launch_step(_sum_kernel, 0, (0, 0, turn.table), constants, _NUM_WARPS)


@triton.jit(do_not_specialize=("x", "scale_x", "row_bytes", "table_ptr"))
def _feed_kernel(
    x: tl.int64,
    scale_x: tl.int64,
    row_bytes: tl.int64,
    table_ptr,
    SCALED: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    nowhere = tl.full((), 0, tl.int64)
    feed(x, scale_x, row_bytes, table_ptr, tl.program_id(0), tl.num_programs(0), nowhere, SCALED, WORLD, BLOCK, False)
    confirm_call(table_ptr)


@triton.jit(do_not_specialize=("table_ptr",))
def _open_kernel(table_ptr, WORLD: tl.constexpr):
    open_call(table_ptr, WORLD)
    confirm_call(table_ptr)


@triton.jit(do_not_specialize=("owner", "num_tiles", "table_ptr"))
def _close_kernel(owner: tl.int32, num_tiles: tl.int32, table_ptr, WORLD: tl.constexpr):
    close_shard(table_ptr, owner, num_tiles, WORLD)
    confirm_call(table_ptr)


@triton.jit(do_not_specialize=("source", "chunk", "table_ptr"))
def _await_kernel(source: tl.int32, chunk: tl.int32, table_ptr, WORLD: tl.constexpr):
    flag = flag_word(table_ptr, word(table_ptr, RANK), source, chunk, WORLD)
    await_word(flag, current_epoch(table_ptr, WORLD) + 1, source, table_ptr)
    confirm_call(table_ptr)


@triton.jit(do_not_specialize=("partial", "nbytes", "owner", "table_ptr"))
def _push_kernel(
    partial: tl.int64, nbytes: tl.int64, owner: tl.int32, table_ptr, WORLD: tl.constexpr, BLOCK: tl.constexpr
):
    rank = word(table_ptr, RANK)
    epoch = current_epoch(table_ptr, WORLD)
    if owner != rank:
        await_word(ack_word(table_ptr, rank, owner, WORLD), epoch - 1, owner, table_ptr)
    push_run(
        slot(table_ptr, owner, rank, epoch, WORLD), partial, nbytes.to(tl.int64),
        flag_word(table_ptr, owner, rank, 0, WORLD), epoch + 1,
        counter_word(table_ptr, rank, owner, 0, WORLD), tl.program_id(0), tl.num_programs(0), BLOCK,
    )  # fmt: skip
    confirm_call(table_ptr)


@triton.jit(do_not_specialize=("out", "num_elements", "table_ptr"))
def _sum_kernel(
    out: tl.int64,
    num_elements: tl.int64,
    table_ptr,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rank = word(table_ptr, RANK)
    epoch = current_epoch(table_ptr, WORLD)
    # One's own are there: whoever brought them came before, on this stream.
    for hop in range(1, WORLD):
        source = (rank + hop) % WORLD
        await_word(flag_word(table_ptr, rank, source, 0, WORLD), epoch + 1, source, table_ptr)
    first = slot(table_ptr, rank, tl.full((), 0, tl.int32), epoch, WORLD)
    stride = tl.load(table_ptr + SLOT_BYTES)
    num_elements = num_elements.to(tl.int64)
    to = typed(out, TYPE, ALIGNED)
    num_whole = num_elements // BLOCK * BLOCK
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for block in range(begin, num_whole, step):
        # Whole blocks carry no mask: a mask of unknown alignment makes every access one element wide.
        offsets = block // BLOCK * BLOCK + tl.arange(0, BLOCK)
        total = sum_slots(first, offsets, None, stride, TYPE, ALIGNED, WORLD)
        tl.store(to + offsets, total.to(TYPE))
    if tl.program_id(0) == 0:
        offsets = num_whole + tl.arange(0, BLOCK)
        mask = offsets < num_elements
        total = sum_slots(first, offsets, mask, stride, TYPE, False, WORLD)
        tl.store(typed(out, TYPE, False) + offsets, total.to(TYPE), mask=mask)
    release(table_ptr, WORLD)


@triton.jit(do_not_specialize=("table_ptr",))
def _release_kernel(table_ptr, WORLD: tl.constexpr):
    release(table_ptr, WORLD)


@triton.jit
def _clock_kernel(out_ptr):
    tl.store(out_ptr, clock_ns())
