"""One real rank with a whole GPU; its peers are memory behind the host's link, and have no processor of their own.

For measuring on one GPU: bytes for a peer cross a real link (PCIe, to pinned host memory), bytes from a peer come over
it, and a fused op cannot tell that nobody is there. The peers' part of a protocol has to be played by stream
operations, which need no SM (``testing/ghost.py`` does); an op that nobody plays for ends in ``PeerTimeout``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tileflux import device as device_info
from tileflux.errors import TransportUnavailable
from tileflux.symm.base import Copy, FlagWrite, Segment, Traits, Transport
from tileflux.symm.stream_copy import StreamCopier

__all__ = ["GhostTransport", "stream_wait", "stream_write"]


class GhostTransport(Transport):
    """The rank that is real."""

    name = "ghost"

    def __init__(self, world_size: int, device: torch.device, rank: int = 0) -> None:
        if not torch.cuda.is_available():
            raise TransportUnavailable("a ghost world needs a GPU, and torch sees none", "use a machine with a GPU")
        _driver()
        self.rank, self.world_size, self.device = rank, world_size, device
        self.traits = Traits(
            copies_need_sms=False,
            has_multicast=False,
            links=tuple("self" if peer == rank else "PCIe" for peer in range(world_size)),
            num_sms=device_info.num_sms(device),
        )
        self._copier = StreamCopier(device)
        self._alarm = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def allocate(self, nbytes: int) -> Segment:
        """One's own on the GPU, the others pinned on the host, where kernels reach them by the same address."""
        views = tuple(
            torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
            if rank == self.rank
            else torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
            for rank in range(self.world_size)
        )
        torch.cuda.current_stream(self.device).synchronize()
        return Segment(nbytes, views)

    def agree(self, what: str, value: object, claims: Mapping[str, object] | None = None) -> None:
        """Ghosts agree with everything."""

    def barrier(self, timeout_s: float) -> Sequence[int]:
        """Ghosts are always there."""
        return ()

    def copy_async(self, dst: torch.Tensor, src: torch.Tensor, signal: FlagWrite | None) -> Copy:
        """By the copy engine."""
        return self._copier.copy(dst, src, signal)

    def alarm(self) -> torch.Tensor:
        """Pinned host memory."""
        return self._alarm

    def close(self, *, orderly: bool) -> None:
        """Memory goes with the last tensor that uses it."""
        self._copier.close()


def stream_wait(word: torch.Tensor, value: int) -> None:
    """Hold the current stream until ``word``, one int32 on the host or the GPU, has reached ``value``. Needs no SM."""
    driver = _driver()
    geq = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    _check(driver.cuStreamWaitValue32(_stream(), word.data_ptr(), value & 0xFFFFFFFF, int(geq)))


def stream_write(word: torch.Tensor, value: int) -> None:
    """Set ``word``, one int32 on the host or the GPU, after everything the current stream holds. Needs no SM."""
    driver = _driver()
    default = driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
    _check(driver.cuStreamWriteValue32(_stream(), word.data_ptr(), value & 0xFFFFFFFF, int(default)))


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise TransportUnavailable(
            "a ghost world queues stream memory operations through cuda-bindings, which is not installed",
            "pip install 'tileflux[cuda]'",
        ) from error
    return driver


def _check(result: tuple[Any, ...]) -> None:
    if int(result[0]) != 0:
        raise RuntimeError(f"the CUDA driver refused a stream memory operation: {result[0]}")
