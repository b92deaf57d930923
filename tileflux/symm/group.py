"""``Group``: the ranks that share symmetric memory, as one of them sees it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType

import torch
import torch.distributed as dist

from tileflux import env
from tileflux.config import CommConfig
from tileflux.errors import GroupBroken, GroupClosed, PeerTimeout
from tileflux.symm.base import Copy, FlagWrite, Traits, Transport
from tileflux.symm.guard import Guard
from tileflux.symm.late import LateNumbers
from tileflux.symm.local import LocalTransport, local_transports
from tileflux.symm.mailbox import HostChannels, Mailbox
from tileflux.symm.shm import ShmTransport
from tileflux.symm.workspace import MemorySummary, Region, Workspace

__all__ = ["Group", "group_by_name", "local_groups", "virtual_rank_on"]

_LONGEST_TIMEOUT_S = 1e6
_names = itertools.count()
_groups: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()
_groups_made: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class Group:
    """One rank's end of a group. Make it with ``from_process_group``, ``from_env`` or ``local_groups``.

    Use it as a context manager, or call ``close()``. All ranks make the same calls in the same order.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        timeout_s: float | None = None,
        config: CommConfig | None = None,
        check: bool | None = None,
    ) -> None:
        # The rank is in the name because compiled graphs, which depend on it, are cached on disk by what they contain.
        self.name = f"{transport.name}-{next(_names)}-rank{transport.rank}of{transport.world_size}"
        self.timeout_s = env.timeout_s() if timeout_s is None else timeout_s
        _check_timeout(self.timeout_s)
        self.check_calls = env.check() if check is None else check
        self.config = _default_config(transport.traits) if config is None else config
        if 0 < transport.traits.num_sms < self.config.num_lanes:
            raise ValueError(
                f"num_lanes={self.config.num_lanes} programs of one rank would fill more than its "
                f"{transport.traits.num_sms} SMs, and wait for ranks that find no room"
            )
        self._transport = transport
        self._workspace = Workspace(transport)
        self._closed = False
        self._broken: BaseException | None = None
        self._last_stream: torch.cuda.Stream | None = None
        self._last_handle: int | None = None
        transport.agree("group settings", (self.config, self.timeout_s, self.check_calls))
        self.guard = Guard(transport, self._workspace, self.timeout_s)
        self.mailbox = Mailbox(self._workspace, self.rank, self.world_size, self.config)
        self.late = LateNumbers()
        _groups[self.name] = self

    @classmethod
    def from_process_group(
        cls,
        process_group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        timeout_s: float | None = None,
        config: CommConfig | None = None,
        check: bool | None = None,
    ) -> Group:
        """The ranks of a torch process group (default: the world), contiguous or not. Collective over them.

        ``device`` defaults to the current GPU if there is one, else the CPU.
        """
        if not dist.is_initialized():
            raise ValueError("torch.distributed is not initialised; call init_process_group, or use Group.from_env()")
        group = dist.group.WORLD if process_group is None else process_group
        if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
            raise ValueError(
                f"global rank {dist.get_rank()} is not in this process group; make the Group only on its members"
            )
        if device is None:
            device = "cuda" if torch.cuda.is_available() and env.transport() != "shm" else "cpu"
        limit = env.timeout_s() if timeout_s is None else timeout_s
        _check_timeout(limit)
        transport = _process_transport(group, torch.device(device), limit)
        return cls(transport, timeout_s=timeout_s, config=config, check=check)

    @classmethod
    def from_env(cls, *, device: torch.device | str | None = None, timeout_s: float | None = None) -> Group:
        """The world that ``torchrun`` started; initialises ``torch.distributed`` if nobody has."""
        if not dist.is_initialized():
            if not env.torchrun_present():
                raise ValueError("RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not all set; start with torchrun")
            if torch.cuda.is_available() and env.transport() != "shm":
                torch.cuda.set_device(env.local_rank() % torch.cuda.device_count())
                dist.init_process_group("cpu:gloo,cuda:nccl")
            else:
                dist.init_process_group("gloo")
        return cls.from_process_group(device=device, timeout_s=timeout_s)

    @property
    def rank(self) -> int:
        """This rank's number within the group."""
        return self._transport.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._transport.world_size

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors must be."""
        return self._transport.device

    @property
    def traits(self) -> Traits:
        """Whether copies need SMs, whether there is multicast, and what the links are."""
        return self._transport.traits

    @property
    def transport(self) -> str:
        """Who carries the bytes: ``shm``, ``local`` or ``cuda``."""
        return self._transport.name

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream a virtual rank on a GPU must be driven on; None for all other groups."""
        return self._transport.stream if isinstance(self._transport, LocalTransport) else None

    def is_idle(self) -> bool:
        """Whether no virtual rank of this group's GPU has work on its stream; always so where there are none."""
        return self._transport.is_idle() if isinstance(self._transport, LocalTransport) else True

    def region(
        self, name: str, nbytes: int, *, grow: bool = False, describe: Callable[[int], str] | None = None
    ) -> Region:
        """Named symmetric memory, zero-filled when new. Collective when new or grown.

        The region belongs to the calling module. ``describe`` turns a byte offset into a flag's name for errors.
        """
        self.ensure_usable()
        owner = sys._getframe(1).f_globals.get("__name__", "?")
        return self._workspace.region(name, nbytes, owner=owner, grow=grow, describe=describe)

    @functools.cached_property
    def channels(self) -> HostChannels:
        """The mailbox's channels as the CPU works them."""
        return HostChannels(self.mailbox, self.guard)

    def copy_async(self, dst: torch.Tensor, src: torch.Tensor, *, signal: FlagWrite | None = None) -> Copy:
        """Copy without blocking, after what the caller has queued; then set the flag. Either side may be a peer's."""
        self.ensure_usable()
        if dst.shape != src.shape or dst.dtype != src.dtype:
            raise ValueError(
                f"copy_async from {tuple(src.shape)} {src.dtype} to {tuple(dst.shape)} {dst.dtype}: "
                "shapes and dtypes must match"
            )
        return self._transport.copy_async(dst, src, signal)

    def barrier(self) -> None:
        """Return once every rank has called. Meets on the host; for a barrier on the stream see ``ops.barrier``."""
        self.ensure_usable()
        missing = self._transport.barrier(self.timeout_s)
        if missing:
            peer = missing[0]
            self._broken = PeerTimeout(
                op="Group.barrier", rank=self.rank, peer=peer, waited_for=peer, flag="arrival", wanted=1, seen=0,
                seconds=self.timeout_s, detail=self._transport.describe_rank(peer),
            )  # fmt: skip
            raise self._broken

    def agree(self, what: str, value: object, claims: Mapping[str, object] | None = None) -> None:
        """Raise ``MismatchError`` unless all ranks pass the same. Between processes it meets on the host."""
        self._transport.agree(what, value, claims)

    def ensure_usable(self) -> None:
        """Raise if the group is closed, or broken by what this or an earlier call made known: a timeout, or a number
        that the GPU has brought since (``late``)."""
        if self._closed:
            raise GroupClosed(f"group {self.name} was closed; make a new one")
        if self._broken is not None:
            reason = str(self._broken) or type(self._broken).__name__
            raise GroupBroken(f"group {self.name} is broken, close it and make a new one: {reason}")
        late = self.late.find()
        error = self.guard.error() if self.guard.alarmed else late
        if error is not None:
            self.mark_broken(error)
            # Who waited in vain may have waited for a rank that got to know of the number first, and left.
            raise error from (late if late is not error else None)

    def mark_broken(self, error: BaseException) -> None:
        """Let every later call raise ``GroupBroken``: channels are no longer in step with the peers'."""
        self._broken = error
        self.guard.tell_peers()

    def order_stream(self) -> None:
        """Make this call follow the group's last one, whatever stream that was on. GPU groups only.

        Channels count messages in call order; two streams at once would interleave their counts.
        """
        if self.device.type != "cuda":
            return
        handle: int = torch._C._cuda_getCurrentRawStream(self.device.index)
        if handle == self._last_handle:
            return  # the stream of the last call, which was the right one then
        current = torch.cuda.current_stream(self.device)
        if self.stream is not None and current != self.stream:
            raise ValueError(
                f"virtual rank {self.rank} must be driven on its own stream, or ranks wait for each other for ever; "
                "use `with torch.cuda.stream(group.stream):`"
            )
        if (
            self._last_stream is not None
            and self._last_stream != current
            and not torch.cuda.is_current_stream_capturing()
        ):
            current.wait_stream(self._last_stream)
        self._last_stream, self._last_handle = current, handle

    def synchronize(self) -> None:
        """Wait for this rank's queued work; raise ``PeerTimeout`` if any of it gave up waiting, and
        ``CapacityExceeded`` if rows of it did not fit."""
        self.wait()
        self.ensure_usable()

    def wait(self) -> None:
        """Until every stream this rank's work may be on is done: the caller's, the last call's, a virtual rank's."""
        if self.device.type == "cuda":
            for stream in (torch.cuda.current_stream(self.device), self._last_stream, self.stream):
                if stream is not None:
                    stream.synchronize()

    def memory_summary(self) -> MemorySummary:
        """Symmetric memory this rank holds; prints as a table."""
        return self._workspace.summary()

    def close(self) -> None:
        """Let go of memory, threads and streams. Works on a broken group too, and twice."""
        self._close(orderly=self._broken is None)

    def _close(self, *, orderly: bool) -> None:
        if self._closed:
            return
        self._closed = True
        _groups.pop(self.name, None)
        if self.device.type == "cuda":
            # Kernels in flight still use the memory; their waits have deadlines, so this ends.
            self.wait()
            orderly = orderly and not self.guard.alarmed
        self.__dict__.pop("channels", None)
        del self.guard, self.mailbox, self.late
        self._workspace.close()
        self._transport.close(orderly=orderly)

    def __del__(self) -> None:
        # Work in flight uses the tables that would go with the group.
        if not sys.is_finalizing() and not getattr(self, "_closed", True):
            with contextlib.suppress(Exception):
                self._close(orderly=False)

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close(orderly=error is None and self._broken is None)

    def __repr__(self) -> str:
        return f"Group({self.name}, {self.device})"


