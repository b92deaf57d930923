"""One growing heap per group, carved into named regions.

The heap grows by whole segments and never moves: kernels and captured CUDA graphs hold addresses. A region has the same
offset on every rank. Asking again for a region returns it; asking in another way is an error, because two pieces
of code that believe they own the same bytes corrupt each other silently.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tileflux.errors import MismatchError, RegionError
from tileflux.symm.base import Segment, Transport
from tileflux.symm.rendezvous import Missing

__all__ = ["MemorySummary", "Region", "Workspace"]

_ALIGNMENT = 256
_SEGMENT_STEP = {"cuda": 2 << 20, "cpu": 64 << 10}  # what the driver and the page table hand out without waste


@dataclass(frozen=True, eq=False)
class Region:
    """Named bytes in the heap, at the same offset on every rank."""

    name: str
    owner: str
    nbytes: int
    offset: int
    segment: Segment
    rank: int
    table: torch.Tensor
    """Device table of every rank's address of this region: int64 ``[W]``."""
    describe: Callable[[int], str] | None = field(default=None, compare=False)

    def view(
        self, rank: int | None = None, dtype: torch.dtype = torch.uint8, shape: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """``rank``'s copy (by default one's own) as a tensor; ``shape`` defaults to all of it, flat."""
        rank = self.rank if rank is None else rank
        if not 0 <= rank < len(self.segment.views):
            raise ValueError(f"rank {rank} is not in a group of {len(self.segment.views)}")
        if shape is None:
            shape = (self.nbytes // dtype.itemsize,)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > self.nbytes:
            raise ValueError(f"a view of {nbytes} bytes does not fit region '{self.name}' of {self.nbytes}")
        flat = self.segment.views[rank][self.offset : self.offset + nbytes]
        return flat.view(dtype).view(shape)

    def address(self, rank: int) -> int:
        """Where ``rank``'s copy begins, in this process's address space."""
        return self.segment.address(rank) + self.offset

    @property
    def multicast_address(self) -> int:
        """Address that reaches all ranks at once, or 0."""
        base = self.segment.multicast_address
        return base + self.offset if base else 0

    def name_of(self, address: int) -> str | None:
        """What lies at an address of one's own copy, in words, or None if it is elsewhere."""
        offset = address - self.address(self.rank)
        if not 0 <= offset < max(self.nbytes, 1):
            return None
        return f"{self.name}.{self.describe(offset)}" if self.describe else f"{self.name}+{offset}"


@dataclass(frozen=True)
class MemorySummary:
    """Symmetric memory held by one rank of a group."""

    heap_bytes: int
    region_bytes: dict[str, int]
    retired_bytes: int

    def __str__(self) -> str:
        lines = [f"{self.heap_bytes / 2**20:.1f} MiB of symmetric memory per rank"]
        lines += [f"  {name}: {nbytes / 2**20:.2f} MiB" for name, nbytes in sorted(self.region_bytes.items())]
        if self.retired_bytes:
            lines.append(f"  (outgrown: {self.retired_bytes / 2**20:.2f} MiB)")
        return "\n".join(lines)


class Workspace:
    """The heap of one rank of a group. All ranks ask for the same regions in the same order."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._segments: list[Segment] = []
        self._used = 0
        self._regions: dict[str, Region] = {}
        self._retired: list[Region] = []
        self._failed = False

    def region(
        self, name: str, nbytes: int, *, owner: str, grow: bool = False, describe: Callable[[int], str] | None = None
    ) -> Region:
        """The region of that name, zero-filled when new. Collective when new.

        With ``grow`` a larger request replaces the region by one of the next power of two; the old bytes stay mapped,
        since work in flight and captured graphs still use them.
        """
        known = self._regions.get(name)
        if self._failed:
            raise RegionError(
                "an earlier region of this group failed and ranks may differ; close it and make a new one"
            )
        if known is not None:
            if known.owner != owner:
                raise RegionError(
                    f"region '{name}' belongs to {known.owner} and cannot be used by {owner}; pick another name"
                )
            if known.nbytes == nbytes or (grow and known.nbytes >= nbytes):
                return known
            if not grow:
                raise RegionError(
                    f"region '{name}' has {known.nbytes} bytes and was asked for again with {nbytes}; "
                    "ask for the same size, or pass grow=True"
                )
            nbytes = 1 << (nbytes - 1).bit_length()
        if nbytes < 0:
            raise ValueError(f"region '{name}' cannot have {nbytes} bytes")
        self._failed = True  # until all ranks have it: offsets must not drift apart
        self._agree(name, nbytes, owner)
        region = self._carve(name, nbytes, owner, describe)
        self._failed = False
        if known is not None:
            self._retired.append(known)
        self._regions[name] = region
        return region

    def summary(self) -> MemorySummary:
        """What is held, by region."""
        return MemorySummary(
            heap_bytes=sum(segment.nbytes for segment in self._segments),
            region_bytes={name: region.nbytes for name, region in self._regions.items()},
            retired_bytes=sum(region.nbytes for region in self._retired),
        )

    def name_of(self, address: int) -> str:
        """The flag at an address of this rank's own memory, in words."""
        # Outgrown regions too: work queued before still uses them.
        for region in (*self._regions.values(), *self._retired):
            if (name := region.name_of(address)) is not None:
                return name
        return hex(address)

    def close(self) -> None:
        """Drop the heap; tensors viewing it keep their memory."""
        self._regions.clear()
        self._retired.clear()
        self._segments.clear()
        self._used = 0

    def _agree(self, name: str, nbytes: int, owner: str) -> None:
        try:
            place = f"{nbytes} bytes for {owner} at {len(self._segments)}+{self._used}"
            self._transport.agree(f"region '{name}'", place)
        except Missing as error:
            raise RegionError(f"{error}; a region is asked for by all ranks of its group") from error
        except MismatchError as error:
            raise RegionError(str(error)) from error

    def _carve(self, name: str, nbytes: int, owner: str, describe: Callable[[int], str] | None) -> Region:
        if not self._segments or self._used + nbytes > self._segments[-1].nbytes:
            step = _SEGMENT_STEP[self._transport.device.type]
            size = -(-max(nbytes, 1) // step) * step
            # It outlives the call that first needs it: torch refuses to write into what was made in inference mode.
            with torch.inference_mode(False):
                self._segments.append(self._transport.allocate(size))
            self._used = 0
        segment, offset = self._segments[-1], self._used
        self._used = -(-(offset + nbytes) // _ALIGNMENT) * _ALIGNMENT
        addresses = [segment.address(rank) + offset for rank in range(self._transport.world_size)]
        table = torch.tensor(addresses, dtype=torch.int64, device=self._transport.device)
        return Region(name, owner, nbytes, offset, segment, self._transport.rank, table, describe)
