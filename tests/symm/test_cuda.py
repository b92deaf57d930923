"""Torch's symmetric memory between processes that share a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import tileflux
from tileflux.symm import cuda
from tileflux.symm.group import Group
from tileflux.testing import run_ranks


def _use(group: Group) -> None:
    assert group.transport == "cuda" and group.device.type == "cuda"
    traits = group.traits
    assert traits.copies_need_sms and not traits.has_multicast and set(traits.links) == {"self", "same GPU"}
    assert traits.num_sms > 0
    region = group.region("data", 1 << 20)
    assert region.view().eq(0).all() and region.multicast_address == 0
    peer = (group.rank + 1) % group.world_size
    region.view(peer, torch.int32)[5] = 100 + group.rank
    tileflux.barrier(group=group)
    group.synchronize()
    assert int(region.view(dtype=torch.int32)[5]) == 100 + (group.rank - 1) % group.world_size
    assert region.table.tolist() == [region.address(rank) for rank in range(group.world_size)]


@pytest.mark.gpu
def test_processes_on_one_gpu() -> None:
    run_ranks(_use, 2, where="mps", timeout_s=120)


def _alternate_streams(group: Group) -> None:
    """Calls on two streams of one group, nobody synchronising: each follows the last."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    size = 1 << 20
    xs = [torch.full((size,), float(call), device=group.device) for call in range(20)]
    outs = [torch.full((group.world_size * size,), float("nan"), device=group.device) for _ in xs]
    torch.cuda.synchronize()
    for call, (x, out) in enumerate(zip(xs, outs, strict=True)):
        with torch.cuda.stream(streams[call % 2]):
            if call % 2 == 0 and group.rank == 0:
                torch.cuda._sleep(2_000_000)  # the even calls start late, and the odd ones must not overtake them
            tileflux.all_gather(x, group=group, out=out)
    torch.cuda.synchronize()
    group.ensure_usable()
    for call, out in enumerate(outs):
        assert (out == call).all(), f"call {call}"


@pytest.mark.gpu
def test_two_streams_of_one_group() -> None:
    run_ranks(_alternate_streams, 2, where="mps", timeout_s=120)


def _make_and_close(group: Group) -> int:
    before = len(cuda._mapped)
    for _ in range(4):
        with Group.from_process_group(device=group.device) as other:
            x = torch.randn(1000, device=group.device)
            assert torch.equal(tileflux.all_gather(x, group=other)[group.rank * 1000 :][:1000], x)
            other.synchronize()
    return len(cuda._mapped) - before


@pytest.mark.gpu
def test_groups_closed_together_free_their_memory() -> None:
    assert run_ranks(_make_and_close, 2, where="mps", timeout_s=120) == [0, 0]


SCHEMAS = {
    "one_shot_all_reduce_out": "(Tensor input, str reduce_op, str group_name, Tensor(a!) out) -> Tensor(a!)",
    "two_shot_all_reduce_": "(Tensor(a!) input, str reduce_op, str group_name) -> Tensor(a!)",
    "multimem_all_reduce_": "(Tensor(a!) input, str reduce_op, str group_name) -> Tensor(a!)",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_torchs_all_reduces_are_what_is_called(name: str) -> None:
    """Its interface is alpha. No build without a GPU can call them, but all have their signatures."""
    op = getattr(torch.ops.symm_mem, name)
    assert op.overloads() == ["default"] and str(op.default._schema) == f"symm_mem::{name}{SCHEMAS[name]}"


def _record(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[object, ...]]]:
    """In place of torch's ops: each call, once its arguments have been matched with the op's own schema."""
    calls: list[tuple[str, tuple[object, ...]]] = []

    def stand_in(name: str) -> object:
        expected = [argument.type.kind() for argument in getattr(torch.ops.symm_mem, name).default._schema.arguments]

        def call(*arguments: object) -> None:
            given = ["TensorType" if isinstance(each, torch.Tensor) else "StringType" for each in arguments]
            assert given == expected
            calls.append((name, arguments))

        return call

    made = SimpleNamespace(**{name: stand_in(name) for name in SCHEMAS})
    monkeypatch.setattr(cuda.torch.ops, "symm_mem", made)
    return calls


def test_a_symmetric_sum_calls_them_with_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _record(monkeypatch)
    made = object.__new__(cuda.SymmetricSum)
    made.buffer, made._group_name = torch.empty(2, 4), "some group"
    out = torch.empty(2, 4)
    assert [made.all_reduce(way, out) is made.buffer for way in cuda.ALL_REDUCES] == [False, True, True]
    assert made.all_reduce("one-shot", out) is out
    assert [name for name, _ in calls[:3]] == list(SCHEMAS)
    for _, arguments in calls:
        assert arguments[0] is made.buffer and arguments[1:3] == ("sum", "some group")
    assert [len(arguments) for _, arguments in calls] == [4, 3, 3, 4] and calls[0][1][3] is out
    with pytest.raises(ValueError, match="way='ring' is not one of one-shot, two-shot, multimem"):
        made.all_reduce("ring", out)


@pytest.mark.parametrize(
    ("way", "shape", "dtype", "has_multicast", "reason"),
    [
        ("one-shot", (3, 6), torch.bfloat16, False, ""),
        ("two-shot", (1, 1), torch.float32, False, ""),
        ("multimem", (1, 2), torch.bfloat16, True, ""),
        ("multimem", (1, 2), torch.bfloat16, False, "no multicast"),
        ("one-shot", (8, 8), torch.float16, True, "float32 and bfloat16, not float16"),
        ("two-shot", (3, 5), torch.bfloat16, True, "multiples of 4 bytes, not 30"),
    ],
)
def test_why_torch_would_refuse_a_sum(
    way: str, shape: tuple[int, int], dtype: torch.dtype, has_multicast: bool, reason: str
) -> None:
    found = cuda.why_not_all_reduce(way, shape, dtype, has_multicast)
    assert reason in found and bool(reason) == bool(found)
