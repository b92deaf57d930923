"""The side stream: what goes before what."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tileflux
from tileflux.kernels import beside as beside_module
from tileflux.kernels.beside import ANNOUNCING, CLOSING, SENDING, beside, join


def test_on_the_cpu_there_is_nothing_beside() -> None:
    (group,) = tileflux.local_groups(1)
    x = torch.zeros(3)
    with beside(group, x):
        x += 1
    join(group)
    assert x.tolist() == [1.0] * 3


class _Group:
    """Can be referred to weakly."""

    device = torch.device("cuda", 0)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of streams, which are not there."""
    done: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Any) -> None:
            done.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event: str) -> None:
            done.append(f"{self.name} waits for {event}")

    callers = Stream("caller")

    names = iter(("side", "second side"))

    def made(device: torch.device, priority: int) -> Stream:
        done.append(f"made with priority {priority}")
        return Stream(next(names))

    @contextlib.contextmanager
    def current(stream: Stream) -> Iterator[None]:
        done.append(f"on {stream.name}")
        yield
        done.append(f"off {stream.name}")

    monkeypatch.setattr(torch.cuda, "Stream", made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: callers)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(beside_module, "_sides", {})
    return done


def test_it_follows_what_the_caller_has_queued_and_is_waited_for_when_joined(log: list[str]) -> None:
    group: Any = _Group()
    tensor: Any = SimpleNamespace(record_stream=lambda stream: log.append(f"kept for {stream.name}"))
    with beside(group, tensor):
        log.append("launch")
    join(group)
    assert log == [
        "made with priority -1", "side waits for caller", "kept for side", "on side", "launch", "off side",
        "caller waits for side",
    ]  # fmt: skip


def test_it_may_follow_an_event_alone_and_the_stream_is_made_once(log: list[str]) -> None:
    group: Any = _Group()
    event: Any = "an event"
    for _ in range(2):
        with beside(group, after=event):
            pass
    assert log == ["made with priority -1", *["side waits for an event", "on side", "off side"] * 2]


def test_what_closes_has_a_stream_of_its_own_that_is_not_joined(log: list[str]) -> None:
    group: Any = _Group()
    after: Any = "an event"
    with beside(group, after=after):
        log.append("send")
    with beside(group, after=after, on=CLOSING):
        log.append("close")
    join(group)
    assert log == [
        "made with priority -1", "side waits for an event", "on side", "send", "off side",
        "made with priority -1", "second side waits for an event", "on second side", "close", "off second side",
        "caller waits for side",
    ]  # fmt: skip


def test_where_all_streams_share_a_queue_flags_stay_behind_their_copies(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a flag that waits for its copy keeps all that is queued later from the GPU."""
    group: Any = _Group()
    event: Any = "an event"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for name in (SENDING, ANNOUNCING):
        with beside(group, after=event, on=name):
            pass
    assert log == ["made with priority -1", *["side waits for an event", "on side", "off side"] * 2]
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    with beside(group, after=event, on=ANNOUNCING):
        pass
    assert log[-2:] == ["on second side", "off second side"]
