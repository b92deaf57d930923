"""all_reduce against torch.distributed, the same bits everywhere and in both algorithms, its gradient and refusals."""

from __future__ import annotations

import pytest
import torch

import tileflux
from tileflux.ops import all_gather, all_reduce_reference
from tileflux.ops.all_reduce import pick_algorithm
from tileflux.symm.group import Group
from tileflux.testing import assert_close, run_ranks

from .cases import SUMMED, check_common_refusals, check_compiled, check_registration


def _against_reference(group: Group) -> None:
    for dtype in SUMMED:
        for shape in ((), (1,), (3, 5, 7), (70_001,)):
            x = torch.randn(shape).to(dtype)
            expected = all_reduce_reference(x)
            for algorithm in ("one_shot", "two_shot", "auto"):
                total = tileflux.all_reduce(x, group=group, algorithm=algorithm)
                assert_close(total, expected, reduction=0, what=f"{algorithm} {shape} {dtype}")
            everywhere = all_gather(total.reshape(1, -1), group=group)
            assert all(torch.equal(everywhere[0], row) for row in everywhere)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_equals_torch_distributed(world_size: int) -> None:
    run_ranks(_against_reference, world_size)


def _in_place(group: Group) -> None:
    for algorithm in ("one_shot", "two_shot"):
        x = torch.randn(1000)
        expected = all_reduce_reference(x)
        assert tileflux.all_reduce(x, group=group, algorithm=algorithm, out=x) is x
        assert_close(x, expected, reduction=0)


def test_in_place() -> None:
    run_ranks(_in_place, 3)


def test_auto_takes_one_shot_for_small_messages() -> None:
    assert pick_algorithm(1024, 8) == "one_shot"
    assert pick_algorithm(1 << 24, 8) == "two_shot"
    assert pick_algorithm(1 << 24, 2) == "one_shot"


def _gradient(group: Group) -> None:
    x = torch.randn(4, 3, requires_grad=True)
    (tileflux.all_reduce(x, group=group) * (group.rank + 1)).sum().backward()
    assert x.grad is not None
    assert_close(x.grad, torch.full((4, 3), 3.0), reduction=0)
    check_compiled(group, lambda x: tileflux.all_reduce(x, group=group), torch.randn(4, 3))


def test_gradient_is_all_reduce() -> None:
    run_ranks(_gradient, 2, timeout_s=120)


def _one_ignores_a_result(group: Group) -> list[float]:
    def step(x: torch.Tensor) -> torch.Tensor:
        first = tileflux.all_reduce(x, group=group)
        second = tileflux.all_reduce(10 * x, group=group)
        return second if group.rank else first + second

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        return [float(compiled(torch.ones(1))), float(step(torch.ones(1)))]


def test_a_compiled_rank_that_ignores_a_result_still_takes_part() -> None:
    assert run_ranks(_one_ignores_a_result, 2, timeout_s=120) == [[22.0, 22.0], [20.0, 20.0]]


def _dynamic(group: Group) -> None:
    compiled = torch.compile(lambda x: tileflux.reduce_scatter(x, group=group), backend="eager", fullgraph=True)
    for num_rows in (5, 7, 9):
        x = torch.randn(num_rows, 2)
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x), tileflux.reduce_scatter(x, group=group))


def test_compiled_with_changing_row_counts() -> None:
    run_ranks(_dynamic, 2, timeout_s=120)


def _registration(group: Group) -> None:
    check_registration(group, torch.ops.tileflux.all_reduce.default, torch.randn(4, 3), group.name, "auto")


def test_registration() -> None:
    run_ranks(_registration, 1, timeout_s=120)


def _refusals(group: Group) -> None:
    check_common_refusals(tileflux.all_reduce, group)
    with pytest.raises(ValueError, match="cannot sum torch.float8_e4m3fn"):
        tileflux.all_reduce(torch.ones(4).to(torch.float8_e4m3fn), group=group)
    with pytest.raises(ValueError, match="algorithm='ring' is not one of auto, one_shot, two_shot"):
        tileflux.all_reduce(torch.ones(4), group=group, algorithm="ring")


def test_refusals() -> None:
    run_ranks(_refusals, 1)
