"""barrier holds every rank until the last has come."""

from __future__ import annotations

import time

import pytest
import torch

import tileflux
from tileflux.ops import barrier_reference
from tileflux.symm.group import Group
from tileflux.testing import run_ranks


def _late(group: Group, late: int) -> tuple[float, float]:
    barrier_reference()
    for _ in range(50):
        tileflux.barrier(group=group)
    if group.rank == late:
        time.sleep(0.3)
    came = time.monotonic()
    tileflux.barrier(group=group)
    return came, time.monotonic()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_nobody_leaves_before_the_last_comes(world_size: int) -> None:
    times = run_ranks(_late, world_size, args=(world_size - 1,))
    assert min(left for _, left in times) >= max(came for came, _ in times)


def test_a_compiled_function_may_hold_a_barrier() -> None:
    (group,) = tileflux.local_groups(1)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        tileflux.barrier(group=group)
        tileflux.all_reduce(y, group=group, out=y)
        return y * 2

    assert torch.compile(step, backend="eager")(torch.ones(3)).tolist() == [4.0] * 3
    group.close()


def test_refusals() -> None:
    with pytest.raises(ValueError, match="group should be a tileflux.Group, not NoneType"):
        tileflux.barrier(group=None)  # type: ignore[arg-type]
    (group,) = tileflux.local_groups(1)
    group.close()
    with pytest.raises(tileflux.GroupClosed):
        tileflux.barrier(group=group)
