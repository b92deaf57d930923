"""Dense ops called again: no check and no dispatcher for what was checked before, and both for everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import tileflux
from tileflux import Group
from tileflux.errors import GroupClosed
from tileflux.ops import _dense
from tileflux.testing import assert_close, poisoned
from tileflux.tune.lookup import forget

OPS = ("gemm", "ag_gemm", "gemm_rs", "gemm_ar")


@pytest.fixture
def group() -> Iterator[Group]:
    (made,) = tileflux.local_groups(1)
    with made:
        yield made


@pytest.fixture
def num_checks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many calls were checked since the last time it was asked."""
    forget()  # whatever other tests have called
    calls: list[object] = []
    check = _dense.check_dense

    def noted(*given: Any) -> None:
        calls.append(given)
        check(*given)

    monkeypatch.setattr(_dense, "check_dense", noted)

    def count() -> int:
        number = len(calls)
        calls.clear()
        return number

    return count


def call(op: str, group: Group, x: Any, weight: Any, bias: Any = None, **options: Any) -> torch.Tensor:
    """The op on one rank, where all of them are the product."""
    placed = {} if op == "gemm" else {"group": group}
    result: torch.Tensor = getattr(tileflux, op)(x, weight, bias, **placed, **options)
    return result


@pytest.mark.parametrize("op", OPS)
def test_a_call_like_an_earlier_one_is_not_checked_again_and_right(
    op: str, group: Group, num_checks: Callable[[], int]
) -> None:
    for number in range(4):
        x, weight, bias = torch.randn(5, 8), torch.randn(6, 8), torch.randn(6)
        expected = x.double() @ weight.double().t() + bias.double()
        out = poisoned((5, 6), torch.float32)
        assert call(op, group, x, weight, bias, out=out) is out
        for result in (out, call(op, group, x, weight, bias)):
            assert_close(result, expected, reduction=8, what=f"{op}, call {number}")
        assert num_checks() == (1 if number == 0 else 0)


@pytest.mark.parametrize("op", OPS)
def test_whatever_the_checks_look_at_makes_another_call(op: str, group: Group, num_checks: Callable[[], int]) -> None:
    x, weight, bias = torch.randn(6, 8), torch.randn(6, 8), torch.randn(6)
    call(op, group, x, weight, bias)
    num_checks()
    others: list[tuple[Any, ...]] = [
        (x[:4], weight, bias), (x, weight[:2], bias[:2]), (x[:, :4], weight[:, :4], bias), (x, weight, None),
        (x, torch.randn(8, 6).t(), bias), (torch.randn(8, 6).t(), weight, bias), (x, weight, bias.half()),
        (x.half(), weight.half(), bias),
    ]  # fmt: skip
    for tensors in others:
        call(op, group, *tensors)
        assert num_checks() == 1
        call(op, group, *tensors)
        assert num_checks() == 0
    for options in ({"out_dtype": torch.float16}, {"config": tileflux.GemmConfig(block_m=16)}):
        assert call(op, group, x, weight, bias, **options).dtype == options.get("out_dtype", torch.float32)
        assert num_checks() == 1


@pytest.mark.parametrize("op", OPS)
def test_what_is_forgotten_is_chosen_anew(op: str, group: Group, num_checks: Callable[[], int]) -> None:
    x, weight = torch.randn(6, 8), torch.randn(6, 8)
    for _ in range(2):
        call(op, group, x, weight)
        call(op, group, x, weight)
        assert num_checks() == 1
        forget()


@pytest.mark.parametrize("op", OPS)
def test_refusals_come_after_good_calls_too(op: str, group: Group) -> None:
    x, weight = torch.randn(6, 8), torch.randn(6, 8)
    for _ in range(2):
        call(op, group, x, weight)
        for tensors, options, message in (
            ((x, weight[:, :4]), {}, "differ in K"),
            ((x.double(), weight), {}, "what can be multiplied"),
            ((x.to_sparse(), weight), {}, "layout"),
            ((x.tolist(), weight), {}, "should be a tensor"),
            ((x, weight), {"config": {"block_m": 16}}, "should be a tileflux.GemmConfig, not dict"),
            ((x, weight), {"out_dtype": torch.int8}, "out_dtype=torch.int8 should be"),
            ((x, weight), {"out": torch.empty(5, 6)}, "out should be contiguous"),
            ((x, weight), {"out": x}, "out "),
        ):
            with pytest.raises(ValueError, match=message):
                call(op, group, *tensors, **options)
    for extra in OPS[1:] if op == "gemm" else [op]:
        with pytest.raises(ValueError, match="group should be a tileflux.Group, not str"):
            getattr(tileflux, extra)(x, weight, group="world")


