"""What happens when a wait outlasts its deadline: the host's side of ``lang/signal.py``.

Each rank has a guard block in symmetric memory. Whoever gives up, a kernel or the host, writes there what it
waited for and sets ``broken`` in every rank's block, so that the others stop waiting too and write down what
*they* waited for. The error then follows these records from rank to rank: if rank 0 waited for rank 1, which
waited for rank 3, which waited for nobody, the one to name is rank 3.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from tileflux.config import GUARD
from tileflux.errors import PeerTimeout
from tileflux.symm.base import Transport
from tileflux.symm.host_signal import HostWords, reached
from tileflux.symm.workspace import Region, Workspace

__all__ = ["Guard"]

_COMPLETE = 2
_GRACE_S = 0.5  # for the others to notice that the group is broken, and to write their records
_LIVENESS_AFTER_S = 0.5  # a peer that keeps us waiting this long is looked up among the living


@dataclass(frozen=True)
class _Record:
    op: int
    peer: int
    flag: int
    wanted: int
    seen: int
    waited_ns: int


class Guard:
    """One rank's deadline and its record of a missed one."""

    def __init__(self, transport: Transport, workspace: Workspace, timeout_s: float) -> None:
        self._transport, self._workspace = transport, workspace
        self.timeout_s = timeout_s
        self._region: Region = workspace.region("guard", GUARD.block_words * 8, owner=__name__)
        self._alarm = transport.alarm()
        self._alarm_word = memoryview(self._alarm.numpy())
        self._ops: list[str] = []
        self.table = self._make_table()
        """Device table handed to every kernel that waits; layout in ``config.GuardLayout``."""
        self._words = [HostWords(self._region.view(r)) for r in self._ranks()] if transport.device.type == "cpu" else []

    def op_number(self, op: str) -> int:
        """The number kernels write for this op; the same name always gets the same number."""
        if op not in self._ops:
            self._ops.append(op)
        return self._ops.index(op)

    @property
    def alarmed(self) -> bool:
        """Whether a kernel of this rank gave up. Reads host memory; synchronises nothing."""
        return bool(self._alarm_word[0])

    def wait(self, words: HostWords, index: int, wanted: int, peer: int, op: str) -> None:
        """Host wait on one of this rank's own flags; raises ``PeerTimeout`` past the deadline."""
        failure: list[tuple[int, float]] = []

        def give_up(seen: int, seconds: float) -> bool:
            late = seconds > self.timeout_s or self._words[self._transport.rank].load(2 * GUARD.broken) != 0
            if late or (seconds > _LIVENESS_AFTER_S and self._transport.is_gone(peer)):
                failure.append((seen, seconds))
            return bool(failure)

        words.wait(index, wanted, give_up)
        # The peer may have raised the flag as its last act, between our look at the flag and our look at the peer.
        if failure and not reached(words.load(index), wanted):
            seen, seconds = failure[0]
            flag = words.address + 4 * index
            self._write_record(_Record(self.op_number(op), peer, flag, wanted, seen, int(seconds * 1e9)))
            raise self.error()

    def error(self) -> PeerTimeout:
        """The timeout this rank's record tells of, with the chain of waits followed to its end."""
        deadline = time.monotonic() + _GRACE_S
        records = self._read_records()
        mine = records[self._transport.rank]
        assert mine is not None, "asked for an error that nobody recorded"
        if mine.peer == self._transport.rank:
            return self._late(mine, records)
        culprit, final = self._follow(records, mine.peer)
        while not final and time.monotonic() < deadline:
            time.sleep(0.02)
            records = self._read_records()
            culprit, final = self._follow(records, mine.peer)
        return PeerTimeout(
            op=self._op_name(mine.op),
            rank=self._transport.rank,
            peer=culprit,
            waited_for=mine.peer,
            flag=self._workspace.name_of(mine.flag),
            wanted=mine.wanted,
            seen=mine.seen,
            seconds=mine.waited_ns / 1e9,
            detail="; ".join(filter(None, (self._transport.describe_rank(culprit), self._who_stopped(mine, records)))),
        )

    def _who_stopped(self, mine: _Record, records: list[_Record | None]) -> str:
        """A rank that has waited past the deadline, where this one has not, but was told to stop.

        Not in which op: the number in its record is of its own list.
        """
        longest_ns, who = max((record.waited_ns, rank) for rank, record in enumerate(records) if record)
        theirs = records[who]
        if theirs is None or not mine.waited_ns <= self.timeout_s * 1e9 < longest_ns:
            return ""
        return f"rank {who} had given up after {longest_ns / 1e9:.1f} s for rank {theirs.peer}"

    def tell_peers(self) -> None:
        """Let every rank stop waiting: this one will not come. CPU groups only."""
        for words in self._words:
            words.store(2 * GUARD.broken, 1)

    def _late(self, mine: _Record, records: list[_Record | None]) -> PeerTimeout:
        """The error of a rank that got through its call, but after another had given up."""
        who, theirs = next(
            ((rank, record) for rank, record in enumerate(records) if record and record.peer != rank),
            (self._transport.rank, mine),
        )
        return PeerTimeout(
            op=self._op_name(mine.op),
            rank=self._transport.rank,
            peer=theirs.peer,
            waited_for=theirs.peer,
            flag="broken",
            wanted=0,
            seen=1,
            seconds=theirs.waited_ns / 1e9,
            detail=f"rank {who} had given up waiting for rank {theirs.peer}, so what arrived here is worthless",
        )

    def _op_name(self, number: int) -> str:
        return self._ops[number] if number < len(self._ops) else f"op {number}"

    def _follow(self, records: list[_Record | None], peer: int) -> tuple[int, bool]:
        """The rank at the end of the chain of waits that starts at ``peer``, and whether that is certain."""
        visited = {self._transport.rank}
        rank = peer
        while rank not in visited:
            if self._transport.is_gone(rank):
                return rank, True
            record = records[rank]
            if record is None:
                return rank, False
            visited.add(rank)
            rank = record.peer
        return peer, True  # ranks wait for each other in a circle: no one of them is to blame

    def _make_table(self) -> torch.Tensor:
        words = torch.zeros(GUARD.blocks + self._transport.world_size, dtype=torch.int64)
        words[GUARD.rank] = self._transport.rank
        words[GUARD.world_size] = self._transport.world_size
        words[GUARD.timeout_ns] = int(self.timeout_s * 1e9)
        words[GUARD.alarm] = self._alarm.data_ptr()
        for rank in self._ranks():
            words[GUARD.blocks + rank] = self._region.address(rank)
        return words.to(self._transport.device)

    def _write_record(self, record: _Record) -> None:
        own = self._region.view(dtype=torch.int64)
        if own[GUARD.state].item() != _COMPLETE:  # a kernel of ours may have been first
            for word, value in (
                (GUARD.op, record.op),
                (GUARD.peer, record.peer),
                (GUARD.flag, record.flag),
                (GUARD.wanted, record.wanted),
                (GUARD.seen, record.seen),
                (GUARD.waited_ns, record.waited_ns),
            ):
                own[word] = value
            self._words[self._transport.rank].store(2 * GUARD.state, _COMPLETE)
        self.tell_peers()

    def _read_records(self) -> list[_Record | None]:
        records: list[_Record | None] = []
        for rank in self._ranks():
            block = self._region.view(rank, torch.int64).cpu().tolist()
            complete = block[GUARD.state] == _COMPLETE
            fields = (GUARD.op, GUARD.peer, GUARD.flag, GUARD.wanted, GUARD.seen, GUARD.waited_ns)
            records.append(_Record(*(block[word] for word in fields)) if complete else None)
        return records

    def _ranks(self) -> range:
        return range(self._transport.world_size)
