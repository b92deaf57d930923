"""The seam between Tileflux and whoever carries the bytes.

A transport is one rank's end: it allocates memory that every rank can reach, compares what ranks are about to
do, copies without blocking, and meets the other ranks. Nothing above this folder knows which transport it has.
Everything here but ``copy_async`` happens at plan time; the hot path allocates nothing and meets nobody.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from tileflux.link import Link

__all__ = ["Copy", "FlagWrite", "Segment", "Traits", "Transport"]


@dataclass(frozen=True)
class Traits:
    """What a waiting kernel and a strategy picker must know of a transport."""

    copies_need_sms: bool
    """Whether ``copy_async`` runs on SMs: then a grid that fills the GPU and waits for a copy never ends."""
    has_multicast: bool
    links: tuple[str, ...]
    """How each rank is reached, by rank: ``self``, ``shared memory``, ``same GPU``, ``NVLink``, ``PCIe``..."""
    num_sms: int
    """SMs this rank may fill with waiting programs; 0 on the CPU."""
    kinds: frozenset[str] = frozenset()
    """Of links between any two ranks, as all of them have agreed; empty where every rank's ``links`` say it."""
    link: Link | None = None
    """Emulated between CPU ranks. If there is one, payload has to go by ``copy_async``: a direct store is at once."""


@dataclass(frozen=True, eq=False)
class Segment:
    """Memory of the same size on every rank, zero-filled, reachable by all of them."""

    nbytes: int
    views: tuple[torch.Tensor, ...]
    """Every rank's bytes, as seen from here: uint8 ``[nbytes]``, by rank."""
    multicast_address: int = 0
    keep_alive: object = None

    def address(self, rank: int) -> int:
        """Where ``rank``'s bytes begin in this process's address space."""
        return self.views[rank].data_ptr()


@dataclass(frozen=True)
class FlagWrite:
    """A flag to set once a copy has landed.

    ``word`` is a one-element int32 view of the flag, on any rank. ``value`` is a number, or a one-element int32
    tensor that is read when the copy is done: in pinned host memory it may be captured in a CUDA graph, where a
    number would repeat on every replay.
    """

    word: torch.Tensor
    value: int | torch.Tensor

    def __post_init__(self) -> None:
        if self.word.dtype != torch.int32 or self.word.numel() != 1:
            raise ValueError(f"a flag is one int32 word, not {tuple(self.word.shape)} of {self.word.dtype}")


class Copy(abc.ABC):
    """A copy under way."""

    landed_ns: int = 0
    """When it had landed, by the clock of ``time.perf_counter_ns``; 0 where nobody can tell."""

    @abc.abstractmethod
    def wait(self) -> None:
        """On the CPU, return when the bytes have landed; on a GPU, make the current stream wait for them."""


class Transport(abc.ABC):
    """One rank's end of a group's shared memory."""

    name: ClassVar[str]
    rank: int
    world_size: int
    device: torch.device
    traits: Traits

    @abc.abstractmethod
    def allocate(self, nbytes: int) -> Segment:
        """Zero-filled memory on every rank. Collective; returns when all ranks may use all of it."""

    @abc.abstractmethod
    def agree(self, what: str, value: object, claims: Mapping[str, object] | None = None) -> None:
        """Raise ``MismatchError`` unless every rank's n-th call passes the same ``what`` and ``value``.

        ``claims`` are facts only some ranks know of, such as how much rank 2 sends to rank 5: where two ranks make a
        claim by the same key, it must be the same.
        """

    @abc.abstractmethod
    def barrier(self, timeout_s: float) -> Sequence[int]:
        """Return once every rank has called, or after the timeout the ranks that have not."""

    @abc.abstractmethod
    def copy_async(self, dst: torch.Tensor, src: torch.Tensor, signal: FlagWrite | None) -> Copy:
        """Copy after what the caller has already queued, without blocking; then set the flag."""

    @abc.abstractmethod
    def alarm(self) -> torch.Tensor:
        """One int32 word that kernels can write and the host can read without synchronising."""

    def is_gone(self, rank: int) -> bool:
        """Whether ``rank`` is known to have ended. False where nobody can tell."""
        return False

    def describe_rank(self, rank: int) -> str:
        """Who ``rank`` is, for error messages: its process, its global rank."""
        return ""

    @abc.abstractmethod
    def close(self, *, orderly: bool) -> None:
        """Let go of threads, streams and memory. ``orderly``: nothing went wrong, and peers are closing too."""
