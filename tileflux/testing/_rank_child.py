"""What runs inside a rank that is a process: set-up, the process group, the function, the report."""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import os
import pickle
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tileflux import env
from tileflux.testing._rank_report import Report

__all__ = ["Call", "Job", "rank_main", "stack_file"]

_PR_SET_PDEATHSIG = 1
_SLACK_S = 30.0  # by which a collective outlasts the runner's deadline, whose error says more than gloo's


@dataclass(frozen=True)
class Call:
    """The function and what goes into it. Forked as it is; pickled for a fresh process."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    group_kwargs: dict[str, Any]


@dataclass(frozen=True)
class Job:
    """The same for all ranks of a run, and picklable without knowing the caller's modules."""

    world_size: int
    folder: Path
    """Private to the run: the store through which ranks meet, and their stack dumps."""
    devices: tuple[str, ...]
    make_group: bool
    leave_together: bool
    """Whether ranks meet once more before they leave; not possible where one may have died."""
    timeout_s: float
    seed: int
    parent: int


def rank_main(job: Job, call: Call | bytes, rank: int, pipe: Connection) -> None:
    """Entry of a rank's process. Whatever happens goes into the pipe as one report."""
    _prepare(job, rank)
    try:
        if isinstance(call, bytes):
            call = pickle.loads(call)
            assert isinstance(call, Call)
        report = Report(rank, time.monotonic(), _run(job, call, rank))
    except BaseException as error:
        # At once, and without closing anything: closing may wait, and peers may fail meanwhile of our failure.
        report = Report.of_error(rank, error)
    pipe.send_bytes(report.to_bytes())
    pipe.close()


def stack_file(folder: Path, rank: int) -> Path:
    """Where a rank writes its stack on SIGUSR1."""
    return folder / f"rank{rank}.stack"


def _prepare(job: Job, rank: int) -> None:
    # The runner stops its ranks; an interrupt from the keyboard reaches the whole foreground process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A runner that is itself killed cannot stop its ranks: the kernel does.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != job.parent:
        os._exit(1)
    # faulthandler dumps from a signal handler in C, so also from a rank stuck in a system call or a lock. The
    # descriptor stays open as long as the process lives.
    dump = os.open(stack_file(job.folder, rank), os.O_WRONLY | os.O_CREAT, 0o600)
    faulthandler.register(signal.SIGUSR1, file=dump, all_threads=True, chain=False)
    torch.set_num_threads(1)
    # Forked ranks would otherwise all draw what the parent draws next, and equal data hides misplaced data.
    torch.manual_seed((job.seed + 1 + rank) % 2**63)
    env.use_loopback()
    device = torch.device(job.devices[rank])
    if device.type == "cuda":
        if len(set(job.devices)) < job.world_size:
            env.share_gpu()
        torch.cuda.set_device(device)


def _run(job: Job, call: Call, rank: int) -> Any:
    if not job.make_group:
        return call.fn(rank, job.world_size, *call.args)
    from tileflux.symm.group import Group

    device = job.devices[rank]
    on_gpu = device.startswith("cuda")
    dist.init_process_group(
        "cpu:gloo,cuda:gloo" if on_gpu else "gloo",
        store=dist.FileStore(str(job.folder / "store"), job.world_size),
        rank=rank,
        world_size=job.world_size,
        timeout=datetime.timedelta(seconds=job.timeout_s + _SLACK_S),
    )
    group = Group.from_process_group(device=device, **call.group_kwargs)
    result = call.fn(group, *call.args)
    if on_gpu:
        torch.cuda.synchronize()
        if job.leave_together:
            dist.barrier()  # a rank that leaves takes its memory along, and peers' kernels may still be in it
    group.close()
    dist.destroy_process_group()
    return result
