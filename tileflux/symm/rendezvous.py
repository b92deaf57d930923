"""How the processes of a group compare notes at plan time: through the process group's key-value store.

Every rank numbers its rendezvous from 0. The n-th of all ranks belong together, whatever they are about, so two ranks
that do different things find out at once instead of hanging.
"""

from __future__ import annotations

import datetime
import pickle
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from tileflux.errors import MismatchError, PeerTimeout

__all__ = ["Missing", "Rendezvous", "disagreement", "other_purpose"]


class Missing(PeerTimeout):
    """Some ranks did not come to a rendezvous in time."""

    def __init__(self, what: str, rank: int, missing: Sequence[int], world_size: int, seconds: float) -> None:
        peer = missing[0] if missing else rank
        super().__init__(
            op=what, rank=rank, peer=peer, waited_for=peer, flag="arrival", wanted=1, seen=0, seconds=seconds
        )
        self.missing = tuple(missing)
        came = [rank for rank in range(world_size) if rank not in self.missing]
        self.args = (f"{what}: asked for by ranks {came} but not by {list(missing)} within {seconds:g} s",)


class Rendezvous:
    """One rank's end of a sequence of meetings in a store."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._timeout_s = timeout_s
        self._num_meetings = 0

    def exchange(self, what: str, value: object, timeout_s: float | None = None) -> list[Any]:
        """Everybody's ``value``, by rank. Raises ``MismatchError`` where ``what`` differs, ``Missing`` on timeout."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        meeting = self._num_meetings
        self._num_meetings += 1
        # The stub says str, and torch takes both; a pickle is no text.
        self._store.set(f"{meeting}/{self._rank}", pickle.dumps((what, value)))  # type: ignore[arg-type]
        deadline = time.monotonic() + timeout_s
        notes: list[tuple[str, Any]] = []
        for rank in range(self._world_size):
            key = f"{meeting}/{rank}"
            remaining = datetime.timedelta(seconds=max(deadline - time.monotonic(), 0.01))
            try:
                self._store.wait([key], remaining)
            except RuntimeError as error:
                raise Missing(what, self._rank, self._absent(meeting), self._world_size, timeout_s) from error
            notes.append(pickle.loads(self._store.get(key)))
        if meeting:
            # All ranks are at this meeting, so all have read the last one: its note can go.
            self._store.delete_key(f"{meeting - 1}/{self._rank}")
        for rank, (their_what, _) in enumerate(notes):
            if their_what != what:
                raise other_purpose(self._rank, what, rank, their_what)
        return [value for _, value in notes]

    def agree(self, what: str, value: object, claims: Mapping[str, object]) -> None:
        """Raise ``MismatchError`` unless all ranks bring the same ``value`` and no two claims contradict."""
        claimed: dict[str, tuple[int, object]] = {}
        for rank, (theirs, their_claims) in enumerate(self.exchange(what, (value, dict(claims)))):
            if theirs != value:
                raise disagreement(what, self._rank, value, rank, theirs)
            # Also between two others: a rank that went on would wait for them until its deadline.
            for key, claim in their_claims.items():
                first, earlier = claimed.setdefault(key, (rank, claim))
                if earlier != claim:
                    raise disagreement(f"{what}, {key}", first, earlier, rank, claim)

    def _absent(self, meeting: int) -> list[int]:
        absent = []
        for rank in range(self._world_size):
            try:
                here = self._store.check([f"{meeting}/{rank}"])
            except RuntimeError:  # the store itself went down with its rank
                here = rank == self._rank
            if not here:
                absent.append(rank)
        return absent


def other_purpose(rank: int, what: str, peer: int, their_what: str) -> MismatchError:
    """The error for two ranks that came for different things."""
    return MismatchError(f"rank {rank} is at '{what}' while rank {peer} is at '{their_what}'")


def disagreement(what: str, rank: int, mine: object, peer: int, theirs: object) -> MismatchError:
    """The error for two ranks that bring different values."""
    return MismatchError(
        f"{what}: rank {rank} has {mine} but rank {peer} has {theirs}; all ranks of a group must make the same call"
    )
