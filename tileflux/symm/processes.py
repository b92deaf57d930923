"""What the transports between processes share: a store to meet in, and who the ranks are."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from tileflux.errors import TilefluxError
from tileflux.symm.base import Transport
from tileflux.symm.rendezvous import Missing, Rendezvous

__all__ = ["Process", "ProcessTransport"]


@dataclass(frozen=True)
class Process:
    """A rank's process, as its peers know it."""

    host: str
    pid: int
    started: str
    global_rank: int

    @classmethod
    def this(cls, global_rank: int) -> Process:
        """The calling process."""
        return cls(socket.gethostname(), os.getpid(), _start_time(os.getpid()) or "", global_rank)

    def is_gone(self) -> bool:
        """Whether it has ended; False for a process of another host."""
        return self.host == socket.gethostname() and _start_time(self.pid) != self.started


class ProcessTransport(Transport):
    """A transport whose ranks are processes that share a ``torch.distributed`` store."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, global_rank: int, timeout_s: float) -> None:
        self.rank, self.world_size = rank, world_size
        self.rendezvous = Rendezvous(store, rank, world_size, timeout_s)
        self.processes: Sequence[Process] = self.rendezvous.exchange("making a group", Process.this(global_rank))

    def agree(self, what: str, value: object, claims: Mapping[str, object] | None = None) -> None:
        """Compare with the other processes; blocks until all have come."""
        self.rendezvous.agree(what, value, claims or {})

    def barrier(self, timeout_s: float) -> Sequence[int]:
        """Meet in the store."""
        try:
            self.rendezvous.exchange("barrier", None, timeout_s)
        except Missing as error:
            return error.missing
        return ()

    def all_closing(self, timeout_s: float) -> bool:
        """Whether every rank has come to close. Never raises: the store may have left with the rank that kept it."""
        try:
            self.rendezvous.exchange("closing", None, timeout_s)
        except (TilefluxError, RuntimeError):
            return False
        return True

    def is_gone(self, rank: int) -> bool:
        """Ask the operating system."""
        return self.processes[rank].is_gone()

    def describe_rank(self, rank: int) -> str:
        """Process id and global rank."""
        process = self.processes[rank]
        state = "is gone" if process.is_gone() else "is alive"
        where = "" if process.host == socket.gethostname() else f" on {process.host}"
        return f"rank {rank} is global rank {process.global_rank}, its process {process.pid}{where} {state}"


def _start_time(pid: int) -> str | None:
    """When a process started, in clock ticks since boot; None if it has ended. Tells a reused process id apart."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    state, started = fields[0], fields[19]
    return None if state in "ZX" else started
