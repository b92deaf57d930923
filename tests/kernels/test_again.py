"""Calls made again: they launch what the long way launches, and go it wherever anything but addresses has changed.

There is no GPU here: a stand-in notes what the main loop is launched with, and results are whatever memory held.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs

import tileflux
from tileflux import GemmConfig
from tileflux.errors import GroupBroken, GroupClosed
from tileflux.kernels import again, dense, direct, gemm_launch, library, loading, prepared, scatter, steps, turns
from tileflux.kernels.recording import recording
from tileflux.ops import ag_gemm, gemm, gemm_ar, gemm_rs

from .again_world import K, M, N, World, make
from .stand_in import stand_in_for_gemm

OPS = ("gemm", "ag_gemm", "gemm_rs", "gemm_ar")
APART = GemmConfig(block_m=16, block_n=32, block_k=32, sums_apart=True)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    for op in (ag_gemm, gemm, gemm_ar, gemm_rs):
        module = __import__(op.__module__, fromlist=["_known"])
        monkeypatch.setattr(module, "_known", prepared.Kept())
    made = World(stand_in_for_gemm(monkeypatch), monkeypatch)
    yield made
    for group in made.groups:
        group.close()


def shape_of(op: str) -> tuple[int, int]:
    """Of rank 0's result."""
    return {"gemm": (M, N), "ag_gemm": (2 * M, N), "gemm_rs": (M // 2, N), "gemm_ar": (M, N)}[op]


@pytest.mark.parametrize("op", OPS)
def test_a_call_like_an_earlier_one_is_launched_as_the_long_way_would(world: World, op: str) -> None:
    kept = []  # so that addresses differ
    for number in range(4):
        x, weight, bias = make(M, K, torch.bfloat16), make(N, K, torch.bfloat16), torch.zeros(N)
        kept.append((x, weight, bias))
        assert world.is_short(op, x=x, weight=weight, bias=bias) == (number >= 2), number
        assert world.is_short(op, x=x, weight=weight) == (number >= 2), "without a bias it is another call"
        out = make(*shape_of(op), torch.bfloat16)
        if number >= 2:
            assert world.is_short(op, x=x, weight=weight, bias=bias, out=out)
            assert world.call(op, x=x, weight=weight, out=out) is out
            assert world.call(op).shape == shape_of(op) and world.call(op).dtype is torch.bfloat16
    given = {"out_dtype": torch.float32}
    assert [world.is_short(op, **given) for _ in range(3)] == [False, False, True]
    assert world.call(op, **given).dtype is torch.float32


@pytest.mark.parametrize("op", OPS)
def test_scales_come_as_they_are_or_the_long_way(world: World, op: str) -> None:
    num_rows = M
    for scales, wanted in (
        ({"scale_x": torch.ones(num_rows), "scale_weight": torch.ones(N)}, True),
        ({"scale_weight": torch.ones(())}, True),
        ({"scale_x": torch.ones(())}, op != "ag_gemm"),  # repeated for every row that is sent
        ({"scale_x": torch.ones(2 * num_rows)[::2]}, False),
        ({"scale_weight": 0.5}, False),
        ({"scale_x": 2}, False),
    ):
        found = [world.is_short(op, dtype=torch.int8, out_dtype=torch.float16, **scales) for _ in range(4)]
        assert found == [False, False, wanted, wanted], scales


@pytest.mark.parametrize("op", OPS)
def test_what_has_to_be_copied_goes_the_long_way(world: World, op: str) -> None:
    for given in (
        {"x": torch.zeros(K, M, dtype=torch.bfloat16).t()},
        {"bias": torch.zeros(2 * N)[::2]},
    ):
        assert not any([world.is_short(op, **given) for _ in range(4)])
    wide = {"x": torch.zeros(M, K + 8, dtype=torch.bfloat16)[:, :K]}
    assert [world.is_short(op, **wide) for _ in range(3)][-1] == (op != "ag_gemm"), "rows that are sent lie together"


@contextlib.contextmanager
def listening(world: World) -> Iterator[dict[str, Any]]:
    knobs.runtime.launch_enter_hook.add(print)
    try:
        yield {}
    finally:
        knobs.runtime.launch_enter_hook.remove(print)


@contextlib.contextmanager
def recorded(world: World) -> Iterator[dict[str, Any]]:
    with recording():
        yield {}


@contextlib.contextmanager
def checked(world: World) -> Iterator[dict[str, Any]]:
    agreed: list[object] = []
    with world.patch.context() as patch:
        patch.setattr(world.group, "check_calls", True)
        patch.setattr(world.group, "agree", lambda *given: agreed.append(given))
        yield {}
    assert len(agreed) == 1


@contextlib.contextmanager
def capturing(world: World) -> Iterator[dict[str, Any]]:
    (tables,) = [turns._tables[world.group]]
    with world.patch.context() as patch:
        patch.setattr(tables, "on_gpu", True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield {}
    assert len(tables._captured) == 1, "a graph holds the table"


@contextlib.contextmanager
def forgotten(world: World) -> Iterator[dict[str, Any]]:
    """The turn, which somebody still holds."""
    (known,) = turns._turns[world.group].values()
    with world.patch.context() as patch:
        patch.setattr(turns, "_MAX_TURNS", 1)
        turns.turn(world.group, dense.gather_shards("another op", (1, 1), 16, False, 1))
        yield {}
    assert known not in turns._turns[world.group].values()


@contextlib.contextmanager
def evicted(world: World) -> Iterator[dict[str, Any]]:
    turns._tables[world.group]._make_room()
    yield {}


@contextlib.contextmanager
def misaligned(name: str, world: World) -> Iterator[dict[str, Any]]:
    rows = {"x": M, "weight": N}[name]
    yield {name: make(rows, K, torch.bfloat16, 1)}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("change", "names"),
    [
        (listening, OPS),
        (recorded, OPS),
        (checked, OPS[1:]),
        (capturing, OPS[1:]),
        (forgotten, OPS[1:]),
        (evicted, OPS[1:]),
        (lambda world: misaligned("x", world), OPS),
        (lambda world: misaligned("weight", world), OPS),
    ],
)
def test_what_else_a_launch_depends_on_is_noticed(
    world: World, op: str, change: Callable[[World], contextlib.AbstractContextManager[dict[str, Any]]], names: Any
) -> None:
    if op not in names:
        return
    assert [world.is_short(op) for _ in range(3)] == [False, False, True]
    with change(world) as given:
        assert not world.is_short(op, **given)
    while not world.is_short(op):  # what was forgotten has to be found again
        assert world.num_long < 8
    assert world.is_short(op)


@pytest.mark.parametrize("op", OPS)
def test_an_out_that_is_not_aligned_or_does_not_fit_is_noticed(world: World, op: str) -> None:
    assert [world.is_short(op) for _ in range(3)] == [False, False, True]
    out = make(*shape_of(op), torch.bfloat16, 1)
    assert not world.is_short(op, out=out)
    with pytest.raises(ValueError, match=f"{op}: out should be contiguous"):
        world.call(op, out=out[1:])
    x = make(M, K, torch.bfloat16)
    own = x.view(-1)[: M // 2 * N].view(M // 2, N)
    if op == "gemm_rs":
        with pytest.raises(ValueError, match="gemm_rs: out overlaps the input"):
            world.call(op, x=x, out=own)
    out = make(*shape_of(op), torch.bfloat16)
    version = out._version
    world.call(op, out=out)
    assert out._version > version


@pytest.mark.parametrize("op", OPS)
def test_how_fp32_is_multiplied_is_noticed(world: World, op: str) -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for precision in ("ieee", "tf32", "ieee"):
            torch.backends.cuda.matmul.fp32_precision = precision
            launched = [world.is_short(op, dtype=torch.float32) for _ in range(3)]
            assert not launched[0] and launched[-1]
            assert world.kernel.past_it[-1][-1].precision == precision
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("op", OPS)
def test_another_current_device_is_noticed(world: World, op: str) -> None:
    assert [world.is_short(op) for _ in range(3)] == [False, False, True]
    module = __import__(getattr(tileflux, op).__module__, fromlist=["_known"])
    (known,) = module._known.values()
    known.again._index = 1
    world.patch.setattr(torch.cuda, "current_device", lambda: 1)
    assert known.again.fits(make(M, K, torch.bfloat16), make(N, K, torch.bfloat16), None)
    world.patch.setattr(torch.cuda, "current_device", lambda: 0)
    assert not known.again.fits(make(M, K, torch.bfloat16), make(N, K, torch.bfloat16), None)


@pytest.mark.parametrize("op", OPS[1:])
def test_a_group_is_looked_at_and_lined_up_before_every_launch(world: World, op: str) -> None:
    assert [world.is_short(op) for _ in range(3)] == [False, False, True]
    ordered: list[int] = []
    world.patch.setattr(world.group, "order_stream", lambda: ordered.append(len(world.kernel.past_it)))
    num_launched = len(world.kernel.past_it)
    world.call(op)
    assert ordered == [num_launched], "before the launch"
    error = RuntimeError("no memory")

    def fail(*given: Any) -> None:
        raise error

    with world.patch.context() as patch:
        patch.setattr(gemm_launch._Prepared, "launch", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            world.call(op)
    with pytest.raises(GroupBroken, match="no memory"):
        world.call(op)
    world.group.close()
    with pytest.raises(GroupClosed):
        world.call(op)


@pytest.mark.parametrize("op", OPS[1:])
def test_what_is_kept_holds_neither_the_group_nor_its_memory(world: World, op: str) -> None:
    assert [world.is_short(op) for _ in range(3)] == [False, False, True]
    (here,) = turns._turns[world.group].values()
    group, here = weakref.ref(world.group), weakref.ref(here)
    for each in world.groups:
        each.close()
    world.groups, world.group = [], None  # type: ignore[assignment]
    gc.collect()
    assert group() is None and here() is None


def test_a_virtual_rank_holds_the_lock_of_launches(world: World) -> None:
    held: list[bool] = []
    real = gemm_launch._Prepared.launch

    def note(*given: Any) -> None:
        held.append(loading.lock._is_owned())  # type: ignore[attr-defined]
        real(*given)

    world.patch.setattr(gemm_launch._Prepared, "launch", note)
    world.patch.setattr(again, "launching", lambda group: loading.lock)
    assert [world.is_short("ag_gemm") for _ in range(3)] == [False, False, True]
    assert held[-2:] == [True, False], "the last is the long way's, that has no such rank"


def test_sums_apart_are_opened_before_and_summed_after(world: World) -> None:
    world.patch.setattr(scatter, "load_steps", lambda *given: None)
    assert [world.is_short("gemm_rs", config=APART) for _ in range(3)] == [False, False, True]
    world.queued.clear()
    real = gemm_launch._Prepared.launch
    world.patch.setattr(gemm_launch._Prepared, "launch", lambda *given: (world.queued.append("gemm"), real(*given)))
    world.call("gemm_rs", config=APART)
    assert world.queued == ["launch_open", "gemm", "launch_await_everyone", "launch_sum"]


@pytest.mark.parametrize("name", ["launch_open", "launch_sum"])
def test_a_call_with_a_step_that_cannot_be_repeated_goes_the_long_way(world: World, name: str) -> None:
    """As while somebody listens to launches; as soon as nobody does, it is made again."""
    world.patch.setattr(scatter, "load_steps", lambda *given: None)
    with world.patch.context() as patch:
        patch.setattr(steps, name, lambda *given: world.queued.append(name))
        assert not any([world.is_short("gemm_rs", config=APART) for _ in range(4)])
    assert [world.is_short("gemm_rs", config=APART) for _ in range(2)] == [False, True]


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
def test_what_copies_send_is_sent_again(world: World, op: str) -> None:
    """The same steps around the launch, in the same order, with the tensors of the call."""
    for module in (dense, scatter):
        world.patch.setattr(module, "sends_by_copies", lambda group: True)
        world.patch.setattr(module, "load_steps", lambda *given: None)
        world.patch.setattr(module, "join", lambda group, **how: world.queued.append("join"))
    world.patch.setattr(steps, "launch_close", lambda *given, **named: world.queued.append("launch_close"))
    world.patch.setattr(turns, "write_flag", lambda word, value: world.queued.append(f"flag {value > 0}"))
    world.patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    events = iter(range(100))
    stream = SimpleNamespace(record_event=lambda: next(events), wait_event=lambda event: None)
    world.patch.setattr(torch.cuda, "current_stream", lambda device: stream)
    real = gemm_launch._Prepared.launch
    world.patch.setattr(gemm_launch._Prepared, "launch", lambda *given: (world.queued.append("gemm"), real(*given)))
    orders = []
    for number in range(4):
        world.queued.clear()
        before, x = world.num_long, torch.randn(M, K).to(torch.bfloat16)
        world.call(op, x=x)
        orders.append((world.num_long == before, world.queued[:]))
        if op == "ag_gemm":
            here = next(iter(turns._turns[world.group].values()))
            assert torch.equal(here.chunk_at(1, 0, torch.bfloat16, K), x), "this call's rows"
        assert here_number(world) == number + 1, "every call is counted"
    long, short = orders[1], orders[3]
    assert (long[0], short[0]) == (False, True) and long[1] == short[1] and "gemm" in short[1]


def here_number(world: World) -> int | None:
    """Calls of the op that the group has counted."""
    (counted,) = turns._counts[world.group].values()
    return counted


def test_only_the_rank_that_adds_the_bias_hands_it_over(world: World) -> None:
    for group, has_bias in zip(world.groups, (True, False), strict=True):
        world.group, bias = group, torch.zeros(N)
        assert [world.is_short("gemm_rs", bias=bias) for _ in range(3)] == [False, False, True]
        assert world.kernel.past_it[-1][4] == (bias.data_ptr() if has_bias else 0)


def test_calls_of_several_launches_go_the_long_way(world: World) -> None:
    """And such a call does not pass for one that is a single launch."""
    assert [world.is_short("ag_gemm") for _ in range(3)] == [False, False, True]
    for given in ({"return_gathered": True}, {"weight": [make(N, K, torch.bfloat16)] * 2}):
        for _ in range(4):
            before = world.num_long
            found = world.call("ag_gemm", **given)
            assert len(found) == 2 and world.num_long > before
    assert world.is_short("ag_gemm")


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs", "gemm_ar"])
def test_a_product_of_the_librarys_is_made_again_with_the_steps_around_it(world: World, op: str) -> None:
    """In the place of what other ranks bring, what the turn's memory holds."""
    long_ways: list[str] = []
    real = dense.multiply
    for module in (dense, scatter):
        world.patch.setattr(module, "multiply", lambda *given, **named: (long_ways.append(""), real(*given, **named)))
    world.patch.setattr(library, "uses_torch", lambda operands: True)
    world.patch.setattr(direct, "sms_for", lambda group: 12)
    for module in (direct, steps):
        world.patch.setattr(module, "launch_step", lambda kernel, *given: world.note(kernel.fn.__name__))
    queues = []
    for number in range(4):
        x, weight = torch.randn(M, K), torch.randn(N, K)
        here = next((each for each in turns._turns.get(world.group, {}).values()), None)
        if here is not None and op == "ag_gemm":
            here.gathered(torch.float32, K).copy_(torch.randn(2 * M, K))
        long_ways.clear(), world.queued.clear()
        out = world.call(op, x=x, weight=weight, strategy="sequential")
        assert bool(long_ways) == (number < 2)
        queues.append(tuple(world.queued))
        if here is not None and op == "ag_gemm":
            assert torch.equal(out, here.gathered(torch.float32, K) @ weight.t())
        elif here is not None:
            partial = here.own_rows if op == "gemm_ar" else here.gathered
            assert torch.equal(partial(torch.float32, N), x @ weight.t())
    assert len(set(queues)) == 1
    assert (
        queues[0]
        == {
            "ag_gemm": ("launch_open", "_feed_all_kernel", "launch_release"),
            "gemm_rs": ("launch_open", "_meet_kernel", "_pull_kernel"),
            "gemm_ar": ("_swap_kernel",),
        }[op]
    )
