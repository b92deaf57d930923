"""A peer that never signals becomes an error that names it: no hang, no crash, and the process goes on."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable

import pytest
import torch

import tileflux
from tileflux.errors import GroupBroken, PeerTimeout
from tileflux.symm.group import Group
from tileflux.testing import Died, run_ranks


def _until_killed(group: Group, victim: int, op: str) -> tuple[PeerTimeout, float, bool, list[str]]:
    """Calls ``op`` until the victim, which kills itself in the middle of one, is missed."""
    x = torch.randn(300_000)  # several pieces per call: the victim dies between two of them
    for call in range(10_000):
        if group.rank == victim and call == 20:
            # In the middle of a call: after its first piece, which only the first peer gets.
            publish = group.channels.publish

            def publish_and_die(lane: int, peer: int, publish: Callable[[int, int], None] = publish) -> None:
                publish(lane, peer)
                os.kill(os.getpid(), signal.SIGKILL)

            group.channels.publish = publish_and_die  # type: ignore[method-assign]
        start = time.monotonic()
        try:
            getattr(tileflux, op)(x, group=group)
        except PeerTimeout as error:
            seconds = time.monotonic() - start
            with pytest.raises(GroupBroken, match="make a new one"):
                tileflux.all_gather(x, group=group)
            group.close()
            left = [name for name in os.listdir("/dev/shm") if "tileflux" in name]
            return error, seconds, group.rank == error.rank, left
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize("op", ["all_gather", "all_reduce"])
@pytest.mark.parametrize("victim", [0, 2])
def test_killed_rank_is_named_by_all_others(op: str, victim: int) -> None:
    results = run_ranks(
        _until_killed, 4, args=(victim, op), group_kwargs={"timeout_s": 2.0}, may_die={victim}, timeout_s=60
    )
    assert isinstance(results[victim], Died)
    for rank, result in enumerate(results):
        if rank == victim:
            continue
        error, seconds, own, left = result
        assert error.peer == victim, str(error)
        assert error.op == op and own and error.flag.startswith("mailbox.")
        assert "is gone" in str(error)
        assert seconds < 5.0
        assert not left


def _one_stays_away(group: Group, absent: int) -> PeerTimeout | None:
    if group.rank == absent:
        time.sleep(1.5)
        return None
    with pytest.raises(PeerTimeout) as caught:
        tileflux.all_reduce(torch.ones(10), group=group)
    return caught.value


@pytest.mark.parametrize("where", ["fork", "virtual"])
def test_rank_that_never_calls(where: str) -> None:
    results = run_ranks(_one_stays_away, 3, args=(1,), where=where, group_kwargs={"timeout_s": 0.5})  # type: ignore[arg-type]
    for rank in (0, 2):
        error = results[rank]
        assert (error.peer, error.rank, error.op) == (1, rank, "all_reduce")
        assert error.wanted == 1 and error.seen == 0
        assert "mailbox.data[lane 0, rank 1]" in str(error)


def _chain(group: Group) -> PeerTimeout | None:
    """Rank 2 waits only for rank 1, which waits for rank 0, which does nothing."""
    if group.rank == 0:
        time.sleep(2.0)
        return None
    if group.rank == 1:
        time.sleep(0.2)  # so that rank 2's deadline is the first to pass
    words = group.channels._own
    with pytest.raises(PeerTimeout) as caught:
        group.guard.wait(words, 0, 1, group.rank - 1, "chain")
    return caught.value


def test_the_end_of_a_chain_of_waits_is_named() -> None:
    results = run_ranks(_chain, 3, where="fork", group_kwargs={"timeout_s": 0.6})
    assert results[1].peer == 0 and results[1].waited_for == 0
    assert results[2].peer == 0 and results[2].waited_for == 1
    assert "rank 1 was itself waiting" in str(results[2])
    assert "given up" not in str(results[2])
    assert "rank 2 had given up after 0.6 s for rank 1" in str(results[1])


def test_timeouts_pickle() -> None:
    error = PeerTimeout(op="o", rank=1, peer=2, waited_for=3, flag="f", wanted=4, seen=5, seconds=6.0, detail="d")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.peer == 2 and again.seen == 5


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["all_gather", "all_reduce"])
def test_virtual_rank_on_a_gpu_that_never_calls(op: str) -> None:
    groups = tileflux.local_groups(3, "cuda", timeout_s=1.0)
    x = torch.randn(100_000, device="cuda")
    torch.cuda.synchronize()
    for group in groups:  # compiles
        with torch.cuda.stream(group.stream):
            tileflux.barrier(group=group)
    torch.cuda.synchronize()
    start = time.monotonic()
    for rank in (0, 2):
        with torch.cuda.stream(groups[rank].stream):
            getattr(tileflux, op)(x, group=groups[rank])
    for rank in (0, 2):
        with torch.cuda.stream(groups[rank].stream):
            with pytest.raises(PeerTimeout) as caught:
                groups[rank].synchronize()
            assert caught.value.peer == 1 and caught.value.op == op
            assert caught.value.flag.startswith("mailbox.data[")
            with pytest.raises(GroupBroken):
                tileflux.all_gather(x, group=groups[rank])
            groups[rank].close()
    assert time.monotonic() - start < 6.0
    assert torch.equal(x + 0, x)  # the context lives
    fresh = tileflux.local_groups(2, "cuda", timeout_s=5.0)
    for group in fresh:
        with torch.cuda.stream(group.stream):
            tileflux.barrier(group=group)
    for group in fresh:
        with torch.cuda.stream(group.stream):
            group.synchronize()
            group.close()


def _dies_on_the_gpu(group: Group, victim: int) -> PeerTimeout | None:
    x = torch.randn(100_000, device="cuda")
    tileflux.all_gather(x, group=group)
    group.synchronize()
    group.barrier()
    if group.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    tileflux.all_gather(x, group=group)
    with pytest.raises(PeerTimeout) as caught:
        group.synchronize()
    assert torch.equal(x + 0, x)
    return caught.value


@pytest.mark.gpu
def test_process_on_a_shared_gpu_that_dies() -> None:
    # Without MPS: one client's death may take the MPS server's other clients along.
    results = run_ranks(
        _dies_on_the_gpu, 2, args=(1,), where="spawn", device="cuda:0", group_kwargs={"timeout_s": 5.0}, may_die={1},
        timeout_s=120,
    )  # fmt: skip
    assert isinstance(results[1], Died)
    assert results[0].peer == 1 and "is gone" in str(results[0])
