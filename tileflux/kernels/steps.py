"""The protocol of a fused op in single steps, for the pipelined strategy: send, wait, sum, give back.

Between them the library's GEMM runs, chunk by chunk. Flags and buffers are those of ``lang/turn.py``: an all-gather's
as the fused kernel uses them, while a reduce-scatter announces whole shards. The host twins are methods of
``kernels/turns.py``.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from tileflux.kernels.loading import launching
from tileflux.kernels.operands import ELEMENTS
from tileflux.kernels.prepared import OUT, SCALE_X, Repeat, X, launch_step
from tileflux.kernels.turns import Turn
from tileflux.lang.policy import await_word, slot, sum_slots
from tileflux.lang.remote import typed
from tileflux.lang.signal import clock_ns
from tileflux.lang.turn import (
    RANK,
    SLOT_BYTES,
    ack_word,
    await_flags,
    await_pieces,
    close_chunk,
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
    "SUM_REGISTERS",
    "add_up",
    "await_everyone",
    "launch_alone",
    "launch_await",
    "launch_await_everyone",
    "launch_close",
    "launch_feed",
    "launch_open",
    "launch_push",
    "launch_release",
    "launch_sum",
    "launch_sum_slabs",
    "load",
    "load_for_slabs",
    "read_clock",
]

_BLOCK = 2048
_SUM_BLOCK = (8, 256)
SUM_REGISTERS = 80
"""Said to the assembler, which else spills to fit more programs on an SM than there are."""
_NUM_WARPS = 8


def launch_feed(
    turn: Turn, x: torch.Tensor, scale_x: torch.Tensor | None, num_feeders: int, world_size: int, kernel: Any = None
) -> Repeat | None:
    """Send ``x``, and the scales of its rows, to every peer; by another ``kernel`` that takes the same, if given."""
    scale = 0 if scale_x is None else scale_x.data_ptr()
    arguments = (x.data_ptr(), scale, x.shape[1] * x.element_size(), turn.table)
    constants = (scale_x is not None, world_size, _BLOCK)
    with launching(turn.group):
        moving = ((0, X), (1, SCALE_X))
        return launch_step(kernel or _feed_kernel, num_feeders, arguments, constants, _NUM_WARPS, moving)


def launch_alone(kernel: Any, turn: Turn, world_size: int, num_programs: int = 1) -> Repeat | None:
    """A kernel of a single program that takes the plan and nothing else."""
    with launching(turn.group):
        return launch_step(kernel, num_programs, (turn.table,), (world_size,), 1, ())


def launch_open(turn: Turn, world_size: int, num_programs: int = 1) -> Repeat | None:
    """Before copies send this rank's rows: wait until every peer's buffer is free."""
    return launch_alone(_open_kernel, turn, world_size, num_programs)


def launch_await(turn: Turn, source: int, chunk: int, world_size: int, num_programs: int = 1) -> None:
    """Let the stream wait for a chunk of ``source``'s rows."""
    with launching(turn.group):
        launch_step(_await_kernel, num_programs, (source, chunk, turn.table), (world_size,), 1)


def launch_await_everyone(turn: Turn, world_size: int, num_programs: int = 1, chunk: int = 0) -> Repeat | None:
    """Let the stream wait until every peer has announced ``chunk`` of what it has for this rank."""
    with launching(turn.group):
        return launch_step(_await_everyone_kernel, num_programs, (chunk, turn.table), (world_size,), 1, ())


def launch_close(
    turn: Turn, owner: int, num_tiles: Sequence[int], world_size: int, num_programs: int = 1, chunk: int = 0
) -> None:
    """Let the stream wait until so many tiles of chunks, or slabs, of ``owner``'s shard have been counted.

    ``num_tiles`` of each from ``chunk`` on; all but the last have as many.
    """
    arguments = (owner, chunk, len(num_tiles), num_tiles[0], num_tiles[-1], turn.table)
    with launching(turn.group):
        launch_step(_close_kernel, num_programs, arguments, (world_size,), 1)


def launch_push(turn: Turn, partial: torch.Tensor, owner: int, num_feeders: int, world_size: int) -> None:
    """Send a shard of partial sums to its owner."""
    arguments = (partial.data_ptr(), partial.nbytes, owner, turn.table)
    with launching(turn.group):
        launch_step(_push_kernel, num_feeders, arguments, (world_size, _BLOCK), _NUM_WARPS)


