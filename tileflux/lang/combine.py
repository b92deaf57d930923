"""What happens to a finished tile of rows grouped by expert: tokens' choices are added up, by slabs of columns.

A tile comes twice. Multiplied, its rows go into memory of this rank's own, and are counted; when a slab's are all
there, blocks of tokens have their choices added up from them, and go to the tokens' owner. Policies, as those of
``lang/policy.py``; ``target`` is (the output, the list of tiles, the slab, how many tiles it has in all).
"""

import triton
import triton.language as tl

from tileflux.config import GROUPS
from tileflux.lang.policy import (
    announce_part,
    pitch_of,
    slot,
    store_block,
    sum_own_tile,
    wait_for_slot,
    wait_for_word,
)
from tileflux.lang.remote import typed
from tileflux.lang.signal import count, signal
from tileflux.lang.turn import RANK, SLOT_BYTES, STAGING, counter_word, current_epoch, data, flag_word, word

__all__ = ["add_choices", "combine_tile", "send_sums", "stage_sums"]

_TOP_K = tl.constexpr(GROUPS.top_k)
_POSITIONS = tl.constexpr(GROUPS.positions)
_WEIGHTS = tl.constexpr(GROUPS.weights)


@triton.jit
def add_choices(
    positions, weights, first, top_k, is_token, rows, pitch, columns, is_column, WEIGHTED: tl.constexpr = True
):  # fmt: skip
    """The choices of some tokens added up in fp32, weighted or not: a block, ``is_token`` high and ``is_column`` wide.

    Choices ``first`` and on, ``top_k`` of each token, are the rows at ``positions``, ``pitch`` elements apart; or not
    here, where that is negative. A choice that is not here adds nothing, whatever its weight is.
    """
    total = tl.zeros((is_token.shape[0], is_column.shape[0]), tl.float32)
    for choice in range(top_k):
        place = tl.load(positions + first + choice, mask=is_token, other=-1)
        mask = (place >= 0)[:, None] & is_column[None, :]
        offsets = place[:, None].to(tl.int64) * pitch + columns[None, :]
        value = tl.load(rows + offsets, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            weight = tl.load(weights + first + choice, mask=is_token, other=0.0)
            value = tl.where(mask, weight[:, None] * value, 0.0)
        total += value
    return total


@triton.jit
def combine_tile(value, target, place, table, SPEC: tl.constexpr):
    """First turn: into memory of one's own, and counted. Second: tokens' choices are added up, and go to their owner.

    There, as in ``scatter_tile``, all ranks' are added up.
    """
    out, groups, slab, _ = target
    rank = word(table, RANK)
    owner, first_row, row, column, num_rows, N, number, turn = place
    products = data(table, rank, SPEC.world_size) + tl.load(table + STAGING)
    _keep_or_await(value, target, place, products, table, SPEC)
    if turn != 0:
        wait_for_slot(table, owner, slab, SPEC)
        epoch = current_epoch(table, SPEC.world_size)
        to = slot(table, owner, rank, epoch, SPEC.world_size)
        pitch = pitch_of(N, SPEC)
        _combine_rows(value.shape, groups, products, to, pitch, column, first_row, row, column, num_rows, N, SPEC)
        if owner != rank:
            signal(flag_word(table, owner, rank, number, SPEC.world_size), epoch + 1)
        else:
            sum_own_tile(value.shape, out, place, number, table, SPEC)


@triton.jit
def stage_sums(value, target, place, table, SPEC: tl.constexpr):
    """As ``combine_tile``, for copies to send: sums go into this rank's own memory, and are counted by owner and slab.

    There, and in slots, a shard lies slab by slab, so that each is one run of bytes. One's own sums go to one's own
    slot, and nothing is added up here, as in ``stage_tile``. In front of the products the memory has room for a slot of
    every owner.
    """
    _, groups, slab, _ = target
    rank = word(table, RANK)
    owner, _, _, _, _, _, _, turn = place
    sums = data(table, rank, SPEC.world_size) + tl.load(table + STAGING)
    products = sums + SPEC.world_size * tl.load(table + SLOT_BYTES)
    _keep_or_await(value, target, place, products, table, SPEC)
    if turn != 0:
        to = sums + owner.to(tl.int64) * tl.load(table + SLOT_BYTES)
        if owner == rank:
            to = slot(table, rank, rank, current_epoch(table, SPEC.world_size), SPEC.world_size)
        _combine_into_slab(value.shape, groups, slab, place, products, to, SPEC)
        if owner != rank:
            count(counter_word(table, rank, owner, slab, SPEC.world_size))


@triton.jit
def send_sums(value, target, place, table, SPEC: tl.constexpr):
    """As ``stage_sums``, but into my slot at the owner; the last of a slab's raises its flag."""
    _, groups, slab, _ = target
    rank = word(table, RANK)
    owner, _, _, _, num_rows, _, _, turn = place
    products = data(table, rank, SPEC.world_size) + tl.load(table + STAGING)
    _keep_or_await(value, target, place, products, table, SPEC)
    if turn != 0:
        to = slot(table, owner, rank, current_epoch(table, SPEC.world_size), SPEC.world_size)
        num_columns = _combine_into_slab(value.shape, groups, slab, place, products, to, SPEC)
        if owner != rank:
            announce_part(value.shape, owner, slab, num_rows, num_columns, table, SPEC)


@triton.jit
def _keep_or_await(value, target, place, products, table, SPEC: tl.constexpr):
    """First turn: keep the product, and count it. Second: wait until all of the slab's have been."""
    _, _, slab, wanted = target
    _, _, row, column, num_rows, N, _, turn = place
    rank = word(table, RANK)
    counter = counter_word(table, rank, rank, slab, SPEC.world_size)
    if turn == 0:
        store_block(value, products, row, column, num_rows, N, SPEC)
        count(counter)
    else:
        wait_for_word(counter, wanted, rank, table, SPEC)


@triton.jit
def _combine_into_slab(SHAPE: tl.constexpr, groups, slab, place, products, to, SPEC: tl.constexpr):
    """``_combine_rows`` into a shard that lies slab by slab; returns the columns of this one."""
    _, first_row, row, column, num_rows, N, _, _ = place
    slab_columns = tl.cdiv(tl.cdiv(N, SPEC.block_n), SPEC.num_slabs) * SPEC.block_n
    first = slab * slab_columns
    num_columns = min(N - first, slab_columns)
    to += num_rows.to(tl.int64) * first * (SPEC.out_type.primitive_bitwidth // 8)
    _combine_rows(
        SHAPE, groups, products, to, pitch_of(num_columns, SPEC), column - first,
        first_row, row, column, num_rows, N, SPEC,
    )  # fmt: skip
    return num_columns


@triton.jit
def _combine_rows(
    SHAPE: tl.constexpr, groups, staging, to, to_pitch, to_column, first_row, row, column, num_rows, N,
    SPEC: tl.constexpr,
):  # fmt: skip
    """The choices of a block of tokens, weighted and added up in fp32, a few tokens at a time.

    The block goes to ``to``, at the same row and at ``to_column``, where rows are ``to_pitch`` elements apart.
    """
    ROWS: tl.constexpr = min(32, SHAPE[0])
    words = groups.to(tl.pointer_type(tl.int32))
    top_k = tl.load(words + _TOP_K)
    positions = words + tl.load(words + _POSITIONS)
    weights = (words + tl.load(words + _WEIGHTS)).to(tl.pointer_type(tl.float32))
    pitch = pitch_of(N, SPEC)
    columns = column + tl.arange(0, SHAPE[1])
    rows_here = typed(staging, SPEC.out_type, SPEC.out_aligned)
    for begin in range(0, SHAPE[0], ROWS):
        rows = row + begin + tl.arange(0, ROWS)
        total = add_choices(
            positions, weights, (first_row + rows) * top_k, top_k, rows < num_rows,
            rows_here, pitch, columns, columns < pitch,
        )  # fmt: skip
        offsets = rows[:, None].to(tl.int64) * to_pitch + (to_column + tl.arange(0, SHAPE[1]))[None, :]
        mask = (rows < num_rows)[:, None] & (columns < pitch)[None, :]
        tl.store(typed(to, SPEC.out_type, SPEC.out_aligned) + offsets, total.to(SPEC.out_type), mask=mask)
