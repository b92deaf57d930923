"""What Hopper's main loop needs of Gluon, and all that differs between its versions.

A Gluon kernel may call functions of ``@triton.jit``: they are compiled with Gluon's rules, under which every block of
numbers has a layout. So the functions of ``lang/`` that handle single numbers serve both loops; where one makes a
block, it asks ``span``, ``lanes`` or ``thread_numbers`` for it. A kernel divided into *partitions*
(``warp_specialize``) runs each on warps of its own: a barrier, or "one thread", is then a partition's.
"""

from typing import Any

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._semantic import GluonSemantic
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = [
    "PIECE",
    "fence_async_shared",
    "gl",
    "gluon",
    "halves",
    "lanes",
    "mbarrier",
    "num_threads",
    "piece_buffers",
    "span",
    "store_by_threads",
    "store_by_tma",
    "sum_by_threads",
    "thread_numbers",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_wait",
    "whole",
]

_WARP = 32


def span(count: Any, _semantic: Any = None) -> Any:
    """0 to ``count`` - 1; under Gluon in whatever layout the block has that it meets."""
    if _semantic is None:
        return tl.arange(0, count)  # interpreted
    if isinstance(_semantic, GluonSemantic):
        return gl.arange(0, count, _semantic=_semantic)
    return tl.arange(0, count, _semantic=_semantic)


def lanes(count: Any, width: Any, _semantic: Any = None, _generator: Any = None) -> Any:
    """0 to ``count`` - 1, for all threads to share out, ``width`` neighbours each; Triton finds that out by itself."""
    if _semantic is None:
        return tl.arange(0, count)
    if isinstance(_semantic, GluonSemantic):
        warps = gl.num_warps(_semantic=_semantic, _generator=_generator).value
        layout = gl.BlockedLayout([tl.constexpr(width).value], [_WARP], [warps], [0])
        return gl.arange(0, count, layout, _semantic=_semantic)
    return tl.arange(0, count, _semantic=_semantic)


def thread_numbers(_semantic: Any = None, _generator: Any = None) -> Any:
    """A block with a number for every thread of the program, or of the partition that runs this, at least."""
    if _semantic is None:
        return tl.arange(0, 1024)
    if isinstance(_semantic, GluonSemantic):
        warps = gl.num_warps(_semantic=_semantic, _generator=_generator).value
        layout = gl.BlockedLayout([1], [_WARP], [warps], [0])
        return gl.arange(0, _WARP * warps, layout, _semantic=_semantic)
    return tl.arange(0, 1024, _semantic=_semantic)


def num_threads(_semantic: Any = None, _generator: Any = None) -> Any:
    """Threads of the program, or of the partition that runs this: a power of two, of which partitions are multiples."""
    if _semantic is None:
        return tl.constexpr(1)
    if isinstance(_semantic, GluonSemantic):
        return tl.constexpr(_WARP * gl.num_warps(_semantic=_semantic, _generator=_generator).value)
    return tl.constexpr(_WARP * _semantic.builder.options.num_warps)


for _function in (span, lanes, thread_numbers, num_threads):
    _function.__triton_builtin__ = True  # type: ignore[attr-defined]


PIECE = gl.constexpr(64)
"""Columns of a tile that are stored at a time: 128 bytes of bf16, a row of TMA's swizzle."""

_NUM_PIECE_BUFFERS = gl.constexpr(2)


@gluon.jit
def piece_buffers(out_desc):
    """Room for pieces on their way out: one is filled while another leaves."""
    return gl.allocate_shared_memory(out_desc.dtype, [_NUM_PIECE_BUFFERS] + out_desc.block_type.shape, out_desc.layout)


@gluon.jit
def store_by_tma(value, target, row, column, NUMBER: gl.constexpr, NUM_PIECES: gl.constexpr):
    """A tile of NUM_PIECES to (row, column) of ``target``, (descriptor, ``piece_buffers``). Does not wait for it."""
    out_desc, buffers = target
    if value.shape[1] == PIECE:
        buffer = buffers.index(NUMBER % _NUM_PIECE_BUFFERS)
        # A tile of one piece uses one buffer.
        tma.store_wait(pendings=min(NUM_PIECES, _NUM_PIECE_BUFFERS) - 1)
        buffer.store(value.to(out_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [row, column], buffer)
    else:
        left, right = halves(value)
        store_by_tma(left, target, row, column, 2 * NUMBER, NUM_PIECES)
        store_by_tma(right, target, row, column + value.shape[1] // 2, 2 * NUMBER + 1, NUM_PIECES)


@gluon.jit
def store_by_threads(value, corner, row_mask_end, column_end, pitch, TYPE: gl.constexpr):
    """A tile to ``corner`` on: rows before ``row_mask_end``, columns before ``column_end``, 16 bytes a thread."""
    if value.shape[1] == PIECE:
        WIDTH: gl.constexpr = 128 // TYPE.primitive_bitwidth
        ACROSS: gl.constexpr = PIECE // WIDTH
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
        rows = gl.arange(0, value.shape[0], gl.SliceLayout(1, LAYOUT))
        columns = gl.arange(0, PIECE, gl.SliceLayout(0, LAYOUT))
        mask = (rows < row_mask_end)[:, None] & (columns < column_end)[None, :]
        narrow = gl.convert_layout(value.to(TYPE), LAYOUT)
        gl.store(corner + (rows[:, None] * pitch + columns[None, :]), narrow, mask=mask)
    else:
        left, right = halves(value)
        half: gl.constexpr = value.shape[1] // 2
        store_by_threads(left, corner, row_mask_end, column_end, pitch, TYPE)
        store_by_threads(right, corner + half, row_mask_end, column_end - half, pitch, TYPE)


@gluon.jit
def sum_by_threads(
    first, stride, out, num_rows, num_columns, pitch,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, TYPE: gl.constexpr, WORLD: gl.constexpr,
):  # fmt: skip
    """fp32 sum, from rank 0 on, of a tile of each of W slots, ``stride`` bytes apart, a few rows at a time."""
    WIDTH: gl.constexpr = 128 // TYPE.primitive_bitwidth
    ACROSS: gl.constexpr = min(32, COLUMNS // WIDTH)
    DOWN: gl.constexpr = 32 // ACROSS * gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, DOWN, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    for begin in range(0, ROWS, DOWN):
        mask = (begin + rows < num_rows)[:, None] & (columns < num_columns)[None, :]
        offsets = (begin + rows)[:, None] * pitch + columns[None, :]
        total = gl.zeros((DOWN, COLUMNS), gl.float32, LAYOUT)
        for source in range(WORLD):
            total += gl.load(first + source * stride + offsets, mask=mask, other=0.0).to(gl.float32)
        gl.store(out + offsets, total.to(TYPE), mask=mask)


@gluon.jit
def halves(value):
    """Left and right half of a tile. Nothing moves: each thread has some of both."""
    rows: gl.constexpr = value.shape[0]
    columns: gl.constexpr = value.shape[1]
    return value.reshape((rows, 2, columns // 2)).permute((0, 2, 1)).split()


@gluon.jit
def whole(left, right, like):
    """The tile of two ``halves``, laid out as ``like``."""
    LAYOUT: gl.constexpr = like.type.layout
    return gl.convert_layout(gl.join(left, right).permute((0, 2, 1)).reshape(like.shape), LAYOUT)
