"""Taking turns: what feeders send to whom and in which order, which words they use, and what a release tells."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

import tileflux
from tileflux import env
from tileflux.config import CONTROL, MAX_CHUNKS
from tileflux.kernels.shards import gather_shards
from tileflux.kernels.turns import Turn
from tileflux.kernels.turns import turn as make_turn
from tileflux.lang import turn as lang_turn
from tileflux.lang.signal import taken
from tileflux.lang.turn import (
    ack_word,
    await_flags,
    close_chunk,
    counter_word,
    current_epoch,
    data,
    feed,
    fetch,
    flag_word,
    leave,
    leave_counted,
    open_call,
    raise_flags,
    release,
    release_silently,
    shard,
)
from tileflux.testing import interpreter, poisoned
from tileflux.testing._interpreter_launch import scalar

pytestmark = pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")

ROW_BYTES = 24


@triton.jit
def _feed_kernel(x, scale_x, row_bytes, table_ptr, SCALED: tl.constexpr, WORLD: tl.constexpr):
    nowhere = tl.full((), 0, tl.int64)
    feed(x, scale_x, row_bytes, table_ptr, tl.program_id(0), tl.num_programs(0), nowhere, SCALED, WORLD, 64, False)


@triton.jit
def _release_kernel(table_ptr, WORLD: tl.constexpr):
    release(table_ptr, WORLD)


@triton.jit
def _words_kernel(out_ptr, table_ptr, owner, other, index, WORLD: tl.constexpr):
    tl.store(out_ptr, flag_word(table_ptr, owner, other, index, WORLD).to(tl.int64))
    tl.store(out_ptr + 1, ack_word(table_ptr, owner, other, WORLD).to(tl.int64))
    tl.store(out_ptr + 2, counter_word(table_ptr, owner, other, index, WORLD).to(tl.int64))
    tl.store(out_ptr + 3, data(table_ptr, owner, WORLD))
    first, count = shard(table_ptr, owner, WORLD)
    tl.store(out_ptr + 4, first)
    tl.store(out_ptr + 5, count)
    tl.store(out_ptr + 6, current_epoch(table_ptr, WORLD))


def make_turns(rows: tuple[int, ...], *, scaled: bool = False, num_chunks: int = 1) -> list[Turn]:
    """The turns of all ranks of a new virtual group; they keep nothing alive, so their groups come with them."""
    interpreter.install()
    groups = tileflux.local_groups(len(rows))
    plan = gather_shards("ag_gemm", rows, ROW_BYTES, scaled, num_chunks)
    turns = [make_turn(group, plan) for group in groups]
    for turn, group in zip(turns, groups, strict=True):
        turn.kept_alive = group
    return turns


def set_epoch(turns: list[Turn], epoch: int) -> None:
    """As if so many calls were over on every rank."""
    for turn in turns:
        words = turn._control.view(dtype=torch.int32)
        words[CONTROL.epoch] = epoch
        words[CONTROL.ack : CONTROL.ack + len(turns)] = epoch


class _Recorder:
    """What a launch of ``feed`` waits for and sends, in order, instead of doing it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.waits: list[tuple[int, int, int]] = []
        self.sent: list[tuple[int, ...]] = []
        patch.setattr(lang_turn, "wait", self._wait)
        patch.setattr(lang_turn, "push_run", self._push_run)

    def _wait(self, flag, wanted, peer, guard, op) -> None:
        self.waits.append((scalar(flag), scalar(wanted), scalar(peer)))
        self.sent.append(("wait", scalar(peer)))

    def _push_run(self, to, source, nbytes, flag, value, counter, feeder, num_feeders, BLOCK) -> None:
        self.sent.append(tuple(scalar(each) for each in (to, source, nbytes, flag, value, counter)))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.integers(0, 900) | st.just(0), min_size=1, max_size=8).filter(any).map(tuple),
    num_chunks=st.integers(1, 4),
    epoch=st.sampled_from([0, 1, 7, 2**31 - 1, -(2**31)]),
)
def test_feeders_send_every_row_to_every_peer_the_nearest_first(
    rows: tuple[int, ...], num_chunks: int, epoch: int
) -> None:
    turns = make_turns(rows, num_chunks=num_chunks)
    plan, world_size = turns[0].plan, len(rows)
    set_epoch(turns, epoch)
    peers_by_hop: list[list[int]] = []
    counters = set()
    for rank, turn in enumerate(turns):
        with pytest.MonkeyPatch.context() as patch:
            recorder = _Recorder(patch)
            _feed_kernel[(1,)](1 << 40, 0, ROW_BYTES, turn.table, False, world_size)
        peers = [(rank - hop) % world_size for hop in range(1, world_size)]
        peers_by_hop.append(peers)
        acks = [turn._control.address(rank) + 4 * (CONTROL.ack + peer) for peer in peers]
        assert recorder.waits == [(ack, epoch, peer) for ack, peer in zip(acks, peers, strict=True)]
        expected: list[tuple] = []
        for peer in peers:
            expected.append(("wait", peer))
            for index in range(plan.num_chunks):
                chunk = plan.chunk(rank, index)
                if chunk:
                    to = turn._data.address(peer) + (plan.first_rows[rank] + chunk.start) * ROW_BYTES
                    flag = turn._flags.address(peer) + 4 * (index * world_size + rank)
                    source = (1 << 40) + chunk.start * ROW_BYTES
                    value = (epoch + 1 + 2**31) % 2**32 - 2**31
                    expected.append((to, source, len(chunk) * ROW_BYTES, flag, value))
                    counter = recorder.sent[len(expected) - 1][5]
                    assert counter not in counters, "two chunks are counted in one word"
                    counters.add(counter)
        assert [each[:5] for each in recorder.sent] == expected
    for at_once in zip(*peers_by_hop, strict=True):
        assert len(set(at_once)) == world_size, "two ranks send to one peer at a time"


