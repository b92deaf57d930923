"""Regions that grow under plans; and the protocol's words as the host uses them."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tileflux
from tileflux.config import CONTROL, MAX_CHUNKS, TABLE, GemmConfig
from tileflux.errors import PeerTimeout
from tileflux.kernels import turns
from tileflux.kernels.shards import ShardPlan, combine_shards, gather_shards, scatter_shards
from tileflux.kernels.turns import Turn, turn
from tileflux.symm.group import Group

CONFIG = GemmConfig(block_m=16, block_n=32)
rows = st.lists(st.integers(0, 5000) | st.just(0), min_size=1, max_size=16).filter(any).map(tuple)


def make_turns(groups: list[Group], plan: ShardPlan) -> list[Turn]:
    """Of all ranks."""
    return [turn(group, plan) for group in groups]


def test_a_plan_is_found_again_and_regions_grow_under_the_next() -> None:
    groups = tileflux.local_groups(2)
    small = scatter_shards("gemm_rs", (4, 4), 16, 2, CONFIG)
    large = scatter_shards("gemm_rs", (400, 4), 160, 2, CONFIG)
    before = make_turns(groups, small)
    assert [turn(group, small) for group in groups] == before
    after = make_turns(groups, large)
    assert after[0]._control is before[0]._control, "all plans of an op count together"
    for region, other in ((after[0]._data, before[0]._data), (after[0]._flags, before[0]._flags)):
        assert region.nbytes > other.nbytes and region.address(0) != other.address(0)
    assert turn(groups[0], small) is before[0], "work in flight uses the old memory"
    between = make_turns(groups, scatter_shards("gemm_rs", (5, 5), 16, 2, CONFIG))
    assert between[0]._data is after[0]._data and between[0]._flags is after[0]._flags
    assert between[0]._half_bytes == after[0]._half_bytes, "plans of one region agree on where its halves are"
    other = make_turns(groups, gather_shards("ag_gemm", (4, 4), 16, False, 1))
    assert other[0]._control is not before[0]._control, "ops do not share their memory"


def test_tables_say_where_everything_is() -> None:
    groups = tileflux.local_groups(3)
    plan = gather_shards("ag_gemm", (300, 0, 700), 40, True, 2)
    for rank, made in enumerate(make_turns(groups, plan)):
        words = made.table.tolist()
        assert made.table.data_ptr() == made.table.data_ptr() and len(words) == TABLE.num_words(3)
        assert words[TABLE.rank] == rank and words[TABLE.guard] == groups[rank].guard.table.data_ptr()
        assert (words[TABLE.num_chunks], words[TABLE.chunk_rows], words[TABLE.scales]) == (2, 512, plan.scales)
        assert words[TABLE.op] == groups[rank].guard.op_number("ag_gemm")
        arrays = [words[TABLE.arrays + 3 * index :][:3] for index in range(5)]
        regions = (made._control, made._flags, made._data)
        addresses = [[region.address(peer) for peer in range(3)] for region in regions]
        assert arrays == [[300, 0, 700], [0, 300, 300], *addresses]


def test_tables_follow_a_plan_whose_memory_has_been_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that was forgotten comes back to the op's largest region, which may lie at the same offset as the old."""
    monkeypatch.setattr(turns, "_MAX_TURNS", 2)
    groups = tileflux.local_groups(2)
    plans = [gather_shards("ag_gemm", (count, count), 1000, False, 1) for count in (100, 1000, 2000, 100)]
    for plan in plans:
        for group in groups:
            made = turn(group, plan)
            begin = TABLE.arrays + 4 * 2
            assert made.table.tolist()[begin : begin + 2] == [made._data.address(rank) for rank in range(2)]