@pytest.mark.parametrize("op", OPS[1:])
def test_groups_are_looked_at_every_time(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (checking,) = tileflux.local_groups(1, check=True)
    agreed: list[str] = []
    monkeypatch.setattr(Group, "agree", lambda group, what, *given: agreed.append(what))
    x, weight = torch.randn(6, 8), torch.randn(6, 8)
    for _ in range(3):
        call(op, checking, x, weight)
    assert agreed == [op] * 3
    checking.close()
    with pytest.raises(GroupClosed):
        call(op, checking, x, weight)


@pytest.mark.parametrize("op", OPS)
def test_a_gradient_is_there_whatever_was_called_before(op: str, group: Group) -> None:
    x, weight = torch.randn(6, 8), torch.randn(6, 8)
    call(op, group, x, weight)
    x.requires_grad_()
    with torch.no_grad():
        assert not call(op, group, x, weight).requires_grad
    call(op, group, x, weight).sum().backward()
    assert x.grad is not None
    assert_close(x.grad, weight.double().sum(0).expand(6, 8), reduction=6, what=f"gradient of {op}")
    with pytest.raises(ValueError, match="out= records no gradient"):
        call(op, group, x, weight, out=torch.empty(6, 6))


@pytest.mark.parametrize("op", OPS)
def test_who_traces_or_transforms_sees_the_op(op: str, group: Group) -> None:
    x, weight = torch.randn(6, 8), torch.randn(6, 8)
    expected = call(op, group, x, weight)
    graph = make_fx(lambda x: call(op, group, x, weight))(x)
    assert f"tileflux.{op}" in graph.code
    with pytest.raises(RuntimeError, match="functorch"):  # torch's refusal, where else a gradient would be lost
        torch.func.grad(lambda x: call(op, group, x, weight).sum())(x)
    compiled = torch.compile(lambda x: call(op, group, x, weight), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)


def test_within_a_mode_or_a_transform_there_is_no_short_way() -> None:
    x = torch.randn(4, 8)
    assert _dense.call_key((x,), None) is not None
    with TorchDispatchMode():
        assert _dense.call_key((x,), None) is None
    keys: list[object] = []
    torch.vmap(lambda row: keys.append(_dense.call_key((row,), None)) or row)(x)  # type: ignore[func-returns-value]
    assert keys == [None]


def test_a_negated_view_is_multiplied_as_it_reads() -> None:
    x, weight = torch._neg_view(torch.randn(4, 8)), torch.randn(6, 8)
    assert x.is_neg() and x.is_contiguous()
    assert _dense.call_key((x, weight), None) is None, "kernels read memory, and do not see that it is to be negated"
    for _ in range(2):
        expected = x.resolve_neg().double() @ weight.double().t()
        assert_close(tileflux.gemm(x, weight), expected, reduction=8, what="gemm of a negated view")


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
def test_sizes_may_be_anything_that_is_gone_through_once(op: str, group: Group) -> None:
    x, weight = torch.randn(6, 8), torch.randn(6, 8)
    for _ in range(3):
        result = call(op, group, x, weight, sizes=iter([6]))
        assert_close(result, x.double() @ weight.double().t(), reduction=8, what=op)
    with pytest.raises(ValueError, match="sizes"):
        call(op, group, x, weight, sizes=iter([5]))


def test_parts_of_ag_gemm_are_told_apart(group: Group, num_checks: Callable[[], int]) -> None:
    x, weight, bias = torch.randn(6, 8), torch.randn(6, 8), torch.randn(6)
    for number in range(2):
        pair = tileflux.ag_gemm(x, [weight, weight], [bias, bias], group=group)
        one, gathered = tileflux.ag_gemm(x, weight, bias, group=group, return_gathered=True)
        assert all(torch.equal(part, one) for part in pair) and torch.equal(gathered, x)
        (alone,) = tileflux.ag_gemm(x, [weight], group=group)
        assert_close(alone, one.double() - bias.double(), reduction=9, what="without a bias")
        assert num_checks() == (4 if number == 0 else 0)


def test_numbers_as_scales_are_those_of_the_call() -> None:
    x, weight = torch.ones(4, 8, dtype=torch.int8), torch.ones(6, 8, dtype=torch.int8)
    for scale in (0.5, 2.0, 4):
        assert torch.equal(tileflux.gemm(x, weight, scale_x=scale), torch.full((4, 6), 8.0 * scale).bfloat16())
