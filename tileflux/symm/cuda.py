"""Several processes with GPUs, over ``torch.distributed._symmetric_memory``. The only file that calls it: it is alpha.

Ranks may have a GPU each, or share one (then copies run on SMs, there is no multicast, and to run side by side they
need MPS). The rendezvous goes through the group's store and a socket, so a gloo process group is enough.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._autograd import DeviceType

from tileflux import device as device_info
from tileflux import env
from tileflux.errors import TransportUnavailable
from tileflux.symm.base import Copy, FlagWrite, Segment, Traits
from tileflux.symm.processes import ProcessTransport
from tileflux.symm.stream_copy import StreamCopier

__all__ = [
    "ALL_REDUCES",
    "CudaTransport",
    "SymmetricSum",
    "fused_all_gather_matmul",
    "fused_matmul_reduce_scatter",
    "has_multicast",
    "why_not_all_reduce",
    "write_flag",
]


ALL_REDUCES = ("one-shot", "two-shot", "multimem")
"""Torch's all-reduces of symmetric memory."""
_SUMMED = (torch.float32, torch.bfloat16)
_CLOSING_S = 5.0
_mapped: list[Segment] = []
"""Memory that peers may still write to. Only an orderly close takes it out, not a group that is merely forgotten."""


class CudaTransport(ProcessTransport):
    """Ranks are processes, and tensors are on GPUs."""

    name = "cuda"

    def __init__(
        self, group: dist.ProcessGroup, store: dist.Store, device: torch.device, global_rank: int, timeout_s: float
    ) -> None:
        super().__init__(store, group.rank(), group.size(), global_rank, timeout_s)
        if not torch.cuda.is_available():
            raise TransportUnavailable("the cuda transport needs a GPU", "use CPU tensors, or a machine with a GPU")
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._group = group
        place = (self.processes[self.rank].host, device_info.uuid(self.device))
        places = self.rendezvous.exchange("naming GPUs", place)
        shared = len(set(places)) < self.world_size
        if shared:
            env.share_gpu()
        links = tuple(device_info.link(place, other) for other in places)
        links = tuple("self" if peer == self.rank else link for peer, link in enumerate(links))
        # What is chosen by the link must be chosen alike: two ranks may be near each other, and far from a third.
        kinds = frozenset().union(*self.rendezvous.exchange("naming links", links)) - {"self"}
        self.traits = Traits(
            copies_need_sms=shared,
            has_multicast=not shared and self.world_size > 1 and has_multicast(self.device),
            links=links,
            num_sms=device_info.num_sms(self.device),
            kinds=kinds,
        )
        self._copier = StreamCopier(self.device)
        self._segments: list[Segment] = []
        self._alarm = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def allocate(self, nbytes: int) -> Segment:
        """Allocate and exchange handles. Blocks the host; never call it while capturing a CUDA graph."""
        with torch.cuda.device(self.device):
            mine = symm_mem.empty(nbytes, dtype=torch.uint8, device=self.device)
            mine.zero_()
            handle = symm_mem.rendezvous(mine, self._group)
            views = tuple(
                mine if rank == self.rank else handle.get_remote_tensor(rank, (nbytes,), torch.uint8)
                for rank in range(self.world_size)
            )
            # A peer must not raise a flag here before our zeroes have landed.
            torch.cuda.current_stream(self.device).synchronize()
        self.rendezvous.exchange("allocating symmetric memory", nbytes)
        multicast = int(handle.multicast_ptr or 0) if self.traits.has_multicast else 0
        segment = Segment(nbytes, views, multicast_address=multicast, keep_alive=(mine, handle))
        self._segments.append(segment)
        _mapped.append(segment)
        return segment

    def copy_async(self, dst: torch.Tensor, src: torch.Tensor, signal: FlagWrite | None) -> Copy:
        """On this rank's copy stream."""
        return self._copier.copy(dst, src, signal)

    def alarm(self) -> torch.Tensor:
        """Pinned host memory."""
        return self._alarm

    def close(self, *, orderly: bool) -> None:
        """Free the memory once every rank has come here; without them keep it, since peers may still write to it.

        A peer's last acknowledgement may arrive after our last kernel has ended. In memory that has been freed and
        allocated again, it would be somebody else's flag.
        """
        self._copier.close()
        if orderly and self.all_closing(_CLOSING_S):
            for segment in self._segments:
                _mapped.remove(segment)
        self._segments.clear()


def has_multicast(device: torch.device) -> bool:
    """Whether the GPU and its fabric can multicast."""
    return bool(symm_mem._SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index or 0))


def write_flag(word: torch.Tensor, value: int) -> None:
    """Set one int32 word from the current stream, after a system-wide fence, without needing an SM."""
    word = word.view(torch.uint32).reshape(-1)
    if torch.cuda.is_current_stream_capturing():
        symm_mem._SymmetricMemory.memset32(word, offset=0, val=value & 0xFFFFFFFF, count=1)
    else:
        symm_mem._SymmetricMemory.stream_write_value32(word, 0, value & 0xFFFFFFFF)


def fused_all_gather_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Torch's own ``all_gather(x) @ weight`` in the default process group: what ours is compared with."""
    name = dist.distributed_c10d._get_default_group().group_name
    _, (result,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [weight], gather_dim=0, group_name=name)
    return torch.as_tensor(result)


def fused_matmul_reduce_scatter(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Torch's own ``reduce_scatter(x @ weight)`` in the default process group."""
    name = dist.distributed_c10d._get_default_group().group_name
    return torch.as_tensor(torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight, "sum", 0, name))


class SymmetricSum:
    """Torch's own all-reduces in the default process group, of a symmetric buffer that is made and met over once.

    The buffer may be overwritten by whatever the stream does next, and freed once the stream is done, though peers read
    it, and of the two ways in place write to it: each of torch's kernels ends with a barrier (``sync_remote_blocks``),
    at which every block waits until that block of every peer has made its last access. It has no deadline.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        group = dist.distributed_c10d._get_default_group()
        self._group_name = group.group_name
        with torch.cuda.device(device):
            self.buffer = symm_mem.empty(shape, dtype=dtype, device=device)
            self._handle = symm_mem.rendezvous(self.buffer, group)

    def all_reduce(self, way: str, out: torch.Tensor) -> torch.Tensor:
        """Sum the buffer over ranks. Where the sum is: ``out`` after one-shot, else the buffer itself, all of it."""
        if way == "one-shot":
            torch.ops.symm_mem.one_shot_all_reduce_out(self.buffer, "sum", self._group_name, out)
            return out
        if way == "two-shot":
            torch.ops.symm_mem.two_shot_all_reduce_(self.buffer, "sum", self._group_name)
        elif way == "multimem":
            torch.ops.symm_mem.multimem_all_reduce_(self.buffer, "sum", self._group_name)
        else:
            raise ValueError(f"way={way!r} is not one of {', '.join(ALL_REDUCES)}")
        return self.buffer


def why_not_all_reduce(way: str, shape: tuple[int, ...], dtype: torch.dtype, has_multicast: bool) -> str:
    """Why torch would refuse an all-reduce of ``SymmetricSum``; empty if it would not. Any world size will do."""
    if way == "multimem" and not has_multicast:
        return "these ranks have no multicast"
    if dtype not in _SUMMED:
        return f"torch's symmetric all-reduces take float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    nbytes = math.prod(shape) * dtype.itemsize
    return f"torch's symmetric all-reduces want multiples of 4 bytes, not {nbytes}" if nbytes % 4 else ""
