"""Policies one by one: what a tile waits for, where it goes, whom it tells, and how it is summed."""

import dataclasses

import pytest
import torch
import triton
import triton.language as tl

from tileflux import env
from tileflux.kernels.shards import gather_shards, scatter_shards, spread_shards
from tileflux.lang import policy
from tileflux.lang.policy import (
    scatter_tile,
    slot,
    spread_tile,
    stage_tile,
    store_tile,
    sum_slots,
    wait_for_nothing,
    wait_for_rows,
    wait_for_slot,
    wait_for_slots,
)
from tileflux.testing import interpreter, poisoned

from .policies import CONFIG, WORLD, ack, counters, events, flag, make_spec, make_turns

__all__ = ["events"]

pytestmark = pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")


@triton.jit
def _wait_kernel(table_ptr, owner, chunk, WAIT: tl.constexpr, SPEC: tl.constexpr):
    WAIT(table_ptr, owner, chunk, SPEC)


@triton.jit
def _slot_kernel(out_ptr, table_ptr, owner, source, epoch, WORLD: tl.constexpr):
    tl.store(out_ptr, slot(table_ptr, owner, source, epoch, WORLD))


@triton.jit
def _sum_kernel(out_ptr, first, stride, TYPE: tl.constexpr, WORLD: tl.constexpr):
    offsets = tl.arange(0, 8)
    tl.store(out_ptr + offsets, sum_slots(first, offsets, offsets < 6, stride.to(tl.int64), TYPE, False, WORLD))


@triton.jit
def _finish_kernel(
    value_ptr, out, table_ptr, owner, first_row, row, column, end, N, number, turn,
    FINISH: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    value = tl.load(value_ptr + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :])
    FINISH(value, out, (owner, first_row, row, column, end, N, number, turn), table_ptr, SPEC)


@pytest.mark.parametrize("epoch", [0, 9, 2**31 - 1])
def test_waits(events: list[tuple], epoch: int) -> None:
    turns = make_turns(gather_shards("ag_gemm", (9, 9, 9), 16, False, 1), epoch)
    following, before = (epoch + 1 + 2**31) % 2**32 - 2**31, epoch - 1
    for wait, owner, expected in (
        (wait_for_nothing, 2, []),
        (wait_for_rows, 1, []),
        (wait_for_rows, 2, [("wait", flag(turns[1], 1, 2, 5), following, 2)]),
        (wait_for_slot, 1, []),
        (wait_for_slot, 0, [("wait", ack(turns[1], 1, 0), before, 0)]),
        (wait_for_slots, 1, [("all", [ack(turns[1], 1, peer) for peer in (2, 0)], before)]),
    ):
        events.clear()
        _wait_kernel[(1,)](turns[1].table, owner, 5, wait, make_spec())
        assert events == expected, wait


def test_ones_own_rows_wait_for_those_that_they_go_through_the_weight_with(events: list[tuple]) -> None:
    """The next rank's, if there are any; a chunk without rows is never announced."""
    together = make_spec(alone=-1)
    turns = make_turns(gather_shards("ag_gemm", (9, 600, 0), 16, False, 3))
    assert turns[0].plan.chunk_rows == 256
    for rank, owner, chunk, source in ((0, 0, 2, 1), (0, 1, 2, 1), (0, 0, 3, None), (1, 1, 0, None), (2, 2, 0, 0)):
        events.clear()
        _wait_kernel[(1,)](turns[rank].table, owner, chunk, wait_for_rows, together)
        expected = [] if source is None else [("wait", flag(turns[rank], rank, source, chunk), 1, source)]
        assert events == expected, (rank, owner, chunk)


