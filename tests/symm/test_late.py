"""Numbers that come late are looked at by whoever uses the group next, and raised there."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tileflux
from tileflux.errors import CapacityExceeded, GroupBroken
from tileflux.ops import routing as routing_module
from tileflux.symm.late import LateNumbers


class Gpu:
    """Streams that come to what is queued on them when they are told to."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.is_capturing = False
        self.queued: dict[int, list[Any]] = {}
        self.asked = 0
        self.current = SimpleNamespace(cuda_stream=0)
        self.pinned = 0
        gpu = self

        class Event:
            def __init__(self) -> None:
                self.has_come = False

            def record(self, stream: Any) -> None:
                gpu.queued.setdefault(stream.cuda_stream, []).append(functools.partial(setattr, self, "has_come", True))

            def query(self) -> bool:
                assert not gpu.is_capturing, "this would end the capture"
                gpu.asked += 1
                return self.has_come

        plain_zeros, plain_copy = torch.zeros, torch.Tensor.copy_

        def zeros(*shape: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            assert not (pin_memory and gpu.is_capturing), "memory cannot be pinned in a capture"
            gpu.pinned += pin_memory
            return plain_zeros(*shape, **kwargs)

        def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            if not non_blocking:
                return plain_copy(self, source)
            if not gpu.is_capturing:  # else a replay would
                gpu.queued.setdefault(gpu.current.cuda_stream, []).append(functools.partial(plain_copy, self, source))
            return self

        patch.setattr(torch, "zeros", zeros)
        patch.setattr(torch.Tensor, "copy_", copy_)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)

    def go_on(self, steps: int | None = None, stream: int = 0) -> None:
        queued = self.queued.get(stream, [])
        for step in queued[:steps]:
            step()
        del queued[:steps]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def error(what: str, number: int) -> Exception:
    return ArithmeticError(f"{number} {what}")


def bring(late: LateNumbers, number: int, what: str = "too many") -> torch.Tensor:
    return late.bring(torch.tensor(number), functools.partial(error, what))


def test_a_number_is_an_error_from_when_it_has_come(gpu: Gpu) -> None:
    late = LateNumbers()
    assert late.find() is None
    pinned = bring(late, 3)
    assert late.find() is None and int(pinned) == 0
    gpu.go_on(1)  # the number is there, and the event behind it not yet
    assert str(late.find()) == "3 too many"
    gpu.go_on()
    for _ in range(2):
        assert str(late.find()) == "3 too many", "as often as it is asked for"


def test_numbers_that_are_0_are_forgotten_in_their_order(gpu: Gpu) -> None:
    late = LateNumbers()
    for number in (0, 0, 7):
        bring(late, number)
    gpu.go_on(3)
    assert late.find() is None and gpu.asked == 2, "nobody behind one that has not come is asked"
    gpu.go_on()
    assert str(late.find()) == "7 too many"


def test_one_that_has_not_come_does_not_hide_another_streams(gpu: Gpu) -> None:
    late = LateNumbers()
    bring(late, 0)
    gpu.current = SimpleNamespace(cuda_stream=5)
    bring(late, 8)
    assert late.find() is None
    gpu.go_on(stream=5)
    assert str(late.find()) == "8 too many"


def test_numbers_that_have_come_are_asked_once(gpu: Gpu) -> None:
    calm = LateNumbers()
    bring(calm, 0)
    gpu.go_on()
    gpu.asked = 0
    for _ in range(3):
        assert calm.find() is None
    assert gpu.asked == 1


def test_what_a_graph_brings_is_looked_at_as_long_as_there_is_the_group(gpu: Gpu) -> None:
    late = LateNumbers()
    bring(late, 0)  # the call before the capture
    gpu.go_on()
    assert late.find() is None
    gpu.is_capturing = True
    captured = [bring(late, 0, f"in call {call}") for call in range(3)]
    assert late.find() is None
    gpu.is_capturing = False
    for _ in range(3):
        assert late.find() is None
    captured[1].fill_(5)  # by a replay
    assert str(late.find()) == "5 in call 1"
    captured[1].fill_(0)
    assert late.find() is None


def test_there_is_room_for_what_a_graph_brings(gpu: Gpu) -> None:
    late, num_calls = LateNumbers(), 4
    for number in range(500 * num_calls):
        gpu.is_capturing = number % 500 != 0
        bring(late, 0)
    assert gpu.pinned == 2 + num_calls, "pages of 1024, and each number that was not captured"


def test_nothing_is_asked_while_a_graph_is_captured(gpu: Gpu) -> None:
    late = LateNumbers()
    bring(late, 4)
    gpu.go_on()
    gpu.is_capturing = True
    assert late.find() is None
    gpu.is_capturing = False
    assert str(late.find()) == "4 too many"


@pytest.mark.parametrize("ask", ["a call", "synchronize", "a routing"])
def test_rows_that_did_not_fit_are_told_after_the_last_op(ask: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number comes when both products have been called, and nobody asks this routing again."""

    def bring_all(group: Any, missing: torch.Tensor, capacity: int, what: str) -> torch.Tensor:
        number: torch.Tensor = group.late.bring(missing, functools.partial(routing_module._too_many, capacity, what))
        return number

    monkeypatch.setattr(routing_module, "readable", bring_all)
    (group,) = tileflux.local_groups(1)
    ids, gates = torch.tensor([[0]] * 4), torch.ones(4, 1)
    routing = tileflux.route(ids, gates, num_experts=2, group=group, capacity=1)
    rows = tileflux.moe_ag_gemm(torch.ones(4, 3), torch.ones(2, 5, 3), routing)
    tileflux.moe_gemm_rs(rows, torch.ones(2, 3, 5), routing)
    group.synchronize()
    gpu.go_on()
    with pytest.raises(CapacityExceeded, match="3 of 4 rows of a rank's experts did not fit: capacity=1 should be at"):
        if ask == "a call":
            tileflux.all_gather(torch.ones(2), group=group)
        elif ask == "synchronize":
            group.synchronize()
        else:
            routing.synchronize()
    if ask != "a routing":  # on the CPU, which this is, that leaves the group as it was
        with pytest.raises(GroupBroken, match="3 of 4 rows"):
            group.barrier()
    group.close()


def test_who_waited_in_vain_tells_of_the_number_too(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that it waited for may have known of it first, and left."""
    (group,) = tileflux.local_groups(1)
    bring(group.late, 3)
    gpu.go_on()
    guard = SimpleNamespace(alarmed=True, error=lambda: TimeoutError("waited for rank 1"), tell_peers=lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(group, "guard", guard)
        with pytest.raises(TimeoutError, match="waited for rank 1") as caught:
            group.ensure_usable()
    assert str(caught.value.__cause__) == "3 too many"
    group.close()
