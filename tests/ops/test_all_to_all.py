"""all_to_all against torch.distributed, its gradient, and what it refuses."""

from __future__ import annotations

import pytest
import torch

import tileflux
from tileflux.ops import all_to_all_reference
from tileflux.symm.group import Group
from tileflux.testing import assert_close, run_ranks

from .cases import MOVED, check_common_refusals, check_compiled, check_registration


def _sizes(group: Group) -> tuple[list[int], list[int]]:
    """Rank r sends r + 2q rows to rank q; rank 0 keeps none for itself."""
    ranks = range(group.world_size)
    return [group.rank + 2 * peer for peer in ranks], [peer + 2 * group.rank for peer in ranks]


def _against_reference(group: Group) -> None:
    send, recv = _sizes(group)
    for dtype in MOVED:
        x = torch.randint(0, 256, (2 * group.world_size, 8), dtype=torch.uint8).view(dtype)
        moved = tileflux.all_to_all(x, group=group)
        assert_close(moved.view(torch.uint8), all_to_all_reference(x).view(torch.uint8))
    x = torch.randn(sum(send), 3)
    moved = tileflux.all_to_all(x, group=group, input_sizes=send, output_sizes=recv)
    assert_close(moved, all_to_all_reference(x, None, send, recv), reduction=0)


@pytest.mark.parametrize("world_size", [1, 3])
def test_equals_torch_distributed(world_size: int) -> None:
    run_ranks(_against_reference, world_size)


def _gradient(group: Group) -> None:
    send, recv = _sizes(group)
    x = torch.randn(sum(send), 3, requires_grad=True)
    moved = tileflux.all_to_all(x, group=group, input_sizes=send, output_sizes=recv)
    (moved * (group.rank + 1)).sum().backward()
    expected = torch.repeat_interleave(torch.arange(1.0, group.world_size + 1), torch.tensor(send))
    assert x.grad is not None
    assert_close(x.grad, expected[:, None].expand(-1, 3).contiguous(), reduction=0)
    check_compiled(group, lambda x: tileflux.all_to_all(x, group=group), torch.randn(4, 3))


def test_gradient_goes_back() -> None:
    run_ranks(_gradient, 2, timeout_s=120)


def _registration(group: Group) -> None:
    op = torch.ops.tileflux.all_to_all.default
    check_registration(group, op, torch.randn(4, 3), group.name, [4], [4], True)


def test_registration() -> None:
    run_ranks(_registration, 1, timeout_s=120)


def _refusals(group: Group) -> None:
    x = torch.ones(5)
    with pytest.raises(ValueError, match="5 rows do not divide among 2 ranks; give input_sizes"):
        tileflux.all_to_all(x, group=group)
    with pytest.raises(ValueError, match="both input_sizes and output_sizes, or neither"):
        tileflux.all_to_all(x, group=group, input_sizes=[2, 3])
    with pytest.raises(ValueError, match=r"input_sizes=\[2, 2\] add up to 4 rows, but the tensor has 5"):
        tileflux.all_to_all(x, group=group, input_sizes=[2, 2], output_sizes=[2, 2])
    with pytest.raises(ValueError, match="sends itself . rows but expects 9 from itself"):
        tileflux.all_to_all(x, group=group, input_sizes=[2, 3], output_sizes=[9, 9])


def test_refusals() -> None:
    run_ranks(_refusals, 2)
    run_ranks(_common, 1)


def _common(group: Group) -> None:
    check_common_refusals(tileflux.all_to_all, group)
