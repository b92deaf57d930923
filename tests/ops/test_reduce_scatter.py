"""reduce_scatter against torch.distributed, bit for bit, its gradient, and what it refuses."""

from __future__ import annotations

import pytest
import torch

import tileflux
from tileflux.ops import reduce_scatter_reference
from tileflux.symm.group import Group
from tileflux.testing import assert_close, run_ranks

from .cases import SUMMED, check_common_refusals, check_compiled, check_registration


def _against_reference(group: Group) -> None:
    for dtype in SUMMED:
        x = torch.randn(7, 5).to(dtype)
        once = tileflux.reduce_scatter(x, group=group)
        assert_close(once, reduce_scatter_reference(x), reduction=0, what=str(dtype))
        assert torch.equal(once, tileflux.reduce_scatter(x, group=group))
    sizes = [2 * rank for rank in range(group.world_size)]
    x = torch.randn(sum(sizes), 3)
    mine = tileflux.reduce_scatter(x, group=group, sizes=sizes)
    assert_close(mine, reduce_scatter_reference(x, sizes=sizes), reduction=0)


@pytest.mark.parametrize("world_size", [1, 3])
def test_equals_torch_distributed(world_size: int) -> None:
    run_ranks(_against_reference, world_size)


def _order(group: Group) -> float:
    """fp32 sums in rank order: 1e8 first swallows the 1 that comes next, and not the other way round."""
    value = [1e8, 1.0, -1e8, 1.0][group.rank]
    return float(tileflux.reduce_scatter(torch.full((4,), value), group=group)[0])


def test_sums_are_in_rank_order() -> None:
    assert run_ranks(_order, 4) == [1.0] * 4


def _gradient(group: Group) -> None:
    x = torch.randn(4, 3, requires_grad=True)
    (tileflux.reduce_scatter(x, group=group) * (group.rank + 1)).sum().backward()
    assert x.grad is not None
    assert_close(x.grad, torch.tensor([1.0, 1.0, 2.0, 2.0])[:, None].expand(4, 3).contiguous(), reduction=0)
    check_compiled(group, lambda x: tileflux.reduce_scatter(x, group=group), torch.randn(4, 3))


def test_gradient_is_all_gather() -> None:
    run_ranks(_gradient, 2, timeout_s=120)


def _registration(group: Group) -> None:
    check_registration(group, torch.ops.tileflux.reduce_scatter.default, torch.randn(4, 3), group.name, [4])


def test_registration() -> None:
    run_ranks(_registration, 1, timeout_s=120)


def _refusals(group: Group) -> None:
    check_common_refusals(tileflux.reduce_scatter, group)
    with pytest.raises(ValueError, match="cannot sum torch.int32; convert to one of float32, float16, bfloat16"):
        tileflux.reduce_scatter(torch.ones(4, dtype=torch.int32), group=group)
    with pytest.raises(ValueError, match="scalar and has no rows"):
        tileflux.reduce_scatter(torch.tensor(1.0), group=group)
    with pytest.raises(ValueError, match=r"sizes=\[3\] add up to 3 rows, but the tensor has 4"):
        tileflux.reduce_scatter(torch.ones(4), group=group, sizes=[3])


def test_refusals() -> None:
    run_ranks(_refusals, 1)
