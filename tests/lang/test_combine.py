"""Sums of tokens' choices: where they go, what they wait for, and whom they tell."""

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from tileflux import env
from tileflux.config import CONTROL, MAX_CHUNKS, GemmConfig
from tileflux.kernels.groups import SortedRows, cut_tiles
from tileflux.kernels.shards import combine_shards
from tileflux.kernels.turns import Turn
from tileflux.lang.combine import send_sums, stage_sums
from tileflux.testing import poisoned

from .policies import WORLD, counters, events, flag, make_spec, make_turns

__all__ = ["events"]

pytestmark = pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")


@triton.jit
def _finish_sums_kernel(
    value_ptr, groups, slab, wanted, table_ptr, owner, first_row, row, column, end, N, turn,
    FINISH: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    value = tl.load(value_ptr + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :])
    place = (owner, first_row, row, column, end, N, row * 0, turn)
    FINISH(value, (value_ptr, groups, slab, wanted), place, table_ptr, SPEC)


ROWS, COLUMNS, CAPACITY = (20, 7, 18), 40, 64
SLABS = GemmConfig(block_m=16, block_n=16, num_chunks=2)


def make_choices() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(the list that the kernel reads, the row of each of two choices or -1, what it is multiplied with)."""
    num_tokens = sum(ROWS)
    rows, weights = torch.randperm(2 * num_tokens).to(torch.int32), torch.rand(num_tokens, 2)
    positions = torch.where(rows < CAPACITY, rows, -1)
    slots = torch.zeros(CAPACITY, dtype=torch.int32)
    starts = torch.tensor([0, CAPACITY], dtype=torch.int32)
    groups = cut_tiles(SortedRows(slots, positions, starts, 1, 1), CAPACITY, 16, weights)
    return groups.index, positions.view(-1, 2), weights


def make_staging(epoch: int) -> tuple[Turn, torch.Tensor, SimpleNamespace]:
    """Rank 1's turn by copies, its products, and what the policy reads of a spec."""
    plan = combine_shards("moe_gemm_rs", ROWS, CAPACITY, COLUMNS, 4, SLABS, by_copies=True)
    mine = make_turns(plan, epoch)[1]
    mine.own.fill_(0x7F)
    begin = WORLD * plan.slot_bytes
    products = mine.own[begin : begin + 4 * CAPACITY * COLUMNS].view(torch.float32).view(CAPACITY, COLUMNS)
    spec = make_spec()
    spec.block_n, spec.num_slabs = 16, 2
    return mine, products, spec


def test_a_product_whose_sums_copies_will_send_is_kept_and_counted(events: list[tuple]) -> None:
    mine, products, spec = make_staging(5)
    index, _, _ = make_choices()
    value = torch.randn(16, 16)
    # A tile of the list: its owner is the stage at which its rows arrive, and says nothing.
    _finish_sums_kernel[(1,)](value, index.data_ptr(), 1, 8, mine.table, 2, 0, 32, 32, 46, COLUMNS, 0, stage_sums, spec)
    assert counters(mine)[1, 1] == 1 and counters(mine).sum() == 1, "counted once, for its slab"
    assert not events and torch.equal(products[32:46, 32:40], value[:14, :8])
    products[32:46, 32:40] = products[0, :8]
    assert mine.own.eq(0x7F).all(), "wrote beside its place"


