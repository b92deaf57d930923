"""Meetings in a store: everybody's notes, or who did not come, or who came for something else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from tileflux.errors import MismatchError
from tileflux.symm.rendezvous import Missing, Rendezvous


def _meet(num_ranks: int, calls: object, timeout_s: float = 5.0) -> list[object]:
    store = dist.HashStore()
    ends = [Rendezvous(store, rank, num_ranks, timeout_s) for rank in range(num_ranks)]
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(calls, ends, range(num_ranks)))  # type: ignore[call-overload, no-any-return]


def test_notes_come_back_in_rank_order_every_time() -> None:
    def call(end: Rendezvous, rank: int) -> list[object]:
        return [end.exchange("greeting", (rank, turn)) for turn in range(20)]

    for notes in _meet(3, call):
        assert notes == [[(rank, turn) for rank in range(3)] for turn in range(20)]


def test_old_notes_are_removed() -> None:
    store = dist.HashStore()
    ends = [Rendezvous(store, rank, 2, 5.0) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(50):
            list(pool.map(lambda end: end.exchange("call", None), ends))
    assert store.num_keys() <= 4


def test_absent_ranks_are_named() -> None:
    (end,) = [Rendezvous(dist.HashStore(), 1, 3, 0.1)]
    with pytest.raises(Missing, match=r"growth: asked for by ranks \[1\] but not by \[0, 2\] within 0.1 s") as caught:
        end.exchange("growth", 1)
    assert caught.value.missing == (0, 2)


def test_different_purposes_are_named() -> None:
    def call(end: Rendezvous, rank: int) -> str:
        with pytest.raises(MismatchError) as caught:
            end.exchange(["eat", "sleep"][rank], None)
        return str(caught.value)

    assert _meet(2, call) == [
        "rank 0 is at 'eat' while rank 1 is at 'sleep'",
        "rank 1 is at 'sleep' while rank 0 is at 'eat'",
    ]


def test_claims_that_contradict_are_named() -> None:
    def call(end: Rendezvous, rank: int) -> str:
        with pytest.raises(MismatchError) as caught:
            end.agree("all_to_all", "same", {"0 to 1": 5 + rank, f"only {rank}": rank})
        return str(caught.value)

    assert "all_to_all, 0 to 1: rank 0 has 5 but rank 1 has 6" in str(_meet(2, call)[0])
