"""The ranks that are not there: a ghost world's peers, played by stream operations.

The real rank runs a fused op as it would among W ranks. Its peers' rows and partial sums come over the host's link by
the copy engine, its own go out over it, and flags and acks are written and waited for by the streams themselves, so
that nothing here needs an SM. Peers are as fast as the real rank: what a peer has to compute before it can send is sent
when the real rank has computed as much.

A stream's wait has no deadline of its own. It needs none: every word that a ghost waits for is set by a launch or copy
of the real rank whose own waits have one, and which goes on after it, so that the group ends in ``PeerTimeout``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tileflux import env
from tileflux.kernels.turns import Turn
from tileflux.symm.ghost import GhostTransport, stream_wait, stream_write
from tileflux.symm.group import Group

__all__ = ["Ghosts", "Stamp", "ghost_group"]


def ghost_group(world_size: int, device: torch.device | str = "cuda", *, timeout_s: float | None = None) -> Group:
    """A group of ``world_size`` ranks of which only rank 0 is real."""
    if world_size < 2:
        raise ValueError(f"world_size={world_size} should be at least 2: a ghost world has one real rank, and ghosts")
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"device={device} should be a GPU: what ghosts send crosses its link to the host")
    env.separate_queues()  # a stream of the ghosts' that waits must not stand in front of one of the real rank's
    if device.index is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return Group(GhostTransport(world_size, device), timeout_s=timeout_s)


@dataclass(frozen=True)
class Stamp:
    """When a ghost's chunk was on the link."""

    source: int
    chunk: int
    nbytes: int
    begin: torch.cuda.Event
    end: torch.cuda.Event


@dataclass
class Ghosts:
    """The peers of a ghost group. For every call of an op by the real rank they make one here, queued beside it.

    ``start`` ties them to the current stream, so that they begin when it comes there; ``join`` lets it wait for them.
    """

    group: Group
    stamps: list[Stamp] | None = None
    """If a list, transfers are timed and noted here."""
    _epochs: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Peers go on sending while they wait for the real rank's rows, and while they announce what they have sent; and
        # what they send next does not begin later for having been waited for in between, as in one stream it would.
        self._streams = tuple(torch.cuda.Stream(self.group.device) for _ in range(4))
        self._watching, self._sending, self._announcing, self._answering = self._streams

    def start(self) -> None:
        """From here on the ghosts' work follows what the current stream holds so far."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self.group.device))

    def join(self) -> None:
        """Make the current stream wait for all that the ghosts do."""
        for stream in self._streams:
            torch.cuda.current_stream(self.group.device).wait_stream(stream)

    def gather(self, here: Turn, x: torch.Tensor) -> None:
        """Send every ghost's rows of ``x``, pinned ``[M, K]``, in the order the real rank needs them; take its own."""
        rank, world_size, plan = self.group.rank, self.group.world_size, here.plan
        epoch = self._next(plan.op)
        buffer = here.gathered(x.dtype, x.shape[1])
        with torch.cuda.stream(self._sending):
            for source in ((rank + hop) % world_size for hop in range(1, world_size)):
                self._send_after(here.ack(source, rank), epoch)
                for chunk in range(plan.num_chunks):
                    rows = plan.chunk(source, chunk)
                    if rows:
                        first = plan.first_rows[source]
                        place = slice(first + rows.start, first + rows.stop)
                        self._send(source, chunk, buffer[place], x[place])
                        self._announce(here.flag(rank, chunk, source), epoch + 1)
        last = max((chunk for chunk in range(plan.num_chunks) if plan.chunk(rank, chunk)), default=None)
        with torch.cuda.stream(self._answering):
            for peer in ((rank - hop) % world_size for hop in range(1, world_size)):
                if last is not None:
                    stream_wait(here.flag(peer, last), epoch + 1)
                stream_write(here.ack(rank, peer), epoch + 1)

    def scatter(
        self,
        here: Turn,
        partials: Sequence[torch.Tensor],
        *,
        order: Sequence[tuple[int, range]],
        leaving: Sequence[torch.cuda.Event] | None,
    ) -> None:
        """Send every ghost's partial sums of the real rank's rows, and take its own for them.

        ``partials`` are pinned ``[m, N]``, by source, and lie slab by slab. A ghost sends a piece when the real rank
        does so, or could, at the same step of the ``order`` of (owner, slabs): when its copy begins, as noted in
        ``leaving`` for every owner that has rows, or where that is None when its tiles have been counted.
        """
        rank, world_size, plan = self.group.rank, self.group.world_size, here.plan
        epoch = self._next(plan.op)
        owners = [(rank + hop) % world_size for hop in range(1, world_size)]
        num_rows, num_columns = partials[rank].shape
        begun = None if leaving is None else iter(leaving)
        with torch.cuda.stream(self._sending):
            for owner, slabs in order:
                source = (2 * rank - owner) % world_size  # as far before the real rank as the owner is behind it
                if plan.rows[owner]:
                    if begun is None:
                        self._send_after(here.staged(owner, slabs[-1]), epoch + 1)
                    else:
                        self._sending.wait_event(next(begun))
                columns = plan.columns(slabs, num_columns)
                piece = partials[source].view(-1)[num_rows * columns.start : num_rows * columns.stop]
                to = here.slabs_at(rank, source, slabs, piece.dtype, num_columns)
                self._send(source, slabs[0], to, piece.view(num_rows, -1))
                self._announce(here.flag(rank, slabs[0], source), epoch + 1)
        last = {owner: slabs[0] for owner, slabs in order}
        with torch.cuda.stream(self._answering):
            for peer in owners:
                if plan.rows[peer]:
                    stream_wait(here.flag(peer, last[peer]), epoch + 1)
                stream_write(here.ack(rank, peer), epoch + 1)

    def num_calls(self, op: str) -> int:
        """Calls of ``op`` that the ghosts have made."""
        return self._epochs.get(op, 0)

    def _next(self, op: str) -> int:
        epoch = self._epochs.get(op, 0)
        self._epochs[op] = epoch + 1
        return epoch

    def _send_after(self, word: torch.Tensor, value: int) -> None:
        """What is sent next follows ``word``'s being set."""
        with torch.cuda.stream(self._watching):
            stream_wait(word, value)
        self._sending.wait_event(self._watching.record_event())

    def _announce(self, word: torch.Tensor, value: int) -> None:
        """Set ``word`` behind what was sent, on another stream: in the same one the next copy would begin later."""
        sent = self._sending.record_event()
        with torch.cuda.stream(self._announcing):
            self._announcing.wait_event(sent)
            stream_write(word, value)

    def _send(self, source: int, chunk: int, to: torch.Tensor, rows: torch.Tensor) -> None:
        if self.stamps is None:
            to.copy_(rows, non_blocking=True)
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        to.copy_(rows, non_blocking=True)
        end.record()
        self.stamps.append(Stamp(source, chunk, rows.nbytes, begin, end))
