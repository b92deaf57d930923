"""Flags on the host: comparison across the wrap, both kinds of access, and waiting."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tileflux.config import MAX_AHEAD
from tileflux.symm import host_signal
from tileflux.symm.host_signal import HostWords, reached, wrap


@given(
    st.integers(-(2**40), 2**40),
    st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 3) | st.integers(MAX_AHEAD - 3, MAX_AHEAD + 3),
)
def test_comparison_survives_the_wrap(wanted: int, ahead: int) -> None:
    assert reached(wrap(wanted + ahead), wrap(wanted)) == (0 <= ahead < MAX_AHEAD)


def test_a_flag_that_nobody_ever_raised_is_not_reached_however_many_calls_there_were() -> None:
    for calls in (1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - MAX_AHEAD):
        assert not reached(0, wrap(calls)), calls


def test_wrapped_numbers_fit_a_word() -> None:
    assert wrap(2**31) == -(2**31) and wrap(-(2**31) - 1) == 2**31 - 1 and wrap(5) == 5


@pytest.mark.parametrize("strongly_ordered", [True, False])
def test_words_are_read_and_written(strongly_ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second way is for machines whose plain loads and stores are not ordered; it works here too."""
    monkeypatch.setattr(host_signal, "_STRONGLY_ORDERED", strongly_ordered)
    memory = torch.zeros(8, dtype=torch.int32)
    words = HostWords(memory)
    words.store(3, 2**31 + 7)
    words.store(0, -1)
    assert memory.tolist() == [-1, 0, 0, wrap(2**31 + 7), 0, 0, 0, 0]
    assert words.load(3) == wrap(2**31 + 7) and words.load(0) == -1


def test_wait_returns_when_reached_and_not_before() -> None:
    words = HostWords(torch.zeros(2, dtype=torch.int32))
    threading.Timer(0.15, lambda: words.store(1, 4)).start()
    start = time.monotonic()
    words.wait(1, 4, lambda seen, seconds: False)
    assert time.monotonic() - start >= 0.14


def test_wait_asks_whether_to_give_up() -> None:
    words = HostWords(torch.full((1,), 3, dtype=torch.int32))
    asked: list[tuple[int, float]] = []

    def give_up(seen: int, seconds: float) -> bool:
        asked.append((seen, seconds))
        return len(asked) == 2

    words.wait(0, 4, give_up)
    assert len(asked) == 2 and asked[0][0] == 3 and asked[1][1] > asked[0][1] > 0.01
