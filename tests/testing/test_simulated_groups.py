"""Simulated groups: the library's collectives, and what their ranks do on the host."""

import threading
from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl

from tileflux import CommConfig, Group, all_gather, all_reduce, env
from tileflux.errors import DataRace, Deadlock
from tileflux.symm.base import FlagWrite
from tileflux.symm.host_signal import HostWords
from tileflux.testing.simulator import simulate

pytestmark = pytest.mark.skipif(not env.interpreting(), reason="kernels of this process are compiled")


@pytest.fixture(autouse=True)
def no_threads_left_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


SMALL = CommConfig(num_lanes=2, slot_bytes=256, min_lane_bytes=64)


def _two_calls(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    gathered = all_gather(torch.full((9, 5), float(group.rank)), group=group)
    group.barrier()
    return gathered, all_reduce(torch.full((33,), 2.0**group.rank), group=group)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_collectives_of_a_simulated_group(world_size: int) -> None:
    for seed in range(3):
        results = simulate(_two_calls, world_size, seed=seed, config=SMALL)
        assert len(results) == world_size
        for gathered, reduced in results:
            expected = torch.cat([torch.full((9, 5), float(rank)) for rank in range(world_size)])
            assert torch.equal(gathered, expected)
            assert torch.equal(reduced, torch.full((33,), 2.0**world_size - 1))


def test_rank_that_makes_no_call_is_a_deadlock_that_names_the_channel() -> None:
    def lazy(group: Group) -> None:
        if group.rank != 1:
            all_gather(torch.zeros(4), group=group)

    with pytest.raises(Deadlock, match=r"rank 0 launch 1 .* waits for rank 0 mailbox\.data.* to reach 1; .* at 0"):
        simulate(lazy, 2, seed=0)


def test_rank_that_does_not_come_to_the_barrier_is_a_deadlock() -> None:
    def lazy(group: Group) -> None:
        if group.rank:
            group.barrier()

    with pytest.raises(Deadlock, match="rank 1 waits for all ranks to come to host barrier 0"):
        simulate(lazy, 2, seed=0)


def _write_to_neighbour(group: Group, meets: bool) -> float:
    data = group.region("data", 64)
    out = torch.zeros(1)
    if group.rank == 0:
        _fill[(1,)](data.view(1, torch.float32), 4.0)
    if meets:
        group.barrier()
    if group.rank == 1:
        _read_one[(1,)](data.view(dtype=torch.float32), out)
    return out.item()


def test_host_barrier_orders_what_kernels_did() -> None:
    for seed in range(4):
        assert simulate(_write_to_neighbour, 2, seed=seed, args=(True,)) == [0.0, 4.0]
        with pytest.raises(DataRace, match=r"rank 1 data\+0"):
            simulate(_write_to_neighbour, 2, seed=seed, args=(False,))


def _copy_between_kernels(group: Group, waits: bool) -> None:
    """The copy reads what a kernel before it wrote, and a kernel after it writes that again."""
    source = group.region("source", 64).view(dtype=torch.float32)
    _fill[(1,)](source, 1.0)
    copy = group.copy_async(torch.zeros(16), source)
    if waits:
        copy.wait()
    _fill[(1,)](source, 2.0)
    copy.wait()


def test_copies_are_ordered_after_their_call_and_before_their_wait() -> None:
    for seed in range(4):
        simulate(_copy_between_kernels, 1, seed=seed, args=(True,))
        with pytest.raises(DataRace, match=r"rank 0 source\+0"):
            simulate(_copy_between_kernels, 1, seed=seed, args=(False,))


@triton.jit
def _fill(data, value):
    tl.store(data + tl.arange(0, 16), value)


def _send_by_copy(group: Group, signalled: bool) -> float:
    """Rank 0 copies into rank 1's region and raises a flag there; rank 1 reads through a kernel."""
    data, flags = group.region("data", 64), group.region("flags", 8)
    out = torch.zeros(1)
    if group.rank == 0:
        flag = FlagWrite(flags.view(1, torch.int32)[:1], 1) if signalled else None
        group.copy_async(data.view(1, torch.float32), torch.full((16,), 3.0), signal=flag).wait()
    else:
        if signalled:
            HostWords(flags.view()).wait(0, 1, lambda seen, seconds: False)
        _read_one[(1,)](data.view(dtype=torch.float32), out)
    return out.item()


@triton.jit
def _read_one(data, out):
    tl.store(out, tl.load(data))


def test_copies_and_host_flags_are_part_of_the_simulation() -> None:
    for seed in range(4):
        assert simulate(_send_by_copy, 2, seed=seed, args=(True,)) == [0.0, 3.0]
        with pytest.raises(DataRace, match=r"rank 1 data\+0.*copier of rank 0|copier of rank 0.*rank 1 data\+0"):
            simulate(_send_by_copy, 2, seed=seed, args=(False,))
