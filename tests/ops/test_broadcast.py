"""broadcast against torch.distributed, its gradient, and what it refuses."""

from __future__ import annotations

import pytest
import torch

import tileflux
from tileflux.ops import broadcast_reference
from tileflux.symm.group import Group
from tileflux.testing import assert_close, run_ranks

from .cases import MOVED, check_common_refusals, check_compiled, check_registration


def _against_reference(group: Group) -> None:
    for root in range(group.world_size):
        for dtype in MOVED:
            x = torch.randint(0, 256, (5, 8), dtype=torch.uint8).view(dtype)
            spread = tileflux.broadcast(x, group=group, root=root)
            assert_close(spread.view(torch.uint8), broadcast_reference(x, root=root).view(torch.uint8))
    scalar = torch.tensor(float(group.rank))
    assert float(tileflux.broadcast(scalar, group=group, root=group.world_size - 1)) == group.world_size - 1
    x = torch.randn(9)
    expected = broadcast_reference(x)
    assert tileflux.broadcast(x, group=group, out=x) is x
    assert_close(x, expected, reduction=0)


@pytest.mark.parametrize("world_size", [1, 3])
def test_equals_torch_distributed(world_size: int) -> None:
    run_ranks(_against_reference, world_size)


def _gradient(group: Group) -> None:
    x = torch.randn(4, 3, requires_grad=True)
    (tileflux.broadcast(x, group=group, root=1) * (group.rank + 1)).sum().backward()
    assert x.grad is not None
    assert_close(x.grad, torch.full((4, 3), 3.0 if group.rank == 1 else 0.0), reduction=0)
    check_compiled(group, lambda x: tileflux.broadcast(x, group=group), torch.randn(4, 3), any_gradient=False)


def test_gradient_is_summed_on_the_root() -> None:
    run_ranks(_gradient, 2, timeout_s=120)


def _registration(group: Group) -> None:
    check_registration(group, torch.ops.tileflux.broadcast.default, torch.randn(4, 3), group.name, 0)
    check_compiled(group, lambda x: tileflux.broadcast(x, group=group), torch.randn(4, 3))


def test_registration() -> None:
    run_ranks(_registration, 1, timeout_s=120)


def _refusals(group: Group) -> None:
    check_common_refusals(tileflux.broadcast, group)
    with pytest.raises(ValueError, match="root=3 is not a rank of a group of 1"):
        tileflux.broadcast(torch.ones(4), group=group, root=3)


def test_refusals() -> None:
    run_ranks(_refusals, 1)