@pytest.mark.parametrize("num_feeders", [1, 3])
@pytest.mark.parametrize(("rows", "num_chunks"), [((5, 2, 0), 1), ((300, 0, 513, 7), 3), ((4, 4), 1)])
def test_fed_rows_and_scales_arrive_with_their_flags(rows: tuple[int, ...], num_chunks: int, num_feeders: int) -> None:
    turns = make_turns(rows, scaled=True, num_chunks=num_chunks)
    plan, world_size = turns[0].plan, len(rows)
    set_epoch(turns, 41)
    xs = [torch.randint(0, 255, (count, ROW_BYTES), dtype=torch.uint8) for count in rows]
    scales = [torch.rand(count) for count in rows]
    for rank, turn in enumerate(turns):
        turn.rows_at(rank, torch.uint8, ROW_BYTES).copy_(poisoned((sum(rows), ROW_BYTES), torch.uint8))
        turn.gathered_scales().fill_(float("nan"))
    for rank, turn in enumerate(turns):
        arguments = (xs[rank].data_ptr(), scales[rank].data_ptr(), ROW_BYTES)
        _feed_kernel[(num_feeders,)](*arguments, turn.table, True, world_size)
    for rank, turn in enumerate(turns):
        for source in range(world_size):
            place = slice(plan.first_rows[source], plan.first_rows[source] + rows[source])
            arrived = turn.gathered(torch.uint8, ROW_BYTES)[place], turn.gathered_scales()[place]
            if source == rank:
                assert arrived[0].eq(0x7F).all() and arrived[1].isnan().all(), "a rank sent to itself"
            else:
                assert torch.equal(arrived[0], xs[source]) and torch.equal(arrived[1], scales[source])
        flags = turn._flags.view(dtype=torch.int32).view(-1, world_size)
        for source in range(world_size):
            for index in range(len(flags)):
                raised = source != rank and index < plan.num_chunks and len(plan.chunk(source, index)) > 0
                assert flags[index, source] == (42 if raised else 0)
        words = turn._control.view(dtype=torch.int32)
        assert words[CONTROL.counters(world_size) :].eq(0).all(), "a count was not set back"


@pytest.mark.parametrize("num_programs", [1, 4])
@pytest.mark.parametrize("epoch", [0, 5, 2**31 - 1])
def test_a_release_tells_every_peer_once_all_programs_have_come(num_programs: int, epoch: int) -> None:
    turns = make_turns((3, 3, 3))
    set_epoch(turns, epoch)
    before = [turn._control.view().clone().view(torch.int32) for turn in turns]
    _release_kernel[(num_programs,)](turns[1].table, 3)
    for rank, turn in enumerate(turns):
        after = turn._control.view(dtype=torch.int32)
        changed = {i: int(after[i]) for i in (after != before[rank]).nonzero().flatten().tolist()}
        finished = (epoch + 1 + 2**31) % 2**32 - 2**31
        assert changed == ({CONTROL.epoch: finished} if rank == 1 else {CONTROL.ack + 1: finished})


@triton.jit
def _silent_release_kernel(table_ptr, WORLD: tl.constexpr):
    release_silently(table_ptr, WORLD)


def test_a_silent_release_counts_the_call_and_tells_nobody() -> None:
    turns = make_turns((3, 3, 3))
    set_epoch(turns, 5)
    before = [turn._control.view().clone().view(torch.int32) for turn in turns]
    _silent_release_kernel[(4,)](turns[1].table, 3)
    before[1][CONTROL.epoch] = 6
    assert all(
        torch.equal(turn._control.view(dtype=torch.int32), each) for turn, each in zip(turns, before, strict=True)
    )


