"""A kernel is loaded once per GPU, under a lock, and never while a graph is captured."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from tileflux.kernels import loading
from tileflux.kernels.loading import load_once

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A GPU of which only stream and capture are asked."""
    state = SimpleNamespace(capturing=False, num_synchronized=0)

    def synchronize() -> None:
        state.num_synchronized += 1

    monkeypatch.setattr(loading, "_loaded", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=synchronize))
    yield state


def test_once_for_every_key_and_gpu(gpu: SimpleNamespace) -> None:
    launched: list[tuple[int, str]] = []
    for device in (GPU, torch.device("cuda", 1)):
        for key in ("a", "b", "a", "b", "a"):
            load_once(device, key, lambda device=device, key=key: launched.append((device.index, key)))
    assert launched == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    assert gpu.num_synchronized == 4, "the load must be over when anything waits"


def test_nothing_is_loaded_on_the_cpu() -> None:
    load_once(torch.device("cpu"), "a", lambda: pytest.fail("launched"))


def test_a_capture_finds_what_is_loaded_and_refuses_the_rest(gpu: SimpleNamespace) -> None:
    load_once(GPU, "a", lambda: None)
    gpu.capturing = True
    load_once(GPU, "a", lambda: pytest.fail("launched again"))
    with pytest.raises(ValueError, match="make the call once before capturing a CUDA graph"):
        load_once(GPU, "b", lambda: pytest.fail("launched while capturing"))


def test_a_load_that_fails_is_tried_again(gpu: SimpleNamespace) -> None:
    def fail() -> None:
        raise RuntimeError("out of registers")

    with pytest.raises(RuntimeError, match="out of registers"):
        load_once(GPU, "a", fail)
    launched: list[int] = []
    load_once(GPU, "a", lambda: launched.append(1))
    assert launched == [1]


def test_threads_that_come_together_load_once(gpu: SimpleNamespace) -> None:
    launched: list[int] = []

    def slow() -> None:
        launched.append(1)
        time.sleep(0.05)

    threads = [threading.Thread(target=lambda: load_once(GPU, "a", slow)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert launched == [1]


def test_a_load_within_a_load(gpu: SimpleNamespace) -> None:
    """The rehearsal of a product loads the kernels that it launches."""
    launched: list[str] = []

    def outer() -> None:
        load_once(GPU, "inner", lambda: launched.append("inner"))
        launched.append("outer")

    load_once(GPU, "outer", outer)
    assert launched == ["inner", "outer"]