def test_views_lie_where_the_plan_says() -> None:
    groups = tileflux.local_groups(2)
    gather, _ = make_turns(groups, gather_shards("ag_gemm", (3, 5), 12, True, 1))
    assert gather.gathered(torch.float32, 3).shape == (8, 3)
    assert gather.gathered(torch.float32, 3).data_ptr() == gather._data.address(0)
    assert gather.rows_at(1, torch.float32, 3).data_ptr() == gather._data.address(1)
    assert gather.gathered_scales().data_ptr() == gather._data.address(0) + 256
    assert gather.scales_at(1).data_ptr() == gather._data.address(1) + 256 and len(gather.scales_at(1)) == 8
    mine, _ = make_turns(groups, scatter_shards("gemm_rs", (3, 5), 6, 2, CONFIG))
    slots = {}
    for epoch in range(4):
        mine._control.view(dtype=torch.int32)[CONTROL.epoch] = epoch
        slots[epoch] = [mine.slot(1, source, torch.float16, 6).data_ptr() - mine._data.address(1) for source in (0, 1)]
    assert slots[0] == slots[2] == [0, 64] and slots[1] == slots[3] == [256, 256 + 64]
    for epoch in (0, 1, 6, 7, -1, 2**31 - 1):
        found = mine.slot(1, 1, torch.float16, 6, epoch)
        assert found.data_ptr() - mine._data.address(1) == slots[epoch & 1][1], "whatever call the rank is at"
        assert found.shape == (5, 6)