@pytest.mark.parametrize("epoch", [5, 6])
@pytest.mark.parametrize(("slab", "column"), [(0, 16), (1, 32)])
@pytest.mark.parametrize("owner", [0, 1, 2])
def test_sums_that_a_copy_will_send_lie_slab_by_slab(
    events: list[tuple], owner: int, slab: int, column: int, epoch: int
) -> None:
    mine, products, spec = make_staging(epoch)
    index, positions, weights = make_choices()
    products.copy_(torch.randn(CAPACITY, COLUMNS))
    mine._data.view(1).fill_(0x7F)
    first, num_rows = sum(ROWS[:owner]), ROWS[owner]
    row = 16 if num_rows > 16 else 0
    nan = poisoned((16, 16), torch.float32)
    _finish_sums_kernel[(1,)](
        nan, index.data_ptr(), slab, 8, mine.table, owner, first, row, column, num_rows, COLUMNS, 1, stage_sums, spec
    )
    product_count = mine._control.address(1) + 4 * (CONTROL.counters(WORLD) + MAX_CHUNKS + slab)
    assert events == [("wait", product_count, 8, 1)], "for the products of the slab alone; nobody is told"
    right = _sums(products, positions, weights, range(first + row, first + num_rows), column)
    if owner == 1:
        found = mine.slabs_at(1, 1, range(slab, slab + 1), torch.float32, COLUMNS)
        assert counters(mine).sum() == 0, "one's own are sent by nobody"
    else:
        found = mine.slabs_to_send(owner, range(slab, slab + 1), torch.float32, COLUMNS)
        assert counters(mine)[owner, slab] == 1 and counters(mine).sum() == 1
    begin = column - 32 * slab
    part = found[row:, begin : begin + right.shape[1]]
    assert torch.equal(part, right)
    part.copy_(torch.tensor(0x7F7F7F7F, dtype=torch.int32).view(torch.float32))
    assert mine._data.view(1).eq(0x7F).all(), "wrote beside its place"
    assert mine.own[: WORLD * mine.plan.slot_bytes].eq(0x7F).all(), "wrote beside its place"


def _sums(
    products: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor, tokens: range, column: int
) -> torch.Tensor:
    right = torch.zeros(len(tokens), min(16, COLUMNS - column))
    columns = slice(column, column + right.shape[1])
    for choice in range(2):
        for number, token in enumerate(tokens):
            place = int(positions[token, choice])
            if place >= 0:
                right[number] += weights[token, choice] * products[place, columns]
    return right


@pytest.mark.parametrize("epoch", [5, 6])
@pytest.mark.parametrize("owner", [0, 1, 2])
def test_sums_that_are_stored_at_their_owner_are_announced_by_the_last_of_a_slab(
    events: list[tuple], owner: int, epoch: int
) -> None:
    plan = combine_shards("moe_gemm_rs", ROWS, CAPACITY, COLUMNS, 4, SLABS, by_slab=True)
    mine = make_turns(plan, epoch)[1]
    spec = make_spec()
    spec.block_n, spec.num_slabs = 16, 2
    index, positions, weights = make_choices()
    products = mine.own[: 4 * CAPACITY * COLUMNS].view(torch.float32).view(CAPACITY, COLUMNS)
    products.copy_(torch.randn(CAPACITY, COLUMNS))
    first, num_rows = sum(ROWS[:owner]), ROWS[owner]
    nan = poisoned((16, 16), torch.float32)
    tiles = [(row, column) for row in range(0, num_rows, 16) for column in (0, 16)]
    told = ("signal", flag(mine, owner, 1, 0), epoch + 1)
    for number, (row, column) in enumerate(tiles):
        events.clear()
        _finish_sums_kernel[(1,)](
            nan, index.data_ptr(), 0, 8, mine.table, owner, first, row, column, num_rows, COLUMNS, 1, send_sums, spec
        )
        is_last = number == len(tiles) - 1
        assert events[1:] == ([told] if is_last and owner != 1 else []), "the flag is behind all tiles of the slab"
        end = min(row + 16, num_rows)
        right = _sums(products, positions, weights, range(first + row, first + end), column)
        slot = mine.slot(owner, 1, torch.float32, COLUMNS, epoch)
        found = slot.flatten()[: num_rows * plan.slab_columns].view(num_rows, plan.slab_columns)
        assert torch.equal(found[row:end, column : column + 16], right)
    assert counters(mine).sum() == 0, "set back for the next call"
