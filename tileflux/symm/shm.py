"""CPU processes on one machine, over anonymous shared memory.

Each rank makes a memory file without a name (``memfd_create``) and its peers map it through ``/proc/<pid>/fd``. There
is never an entry in ``/dev/shm``, so nothing can be left behind: not by an exception, not by a killed rank.
"""

from __future__ import annotations

import mmap
import os

import torch
import torch.distributed as dist

from tileflux import env
from tileflux.errors import TransportUnavailable
from tileflux.symm.base import Copy, FlagWrite, Segment, Traits
from tileflux.symm.host_copy import HostCopier
from tileflux.symm.processes import ProcessTransport

__all__ = ["ShmTransport"]


class ShmTransport(ProcessTransport):
    """Ranks are processes of one machine, and tensors are on the CPU."""

    name = "shm"

    def __init__(self, store: dist.Store, rank: int, world_size: int, global_rank: int, timeout_s: float) -> None:
        link = env.link()
        super().__init__(store, rank, world_size, global_rank, timeout_s)
        hosts = sorted({process.host for process in self.processes})
        if len(hosts) > 1:
            raise TransportUnavailable(
                f"shm joins processes of one machine, and these ranks are on {', '.join(hosts)}",
                "make one group per machine",
            )
        self.device = torch.device("cpu")
        links = tuple("self" if peer == rank else "shared memory" for peer in range(world_size))
        self.traits = Traits(copies_need_sms=False, has_multicast=False, links=links, num_sms=0, link=link)
        self._copier = HostCopier(f"rank{rank}", link)
        self._alarm = torch.zeros(1, dtype=torch.int32)

    def allocate(self, nbytes: int) -> Segment:
        """Map every rank's memory file."""
        own = os.memfd_create("tileflux", os.MFD_CLOEXEC)
        try:
            os.ftruncate(own, nbytes)
            files = self.rendezvous.exchange("allocating shared memory", (os.getpid(), own))
            views = tuple(self._map(rank, pid, fd, nbytes) for rank, (pid, fd) in enumerate(files))
            # Nobody may close its descriptor before all have opened it.
            self.rendezvous.exchange("mapping shared memory", nbytes)
        finally:
            os.close(own)
        return Segment(nbytes, views)

    def copy_async(self, dst: torch.Tensor, src: torch.Tensor, signal: FlagWrite | None) -> Copy:
        """Hand the copy to this rank's worker thread, which sends it through the emulated link if there is one."""
        return self._copier.copy(dst, src, signal)

    def alarm(self) -> torch.Tensor:
        """Ordinary memory: interpreted kernels write it."""
        return self._alarm

    def close(self, *, orderly: bool) -> None:
        """End the worker thread. Mappings go with the last tensor that uses them."""
        self._copier.close(orderly=orderly)

    def _map(self, rank: int, pid: int, fd: int, nbytes: int) -> torch.Tensor:
        path = f"/proc/{pid}/fd/{fd}"
        try:
            file = os.open(path, os.O_RDWR)
        except OSError as error:
            raise TransportUnavailable(
                f"rank {self.rank} cannot open the memory of rank {rank} ({path}: {error.strerror})",
                "run all ranks as one user, in one container or process namespace",
            ) from error
        try:
            return torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)
        finally:
            os.close(file)
