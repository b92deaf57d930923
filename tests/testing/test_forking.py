"""Ranks are forked while no other thread works: a lock that one holds would be held in the rank for ever."""

from __future__ import annotations

import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

from tileflux.testing import _forking, _rank_processes, run_ranks
from tileflux.testing._forking import wait_for_rest

SIZE = 256


class Busy(threading.Thread):
    """Multiplies, mostly without Python's lock, until it is told to stop."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.stopping = threading.Event()

    def run(self) -> None:
        x = torch.ones(SIZE, SIZE)
        while not self.stopping.is_set():
            torch.mm(x, x)

    def __enter__(self) -> Busy:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self.join()


def test_a_thread_that_works_is_named_and_one_that_waits_is_not() -> None:
    waiting = threading.Event()
    parked = threading.Thread(target=waiting.wait, daemon=True)
    parked.start()
    try:
        assert wait_for_rest(5.0) == []
        with Busy() as busy:
            begin = time.monotonic()
            # It waits for Python's lock now and then, and rests in the eyes of one who looks just then.
            assert any(wait_for_rest(0.0) == [busy.native_id] for _ in range(1000))
            assert time.monotonic() - begin < 5.0
        assert wait_for_rest(5.0) == []
    finally:
        waiting.set()
        parked.join()


def test_it_waits_for_threads_that_python_has_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A joined thread is not in ``threading.enumerate`` any more, and still at work."""
    seen = iter([[12, 34], [34], []])
    monkeypatch.setattr(_forking, "_working", lambda: next(seen))
    assert wait_for_rest(5.0) == []
    assert next(seen, None) is None


def test_without_proc_nobody_is_seen_to_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_forking, "_TASKS", tmp_path / "none")
    assert wait_for_rest(5.0) == []


def test_forking_beside_work_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def never_rests(timeout_s: float) -> list[int]:
        asked.append(timeout_s)
        return [4711]

    monkeypatch.setattr(_rank_processes, "wait_for_rest", never_rests)
    with pytest.warns(RuntimeWarning, match=r"threads that work \(4711\).*where='spawn'"):
        assert run_ranks(lambda rank, world_size: rank, 1, make_group=False) == [0]
    assert asked == [_rank_processes._REST_S]


def multiply(rank: int, world_size: int) -> float:
    return float((torch.ones(4 + rank, 40) @ torch.ones(40, 300)).sum())


def test_forked_ranks_multiply_after_threads_that_did() -> None:
    """One such fork in a hundred hung in MKL before forks waited; in a rank that hangs the run ends at its deadline."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(30):
            assert run_ranks(multiply, 3, where="virtual", make_group=False) == [48000.0, 60000.0, 72000.0]
            assert run_ranks(multiply, 3, make_group=False, timeout_s=20.0) == [48000.0, 60000.0, 72000.0]
