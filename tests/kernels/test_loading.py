"""A kernel is loaded once per GPU, under a lock, and never while a graph is captured."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tileflux.kernels import loading
from tileflux.kernels.loading import load_once

GPU = torch.device("cuda", 0)
PACKAGE = Path(loading.__file__).parents[1]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU of which only its capture is asked."""
    state = SimpleNamespace(capturing=False)
    monkeypatch.setattr(loading, "_loaded", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    return state


def test_once_for_every_key_and_gpu(gpu: SimpleNamespace) -> None:
    launched: list[tuple[int, str]] = []
    for device in (GPU, torch.device("cuda", 1)):
        for key in ("a", "b", "a", "b", "a"):
            load_once(device, key, lambda device=device, key=key: launched.append((device.index, key)))
    assert launched == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]


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


def test_keys_are_settled_from_the_bottom_up() -> None:
    """A function's key contains those of the functions it calls: theirs come first, and none is left out."""
    with_functions = {
        f"tileflux.{file.parent.name}.{file.stem}"
        for folder in ("lang", "kernels")
        for file in (PACKAGE / folder).glob("*.py")
        if "@triton.jit" in file.read_text()
    }
    assert set(loading._MODULES) == with_functions and len(loading._MODULES) == len(with_functions)
    for position, name in enumerate(loading._MODULES):
        source = (PACKAGE.parent / Path(*name.split("."))).with_suffix(".py").read_text()
        used = {line.split()[1] for line in source.splitlines() if line.startswith("from tileflux.")}
        assert not used & set(loading._MODULES[position:]), f"{name} comes before what it calls"
    loading.settle_keys()
