"""W virtual ranks in this process, on the CPU or on one GPU.

The memory of all ranks belongs to one shared ``_World``; a rank's transport is a window on it. The first rank to ask
allocates for all, so one thread may drive all ranks in turn; a rank whose n-th request differs from what another
rank asked for at that place gets an error. On a GPU each rank has a stream of its own: on one stream, a kernel that
waits for the next rank's kernel would wait for ever.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tileflux import device as device_info
from tileflux import env
from tileflux.symm.base import Copy, FlagWrite, Segment, Traits, Transport
from tileflux.symm.host_copy import HostCopier
from tileflux.symm.rendezvous import disagreement, other_purpose
from tileflux.symm.stream_copy import StreamCopier

__all__ = ["LocalTransport", "local_transports"]


_MAX_STREAMS = 32
_log = logging.getLogger("tileflux")


@dataclass
class _Entry:
    """What the first rank to come to an agreement brought."""

    rank: int
    what: str
    value: object
    claims: dict[str, tuple[int, object]] = field(default_factory=dict)
    num_ranks_seen: int = 0


class _World:
    """What the virtual ranks share."""

    def __init__(self, world_size: int, device: torch.device) -> None:
        self.world_size, self.device = world_size, device
        self.lock = threading.Lock()
        self.segments: list[Segment] = []
        self.ledger: dict[int, _Entry] = {}
        self.meeting = threading.Condition(self.lock)
        self.arrivals = [0] * world_size
        self.streams: list[torch.cuda.Stream] = []


class LocalTransport(Transport):
    """One virtual rank."""

    name = "local"

    def __init__(self, world: _World, rank: int) -> None:
        self._world, self.rank = world, rank
        self.world_size, self.device = world.world_size, world.device
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        if self.stream is not None:
            world.streams.append(self.stream)
        kind = "same process" if self.stream is None else "same GPU"
        links = tuple("self" if peer == rank else kind for peer in range(self.world_size))
        num_sms = 0 if self.stream is None else device_info.num_sms(self.device) // self.world_size
        link = env.link() if self.stream is None else None
        self.traits = Traits(
            copies_need_sms=self.stream is not None,
            has_multicast=False,
            links=links,
            num_sms=max(num_sms, 0),
            link=link,
        )
        self._num_segments = 0
        self._num_agreements = 0
        self._copier = StreamCopier(self.device) if self.stream is not None else HostCopier(f"rank{rank}", link)
        self._alarm = torch.zeros(1, dtype=torch.int32, pin_memory=self.stream is not None)

    def allocate(self, nbytes: int) -> Segment:
        """The n-th segment, made by whichever rank asks first."""
        with self._world.lock:
            if self._num_segments == len(self._world.segments):
                self._world.segments.append(self._make_segment(nbytes))
            segment = self._world.segments[self._num_segments]
            self._num_segments += 1
        return segment

    def agree(self, what: str, value: object, claims: Mapping[str, object] | None = None) -> None:
        """Compare with what other ranks did at this place, without waiting for them."""
        with self._world.lock:
            entry = self._world.ledger.setdefault(self._num_agreements, _Entry(self.rank, what, value))
            entry.num_ranks_seen += 1
            if entry.num_ranks_seen == self.world_size:
                del self._world.ledger[self._num_agreements]
            self._num_agreements += 1
        if entry.what != what:
            raise other_purpose(self.rank, what, entry.rank, entry.what)
        if entry.value != value:
            raise disagreement(what, self.rank, value, entry.rank, entry.value)
        for key, claim in (claims or {}).items():
            with self._world.lock:
                peer, their_claim = entry.claims.setdefault(key, (self.rank, claim))
            if their_claim != claim:
                raise disagreement(f"{what}, {key}", self.rank, claim, peer, their_claim)

    def barrier(self, timeout_s: float) -> Sequence[int]:
        """Meet the threads that drive the other ranks."""
        world = self._world
        with world.meeting:
            world.arrivals[self.rank] += 1
            mine = world.arrivals[self.rank]
            world.meeting.notify_all()
            world.meeting.wait_for(lambda: min(world.arrivals) >= mine, timeout_s)
            return [rank for rank, count in enumerate(world.arrivals) if count < mine]

    def is_idle(self) -> bool:
        """Whether no rank of this world has work on the GPU."""
        return all(stream.query() for stream in self._world.streams)

    def copy_async(self, dst: torch.Tensor, src: torch.Tensor, signal: FlagWrite | None) -> Copy:
        """On a worker thread, or on this rank's copy stream."""
        return self._copier.copy(dst, src, signal)

    def alarm(self) -> torch.Tensor:
        """Pinned where a GPU writes it."""
        return self._alarm

    def close(self, *, orderly: bool) -> None:
        """End the worker thread, and leave the memory to the ranks that are still open."""
        if isinstance(self._copier, HostCopier):
            self._copier.close(orderly=orderly)
        else:
            self._copier.close()
        del self._world

    def _make_segment(self, nbytes: int) -> Segment:
        views = tuple(torch.zeros(nbytes, dtype=torch.uint8, device=self.device) for _ in range(self.world_size))
        if self.stream is not None:
            # Ranks use the memory on streams of their own, none of which saw the zeroes being written.
            torch.cuda.current_stream(self.device).synchronize()
        return Segment(nbytes, views)


def local_transports(world_size: int, device: torch.device) -> list[LocalTransport]:
    """Transports for all ranks of a new virtual world."""
    if device.type == "cuda" and world_size > _MAX_STREAMS:
        raise ValueError(f"world_size={world_size}: torch has {_MAX_STREAMS} streams on a GPU, and each rank needs one")
    if device.type == "cuda" and world_size > 1:
        came_late = torch.cuda.is_initialized()
        if not env.separate_streams() and came_late:
            _log.warning(
                "CUDA was started before these virtual ranks, with 8 hardware queues for all streams, and kernels "
                "loaded when they are first launched. Ranks may wait for each other until the deadline: set "
                "CUDA_DEVICE_MAX_CONNECTIONS=32 and CUDA_MODULE_LOADING=EAGER"
            )
    world = _World(world_size, device)
    return [LocalTransport(world, rank) for rank in range(world_size)]
