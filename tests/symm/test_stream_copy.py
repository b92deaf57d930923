"""``copy_async`` on a GPU: a kernel that waits for the flag finds the bytes."""

from __future__ import annotations

import pytest
import torch

import tileflux
from tileflux import FlagWrite
from tileflux.symm.group import Group
from tileflux.testing import run_ranks


def _push(group: Group) -> None:
    peer = (group.rank + 1) % group.world_size
    data = group.region("data", 1 << 20)
    flags = group.region("flags", 64)
    for epoch in range(1, 11):
        source = torch.full((1 << 18,), float(100 * epoch + group.rank), device=group.device)
        pinned = torch.tensor([epoch], dtype=torch.int32, pin_memory=True)
        signal = FlagWrite(flags.view(peer, torch.int32)[0:1], epoch if epoch % 2 else pinned)
        group.copy_async(data.view(peer, torch.float32), source, signal=signal).wait()
        tileflux.barrier(group=group)
        group.synchronize()
        left = (group.rank - 1) % group.world_size
        assert int(flags.view(dtype=torch.int32)[0]) == epoch
        assert (data.view(dtype=torch.float32) == 100 * epoch + left).all()
        tileflux.barrier(group=group)
        group.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["virtual", "mps"])
def test_neighbours_see_bytes_and_flag(where: str) -> None:
    run_ranks(_push, 2, where=where, device="cuda", timeout_s=120)  # type: ignore[arg-type]