def launch_sum(turn: Turn, out: torch.Tensor, num_programs: int, world_size: int) -> Repeat | None:
    """Wait for all ranks' partial sums of this rank's shard, and add them up."""
    address = out.data_ptr()
    constants = (ELEMENTS[out.dtype], address % 16 == 0, world_size, _BLOCK)
    with launching(turn.group):
        arguments = (address, out.numel(), turn.table)
        return launch_step(_sum_kernel, num_programs, arguments, constants, _NUM_WARPS, ((0, OUT),))


def launch_sum_slabs(
    turn: Turn, out: torch.Tensor, num_programs: int, world_size: int, *, mostly_whole: bool = False
) -> None:
    """As ``launch_sum``, of shards that lie slab by slab, and come so; ``mostly_whole``: from the next rank alone."""
    address, (num_rows, num_columns) = out.data_ptr(), out.shape
    arguments = (address, num_rows, num_columns, turn.plan.slab_columns, turn.table)
    is_aligned = address % 16 == 0 and num_columns * out.element_size() % 16 == 0
    constants = (ELEMENTS[out.dtype], is_aligned, mostly_whole, world_size, *_SUM_BLOCK)
    with launching(turn.group):
        launch_step(_sum_slabs_kernel, num_programs, arguments, constants, _NUM_WARPS, maxnreg=SUM_REGISTERS)


def launch_release(turn: Turn, world_size: int, num_programs: int = 1) -> Repeat | None:
    """This rank has finished the call."""
    return launch_alone(_release_kernel, turn, world_size, num_programs)


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
    launch_close(turn, 0, (0,), world_size, 0)
    launch_await(turn, 0, 0, world_size, 0)
    launch_await_everyone(turn, world_size, 0)
    launch_release(turn, world_size, 0)
    for aligned in (False, True):
        constants = (ELEMENTS[out.dtype], aligned, world_size, _BLOCK)
        launch_step(_sum_kernel, 0, (0, 0, turn.table), constants, _NUM_WARPS)


def load_for_slabs(turn: Turn, out: torch.Tensor, world_size: int, mostly_whole: bool) -> None:
    """The same of those that send and sum slab by slab."""
    launch_open(turn, world_size, 0)
    launch_await_everyone(turn, world_size, 0)
    launch_close(turn, 0, (0,), world_size, 0)
    launch_release(turn, world_size, 0)
    for aligned in (False, True):
        constants = (ELEMENTS[out.dtype], aligned, mostly_whole, world_size, *_SUM_BLOCK)
        launch_step(_sum_slabs_kernel, 0, (0, 0, 0, 1, turn.table), constants, _NUM_WARPS, maxnreg=SUM_REGISTERS)


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


@triton.jit(do_not_specialize=("owner", "chunk", "num_chunks", "num_tiles", "last_tiles", "table_ptr"))
def _close_kernel(
    owner: tl.int32,
    chunk: tl.int32,
    num_chunks: tl.int32,
    num_tiles: tl.int32,
    last_tiles: tl.int32,
    table_ptr,
    WORLD: tl.constexpr,
):
    for index in range(num_chunks):
        wanted = num_tiles
        if index == num_chunks - 1:
            wanted = last_tiles
        close_chunk(table_ptr, owner, chunk + index, wanted, WORLD)
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


@triton.jit
def await_everyone(table, chunk, WORLD: tl.constexpr):
    """Until every peer has announced ``chunk`` of what it has for this rank."""
    await_flags(table, chunk, WORLD - 1, WORLD)


@triton.jit(do_not_specialize=("chunk", "table_ptr"))
def _await_everyone_kernel(chunk: tl.int32, table_ptr, WORLD: tl.constexpr):
    await_everyone(table_ptr, chunk, WORLD)
    confirm_call(table_ptr)


