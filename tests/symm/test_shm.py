"""Shared memory between processes, with no name that could be left behind."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import tileflux
from tileflux.errors import RankFailed, TransportUnavailable
from tileflux.symm import processes
from tileflux.symm.group import Group
from tileflux.symm.shm import ShmTransport
from tileflux.testing import Died, run_ranks


def _names() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _use(group: Group, end: str) -> None:
    data = group.region("data", 1 << 20)
    data.view((group.rank + 1) % group.world_size).fill_(group.rank)
    group.barrier()
    assert data.view().eq((group.rank - 1) % group.world_size).all()
    assert not {name for name in _names() if "tileflux" in name}
    if end == "exception" and group.rank == 0:
        raise ZeroDivisionError
    if end == "killed" and group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if end != "normal":
        time.sleep(0.2)


@pytest.mark.parametrize("end", ["normal", "exception", "killed"])
def test_nothing_is_left_behind(end: str) -> None:
    before = _names()
    if end == "exception":
        with pytest.raises(RankFailed, match="ZeroDivisionError"):
            run_ranks(_use, 3, args=(end,))
    else:
        results = run_ranks(_use, 3, args=(end,), may_die={1})
        assert isinstance(results[1], Died) == (end == "killed")
    assert _names() == before


def _open_files(group: Group) -> int:
    before = len(os.listdir("/proc/self/fd"))
    for size in range(20):
        group.region(f"r{size}", 100_000)
    return len(os.listdir("/proc/self/fd")) - before


def test_segments_keep_no_file_open() -> None:
    # mmap keeps a duplicate of its own descriptor: two ranks' mappings per segment, and nothing else.
    assert max(run_ranks(_open_files, 2)) <= 2 * 20


def test_ranks_on_two_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = replace(processes.Process.this(0), host="elsewhere")
    store = dist.HashStore()
    both = [processes.Process.this(0), elsewhere]
    monkeypatch.setattr(processes.Rendezvous, "exchange", lambda *_: both)
    with pytest.raises(TransportUnavailable, match="one machine, and these ranks are on .*elsewhere"):
        ShmTransport(store, 0, 2, 0, 1.0)


def test_memory_of_a_stranger_is_refused_with_the_fix() -> None:
    store = dist.HashStore()
    transport = ShmTransport(store, 0, 1, 0, 1.0)
    with pytest.raises(TransportUnavailable, match=r"cannot open the memory of rank 1 .* run all ranks as one user"):
        transport._map(1, 2**22 + 1, 5, 100)
    transport.close(orderly=True)
    assert torch.equal(tileflux.local_groups(1)[0].region("x", 4).view(), torch.zeros(4, dtype=torch.uint8))
