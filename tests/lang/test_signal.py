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
from tileflux.lang.signal import signal, take, taken, wait
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
