"""Which bytes go to whom: plans for the movers, as plain integers that host and device follow alike.

A message of any length is cut into ``num_lanes`` parts, a part into pieces of at most one slot. Cuts fall on
multiples of 16 bytes of the *message*, so both ends agree on them whatever the alignment of their own tensors.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tileflux.config import CommConfig

__all__ = [
    "Extent",
    "MovePlan",
    "gather_plan",
    "part",
    "permute_plan",
    "reduce_plan",
    "spread_plan",
    "num_pieces",
    "split_rows",
]

GRAIN = 16
"""Bytes a cut is a multiple of: the widest load a thread makes."""


@dataclass(frozen=True)
class Extent:
    """A run of bytes in a rank's own tensor."""

    offset: int
    nbytes: int


@dataclass(frozen=True)
class MovePlan:
    """What one rank sends from its input to each peer, and puts from each peer into its output, in bytes."""

    rank: int
    send: tuple[Extent, ...]
    recv: tuple[Extent, ...]
    widest: int | None
    """Bytes of the largest message between any two ranks, None where a rank cannot know it."""

    def num_lanes(self, config: CommConfig) -> int:
        """Lanes to use; the same on every rank."""
        return config.num_lanes if self.widest is None else config.lanes_for(self.widest)

    @functools.cached_property
    def is_empty(self) -> bool:
        """Whether this rank has no byte to move."""
        return not any(extent.nbytes for extent in self.send + self.recv)

    @functools.cached_property
    def even(self) -> tuple[int, int, int, int] | None:
        """(send bytes, send stride, recv bytes, recv stride) if all runs are of one length, evenly spaced."""
        strides = tuple(_stride(extents) for extents in (self.send, self.recv))
        if strides[0] is None or strides[1] is None:
            return None
        return self.send[0].nbytes, strides[0], self.recv[0].nbytes, strides[1]

    @functools.cached_property
    def table(self) -> tuple[int, ...]:
        """The four rows ``send offset, send bytes, recv offset, recv bytes``, by rank, flat: for ragged plans."""
        rows = [extent.offset for extent in self.send], [extent.nbytes for extent in self.send]
        more = [extent.offset for extent in self.recv], [extent.nbytes for extent in self.recv]
        return tuple(number for row in (*rows, *more) for number in row)


def part(nbytes: int, lane: int, num_lanes: int) -> Extent:
    """The run of a message of ``nbytes`` that ``lane`` carries."""
    share = -(-nbytes // (num_lanes * GRAIN)) * GRAIN
    begin = min(nbytes, lane * share)
    return Extent(begin, min(share, nbytes - begin))


def num_pieces(nbytes: int, slot_bytes: int) -> int:
    """Messages it takes to carry a part."""
    return -(-nbytes // slot_bytes)


def split_rows(num_rows: int, world_size: int) -> tuple[int, ...]:
    """Rows per rank when ``num_rows`` need not divide: the first have one more, as ``torch.tensor_split`` does."""
    return tuple((num_rows + world_size - 1 - rank) // world_size for rank in range(world_size))


@functools.lru_cache(maxsize=4096)
def gather_plan(rank: int, sizes: tuple[int, ...]) -> MovePlan:
    """All-gather: my bytes to everyone; rank r's to where those of the ranks before it end."""
    offsets = _offsets(sizes)
    send = tuple(Extent(0, sizes[rank]) for _ in sizes)
    recv = tuple(Extent(offset, size) for offset, size in zip(offsets, sizes, strict=True))
    return MovePlan(rank, send, recv, max(sizes))


@functools.lru_cache(maxsize=4096)
def permute_plan(rank: int, send_sizes: tuple[int, ...], recv_sizes: tuple[int, ...], even: bool) -> MovePlan:
    """All-to-all: runs in rank order on both sides."""
    send = tuple(Extent(o, n) for o, n in zip(_offsets(send_sizes), send_sizes, strict=True))
    recv = tuple(Extent(o, n) for o, n in zip(_offsets(recv_sizes), recv_sizes, strict=True))
    return MovePlan(rank, send, recv, send_sizes[0] if even else None)


@functools.lru_cache(maxsize=4096)
def spread_plan(rank: int, world_size: int, root: int, nbytes: int) -> MovePlan:
    """Broadcast: the root's bytes to everyone."""
    send = tuple(Extent(0, nbytes if rank == root else 0) for _ in range(world_size))
    recv = tuple(Extent(0, nbytes if peer == root else 0) for peer in range(world_size))
    return MovePlan(rank, send, recv, nbytes)


@functools.lru_cache(maxsize=4096)
def reduce_plan(rank: int, sizes: tuple[int, ...], scatter: bool) -> MovePlan:
    """Reductions: rank r's run of my input to rank r (or, without ``scatter``, all of it); everyone's to my output."""
    offsets = _offsets(sizes) if scatter else (0,) * len(sizes)
    send = tuple(Extent(offset, size) for offset, size in zip(offsets, sizes, strict=True))
    recv = tuple(Extent(0, sizes[rank]) for _ in sizes)
    return MovePlan(rank, send, recv, max(sizes))


def _offsets(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sum(sizes[:index]) for index in range(len(sizes)))


def _stride(extents: tuple[Extent, ...]) -> int | None:
    stride = extents[1].offset - extents[0].offset if len(extents) > 1 else 0
    regular = all(e.nbytes == extents[0].nbytes and e.offset == i * stride for i, e in enumerate(extents))
    return stride if regular else None