def test_a_wait_before_tma_is_fenced(events: list[tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    turns = make_turns(gather_shards("ag_gemm", (9, 9, 9), 16, False, 1))
    monkeypatch.setattr(policy, "tma_fence", lambda: events.append(("fence",)))
    for use_tma in (False, True):
        events.clear()
        _wait_kernel[(1,)](turns[1].table, 2, 0, wait_for_rows, make_spec(use_tma=use_tma))
        _wait_kernel[(1,)](turns[1].table, 2, 0, wait_for_slots, make_spec(use_tma=use_tma))
        fence = ["fence"] * use_tma
        assert [event[0] for event in events] == ["wait", *fence, "all", *fence]


@pytest.mark.parametrize("epoch", [0, 1, 6, 2**31 - 1, -(2**31)])
def test_slots_are_the_host_twins(epoch: int) -> None:
    turns = make_turns(scatter_shards("gemm_rs", (5, 0, 9), 24, 2, CONFIG), epoch)
    out = torch.zeros(1, dtype=torch.int64)
    found = set()
    for owner in range(WORLD):
        for source in range(WORLD):
            _slot_kernel[(1,)](out, turns[1].table, owner, source, epoch, WORLD)
            host = turns[1].slot(owner, source, torch.float16, 24)
            assert out.item() == host.data_ptr() and host.shape == (9, 24)
            found.add(out.item())
    assert len(found) == WORLD**2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_sums_are_in_rank_order_and_in_fp32(dtype: torch.dtype) -> None:
    interpreter.install()
    # Any other order, and any sum in less than fp32, keeps or loses the 1 where this one does not.
    parts = torch.randn(4, 8).to(dtype)
    large = 2.0**25 if dtype != torch.float16 else 2.0**15
    parts[:, 0] = torch.tensor([large, 1.0, -large, 1.0]).to(dtype)
    parts[:, 1] = torch.tensor([large, -large, 1.0, 2.0**-20]).to(dtype)
    parts[:, 6:] = float("nan")
    out = poisoned((8,), torch.float32)
    types = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    _sum_kernel[(1,)](out, parts.data_ptr(), parts.stride(0) * dtype.itemsize, types[dtype], 4)
    right = torch.zeros(8)
    for part in parts:
        right += part.float()
    assert torch.equal(out[:6], right[:6])


@pytest.mark.parametrize(("first_row", "row", "column", "end", "N"), [(0, 0, 0, 16, 16), (3, 16, 16, 20, 21)])
@pytest.mark.parametrize("aligned", [True, False])
def test_a_stored_tile_stays_within_its_shard(
    first_row: int, row: int, column: int, end: int, N: int, aligned: bool
) -> None:
    interpreter.install()
    if N % 4 and aligned:
        N = 20
    value = torch.randn(16, 16)
    out = poisoned((40, N), torch.float32)
    place = (1, first_row, row, column, end, N, 0, 0)
    table = torch.zeros(1, dtype=torch.int64)
    _finish_kernel[(1,)](value, out.data_ptr(), table, *place, store_tile, make_spec(aligned=aligned))
    rows, columns = slice(first_row + row, first_row + min(end, row + 16)), slice(column, min(N, column + 16))
    height, width = out[rows, columns].shape
    assert torch.equal(out[rows, columns], value[:height, :width])
    out[rows, columns] = float("nan")
    assert out.isnan().all(), "wrote beside its place"


@pytest.mark.parametrize("epoch", [4, 5])
def test_a_tile_of_a_peer_goes_to_its_slot_and_is_announced(events: list[tuple], epoch: int) -> None:
    turns = make_turns(scatter_shards("gemm_rs", (20, 20, 20), 16, 4, CONFIG), epoch)
    me, owner = 1, 2
    mine = turns[me].slot(owner, me, torch.float32, 16)
    turns[me]._data.view(owner).fill_(0x7F)
    value, out = torch.randn(16, 16), poisoned((20, 16), torch.float32)
    place = (owner, 40, 16, 0, 20, 16, 1, 0)
    _finish_kernel[(1,)](value, out.data_ptr(), turns[me].table, *place, scatter_tile, make_spec())
    assert events == [("signal", flag(turns[me], owner, me, 1), epoch + 1)]
    assert torch.equal(mine[16:20], value[:4]) and out.isnan().all()
    mine[16:20].view(torch.uint8).fill_(0x7F)
    assert turns[me]._data.view(owner).eq(0x7F).all(), "wrote beside its slot"


def test_ones_own_tile_is_summed_after_a_wait_for_every_peer(events: list[tuple]) -> None:
    turns = make_turns(scatter_shards("gemm_rs", (20, 20, 20), 16, 4, CONFIG), 6)
    value, out = torch.randn(16, 16), poisoned((20, 16), torch.float32)
    slots = [turns[1].slot(1, source, torch.float32, 16) for source in range(WORLD)]
    for each in slots:
        each.copy_(torch.randn(20, 16))
    place = (1, 20, 16, 0, 20, 16, 1, 0)
    _finish_kernel[(1,)](value, out.data_ptr(), turns[1].table, *place, scatter_tile, make_spec())
    assert events == [("all", [flag(turns[1], 1, source, 1) for source in (2, 0)], 7)]
    right = slots[0][16:20] + value[:4] + slots[2][16:20]
    assert torch.equal(out[16:20], right) and out[:16].isnan().all()


@pytest.mark.parametrize("num_slabs", [1, 3])
def test_a_tile_that_a_copy_will_send_is_kept_and_counted(events: list[tuple], num_slabs: int) -> None:
    """Of 40 columns in three slabs, the last, of 8."""
    config = dataclasses.replace(CONFIG, num_chunks=num_slabs)
    turns = make_turns(scatter_shards("gemm_rs", (20, 20, 20), 40, 4, config, by_copies=True), 5)
    me, owner = 1, 2
    turns[me]._data.view(me).fill_(0x7F)
    value, out = torch.randn(16, 16), poisoned((20, 40), torch.float32)
    place = (owner, 40, 16, 32, 20, 40, 1, 0)
    for count in (1, 2):
        _finish_kernel[(1,)](value, out.data_ptr(), turns[me].table, *place, stage_tile, make_spec())
        words = counters(turns[me])
        assert words[owner, num_slabs - 1] == count and words.sum() == count, "counted once, for its owner and slab"
    assert not events and out.isnan().all()
    kept = turns[me].staging(torch.float32, 40)[56:60, 32:]
    if num_slabs > 1:
        kept = turns[me].staged_slabs(owner, range(2, 3), torch.float32, 40)[16:]
        assert kept.shape == (4, 8) and kept.is_contiguous()
    assert torch.equal(kept, value[:4, :8])
    kept.view(torch.uint8).fill_(0x7F)
    assert turns[me]._data.view(me).eq(0x7F).all(), "wrote beside its place"


def test_ones_own_tile_waits_in_its_place_among_slabs(events: list[tuple]) -> None:
    config = dataclasses.replace(CONFIG, num_chunks=2)
    turns = make_turns(scatter_shards("gemm_rs", (20, 20, 20), 40, 4, config, by_copies=True), 5)
    turns[1]._data.view(1).fill_(0x7F)
    value, out = torch.randn(16, 16), poisoned((20, 40), torch.float32)
    _finish_kernel[(1,)](
        value, out.data_ptr(), turns[1].table, 1, 20, 16, 16, 20, 40, 1, 0, stage_tile, make_spec()
    )  # fmt: skip
    assert not events and out.isnan().all() and not counters(turns[1]).any()
    kept = turns[1].slabs_at(1, 1, range(1), torch.float32, 40)
    assert kept.shape == (20, 32) and torch.equal(kept[16:, 16:], value[:4])
    kept[16:, 16:].view(torch.uint8).fill_(0x7F)
    assert turns[1]._data.view(1).eq(0x7F).all(), "wrote beside its place"


@pytest.mark.parametrize("epoch", [5, 6])
def test_ones_own_tile_waits_in_its_slot_for_shards_that_copies_bring(events: list[tuple], epoch: int) -> None:
    turns = make_turns(scatter_shards("gemm_rs", (20, 20, 20), 16, 4, CONFIG, by_copies=True), epoch)
    value, out = torch.randn(16, 16), poisoned((20, 16), torch.float32)
    slots = [turns[1].slot(1, source, torch.float32, 16) for source in range(WORLD)]
    assert slots[0].data_ptr() == turns[1]._data.view(1).data_ptr(), "the same half in every call"
    before = [torch.randn(20, 16) for _ in slots]
    for each, given in zip(slots, before, strict=True):
        each.copy_(given)
    place = (1, 20, 16, 0, 20, 16, 1, 0)
    _finish_kernel[(1,)](value, out.data_ptr(), turns[1].table, *place, stage_tile, make_spec())
    assert not events and out.isnan().all(), "nobody is waited for, and nothing summed"
    before[1][16:20] = value[:4]
    assert all(torch.equal(each, given) for each, given in zip(slots, before, strict=True))


def test_a_spread_tile_goes_everywhere_then_is_summed_from_everywhere(events: list[tuple]) -> None:
    turns = make_turns(spread_shards("gemm_ar", WORLD, 18, 16, 4, CONFIG), 3)
    value, out = torch.randn(16, 16), poisoned((18, 16), torch.float32)
    place = (0, 0, 16, 0, 18, 16, 1)
    _finish_kernel[(1,)](value, out.data_ptr(), turns[1].table, *place, 0, spread_tile, make_spec())
    assert events == [("signal", flag(turns[1], peer, 1, 1), 4) for peer in (2, 0, 1)]
    for peer in range(WORLD):
        assert torch.equal(turns[1].slot(peer, 1, torch.float32, 16)[16:18], value[:2])
    assert out.isnan().all()
    events.clear()
    others = {source: turns[1].slot(1, source, torch.float32, 16) for source in (0, 2)}
    for each in others.values():
        each.copy_(torch.randn(18, 16))
    _finish_kernel[(1,)](nan := poisoned((16, 16), torch.float32), out.data_ptr(), turns[1].table, *place, 1,
                         spread_tile, make_spec())  # fmt: skip
    assert events == [("all", [flag(turns[1], 1, source, 1) for source in (2, 0, 1)], 4)]
    assert nan.isnan().all() and out[:16].isnan().all()
    assert torch.equal(out[16:18], others[0][16:18] + value[:2] + others[2][16:18])