def local_groups(
    world_size: int,
    device: torch.device | str = "cpu",
    *,
    timeout_s: float | None = None,
    config: CommConfig | None = None,
    check: bool | None = None,
) -> list[Group]:
    """W virtual ranks in this process, on the CPU or all on one GPU.

    On the CPU an op of one rank returns when its peers have made theirs, so each rank needs a thread. On a GPU ops only
    queue work: one thread may drive all ranks in turn, each on its own ``group.stream``.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size} should be at least 1")
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    transports = local_transports(world_size, device)
    return [Group(transport, timeout_s=timeout_s, config=config, check=check) for transport in transports]


def virtual_rank_on(stream: int) -> Group | None:
    """The group of the virtual rank that is driven on the stream with this handle, if one is."""
    for reference in _groups.valuerefs():  # a list made at once: another thread may be making a group
        group = reference()
        if group is not None and group.stream is not None and group.stream.cuda_stream == stream:
            return group
    return None


def group_by_name(name: str) -> Group:
    """The group an op registered with torch was called on."""
    group = _groups.get(name)
    if group is None:
        raise GroupClosed(f"no open group is called {name}")
    return group


def _process_transport(group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> Transport:
    # Several groups may be made from one process group; each meets under a prefix of its own.
    wanted = env.transport()
    shm = wanted == "shm" or (wanted == "auto" and device.type == "cpu")
    if shm and device.type != "cpu":
        raise ValueError(f"the shm transport carries CPU tensors; device={device} needs TILEFLUX_TRANSPORT=cuda")
    if not shm and device.type != "cuda":
        raise ValueError(f"the cuda transport carries CUDA tensors; device={device} needs TILEFLUX_TRANSPORT=shm")
    index = _groups_made.get(group, 0)
    _groups_made[group] = index + 1
    store = dist.PrefixStore(f"tileflux/{index}", dist.distributed_c10d._get_process_group_store(group))
    if shm:
        return ShmTransport(store, dist.get_rank(group), dist.get_world_size(group), dist.get_rank(), timeout_s)
    from tileflux.symm.cuda import CudaTransport

    return CudaTransport(group, store, device, dist.get_rank(), timeout_s)


def _check_timeout(seconds: float) -> None:
    if not 0 < seconds <= _LONGEST_TIMEOUT_S:
        raise ValueError(f"timeout_s={seconds} should be a positive number of seconds, at most {_LONGEST_TIMEOUT_S:g}")


def _default_config(traits: Traits) -> CommConfig:
    if traits.num_sms == 0:
        return CommConfig(num_lanes=1, slot_bytes=256 * 1024)
    # Half of the SMs at most: a lane that waits holds its SM, and the compute beside it needs the rest.
    return CommConfig(num_lanes=max(1, min(32, traits.num_sms // 2)), slot_bytes=64 * 1024)