def test_calls_are_counted_by_op_until_a_graph_may_repeat_them(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[int, int]] = []
    monkeypatch.setattr(turns, "write_flag", lambda word, value: written.append((word.data_ptr(), value)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    groups = tileflux.local_groups(2)
    small, _ = make_turns(groups, gather_shards("ag_gemm", (4, 4), 16, False, 1))
    large, _ = make_turns(groups, gather_shards("ag_gemm", (600, 600), 16, False, 2))
    other, _ = make_turns(groups, scatter_shards("gemm_rs", (4, 4), 8, 4, CONFIG, by_copies=True))
    for here, index in ((small, 0), (large, 1), (other, 0), (small, 0)):
        here.count_call()
        here.announce(1, index)
    places = [here.flag(1, index).data_ptr() for here, index in ((small, 0), (large, 1), (other, 0), (small, 0))]
    assert written == list(zip(places, (1, 2, 1, 3), strict=True)), "the op's number, whatever the sizes"

    def from_memory(here: Turn, value: int) -> None:
        here.next.fill_(value)
        here.count_call()
        here.announce(1, 0)
        assert here.flag(1, 0).item() == value

    written.clear()
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        from_memory(small, 4)
    from_memory(small, 7)  # it may have been replayed
    from_memory(large, 8)
    other.count_call()
    other.announce(1, 0)
    assert written == [(other.flag(1, 0).data_ptr(), 2)], "of the other op no graph knows"


def test_words_lie_where_peers_and_kernels_look_for_them() -> None:
    groups = tileflux.local_groups(3)
    made = make_turns(groups, gather_shards("ag_gemm", (4, 4, 4), 16, False, 1))
    for rank, here in enumerate(made):
        assert here.group is groups[rank]
        assert here.next.data_ptr() == here._control.address(rank) + 4 * CONTROL.next and here.next.shape == (1,)
        for owner in range(3):
            assert len(here.flags(owner)) == here.plan.num_flags * 3 and here.flags(owner).dtype == torch.int32
            for index in (0, 1, MAX_CHUNKS - 1):
                for source in range(3):
                    word = here.flag(owner, index, source)
                    place = here._flags.address(owner) + 4 * (3 * index + source)
                    assert word.data_ptr() == place == here.flags(owner)[3 * index + source :].data_ptr()
                    assert word.shape == (1,) and word.data_ptr() == made[source].flag(owner, index).data_ptr()
            for peer in range(3):
                ack = here.ack(owner, peer)
                assert ack.data_ptr() == here._control.address(owner) + 4 * (CONTROL.ack + peer)
                assert ack.shape == (1,) and ack.dtype == torch.int32
    made[1].raise_flag(2, 5)
    assert made[0].flag(2, 5, source=1).item() == 1 and made[0].flags(2).count_nonzero() == 1
    made[1].release()
    assert [made[0].ack(owner, 1).item() for owner in range(3)] == [1, 0, 1]


@given(
    rows=rows,
    num_columns=st.integers(1, 300),
    num_slabs=st.integers(1, MAX_CHUNKS),
    capacity=st.integers(0, 900),
)
def test_slabs_have_every_column_once(rows: tuple[int, ...], num_columns: int, num_slabs: int, capacity: int) -> None:
    config = GemmConfig(block_m=16, block_n=32, num_chunks=num_slabs)
    by_stores, plan = (
        combine_shards("op", rows, capacity, num_columns, 2, config, by_copies=by_copies) for by_copies in (False, True)
    )
    slabs = plan.slabs(num_columns)
    assert [column for slab in slabs for column in slab] == list(range(num_columns))
    assert 1 <= len(slabs) <= num_slabs and all(slabs)
    assert all(slab.start % 32 == 0 for slab in slabs), "no tile is in two of them"
    # As the kernel cuts them, see ``tiles.cut``.
    num_tiles = -(-num_columns // 32)
    across = -(-num_tiles // num_slabs)
    assert plan.slab_columns == across * 32 and plan.by_copies and plan.num_flags == MAX_CHUNKS >= len(slabs)
    assert plan.data_bytes >= len(rows) * plan.slot_bytes and plan.slot_bytes >= max(rows) * num_columns * 2
    assert plan.staging_bytes == len(rows) * plan.slot_bytes + capacity * num_columns * 2
    assert (by_stores.staging_bytes, by_stores.slab_columns) == (capacity * num_columns * 2, 0)
    assert not by_stores.by_copies and by_stores.data_bytes == 2 * plan.data_bytes


@pytest.mark.parametrize("sizes", [(5, 0, 9), (1, 1, 1)])
@pytest.mark.parametrize(("num_columns", "num_slabs"), [(70, 2), (33, 4), (8, 3)])
def test_every_sum_has_one_place_among_what_is_sent_and_one_where_it_goes(
    sizes: tuple[int, ...], num_columns: int, num_slabs: int
) -> None:
    config = GemmConfig(block_m=16, block_n=16, num_chunks=num_slabs)
    groups = tileflux.local_groups(3)
    made = make_turns(groups, combine_shards("moe_gemm_rs", sizes, 6, num_columns, 4, config, by_copies=True))
    shape = (torch.float32, num_columns)
    for rank, here in enumerate(made):
        num_slabs_here = len(here.plan.slabs(num_columns))
        here.own.view(torch.int32).zero_()
        here._data.view(dtype=torch.int32).zero_()
        sent = [here.slabs_to_send(owner, range(i, i + 1), *shape) for owner in range(3) for i in range(num_slabs_here)]
        slots = [
            here.slabs_at(rank, source, range(i, i + 1), *shape) for source in range(3) for i in range(num_slabs_here)
        ]
        for each in (*sent, *slots):
            assert each.is_contiguous() and not each.count_nonzero(), "two slabs share a place"
            each += 1
        assert sum(each.numel() for each in sent) == sum(sizes) * num_columns
        assert sum(each.numel() for each in slots) == 3 * sizes[rank] * num_columns
        used = here.own.view(torch.float32).count_nonzero()
        assert used == sum(sizes) * num_columns and not here.own[3 * here.plan.slot_bytes :].count_nonzero()
        for owner in range(3):
            for index in range(num_slabs_here):
                one = range(index, index + 1)
                to = here.slabs_at(owner, rank, one, *shape)
                assert to.data_ptr() == made[owner].slabs_at(owner, rank, one, *shape).data_ptr()
                assert to.shape == here.slabs_to_send(owner, one, *shape).shape
                word = here.staged(owner, index).data_ptr() - here._control.address(rank)
                assert word == 4 * (CONTROL.staged(3) + owner * MAX_CHUNKS + index)


def test_a_turn_keeps_no_group_alive() -> None:
    (group,) = tileflux.local_groups(1)
    here = turn(group, gather_shards("ag_gemm", (4,), 16, False, 1))
    assert here.group is group
    del group
    gc.collect()
    with pytest.raises(AssertionError, match="does not outlive its group"):
        _ = here.group


def test_flags_and_epochs_go_from_rank_to_rank() -> None:
    groups = tileflux.local_groups(3, timeout_s=5.0)
    made = make_turns(groups, gather_shards("ag_gemm", (4, 4, 4), 16, False, 1))
    waiter, source = made[2], made[1]
    assert [each.epoch() for each in made] == [0, 0, 0]
    for each in made:
        each.wait_for_buffer(0 if each is not made[0] else 1, calls_ago=1)
    done = threading.Event()
    thread = threading.Thread(target=lambda: (waiter.wait_for_flag(1, 5), done.set()))
    thread.start()
    source.raise_flag(2, 4)
    made[0].raise_flag(2, 5)
    time.sleep(0.05)
    assert not done.is_set(), "another flag, or another rank's, was taken for the one waited for"
    source.raise_flag(2, 5)
    thread.join(5)
    assert done.is_set()
    assert source.flag(2, 5).item() == 1 and source.flag(2, 3).item() == 0
    source.release()
    assert [each.epoch() for each in made] == [0, 1, 0]
    waiter.wait_for_buffer(1, calls_ago=0)
    acks = [each._control.view(dtype=torch.int32)[CONTROL.ack :][:3].tolist() for each in made]
    assert acks == [[0, 1, 0], [0, 0, 0], [0, 1, 0]]


def test_epochs_pass_the_largest_number() -> None:
    groups = tileflux.local_groups(2, timeout_s=5.0)
    first, second = make_turns(groups, gather_shards("ag_gemm", (4, 4), 16, False, 1))
    for each in (first, second):
        words = each._control.view(dtype=torch.int32)
        words[CONTROL.epoch] = words[CONTROL.ack : CONTROL.ack + 2] = 2**31 - 1
    first.raise_flag(1, 0)
    second.wait_for_flag(0, 0)
    assert first.flag(1, 0).item() == -(2**31)
    for each in (first, second):
        each.release()
    assert first.epoch() == second.epoch() == -(2**31)
    for calls_ago in (1, 2):
        first.wait_for_buffer(1, calls_ago=calls_ago)


def test_a_wait_in_vain_names_what_it_waited_for() -> None:
    plan = gather_shards("ag_gemm", (4, 4, 4), 16, False, 1)
    for wait, flag, wanted in (
        (lambda each: each.wait_for_flag(2, 3), "ag_gemm.flags.3 of rank 2", 1),
        (lambda each: each.wait_for_buffer(2, calls_ago=0), "ag_gemm.control.ack[rank 2]", 1),
    ):
        groups = tileflux.local_groups(3, timeout_s=0.1)
        waiting = make_turns(groups, plan)[0]
        with pytest.raises(PeerTimeout) as caught:
            wait(waiting)
        error = caught.value
        assert (error.op, error.rank, error.waited_for, error.flag) == ("ag_gemm", 0, 2, flag)
        assert (error.wanted, error.seen) == (wanted, 0)


def test_words_in_words() -> None:
    texts = [turns._describe_control(2, 4 * index) for index in range(7)]
    assert texts == ["epoch", "done", "next", "fetched", "ack[rank 0]", "ack[rank 1]", "counter"]
    last = CONTROL.staged(2)
    assert [turns._describe_control(2, 4 * index) for index in (last - 1, last)] == ["counter", "staged"]
    assert turns._describe_flag(4, 4 * 11) == "2 of rank 3"
