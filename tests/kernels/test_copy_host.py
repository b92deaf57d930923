"""Collectives through an emulated link: the same bits, later. Without one: every test of ``tests/ops`` on the CPU."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
import torch

import tileflux
from tileflux import CommConfig, GroupBroken, PeerTimeout, env
from tileflux.ops._call import sum_in_rank_order
from tileflux.symm.group import Group
from tileflux.testing import Died, nan_like, poisoned, run_ranks
from tileflux.testing.collectives import check_collectives, random_inputs
from tileflux.testing.simulator import simulate

SHAPES = [(0, 4), (1, 1), (13, 8), (257, 129)]
DTYPES = [torch.float32, torch.bfloat16]
SMALL_SLOTS = CommConfig(num_lanes=2, slot_bytes=1024, min_lane_bytes=64)


def linked(link: str, function: Any, world_size: int, **settings: Any) -> list[Any]:
    """``run_ranks`` with a link between the ranks."""
    with env.scoped({"TILEFLUX_LINK": link}):
        return run_ranks(function, world_size, **settings)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_processes(world_size: int) -> None:
    linked("500MB/s,1ms", check_collectives, world_size, args=(SHAPES, DTYPES))


@pytest.mark.parametrize("where", ["fork", "virtual"])
def test_several_lanes_and_pieces(where: str) -> None:
    settings = {"where": where, "group_kwargs": {"config": SMALL_SLOTS}}
    linked("100MB/s,200us", check_collectives, 3, args=([(5, 7), (48, 128)], DTYPES), **settings)


def _timed(group: Group, op: str) -> float:
    x = torch.randn(125_000, 2)
    group.barrier()
    start = time.monotonic()
    getattr(tileflux, op)(x, group=group)
    return time.monotonic() - start


@pytest.mark.parametrize(("op", "nbytes"), [("all_gather", 1e6), ("reduce_scatter", 5e5), ("all_to_all", 5e5)])
def test_what_a_rank_sends_takes_its_time(op: str, nbytes: float) -> None:
    assert min(linked("10MB/s,5ms", _timed, 2, args=(op,))) >= nbytes / 10e6 + 5e-3


def _barriers(group: Group) -> float:
    start = time.monotonic()
    for _ in range(5):
        tileflux.barrier(group=group)
    return time.monotonic() - start


def test_a_barrier_carries_nothing_and_takes_no_time() -> None:
    assert max(linked("1KB/s,2s", _barriers, 3)) < 2.0


def _changes_x(group: Group) -> None:
    """A rank that only sends is through first. What it sent must not change with its tensor."""
    for call in range(3):
        values = torch.full((3000,), float(call + 1))
        x = values.clone() if group.rank == 0 else nan_like(values)
        out = poisoned((3000,), torch.float32)
        tileflux.broadcast(x, group=group, root=0, out=out)
        x.fill_(float("nan"))
        assert torch.equal(out, values), f"call {call} on rank {group.rank}"


def test_a_call_returns_when_its_input_may_change() -> None:
    linked("1MB/s,10ms", _changes_x, 3, group_kwargs={"config": SMALL_SLOTS})


def _in_place(group: Group, algorithm: str, seed: int) -> None:
    """Rank 0's pieces are slow, so it has everybody else's while its own are still under way."""
    with env.scoped({"TILEFLUX_LINK": "1MB/s,20ms" if group.rank == 0 else None}):
        uneven = Group.from_process_group()
    xs = random_inputs(group.world_size, (2000,), torch.float32, seed)
    mine = xs[group.rank].clone()
    with uneven:
        tileflux.all_reduce(mine, group=uneven, algorithm=algorithm, out=mine)
    assert torch.equal(mine, sum_in_rank_order(xs))


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_a_sum_in_place_does_not_overwrite_what_is_being_sent(algorithm: str) -> None:
    run_ranks(_in_place, 3, args=(algorithm, int(torch.randint(2**31, ()))))


def _root_dies(group: Group) -> tuple[PeerTimeout, float]:
    """With most of its message still under way."""
    x = torch.randn(1_000_000)
    group.barrier()
    if group.rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.2)  # its signal ends the process
    start = time.monotonic()
    with pytest.raises(PeerTimeout) as caught:
        tileflux.broadcast(x, group=group, root=0)
    return caught.value, time.monotonic() - start


def test_a_rank_that_dies_while_it_sends_is_missed() -> None:
    results = linked("1MB/s,1ms", _root_dies, 3, group_kwargs={"timeout_s": 20.0}, may_die={0})
    assert isinstance(results[0], Died)
    for error, seconds in results[1:]:
        assert error.peer == 0 and "is gone" in str(error) and seconds < 10.0


def _too_slow(group: Group) -> tuple[PeerTimeout, float]:
    group.barrier()
    start = time.monotonic()
    with pytest.raises(PeerTimeout) as caught:
        tileflux.broadcast(torch.randn(1000), group=group, root=0)
    with pytest.raises(GroupBroken):
        tileflux.barrier(group=group)
    group.close()
    return caught.value, time.monotonic() - start


@pytest.mark.parametrize("where", ["fork", "virtual"])
def test_a_link_slower_than_the_deadline_is_a_timeout_on_every_rank(where: str) -> None:
    """On the rank that only sends, too: it would be busy for another minute."""
    settings = {"where": where, "group_kwargs": {"timeout_s": 1.0}}
    for error, seconds in linked("100B/s", _too_slow, 2, **settings):
        assert error.op == "broadcast" and seconds < 10.0


def test_without_a_link_nothing_goes_by_the_copying_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "copy_async", lambda *_, **__: pytest.fail("copy_async was called"))
    run_ranks(check_collectives, 2, args=([(13, 8)], [torch.float32]))


def _simulated(group: Group) -> None:
    check_collectives(group, [(13, 8), (40, 5)], [torch.float32])


@pytest.mark.skipif(not env.interpreting(), reason="kernels of this process are compiled")
@pytest.mark.parametrize("world_size", [2, 3])
def test_no_schedule_of_copies_brings_it_to_a_halt(monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    monkeypatch.setattr(env, "cpu_backend", lambda: "host")
    config = CommConfig(num_lanes=2, slot_bytes=256, min_lane_bytes=64)
    with env.scoped({"TILEFLUX_LINK": "1GB/s"}):
        for seed in range(5):
            simulate(_simulated, world_size, seed=seed, config=config)
