"""``copy_async`` on the CPU: the flag is set after the bytes, in the order asked for."""

from __future__ import annotations

import pytest
import torch

from tileflux import FlagWrite
from tileflux.symm.group import Group
from tileflux.symm.host_signal import HostWords
from tileflux.testing import run_ranks


def _push_to_neighbour(group: Group) -> None:
    peer = (group.rank + 1) % group.world_size
    data = group.region("data", 4000)
    flags = group.region("flags", 64)
    word = flags.view(peer, torch.int32)[0:1]
    own = HostWords(flags.view())
    for epoch in range(1, 21):
        source = torch.full((1000,), float(100 * epoch + group.rank))
        value: int | torch.Tensor = epoch if epoch % 2 else torch.tensor([epoch], dtype=torch.int32)
        done = group.copy_async(data.view(peer, torch.float32), source, signal=FlagWrite(word, value))
        own.wait(0, epoch, lambda seen, seconds: seconds > 10)
        left = (group.rank - 1) % group.world_size
        assert (data.view(dtype=torch.float32) == 100 * epoch + left).all()
        done.wait()
        group.barrier()


@pytest.mark.parametrize("where", ["fork", "virtual"])
def test_neighbours_see_bytes_before_the_flag(where: str) -> None:
    run_ranks(_push_to_neighbour, 3, where=where)  # type: ignore[arg-type]


def _bad_copies(group: Group) -> None:
    with pytest.raises(ValueError, match="shapes and dtypes must match"):
        group.copy_async(torch.zeros(3), torch.zeros(4))
    with pytest.raises(ValueError, match="one int32 word"):
        FlagWrite(torch.zeros(2, dtype=torch.int32), 1)


def test_bad_copies_are_refused() -> None:
    run_ranks(_bad_copies, 1, where="virtual")


def test_an_error_in_the_worker_reaches_the_caller() -> None:
    from tileflux.symm.host_copy import HostCopier

    copier = HostCopier("test")
    with pytest.raises(RuntimeError):
        copier.copy(torch.zeros(3), torch.zeros(4), None).wait()
    copier.copy(torch.zeros(3), torch.ones(3), None).wait()
    copier.close()