@triton.jit
def _partial_release_kernel(table_ptr, first, end, WORLD: tl.constexpr):
    if (tl.program_id(0) >= first) & (tl.program_id(0) < end):
        release(table_ptr, WORLD)


def test_peers_are_told_by_the_last_program_alone() -> None:
    turns = make_turns((3, 3))
    words, told = turns[0]._control.view(dtype=torch.int32), turns[1]._control.view(dtype=torch.int32)
    for index in range(3):
        assert words[CONTROL.epoch] == 0 and told[CONTROL.ack] == 0
        _partial_release_kernel[(3,)](turns[0].table, index, index + 1, 2)
    assert words[CONTROL.epoch] == 1 and told[CONTROL.ack] == 1 and words[CONTROL.done] == 0


@triton.jit
def _fetch_kernel(out_ptr, table_ptr, WORLD: tl.constexpr):
    first = taken(fetch(table_ptr, WORLD))
    ticket = fetch(table_ptr, WORLD)
    tl.store(out_ptr + 2 * tl.program_id(0), first)
    tl.store(out_ptr + 2 * tl.program_id(0) + 1, taken(ticket))


@triton.jit
def _leave_kernel(out_ptr, table_ptr, first, end, WORLD: tl.constexpr):
    if (tl.program_id(0) >= first) & (tl.program_id(0) < end):
        tl.store(out_ptr + tl.program_id(0), leave(table_ptr, WORLD))


def test_steps_are_counted_in_the_ranks_own_word() -> None:
    turns = make_turns((3, 3, 3))
    out = torch.full((6,), -1, dtype=torch.int32)
    _fetch_kernel[(3,)](out, turns[1].table, 3)
    assert out.tolist() == [0, 1, 2, 3, 4, 5]
    words = [turn._control.view(dtype=torch.int32) for turn in turns]
    assert [int(each[CONTROL.fetched]) for each in words] == [0, 6, 0]
    assert all(each.count_nonzero() == (rank == 1) for rank, each in enumerate(words)), "and nowhere else"


@pytest.mark.parametrize("releases", [False, True])
def test_the_last_program_of_a_launch_sets_the_count_of_steps_back(releases: bool) -> None:
    turns = make_turns((3, 3))
    words, told = turns[0]._control.view(dtype=torch.int32), turns[1]._control.view(dtype=torch.int32)
    was_last = torch.full((3,), -1, dtype=torch.int32)
    words[CONTROL.fetched] = 11
    for index in range(3):
        assert words[CONTROL.fetched] == 11, "programs that have not left may still fetch"
        if releases:
            _partial_release_kernel[(3,)](turns[0].table, index, index + 1, 2)
        else:
            _leave_kernel[(3,)](was_last, turns[0].table, index, index + 1, 2)
    assert words[CONTROL.fetched] == 0 and words[CONTROL.done] == 0
    assert words[CONTROL.epoch] == told[CONTROL.ack] == int(releases), "nobody is told where the call goes on"
    assert releases or was_last.tolist() == [0, 0, 1]


@pytest.mark.parametrize(("owner", "other", "index"), [(0, 1, 0), (2, 0, 3), (1, 2, 15)])
def test_words_are_the_host_twins(owner: int, other: int, index: int) -> None:
    turns = make_turns((5, 0, 9))
    set_epoch(turns, 1 << 20)
    out = torch.zeros(7, dtype=torch.int64)
    # As rank `other` sees it: the flag is one that it raises.
    turn = turns[other]
    _words_kernel[(1,)](out, turn.table, owner, other, index, 3)
    control = turn._control.address(owner)
    assert out.tolist() == [
        turn.flag(owner, index).data_ptr(),
        control + 4 * (CONTROL.ack + other),
        control + 4 * (CONTROL.counters(3) + other * 16 + index),
        turn.rows_at(owner, torch.uint8, ROW_BYTES).data_ptr(),
        (0, 5, 5)[owner],
        (5, 0, 9)[owner],
        1 << 20,
    ]
    assert CONTROL.counters(3) * 4 + 2 * 3 * 16 * 4 == CONTROL.nbytes(3)


@triton.jit
def _open_kernel(table_ptr, WORLD: tl.constexpr):
    open_call(table_ptr, WORLD)


@triton.jit
def _close_kernel(table_ptr, owner, chunk, num_tiles, WORLD: tl.constexpr):
    close_chunk(table_ptr, owner, chunk, num_tiles, WORLD)


