"""Torch's symmetric memory between processes that share a GPU."""

from __future__ import annotations

import pytest
import torch

import tileflux
from tileflux.symm.group import Group
from tileflux.testing import run_ranks


def _use(group: Group) -> None:
    assert group.transport == "cuda" and group.device.type == "cuda"
    traits = group.traits
    assert traits.copies_need_sms and not traits.has_multicast and set(traits.links) == {"self", "same GPU"}
    assert traits.num_sms > 0
    region = group.region("data", 1 << 20)
    assert region.view().eq(0).all() and region.multicast_address == 0
    peer = (group.rank + 1) % group.world_size
    region.view(peer, torch.int32)[5] = 100 + group.rank
    tileflux.barrier(group=group)
    group.synchronize()
    assert int(region.view(dtype=torch.int32)[5]) == 100 + (group.rank - 1) % group.world_size
    assert region.table.tolist() == [region.address(rank) for rank in range(group.world_size)]


@pytest.mark.gpu
def test_processes_on_one_gpu() -> None:
    run_ranks(_use, 2, where="mps", timeout_s=120)


def _alternate_streams(group: Group) -> None:
    """Calls on two streams of one group, nobody synchronising: each follows the last."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    size = 1 << 20
    xs = [torch.full((size,), float(call), device=group.device) for call in range(20)]
    outs = [torch.full((group.world_size * size,), float("nan"), device=group.device) for _ in xs]
    torch.cuda.synchronize()
    for call, (x, out) in enumerate(zip(xs, outs, strict=True)):
        with torch.cuda.stream(streams[call % 2]):
            if call % 2 == 0 and group.rank == 0:
                torch.cuda._sleep(2_000_000)  # the even calls start late, and the odd ones must not overtake them
            tileflux.all_gather(x, group=group, out=out)
    torch.cuda.synchronize()
    group.ensure_usable()
    for call, out in enumerate(outs):
        assert (out == call).all(), f"call {call}"


@pytest.mark.gpu
def test_two_streams_of_one_group() -> None:
    run_ranks(_alternate_streams, 2, where="mps", timeout_s=120)


def _make_and_close(group: Group) -> int:
    from tileflux.symm import cuda

    before = len(cuda._mapped)
    for _ in range(4):
        with Group.from_process_group(device=group.device) as other:
            x = torch.randn(1000, device=group.device)
            assert torch.equal(tileflux.all_gather(x, group=other)[group.rank * 1000 :][:1000], x)
            other.synchronize()
    return len(cuda._mapped) - before


@pytest.mark.gpu
def test_groups_closed_together_free_their_memory() -> None:
    assert run_ranks(_make_and_close, 2, where="mps", timeout_s=120) == [0, 0]
