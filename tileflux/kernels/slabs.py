"""Columns slab by slab, for ``moe_gemm_rs`` pipelined: a grouped product of some columns alone, and tokens' sums.

The weights of all experts are one matrix, in which an expert's rows begin where the one before has ended. Of a slab as
wide as a whole part of it, say an S-th, the same matrix holds S times as many experts of that width, of which every
S-th is wanted: so the list of tiles is made anew with the experts' numbers times S, and serves all slabs.

Sums lie as copies send them (``Turn.slabs_to_send``): a slot for each owner, in which a share of tokens lies slab by
slab. One's own go to one's own slot, where all ranks' are added up.
"""

import torch
import triton
import triton.language as tl

from tileflux.config import GROUPS
from tileflux.kernels.choices import SUMMED
from tileflux.kernels.loading import launching
from tileflux.kernels.prepared import launch_step
from tileflux.kernels.turns import Turn
from tileflux.lang.combine import add_choices
from tileflux.lang.policy import await_word, slot
from tileflux.lang.remote import typed
from tileflux.lang.turn import (
    RANK,
    SLOT_BYTES,
    STAGING,
    ack_word,
    confirm_call,
    counter_word,
    current_epoch,
    data,
    flag_word,
    push_run,
    shard,
    word,
)
from tileflux.symm.group import Group

__all__ = ["launch_push_slab", "launch_spaced", "launch_sums", "load"]

_COPY = 1024
_BLOCK = 2048
_NUM_WARPS, _NUM_COPIERS = 4, 8
_ELEMENTS, _MAX_COLUMNS, _MIN_COLUMNS = 2048, 512, 32  # that a program adds up at a time
_WIDTH = 8  # elements that a thread loads at a time; of fp32 in two accesses

_TILES, _TILE_WORDS, _EXPERT = (
    tl.constexpr(GROUPS.tiles), tl.constexpr(GROUPS.tile_words), tl.constexpr(GROUPS.expert)
)  # fmt: skip
_TOP_K = tl.constexpr(GROUPS.top_k)
_POSITIONS, _WEIGHTS = tl.constexpr(GROUPS.positions), tl.constexpr(GROUPS.weights)


def launch_spaced(group: Group, index: torch.Tensor, spaced: torch.Tensor, times: int, num_programs: int = -1) -> None:
    """Fill ``spaced`` with the list of tiles at the beginning of ``index``, every expert's number ``times`` as high."""
    num_words = len(spaced)
    grid = triton.cdiv(num_words, _COPY) if num_programs < 0 else num_programs
    with launching(group):
        launch_step(_spaced_kernel, grid, (index.data_ptr(), num_words, times, spaced), (_COPY,), _NUM_WARPS)


def launch_sums(
    turn: Turn, index: torch.Tensor, products: torch.Tensor, slab: int, hops: range, world_size: int
) -> None:
    """Add up the choices of tokens of the ranks ``hops`` behind this one, of which ``products`` has a slab; and round.

    ``hops`` follow each other; 0 or W is this rank.
    """
    width = products.shape[1]
    columns = min(_MAX_COLUMNS, max(_MIN_COLUMNS, triton.next_power_of_2(width)))
    tokens = _ELEMENTS // columns
    # Slots, slabs and rows are whole units of 16 bytes where the width is, and so is where products begin.
    is_aligned = width % _WIDTH == 0
    blocks = triton.cdiv(max(turn.plan.rows), tokens) * triton.cdiv(width, columns)
    num_blocks = triton.cdiv(max(turn.plan.rows), tokens)
    arguments = (index.data_ptr(), products.data_ptr(), width, slab, hops.start, num_blocks, turn.table)
    constants = (SUMMED[products.dtype], is_aligned, world_size, tokens, columns, _WIDTH)
    with launching(turn.group):
        launch_step(_slab_sums_kernel, len(hops) * blocks, arguments, constants, _NUM_WARPS)


def launch_push_slab(turn: Turn, products: torch.Tensor, slab: int, num_feeders: int, world_size: int) -> None:
    """Send a slab of this rank's sums, as wide as ``products``, to every peer, the next one first."""
    arguments = (products.shape[1] * products.element_size(), slab, turn.table)
    with launching(turn.group):
        launch_step(_push_slab_kernel, num_feeders, arguments, (world_size, _BLOCK), _NUM_COPIERS)


