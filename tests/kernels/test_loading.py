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
    """A GPU of which only its capture is asked, and which stream is the current one."""
    state = SimpleNamespace(capturing=False, cuda_stream=0)
    monkeypatch.setattr(loading, "_loaded", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: state)
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
        if any(mark in file.read_text() for mark in ("@triton.jit", "@gluon.jit"))
    }
    assert set(loading._MODULES) == with_functions and len(loading._MODULES) == len(with_functions)
    for position, name in enumerate(loading._MODULES):
        source = (PACKAGE.parent / Path(*name.split("."))).with_suffix(".py").read_text()
        used = {line.split()[1] for line in source.splitlines() if line.startswith("from tileflux.")}
        assert not used & set(loading._MODULES[position:]), f"{name} comes before what it calls"
    loading.settle_keys()


class VirtualGroup:
    """A virtual rank as loading sees it: a stream of its own, a world that is at work or not, a deadline."""

    def __init__(self, timeout_s: float = 30.0) -> None:
        self.timeout_s = timeout_s
        self.log: list[str] = []
        self.idle = threading.Event()
        self.looked = threading.Event()
        self.stream = SimpleNamespace(synchronize=lambda: self.log.append("synchronize"))

    def is_idle(self) -> bool:
        self.looked.set()
        self.log.append("look")
        return self.idle.is_set()


def start_loading(group: VirtualGroup, key: str) -> tuple[threading.Thread, list[str]]:
    """On a thread; returns once it has seen whether the world is at work."""
    launched: list[str] = []

    def load() -> None:
        load_once(GPU, key, lambda: launched.append(key), group)  # type: ignore[arg-type]

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    assert group.looked.wait(10)
    return thread, launched


def test_a_virtual_rank_loads_when_no_rank_has_work(gpu: SimpleNamespace) -> None:
    group = VirtualGroup()
    thread, launched = start_loading(group, "a")
    time.sleep(0.05)
    assert thread.is_alive() and launched == []
    group.idle.set()
    thread.join(10)
    assert launched == ["a"] and group.log[0] == "synchronize" and group.log.count("synchronize") == 1
    before = len(group.log)
    load_once(GPU, "a", lambda: pytest.fail("launched again"), group)  # type: ignore[arg-type]
    assert len(group.log) == before, "a kernel that is loaded waits for nothing"


def test_a_load_without_a_group_is_that_of_the_virtual_rank_on_whose_stream_it_is(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a product between two ops that wait: a peer may be in the second of them."""
    group = VirtualGroup()
    monkeypatch.setattr(loading, "virtual_rank_on", lambda stream: group if stream == 7 else None)
    load_once(GPU, "somebody else's", lambda: None)
    assert group.log == []
    gpu.cuda_stream = 7
    launched: list[str] = []
    thread = threading.Thread(target=lambda: load_once(GPU, "a", lambda: launched.append("a")), daemon=True)
    thread.start()
    assert group.looked.wait(10)
    time.sleep(0.05)
    assert launched == [] and group.log[0] == "synchronize"
    group.idle.set()
    thread.join(10)
    assert launched == ["a"]


def test_ones_own_work_is_done_before_the_lock_is_asked_for(gpu: SimpleNamespace) -> None:
    """A peer may wait for it, and needs the lock for what it launches."""
    group = VirtualGroup()
    group.idle.set()
    held: list[bool] = []
    group.stream.synchronize = lambda: held.append(is_held())
    load_once(GPU, "a", lambda: held.append(is_held()), group)  # type: ignore[arg-type]
    assert held == [False, True]


def is_held() -> bool:
    """Whether any thread has the lock: asked by another one, since it may be taken twice."""
    found: list[bool] = []

    def ask() -> None:
        free = loading.lock.acquire(blocking=False)
        if free:
            loading.lock.release()
        found.append(not free)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return found[0]


def test_the_lock_is_free_while_a_rank_waits_for_standstill(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others launch, and load, meanwhile: what they launch is what the world is at work with."""
    group = VirtualGroup()
    asleep_with_it: list[bool] = []
    # Asked from the thread that sleeps, by one that has nothing else to do with the lock.
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: asleep_with_it.append(is_held()))
    monkeypatch.setattr(loading, "time", clock)
    thread, launched = start_loading(group, "a")
    while len(asleep_with_it) < 3:
        time.sleep(0.001)
    assert not any(asleep_with_it[:3])
    for number in range(20):
        assert loading.lock.acquire(timeout=10), "nobody can launch while a rank waits"
        loading.lock.release()
        load_once(GPU, number, lambda: None)
    assert launched == []
    group.idle.set()
    thread.join(10)
    assert launched == ["a"]


def test_it_does_not_begin_while_somebody_launches(gpu: SimpleNamespace) -> None:
    group = VirtualGroup()
    group.idle.set()
    launched: list[str] = []
    with loading.launching(group):  # type: ignore[arg-type]
        thread = threading.Thread(target=lambda: load_once(GPU, "a", lambda: launched.append("a"), group))  # type: ignore[arg-type]
        thread.start()
        time.sleep(0.05)
        assert launched == []
    thread.join(10)
    assert launched == ["a"]


def test_who_waits_goes_on_when_another_rank_has_loaded_it(gpu: SimpleNamespace) -> None:
    group = VirtualGroup()
    thread, launched = start_loading(group, "a")
    theirs: list[str] = []
    load_once(GPU, "a", lambda: theirs.append("a"))
    thread.join(10)
    assert not thread.is_alive() and theirs == ["a"] and launched == []


def test_past_the_deadline_it_loads_anyway(gpu: SimpleNamespace) -> None:
    """The rank that then waits in vain says so; here nothing could."""
    group = VirtualGroup(timeout_s=0.1)
    start = time.monotonic()
    thread, launched = start_loading(group, "a")
    thread.join(10)
    assert launched == ["a"] and time.monotonic() - start >= 0.1 and not group.idle.is_set()


def test_groups_that_are_not_virtual_wait_for_nobody(gpu: SimpleNamespace) -> None:
    group = SimpleNamespace(stream=None)
    launched: list[str] = []
    load_once(GPU, "a", lambda: launched.append("a"), group)  # type: ignore[arg-type]
    assert launched == ["a"]


def test_only_virtual_ranks_on_a_gpu_launch_under_the_lock() -> None:
    for group, held in ((None, False), (SimpleNamespace(stream=None), False), (VirtualGroup(), True)):
        with loading.launching(group):  # type: ignore[arg-type]
            assert is_held() == held
            with loading.launching(group):  # type: ignore[arg-type]
                assert is_held() == held, "a launch within a launch"
        assert not is_held()


def test_a_launch_of_nobody_in_particular_keeps_out_of_loads_on_a_gpu() -> None:
    assert loading.launching_on(GPU) is loading.lock
    with loading.launching_on(torch.device("cpu")):  # the simulator switches ranks in the middle of a launch
        other = threading.Thread(
            target=lambda: taken.append(loading.lock.acquire(timeout=1) and not loading.lock.release())
        )
        taken: list[bool] = []
        other.start()
        other.join()
    assert taken == [True]
