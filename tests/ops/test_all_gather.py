"""all_gather against torch.distributed, its gradient, and what it refuses."""

from __future__ import annotations

import pytest
import torch

import tileflux
from tileflux.ops import all_gather_reference
from tileflux.symm.group import Group
from tileflux.testing import assert_close, run_ranks

from .cases import MOVED, check_common_refusals, check_compiled, check_registration


def _against_reference(group: Group) -> None:
    for dtype in MOVED:
        x = torch.randint(0, 256, (5, 8), dtype=torch.uint8).view(dtype) if dtype.itemsize <= 8 else torch.ones(5)
        assert_close(tileflux.all_gather(x, group=group).view(torch.uint8), all_gather_reference(x).view(torch.uint8))
    sizes = [3 * rank for rank in range(group.world_size)]
    x = torch.randn(sizes[group.rank], 7)
    assert_close(tileflux.all_gather(x, group=group, sizes=sizes), all_gather_reference(x, sizes=sizes), reduction=0)
    strided = torch.randn(6, 10)[::2, 1::3]
    assert_close(tileflux.all_gather(strided, group=group), all_gather_reference(strided.contiguous()), reduction=0)


@pytest.mark.parametrize("world_size", [1, 3])
def test_equals_torch_distributed(world_size: int) -> None:
    run_ranks(_against_reference, world_size)


def _gradient(group: Group) -> None:
    x = torch.randn(2, 3, requires_grad=True)
    weights = torch.arange(2.0 * group.world_size).add(group.rank)[:, None]
    (tileflux.all_gather(x, group=group) * weights).sum().backward()
    rows = torch.arange(2.0).add(2 * group.rank)[:, None]
    expected = (rows * group.world_size + sum(range(group.world_size))).expand(2, 3)
    assert x.grad is not None
    assert_close(x.grad, expected.contiguous(), reduction=0)
    check_compiled(group, lambda x: tileflux.all_gather(x, group=group), torch.randn(2, 3))


def _double_precision(group: Group) -> None:
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    gathered = tileflux.all_gather(x, group=group)
    with pytest.raises(ValueError, match="reduce_scatter: cannot sum torch.float64"):
        gathered.sum().backward()


def test_a_gradient_that_cannot_be_summed_exactly_is_refused() -> None:
    run_ranks(_double_precision, 2)


def test_gradient_is_reduce_scatter() -> None:
    run_ranks(_gradient, 2, timeout_s=120)


def _registration(group: Group) -> None:
    check_registration(group, torch.ops.tileflux.all_gather.default, torch.randn(4, 3), group.name, [4])


def test_registration() -> None:
    run_ranks(_registration, 1, timeout_s=120)


def _refusals(group: Group) -> None:
    check_common_refusals(tileflux.all_gather, group)
    with pytest.raises(ValueError, match="x is a scalar; give it a row dimension"):
        tileflux.all_gather(torch.tensor(1.0), group=group)
    with pytest.raises(ValueError, match=r"sizes=\[1, 2\] has 2 entries for 1 ranks"):
        tileflux.all_gather(torch.ones(1), group=group, sizes=[1, 2])
    with pytest.raises(ValueError, match=r"sizes=\[-1\] has a negative entry"):
        tileflux.all_gather(torch.ones(1), group=group, sizes=[-1])
    with pytest.raises(ValueError, match=r"x has 4 rows but sizes\[0\] is 3"):
        tileflux.all_gather(torch.ones(4), group=group, sizes=[3])


def test_refusals() -> None:
    run_ranks(_refusals, 1)