def load(turn: Turn, index: torch.Tensor, products: torch.Tensor, world_size: int) -> None:
    """Compile and load all of them, with nothing to do."""
    launch_spaced(turn.group, index, index[:0], 1, 0)
    launch_sums(turn, index, products, 0, range(0), world_size)
    launch_push_slab(turn, products, 0, 0, world_size)


@triton.jit(do_not_specialize=("index", "num_words", "times", "spaced_ptr"))
def _spaced_kernel(index: tl.int64, num_words: tl.int32, times: tl.int32, spaced_ptr, BLOCK: tl.constexpr):
    words = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = words < num_words
    value = tl.load(typed(index, tl.int32, False) + words, mask=mask, other=0)
    is_expert = (words >= _TILES) & ((words - _TILES) % _TILE_WORDS == _EXPERT)
    tl.store(typed(spaced_ptr, tl.int32, False) + words, tl.where(is_expert, value * times, value), mask=mask)


@triton.jit(do_not_specialize=("index", "products", "width", "slab", "first_hop", "num_blocks", "table_ptr"))
def _slab_sums_kernel(
    index: tl.int64,
    products: tl.int64,
    width: tl.int32,
    slab: tl.int32,
    first_hop: tl.int32,
    num_blocks: tl.int32,
    table_ptr,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WORLD: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A program has some of one owner's tokens, and some columns."""
    num_parts = tl.cdiv(width, COLUMNS)
    if ALIGNED:
        # So that the compiler can tell, and does not load element by element.
        width = width // WIDTH * WIDTH
    rank = word(table_ptr, RANK)
    block = tl.program_id(0) // num_parts
    owner = (rank + first_hop + block // num_blocks) % WORLD
    first_row, num_rows = shard(table_ptr, owner, WORLD)
    rows = block % num_blocks * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(0) % num_parts * COLUMNS + tl.arange(0, COLUMNS)
    is_row = rows < num_rows
    is_column = columns < width
    words = typed(index, tl.int32, False)
    top_k = tl.load(words + _TOP_K)
    positions = words + tl.load(words + _POSITIONS)
    weights = (words + tl.load(words + _WEIGHTS)).to(tl.pointer_type(tl.float32))
    total = add_choices(
        positions, weights, (first_row + rows).to(tl.int64) * top_k, top_k, is_row,
        typed(products, TYPE, ALIGNED), width, columns, is_column,
    )  # fmt: skip
    to = data(table_ptr, rank, WORLD) + tl.load(table_ptr + STAGING)
    to += owner.to(tl.int64) * tl.load(table_ptr + SLOT_BYTES)
    if owner == rank:
        to = slot(table_ptr, rank, rank, current_epoch(table_ptr, WORLD), WORLD)
    to += num_rows.to(tl.int64) * slab * width * (TYPE.primitive_bitwidth // 8)
    offsets = rows[:, None].to(tl.int64) * width + columns[None, :]
    tl.store(typed(to, TYPE, ALIGNED) + offsets, total.to(TYPE), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=("row_bytes", "slab", "table_ptr"))
def _push_slab_kernel(row_bytes: tl.int64, slab: tl.int32, table_ptr, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    rank = word(table_ptr, RANK)
    epoch = current_epoch(table_ptr, WORLD)
    staging = data(table_ptr, rank, WORLD) + tl.load(table_ptr + STAGING)
    for hop in range(1, WORLD):
        owner = (rank + hop) % WORLD
        _, num_rows = shard(table_ptr, owner, WORLD)
        if num_rows > 0:
            nbytes = num_rows.to(tl.int64) * row_bytes
            await_word(ack_word(table_ptr, rank, owner, WORLD), epoch - 1, owner, table_ptr)
            push_run(
                slot(table_ptr, owner, rank, epoch, WORLD) + slab * nbytes,
                staging + owner.to(tl.int64) * tl.load(table_ptr + SLOT_BYTES) + slab * nbytes, nbytes,
                flag_word(table_ptr, owner, rank, slab, WORLD), epoch + 1,
                counter_word(table_ptr, rank, owner, slab, WORLD), tl.program_id(0), tl.num_programs(0), BLOCK,
            )  # fmt: skip
    confirm_call(table_ptr)
