"""A kernel's wait: satisfied, across the wrap, or given up with a record that the host understands."""

import threading
import time

import pytest
import torch
import triton
import triton.language as tl

import tileflux
from tileflux import env
from tileflux.errors import GroupBroken, PeerTimeout
from tileflux.kernels.shards import gather_shards
from tileflux.kernels.turns import turn as make_turn
from tileflux.lang.signal import reached_all, signal, signal_all, take, taken, wait
from tileflux.lang.turn import await_flags
from tileflux.testing import interpreter
from tileflux.testing.simulator import Simulator

pytestmark = pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")


@triton.jit
def _wait_kernel(out_ptr, data, flag, wanted, peer, guard, op):
    wait(flag.to(tl.pointer_type(tl.int32)), wanted, peer, guard, op)
    tl.store(out_ptr, tl.load(data.to(tl.pointer_type(tl.int32))))


@triton.jit
def _signal_kernel(data, flag, number, value):
    tl.store(data.to(tl.pointer_type(tl.int32)), number)
    signal(flag.to(tl.pointer_type(tl.int32)), value)


@triton.jit
def _take_kernel(out_ptr, counter_ptr):
    for i in range(4):
        ticket = take(counter_ptr)
        tl.store(out_ptr + tl.program_id(0) * 4 + i, taken(ticket))


@pytest.mark.parametrize("seed", range(4))
def test_every_number_is_taken_once_and_a_program_takes_growing_ones(seed: int) -> None:
    simulator = Simulator(seed)
    counter = simulator.share(torch.full((3,), 5, dtype=torch.int32), "counter")
    out = torch.full((3, 4), -1, dtype=torch.int32)
    simulator.spawn(lambda: _take_kernel[(3,)](out, counter[1:]))
    simulator.run()
    assert sorted(out.flatten().tolist()) == list(range(5, 17))
    assert out.diff(dim=1).gt(0).all() and counter.tolist() == [5, 17, 5]


@triton.jit
def _tell_all_kernel(data_ptr, flag_ptr, first, count, value):
    lanes = tl.arange(0, 8)
    tl.store(data_ptr + lanes, lanes + 10, mask=lanes < 5)
    signal_all(flag_ptr + lanes, (lanes >= first) & (lanes < first + count), value)


@triton.jit
def _look_kernel(out_ptr, data_ptr, flag_ptr, wanted):
    lanes = tl.arange(0, 8)
    reached = reached_all(flag_ptr + lanes, lanes < 5, wanted)
    tl.store(out_ptr + 8, reached.to(tl.int32))
    tl.store(out_ptr + lanes, tl.load(data_ptr + lanes, mask=lanes < 5, other=0))


@pytest.mark.parametrize("seed", range(6))
def test_whoever_finds_all_flags_raised_sees_what_was_published(seed: int) -> None:
    """Two tell, of all five flags, one of them by two programs; the simulator finds what is read too early."""
    simulator = Simulator(seed)
    data = simulator.share(torch.zeros(8, dtype=torch.int32), "data")
    others = simulator.share(torch.zeros(8, dtype=torch.int32), "others")
    flags = simulator.share(torch.zeros(8, dtype=torch.int32), "flags")
    out = torch.zeros(9, dtype=torch.int32)
    simulator.spawn(lambda: _tell_all_kernel[(1,)](data, flags, 0, 3, 7))
    simulator.spawn(lambda: _tell_all_kernel[(1,)](others, flags, 3, 2, 7))
    simulator.spawn(lambda: _look_kernel[(1,)](out, data, flags, 7))
    simulator.run()
    assert out.tolist() == [10, 11, 12, 13, 14, 0, 0, 0, 1]
    assert flags.tolist() == [7] * 5 + [0] * 3


@pytest.mark.parametrize("wanted", [4, 2**31 - 1, -(2**31)])
def test_a_look_at_flags_ends_without_them(wanted: int) -> None:
    interpreter.install()
    before = (wanted - 1 + 2**31) % 2**32 - 2**31
    flags, out = torch.full((8,), wanted, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    for late, reached in ((7, 1), (0, 0), (4, 0)):
        flags.fill_(wanted)
        flags[late] = before
        _look_kernel[(1,)](out, flags, flags, wanted)
        assert out[8] == reached, "only those that are chosen count"


def test_a_peer_that_is_missing_among_all_is_named(pair) -> None:
    waiter, _ = pair
    here = make_turn(waiter, gather_shards("ag_gemm", (2, 2), 16, False, 1))
    start = time.monotonic()
    _await_all_kernel[(1,)](here.table, 2)
    assert 0.3 < time.monotonic() - start < 5
    with pytest.raises(PeerTimeout) as caught:
        waiter.synchronize()
    assert (caught.value.op, caught.value.peer, caught.value.wanted) == ("ag_gemm", 1, 1)


@triton.jit
def _await_all_kernel(table_ptr, WORLD: tl.constexpr):
    await_flags(table_ptr, 0, WORLD - 1, WORLD)


@pytest.fixture
def pair():
    interpreter.install()
    groups = tileflux.local_groups(2, timeout_s=0.4)
    yield groups
    for group in groups:
        group.close()


@pytest.mark.parametrize("epoch", [1, 2**31 - 1, -(2**31), -7])
def test_a_wait_ends_with_its_signal_and_sees_the_data(pair, epoch: int) -> None:
    waiter, signaller = pair
    waiter.guard.table[2] = 10_000_000_000
    region = waiter.region("words", 64)
    words = region.view(dtype=torch.int32)
    words[1] = epoch - 1 if epoch > -(2**31) else 2**31 - 1
    out = torch.zeros(1, dtype=torch.int32)
    data, flag = region.address(0), region.address(0) + 4
    arguments = (out, data, flag, epoch, 1, waiter.guard.table, waiter.guard.op_number("test"))
    thread = threading.Thread(target=lambda: _wait_kernel[(1,)](*arguments))
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive(), "did not wait"
    _signal_kernel[(1,)](data, flag, 42, epoch)
    thread.join(10)
    assert not thread.is_alive() and int(out) == 42 and int(words[1]) == epoch


def test_a_wait_that_gives_up_is_recorded_and_breaks_the_group(pair) -> None:
    waiter, other = pair
    region = waiter.region("words", 64, describe=lambda offset: f"flag {offset // 4}")
    region.view(dtype=torch.int32)[3] = 5
    out = torch.zeros(1, dtype=torch.int32)
    op = waiter.guard.op_number("kernel test")
    start = time.monotonic()
    flag = region.address(0) + 12
    _wait_kernel[(1,)](out, region.address(0), flag, 9, 1, waiter.guard.table, op)
    assert 0.3 < time.monotonic() - start < 5
    with pytest.raises(PeerTimeout) as caught:
        waiter.synchronize()
    error = caught.value
    assert (error.op, error.rank, error.peer, error.wanted, error.seen) == ("kernel test", 0, 1, 9, 5)
    assert error.flag == "words.flag 3" and 0.3 < error.seconds < 5
    with pytest.raises(GroupBroken, match="words.flag 3"):
        tileflux.barrier(group=waiter)
    # Later waits of the same launch, and those of peers, stop at once.
    start = time.monotonic()
    _wait_kernel[(1,)](out, region.address(0), flag, 9, 0, other.guard.table, op)
    assert time.monotonic() - start < 0.3
    with pytest.raises(PeerTimeout):
        other.synchronize()
