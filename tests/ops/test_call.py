"""Between a caller's tensors and the kernels: memory that is given twice, and views of something else than it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tileflux
from tileflux import Group
from tileflux.ops import _dense
from tileflux.ops._call import check_apart, check_out
from tileflux.testing import assert_close, poisoned

from .dense_cases import SMALL, install_interpreter, interpreted, needs_interpreter

OPS = ("gemm", "ag_gemm", "gemm_rs", "gemm_ar", "grouped_gemm")
OVERLAPS = "out overlaps the input; give them separate memory"


@pytest.fixture
def group() -> Iterator[Group]:
    (made,) = tileflux.local_groups(1)
    with made:
        yield made


def call(op: str, group: Group, x: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
    """The op on one rank and, if it is one of experts, with one expert: all of them are the product."""
    if op == "grouped_gemm":
        counts = options.pop("counts", torch.tensor([len(x)]))
        one = {name: options.pop(name)[None] for name in ("bias", "scale_weight") if name in options}
        return tileflux.grouped_gemm(x, weight[None], counts, **one, **options)
    result: torch.Tensor = getattr(tileflux, op)(x, weight, **({} if op == "gemm" else {"group": group}), **options)
    return result


@pytest.mark.parametrize(
    ("make", "is_refused"),
    [
        (lambda room: room[40:60].view(5, 4).t(), True),
        (lambda room: room[20:100].view(4, 20)[:, :5], True),  # begins before it, ends behind it
        (lambda room: room[59:].as_strided((3, 2), (7, 3)), True),  # its first element is the last of out
        (lambda room: room[60:].as_strided((3, 2), (7, 3)), False),
        (lambda room: room[23:].as_strided((3, 2), (7, 3)), True),  # its last element is the first of out
        (lambda room: room[22:].as_strided((3, 2), (7, 3)), False),
        (lambda room: room[38:].as_strided((2, 2), (30, 1)), True),  # no byte in common, but all around it
        (lambda room: room[39:40].expand(8, 8), False),
        (lambda room: room[40:41].expand(8, 8), True),
        (lambda room: room[50:50].view(0, 5), False),
        (lambda room: room[45:55].view(2, 5)[:, 3:3], False),
        (lambda room: room[45:46].as_strided((1, 1), (50, 50)), True),
        (lambda room: room[60:], False),
        (lambda room: room[:40], False),
        (lambda room: room[:41], True),
    ],
)
def test_out_must_not_lie_where_an_input_reaches(
    make: Callable[[torch.Tensor], torch.Tensor], is_refused: bool
) -> None:
    room = torch.zeros(100)
    out, given, other = room[40:60].view(4, 5), make(room), torch.zeros(3)
    for like, others in ((given, ()), (other, (None, given))):
        if is_refused:
            with pytest.raises(ValueError, match=f"op: {OVERLAPS}"):
                check_out("op", out, (4, 5), like, others=others)
        else:
            assert check_out("op", out, (4, 5), like, others=others) is out


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=3),
    st.integers(0, 20),
    st.integers(0, 60),
    st.integers(0, 8),
)
def test_the_range_of_a_strided_input_is_that_of_its_elements(
    dims: list[tuple[int, int]], start: int, place: int, length: int
) -> None:
    room = torch.arange(140)
    given = room.as_strided([size for size, _ in dims], [step for _, step in dims], start)
    numbers, out = given.flatten().tolist(), room[place : place + length]
    is_apart = not numbers or not length or max(numbers) < place or min(numbers) >= place + length
    if is_apart:
        assert check_out("op", out, (length,), given) is out
    else:
        with pytest.raises(ValueError, match=OVERLAPS):
            check_out("op", out, (length,), given)


def test_an_input_may_lie_in_its_own_place_in_one_piece_only() -> None:
    room = torch.zeros(6, 6)
    assert check_out("op", room, (6, 6), room[2:4], own_place=48) is room
    for wrong, place in ((room[2:4], 24), (room[2:4, :5], 48), (room.t(), 0), (room[2:4], None)):
        with pytest.raises(ValueError, match=f"op: {OVERLAPS}"):
            check_out("op", room, (6, 6), wrong, own_place=place)
    with pytest.raises(ValueError, match=f"op: {OVERLAPS}"):
        check_out("op", room, (6, 6), torch.zeros(1), own_place=48, others=(room[2:4],))


@pytest.mark.parametrize("op", OPS)
def test_every_input_is_kept_apart_from_out_whatever_its_strides(op: str, group: Group) -> None:
    room, num = torch.zeros(16, 16), 8
    out = room.view(-1)[: num * num].view(num, num)
    x, weight, bias = torch.ones(num, num), torch.ones(num, num), torch.ones(num)
    wide, one_of_two, turned = room[:num, :num], room.view(-1)[: 2 * num : 2], out.t()
    for wrong in ({"x": wide}, {"x": turned}, {"weight": wide}, {"weight": turned}, {"bias": one_of_two}):
        with pytest.raises(ValueError, match=f"^{op}: {OVERLAPS}"):
            call(op, group, **({"x": x, "weight": weight, "bias": bias} | wrong), out=out)
    small: dict[str, Any] = {"x": x.to(torch.int8), "weight": weight.to(torch.int8), "out_dtype": torch.float32}
    for name in ("scale_x", "scale_weight"):
        for scale in (one_of_two, out[0]):
            with pytest.raises(ValueError, match=f"^{op}: {OVERLAPS}"):
                call(op, group, **small, **{name: scale}, out=out)
    assert room.abs().sum() == 0, "nothing was written"


def test_counts_are_kept_apart_from_out(group: Group) -> None:
    out = torch.zeros(4, 5)
    with pytest.raises(ValueError, match=f"^grouped_gemm: {OVERLAPS}"):
        counts = out.view(-1)[6:8].view(torch.int64)
        call("grouped_gemm", group, torch.ones(4, 3), torch.ones(5, 3), counts=counts, out=out)


@pytest.mark.parametrize("place", range(5))
def test_a_repeated_call_keeps_every_input_apart_from_out(place: int) -> None:
    launched: list[object] = []
    again = SimpleNamespace(
        shape=(4, 4), dtype=torch.float32, fits=lambda *given: True, launch=lambda *given: launched.append(given)
    )
    known: Any = SimpleNamespace(again=again)
    tensors = [torch.ones(4, 4), torch.ones(4, 4), torch.ones(4), torch.ones(4), torch.ones(4)]
    room = torch.zeros(8, 4)
    out = room[:4]
    assert _dense.call_again("gemm", known, None, tuple(tensors), out) is out and len(launched) == 1
    tensors[place] = out.t() if place < 2 else room.view(-1)[8:16:2]
    with pytest.raises(ValueError, match=f"gemm: {OVERLAPS}"):
        _dense.call_again("gemm", known, None, tuple(tensors), out)
    assert len(launched) == 1


def test_results_are_kept_apart_from_each_other() -> None:
    room = torch.zeros(40)
    first, behind, across, last = room[:10], room[10:20], room[15:25], room[25:]
    check_apart("op", [])
    for outs in ([first], [first, behind], [last, first, behind], [first[:0], first, first[:0], first[5:5], behind]):
        check_apart("op", outs)
    for outs, pair in (
        ([first, first], (0, 1)),
        ([first, last, first], (0, 2)),
        ([across, first, behind], (0, 2)),
        ([last, room[24:26], first], (0, 1)),
        ([room, last], (0, 1)),
        ([first[::2], first[1:2]], (0, 1)),
    ):
        message = rf"op: out\[{pair[0]}\] and out\[{pair[1]}\] overlap; give them separate memory"
        with pytest.raises(ValueError, match=message):
            check_apart("op", outs)


NEGATED = [(op, name) for op in OPS for name in ("x", "weight", "bias", "scale_x", "scale_weight")]


@needs_interpreter
@pytest.mark.parametrize(("op", "name"), [*NEGATED, ("grouped_gemm", "counts")])
def test_a_negated_view_is_read_as_such_also_with_out(op: str, name: str, group: Group) -> None:
    """Without ``out=`` torch's dispatcher sees to it. On the host torch multiplies, which does it anyway."""
    install_interpreter()
    is_scaled = name.startswith("scale")
    torch.manual_seed(len(op) + len(name))
    tensors = {"x": torch.randint(-9, 9, (6, 8)).float(), "weight": torch.randint(-9, 9, (5, 8)).float()}
    if is_scaled:
        tensors = {each: tensor.to(torch.int8) for each, tensor in tensors.items()}
        tensors |= {"scale_x": torch.rand(6) + 0.5, "scale_weight": torch.rand(5) + 0.5}
    tensors["bias"] = torch.randint(-9, 9, (5,)).float()
    if op == "grouped_gemm":
        tensors["counts"] = torch.tensor([6])
    values = {each: tensor.double() for each, tensor in tensors.items()}
    tensors[name] = torch._neg_view(tensors[name].neg())
    assert tensors[name].is_neg() and tensors[name].is_contiguous()
    right = values["x"] @ values["weight"].t()
    if is_scaled:
        right = right * values["scale_x"][:, None] * values["scale_weight"]
    right = right + values["bias"]
    with interpreted():
        for _ in range(2):
            out = poisoned((6, 5), torch.float32)
            assert call(op, group, **tensors, config=SMALL, out_dtype=torch.float32, out=out) is out
            assert_close(out, right, reduction=8, what=f"{op} of a negated {name}")


@needs_interpreter
@pytest.mark.parametrize("turned", [False, True])
def test_negated_weights_of_several_products_keep_their_layout(turned: bool, group: Group) -> None:
    install_interpreter()
    x, weights = torch.randn(6, 8), [torch.randn(5, 8), torch.randn(7, 8)]
    rights = [x.double() @ weight.double().t() for weight in weights]
    negated = [weight.neg() for weight in weights]
    if turned:
        negated = [weight.t().contiguous().t() for weight in negated]
    outs = [poisoned((6, len(weight)), torch.float32) for weight in weights]
    with interpreted():
        views = [torch._neg_view(weight) for weight in negated]
        tileflux.ag_gemm(x, views, group=group, config=SMALL, out=outs)
    for out, right in zip(outs, rights, strict=True):
        assert_close(out, right, reduction=8)
