"""``run_ranks``: run a function on every rank of a small world, and get its results or one good error.

Ranks are forked CPU processes (``fork``), fresh processes (``spawn``), fresh processes that share one GPU side by side
(``mps``), or threads with virtual ranks (``virtual``). Whatever happens to a rank, the caller gets its results in rank
order or a ``RankFailed`` that begins with the first rank's traceback, and nothing is left behind but, for
``virtual``, threads that would not end.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist

from tileflux.testing._rank_child import Call
from tileflux.testing._rank_processes import Died, run_processes
from tileflux.testing._rank_report import Failure, Report, failed, rank_list, timed_out
from tileflux.testing.mps import MpsDaemon

if TYPE_CHECKING:
    from tileflux.symm.group import Group

__all__ = ["Died", "Where", "run_ranks"]

Where = Literal["fork", "virtual", "mps", "spawn"]

_LINGER_S = 1.0  # after a thread's failure, for the others to end by themselves


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *,
    args: Sequence[Any] = (),
    where: Where = "fork",
    device: str | torch.device | None = None,
    timeout_s: float = 120.0,
    group_kwargs: Mapping[str, Any] | None = None,
    make_group: bool = True,
    sm_share: int | None = None,
    may_die: Collection[int] = (),
) -> list[Any]:
    """Run ``fn(group, *args)`` on every rank and return the results in rank order.

    With ``make_group=False`` the call is ``fn(rank, world_size, *args)`` and no process group is made.

    ``where``
        ``fork``: CPU processes forked from this one; quick, and ``fn`` may be a closure. ``spawn``: fresh processes,
        for CUDA; ``fn`` must be importable by name. ``mps``: the same, all on one GPU under an MPS daemon of their
        own, each with ``sm_share`` percent of the SMs (default ``100 // world_size``). ``virtual``: threads.
    ``device``
        Default: ``cpu`` for fork and virtual, ``cuda`` for spawn and mps. For spawn ``cuda`` means one GPU per rank,
        and ``cuda:0`` that all ranks share that one.
    ``may_die``
        Ranks that may be killed by a signal without failing the run; their result is then ``Died(signal)``.

    Results and errors of processes come back pickled: return CPU tensors. A result that cannot be pickled comes back
    as its ``repr``. Ranks that are processes draw different random numbers, the same in every run with
    the caller's ``torch.manual_seed``; threads share the process's one generator.

    Raises ``RankFailed`` if a rank raises, dies, or is still running after ``timeout_s``.
    """
    _check(where, world_size, timeout_s, sm_share, may_die)
    device = torch.device(device if device is not None else "cpu" if where in ("fork", "virtual") else "cuda")
    call = Call(fn, tuple(args), dict(group_kwargs or {}))
    if where == "virtual":
        return _run_threads(call, world_size, device, make_group, timeout_s)
    changes: dict[str, str | None] = {}
    with contextlib.ExitStack() as stack:
        devices = _devices(where, device, world_size)
        if where == "mps":
            daemon = stack.enter_context(MpsDaemon())
            changes = daemon.client_variables(sm_share if sm_share is not None else 100 // world_size)
        return run_processes(
            call if where == "fork" else _pickled(call, where),
            method="fork" if where == "fork" else "spawn",
            devices=devices,
            make_group=make_group,
            timeout_s=timeout_s,
            may_die=frozenset(may_die),
            changes=changes,
        )


def _check(where: str, world_size: int, timeout_s: float, sm_share: int | None, may_die: Collection[int]) -> None:
    if where not in get_args(Where):
        raise ValueError(f"where={where!r} should be one of {', '.join(get_args(Where))}")
    if not 1 <= world_size <= 100:
        raise ValueError(f"world_size={world_size} should be between 1 and 100")
    if timeout_s <= 0:
        raise ValueError(f"timeout_s={timeout_s} should be a positive number of seconds")
    if sm_share is not None and where != "mps":
        raise ValueError(f"sm_share={sm_share} needs where='mps': only MPS divides a GPU's SMs among processes")
    if sm_share is not None and not 1 <= sm_share <= 100:
        raise ValueError(f"sm_share={sm_share} should be between 1 and 100 percent")
    if may_die and where == "virtual":
        raise ValueError(f"may_die={set(may_die)} needs ranks that are processes, and where='virtual' has threads")
    if wrong := [rank for rank in may_die if not 0 <= rank < world_size]:
        raise ValueError(f"may_die={set(may_die)} names {rank_list(wrong)}, and there are only {world_size} ranks")
    if where == "fork" and dist.is_initialized():
        raise ValueError("where='fork' would copy this process's torch.distributed into every rank; use where='spawn'")


def _devices(where: str, device: torch.device, world_size: int) -> tuple[str, ...]:
    """Device of each rank."""
    if device.type == "cpu":
        if where == "mps":
            raise ValueError("where='mps' shares a GPU; for CPU ranks use where='fork'")
        return ("cpu",) * world_size
    if device.type != "cuda":
        raise ValueError(f"device={str(device)!r} should be cpu, cuda or cuda:N")
    if where == "fork":
        raise ValueError(f"device={str(device)!r} needs where='spawn' or 'mps': CUDA does not survive a fork")
    num_gpus = torch.cuda.device_count()
    first = device.index or 0
    needed = world_size if where == "spawn" and device.index is None else first + 1
    if needed > num_gpus:
        instead = "where='mps' lets ranks share one" if num_gpus else "where='fork' and 'virtual' need none"
        raise ValueError(
            f"device={str(device)!r} with where={where!r} and {world_size} ranks needs {needed} GPUs, and {num_gpus} "
            f"are visible; {instead}"
        )
    if where == "spawn" and device.index is None:
        return tuple(f"cuda:{rank}" for rank in range(world_size))
    return (f"cuda:{first}",) * world_size


def _pickled(call: Call, where: str) -> bytes:
    try:
        return pickle.dumps(call)
    except Exception as error:
        raise ValueError(
            f"where={where!r} starts fresh processes, so {call.fn!r} must be a function they can import, and its "
            f"arguments must pickle: {error}"
        ) from error


def _run_threads(call: Call, world_size: int, device: torch.device, make_group: bool, timeout_s: float) -> list[Any]:
    groups: list[Group] = []
    if make_group:
        from tileflux.symm.group import local_groups

        groups = local_groups(world_size, device, **call.group_kwargs)
    reports: queue.SimpleQueue[Report] = queue.SimpleQueue()

    def rank_main(rank: int) -> None:
        try:
            value = _run_in_thread(call, groups[rank]) if groups else call.fn(rank, world_size, *call.args)
            report = Report(rank, time.monotonic(), value)
        except BaseException as error:
            report = Report.of_error(rank, error)
        reports.put(report)

    threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"rank{rank}", daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    try:
        return _gather(threads, reports, timeout_s)
    finally:
        for thread in threads:
            thread.join(0.1)  # one that has reported is on its way out
        # A thread that goes on may be using its group's memory, and its peers'.
        if not any(thread.is_alive() for thread in threads):
            for group in groups:
                group.close()


def _run_in_thread(call: Call, group: Group) -> Any:
    if group.stream is None:
        return call.fn(group, *call.args)
    with torch.cuda.stream(group.stream):
        result = call.fn(group, *call.args)
        group.stream.synchronize()
    return result


def _gather(threads: list[threading.Thread], reports: queue.SimpleQueue[Report], timeout_s: float) -> list[Any]:
    """Every thread's result, or ``RankFailed``. Threads that go on running are named, since nothing can end them."""
    deadline = time.monotonic() + timeout_s
    seen: dict[int, Report] = {}
    failures: list[Failure] = []
    while len(seen) < len(threads):
        try:
            report = reports.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        seen[report.rank] = report
        if report.summary:
            failures.append(Failure.of_report(report))
            deadline = min(deadline, time.monotonic() + _LINGER_S)
    others = {rank: "returned" for rank, report in seen.items() if not report.summary}
    running = [rank for rank in range(len(threads)) if rank not in seen]
    if failures:
        others |= {rank: f"still running; it was at\n{_stack(threads[rank])}" for rank in running}
        raise failed(len(threads), failures, others)
    if running:
        raise timed_out(len(threads), timeout_s, {rank: _stack(threads[rank]) for rank in running}, others)
    return [seen[rank].value for rank in range(len(threads))]


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    frames = [] if frame is None else traceback.extract_stack(frame)
    rank_frames = itertools.dropwhile(lambda entry: entry.filename in (threading.__file__, __file__), frames)
    text = "".join(traceback.format_list(list(rank_frames)))
    return text + "  (a thread cannot be stopped: it goes on in the background)"