@triton.jit
def add_up(
    out, num_elements, given, SUM: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr, WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store sums at ``out``, of blocks that programs take in turn: what ``SUM`` makes of ``given`` in fp32, rounded."""
    num_elements = num_elements.to(tl.int64)
    to = typed(out, TYPE, ALIGNED)
    num_whole = num_elements // BLOCK * BLOCK
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for block in range(begin, num_whole, step):
        # Whole blocks carry no mask: a mask of unknown alignment makes every access one element wide.
        offsets = block // BLOCK * BLOCK + tl.arange(0, BLOCK)
        total = SUM(given, offsets, None, TYPE, ALIGNED, WORLD)
        tl.store(to + offsets, total.to(TYPE))
    if (tl.program_id(0) == 0) & (num_whole < num_elements):
        offsets = num_whole + tl.arange(0, BLOCK)
        mask = offsets < num_elements
        total = SUM(given, offsets, mask, TYPE, False, WORLD)
        tl.store(typed(out, TYPE, False) + offsets, total.to(TYPE), mask=mask)


@triton.jit
def _sum_of_slots(given, offsets, mask, TYPE: tl.constexpr, ALIGNED: tl.constexpr, WORLD: tl.constexpr):
    first, stride = given
    return sum_slots(first, offsets, mask, stride, TYPE, ALIGNED, WORLD)


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
    await_everyone(table_ptr, 0, WORLD)
    first = slot(table_ptr, rank, tl.full((), 0, tl.int32), epoch, WORLD)
    stride = tl.load(table_ptr + SLOT_BYTES)
    add_up(out, num_elements, (first, stride), _sum_of_slots, TYPE, ALIGNED, WORLD, BLOCK)
    release(table_ptr, WORLD)


@triton.jit(do_not_specialize=("out", "num_rows", "N", "slab_columns", "table_ptr"))
def _sum_slabs_kernel(
    out: tl.int64,
    num_rows: tl.int32,
    N: tl.int32,
    slab_columns: tl.int32,
    table_ptr,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    MOSTLY_WHOLE: tl.constexpr,
    WORLD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rank = word(table_ptr, RANK)
    epoch = current_epoch(table_ptr, WORLD)
    stride = tl.load(table_ptr + SLOT_BYTES)
    if ALIGNED:
        # So that the compiler can tell that every row is whole units of 16 bytes. A slab is whole tiles.
        N = N // (128 // TYPE.primitive_bitwidth) * (128 // TYPE.primitive_bitwidth)
        slab_columns = slab_columns // 16 * 16
    BYTES: tl.constexpr = TYPE.primitive_bitwidth // 8
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    for slab in range(tl.cdiv(N, slab_columns)):
        if MOSTLY_WHOLE:
            await_pieces(table_ptr, slab, WORLD)
        else:
            await_everyone(table_ptr, slab, WORLD)
        begin = slab * slab_columns
        width = min(N - begin, slab_columns)
        if ALIGNED:
            width = width // (128 // TYPE.primitive_bitwidth) * (128 // TYPE.primitive_bitwidth)
        first = slot(table_ptr, rank, tl.full((), 0, tl.int32), epoch, WORLD)
        first += num_rows.to(tl.int64) * begin * BYTES
        across = tl.cdiv(width, COLUMNS)
        for block in range(tl.program_id(0), tl.cdiv(num_rows, ROWS) * across, tl.num_programs(0)):
            row, column = block // across * ROWS, block % across * COLUMNS
            source = first + (row.to(tl.int64) * width + column) * BYTES
            to = typed(out + (row.to(tl.int64) * N + begin + column) * BYTES, TYPE, ALIGNED)
            if (row + ROWS <= num_rows) & (column + COLUMNS <= width):
                # With a mask, loads would be queued one behind the other: 8 times as long a way to memory.
                total = sum_slots(source, rows * width + columns, None, stride, TYPE, ALIGNED, WORLD)
                tl.store(to + (rows * N + columns), total.to(TYPE))
            else:
                mask = (row + rows < num_rows) & (column + columns < width)
                total = sum_slots(source, rows * width + columns, mask, stride, TYPE, ALIGNED, WORLD)
                tl.store(to + (rows * N + columns), total.to(TYPE), mask=mask)
    release(table_ptr, WORLD)


@triton.jit(do_not_specialize=("table_ptr",))
def _release_kernel(table_ptr, WORLD: tl.constexpr):
    release(table_ptr, WORLD)


@triton.jit
def _clock_kernel(out_ptr):
    tl.store(out_ptr, clock_ns())
