"""Chosen rows of tokens on their way: where they are in messages, and which of them go to whom.

The device's twin of ``kernels/rows_plan.py``; a test compares the two. ``table`` is the plan (``config.RowsLayout``).
``sent`` is the address of int32 ``[W, num_tokens + 1]``: how many tokens before each go to each rank, so that a token
goes there if the next number is larger.
"""

import triton
import triton.language as tl

from tileflux.config import ROWS
from tileflux.lang.remote import copy_run, typed

__all__ = [
    "copy_row",
    "first_token",
    "goes_to",
    "num_pieces",
    "num_steps",
    "num_tokens",
    "number_of",
    "piece",
    "plan_word",
    "totals",
]

_ROWS_PER_PIECE = tl.constexpr(ROWS.rows_per_piece)
_NUM_SLABS = tl.constexpr(ROWS.num_slabs)
_SLAB_BYTES = tl.constexpr(ROWS.slab_bytes)
_ROW_BYTES = tl.constexpr(ROWS.row_bytes)
_MIN_PIECES = tl.constexpr(ROWS.min_pieces)
_ARRAYS = tl.constexpr(ROWS.arrays)


@triton.jit
def plan_word(table, INDEX: tl.constexpr):
    """A single number of the plan."""
    return tl.load(table + INDEX)


@triton.jit
def num_tokens(table, rank):
    """Tokens of ``rank``."""
    return tl.load(table + _ARRAYS + rank).to(tl.int32)


@triton.jit
def first_token(table, rank, WORLD: tl.constexpr):
    """Tokens of the ranks before ``rank``."""
    return tl.load(table + _ARRAYS + WORLD + rank).to(tl.int32)


@triton.jit
def num_pieces(table, rank):
    """Messages of this lane for the tokens of ``rank``."""
    _, count = _run(table, rank)
    pieces = tl.cdiv(count, plan_word(table, _ROWS_PER_PIECE).to(tl.int32))
    return tl.maximum(pieces, plan_word(table, _MIN_PIECES).to(tl.int32)) * plan_word(table, _NUM_SLABS).to(tl.int32)


@triton.jit
def num_steps(table, WORLD: tl.constexpr):
    """Messages of this lane for the rank with the most tokens."""
    longest = num_pieces(table, 0)
    for rank in range(1, WORLD):
        longest = tl.maximum(longest, num_pieces(table, rank))
    return longest


@triton.jit
def piece(table, rank, step):
    """(first token, tokens, where in a row its bytes begin, how many they are) of one message of this lane."""
    num_slabs = plan_word(table, _NUM_SLABS).to(tl.int32)
    rows_per_piece = plan_word(table, _ROWS_PER_PIECE).to(tl.int32)
    begin, count = _run(table, rank)
    done = step // num_slabs * rows_per_piece
    slab_bytes = plan_word(table, _SLAB_BYTES)
    shift = (step % num_slabs).to(tl.int64) * slab_bytes
    nbytes = tl.maximum(0, tl.minimum(slab_bytes, plan_word(table, _ROW_BYTES) - shift))
    return begin + done, tl.maximum(0, tl.minimum(rows_per_piece, count - done)), shift, nbytes


@triton.jit
def _run(table, rank):
    """(first token, tokens) of this lane."""
    size = num_tokens(table, rank)
    share = tl.cdiv(size, tl.num_programs(0))
    begin = tl.minimum(size, tl.program_id(0) * share)
    return begin, tl.minimum(share, size - begin)


@triton.jit
def number_of(sent, rank, tokens, count, inside):
    """The number of each of ``tokens``, of ``count`` here, among those that go to ``rank``; -1 if it does not go."""
    words = typed(sent, tl.int32, False) + rank * (count + 1) + tokens
    before = tl.load(words, mask=inside)
    return tl.where(tl.load(words + 1, mask=inside) > before, before, -1)


@triton.jit
def goes_to(sent, rank, token, count):
    """Whether one token goes to ``rank``."""
    words = typed(sent, tl.int32, False) + rank * (count + 1) + token
    return tl.load(words + 1) > tl.load(words)


@triton.jit
def totals(sent, ranks, count, WORLD: tl.constexpr):
    """How many tokens go to each of ``ranks``."""
    return tl.load(typed(sent, tl.int32, False) + ranks * (count + 1) + count, mask=ranks < WORLD, other=0)


@triton.jit
def copy_row(dst, src, nbytes, BLOCK: tl.constexpr):
    """``copy_run``, but also the last part of a block is copied as widely as can be, if it is a multiple of that."""
    if ((dst | src | nbytes) & 15) == 0:
        num_elements = nbytes // 16 * 2
        for block in range(tl.cdiv(num_elements, BLOCK)):
            offsets = block * BLOCK + tl.arange(0, BLOCK)
            inside = offsets < num_elements
            values = tl.load(typed(src, tl.int64, True) + offsets, mask=inside)
            tl.store(typed(dst, tl.int64, True) + offsets, values, mask=inside)
    else:
        copy_run(dst, src, nbytes, BLOCK)