@pytest.mark.parametrize("epoch", [0, 3, 2**31 - 1])
def test_a_call_that_sends_by_copies_waits_for_all_peers_first(epoch: int) -> None:
    turns = make_turns((4, 4, 4))
    set_epoch(turns, epoch)
    with pytest.MonkeyPatch.context() as patch:
        recorder = _Recorder(patch)
        _open_kernel[(1,)](turns[1].table, 3)
        assert not recorder.waits, "all have come: looked at together"
        acks = {peer: turns[1]._control.address(1) + 4 * (CONTROL.ack + peer) for peer in (2, 0)}
        for late in acks:
            turns[1]._control.view(dtype=torch.int32)[CONTROL.ack + late] -= 1
            recorder.waits.clear()
            _open_kernel[(1,)](turns[1].table, 3)
            assert recorder.waits == [(ack, epoch, peer) for peer, ack in acks.items()], "with a deadline, each"
            turns[1]._control.view(dtype=torch.int32)[CONTROL.ack + late] += 1
    assert turns[1].next.item() == (epoch + 1 if epoch < 2**31 - 1 else -(2**31)), "what flags are set to"


@triton.jit
def _raise_kernel(table_ptr, index, COUNT: tl.constexpr, WORLD: tl.constexpr):
    raise_flags(table_ptr, index, COUNT, WORLD)


@triton.jit
def _await_kernel(table_ptr, index, COUNT: tl.constexpr, WORLD: tl.constexpr):
    await_flags(table_ptr, index, COUNT, WORLD)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("epoch", [0, 5, 2**31 - 1])
def test_flags_are_raised_at_peers_and_here_if_asked_for(world_size: int, epoch: int) -> None:
    rank, index = world_size // 2, 3
    for count in (world_size - 1, world_size):
        turns = make_turns((2,) * world_size, num_chunks=4)
        set_epoch(turns, epoch)
        _raise_kernel[(1,)](turns[rank].table, index, count, world_size)
        for owner, turn in enumerate(turns):
            flags = turn._flags.view(dtype=torch.int32).clone()
            is_told = owner != rank or count == world_size
            assert flags[index * world_size + rank] == ((epoch + 1 + 2**31) % 2**32 - 2**31 if is_told else 0)
            flags[index * world_size + rank] = 0
            assert flags.eq(0).all(), "raised another one's flag"


@pytest.mark.parametrize("count", [2, 3])
def test_flags_of_all_are_waited_for_and_of_nobody_else(count: int) -> None:
    turns = make_turns((2, 2, 2), num_chunks=4)
    set_epoch(turns, 6)
    flags = turns[1]._flags.view(dtype=torch.int32)
    here = turns[1]._flags.address(1)
    for late in (0, 1, 2):
        flags.fill_(7)
        flags[2 * 3 + late] = 6
        with pytest.MonkeyPatch.context() as patch:
            recorder = _Recorder(patch)
            _await_kernel[(1,)](turns[1].table, 2, count, 3)
        sources = (2, 0, 1)[:count] if late != 1 or count == 3 else ()
        assert recorder.waits == [(here + 4 * (2 * 3 + source), 7, source) for source in sources]


@pytest.mark.parametrize("chunk", [0, 3, MAX_CHUNKS - 1])
def test_a_chunk_is_closed_when_all_its_tiles_have_been_counted(chunk: int) -> None:
    turns = make_turns((4, 4, 4))
    set_epoch(turns, 9)  # the launch that counted may have ended the call already
    mine = turns[1]
    mine.next.fill_(9)
    counter = CONTROL.counters(3) + 2 * MAX_CHUNKS + chunk
    words = mine._control.view(dtype=torch.int32)
    before = words.clone()
    words[counter] = 6
    with pytest.MonkeyPatch.context() as patch:
        recorder = _Recorder(patch)
        _close_kernel[(1,)](mine.table, 2, chunk, 6, 3)
    assert recorder.waits == [(mine._control.address(1) + 4 * counter, 6, 1)]
    assert words[counter] == 0, "set back for the next call"
    assert mine.staged(2, chunk).item() == 9
    mine.staged(2, chunk).zero_()
    assert torch.equal(words, before), "no other word is touched"


@triton.jit
def _leave_counted_kernel(table_ptr, first, end, WORLD: tl.constexpr):
    if (tl.program_id(0) >= first) & (tl.program_id(0) < end):
        leave_counted(table_ptr, WORLD)


def test_the_last_program_sets_this_ranks_own_counts_back() -> None:
    turns = make_turns((4, 4, 4))
    words = turns[1]._control.view(dtype=torch.int32)
    counters = words[CONTROL.counters(3) :][: 3 * MAX_CHUNKS].view(3, MAX_CHUNKS)
    counters.fill_(7)
    for index in range(3):
        assert counters[1].eq(7).all(), "not all programs have left"
        _leave_counted_kernel[(3,)](turns[1].table, index, index + 1, 3)
    assert counters[1].eq(0).all() and counters[[0, 2]].eq(7).all()
    assert words[CONTROL.epoch] == 0, "the call goes on"
