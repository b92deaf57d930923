"""Starting, watching and ending ranks that are processes.

Each rank has a pipe of its own for its one report, and the runner waits for pipes and process ends together: no
queue, no helper thread, nothing that a killed rank could leave locked.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from tileflux import env
from tileflux.testing._forking import wait_for_rest
from tileflux.testing._rank_child import Call, Job, rank_main, stack_file
from tileflux.testing._rank_report import Failure, Report, failed, timed_out

__all__ = ["Died", "run_processes"]

_LINGER_S = 0.3  # after the first failure, for the others to say what they think of it
_REST_S = 10.0  # for threads of this process to rest before it is forked
_TERM_GRACE_S = 0.5
_STACK_S = 2.0


@dataclass(frozen=True)
class Died:
    """Result of a rank that was allowed to die, and did: by which signal."""

    signal: int


@dataclass
class _Rank:
    """The runner's view of one process."""

    number: int
    process: BaseProcess
    pipe: Connection | None
    report: Report | None = None
    ended: float | None = field(default=None)
    """When the process was seen to have ended."""

    def waitables(self) -> list[Any]:
        return [self.process.sentinel] + ([] if self.pipe is None else [self.pipe])

    def update(self) -> None:
        """Take in what has happened; never blocks longer than a report takes to come through the pipe."""
        over = self.process.exitcode is not None
        if self.pipe is not None and self.pipe.poll():
            with contextlib.suppress(EOFError, OSError):  # it ended before, or in the middle of, its report
                self.report = Report.from_bytes(self.pipe.recv_bytes())
            self.close_pipe()
        if over and self.ended is None:
            self.ended = time.monotonic()

    def close_pipe(self) -> None:
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None

    def failure(self, may_die: bool) -> Failure | None:
        """Why this rank has failed, if by now it has."""
        if self.report is not None and self.report.summary:
            return Failure.of_report(self.report)
        code = self.process.exitcode
        if self.ended is None or code is None or (code < 0 and may_die) or (code == 0 and self.report is not None):
            return None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        if self.report is not None:
            how = f"returned, and then {how} while shutting down"
        elif code >= 0:
            how += " instead of returning"
        # The moment of its death is not known, only that it was seen now. Its peers may have failed of it a little
        # earlier, and nothing a peer does kills a process: so death comes first.
        return Failure(self.number, 0.0 if code < 0 else self.ended, how)

    def state(self) -> str:
        """For the others' line in an error message."""
        if self.report is not None:
            return "returned"
        return "running" if self.ended is None else "ended"


def run_processes(
    call: Call | bytes,
    *,
    method: str,
    devices: tuple[str, ...],
    make_group: bool,
    timeout_s: float,
    may_die: Set[int],
    changes: Mapping[str, str | None],
) -> list[Any]:
    """Run one process per device name, started by ``method`` with ``changes`` made to the environment."""
    job = Job(
        world_size=len(devices),
        folder=Path(tempfile.mkdtemp(prefix="tileflux-ranks-")),
        devices=devices,
        make_group=make_group,
        leave_together=not may_die,
        timeout_s=timeout_s,
        seed=torch.initial_seed(),
        parent=os.getpid(),
    )
    ranks: list[_Rank] = []
    try:
        with env.scoped(changes):
            _start(job, call, method, ranks)
        _watch(job, ranks, may_die)
        return [rank.report.value if rank.report else Died(-(rank.process.exitcode or 0)) for rank in ranks]
    finally:
        _stop(ranks)
        shutil.rmtree(job.folder, ignore_errors=True)


def _start(job: Job, call: Call | bytes, method: str, ranks: list[_Rank]) -> None:
    context = multiprocessing.get_context(method)
    for number in range(job.world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(  # type: ignore[attr-defined]
            target=rank_main, args=(job, call, number, sender), name=f"rank{number}", daemon=True
        )
        ranks.append(_Rank(number, process, receiver))
        if method == "fork":
            _rest()
        with warnings.catch_warnings():
            # Forking beside other threads is dangerous if they hold locks the child needs; these rest.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            process.start()
        sender.close()  # before the next fork, which would inherit it and keep the pipe open after this rank's death


def _rest() -> None:
    working = wait_for_rest(_REST_S)
    if working:
        warnings.warn(
            f"ranks are forked beside threads that work ({', '.join(map(str, working))}): a lock that one of them "
            f"holds now is never released in the rank, which may hang. where='spawn' starts ranks that inherit none",
            RuntimeWarning,
            stacklevel=2,
        )


def _watch(job: Job, ranks: list[_Rank], may_die: Set[int]) -> None:
    """Return when every rank has returned (or died, where allowed); else raise ``RankFailed``."""
    deadline = time.monotonic() + job.timeout_s
    while True:
        for rank in ranks:
            rank.update()
        failures = [failure for rank in ranks if (failure := rank.failure(rank.number in may_die))]
        running = [rank for rank in ranks if rank.ended is None]
        if failures:
            deadline = min(deadline, time.monotonic() + _LINGER_S)
        remaining = deadline - time.monotonic()
        if failures and (not running or remaining <= 0):
            names = {failure.rank for failure in failures}
            others = {rank.number: rank.state() for rank in ranks if rank.number not in names}
            raise failed(job.world_size, failures, others | _where_others_are(job.folder, running, names))
        if not running:
            return
        if remaining <= 0:
            others = {rank.number: rank.state() for rank in ranks if rank.ended is not None}
            raise timed_out(job.world_size, job.timeout_s, _stacks(job.folder, running), others)
        wait([item for rank in running for item in rank.waitables()], remaining)


def _where_others_are(folder: Path, running: list[_Rank], failed_ranks: Set[int]) -> dict[int, str]:
    """Lines for ranks that neither failed nor ended: one that a peer has waited for in vain hangs where it is."""
    stacks = _stacks(folder, [rank for rank in running if rank.number not in failed_ranks and rank.report is None])
    return {number: f"still running, stopped by the runner; it was at\n{stack}" for number, stack in stacks.items()}


def _stacks(folder: Path, running: list[_Rank]) -> dict[int, str]:
    """Ask the ranks still running for their stacks, and wait until the dumps are whole.

    With each, whether its process works or sleeps: one that is slow looks like one that hangs.
    """
    if not running:
        return {}
    doing = {rank.number: _doing(rank.process.pid) for rank in running}
    for rank in running:
        assert rank.process.pid, "a rank that never started cannot be running"
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, signal.SIGUSR1)
    give_up = time.monotonic() + _STACK_S
    texts: dict[int, str] = {}
    while time.monotonic() < give_up:
        time.sleep(0.05)
        before, texts = texts, {rank.number: _read(stack_file(folder, rank.number)) for rank in running}
        if texts == before and all(texts.values()):
            break
    return {number: doing[number] + (_without_runner(text) or "  (it left no stack)") for number, text in texts.items()}


def _doing(pid: int | None) -> str:
    """The state of a process, and how long it has worked, as Linux tells; nothing where it does not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return f"  (state {fields[0]}, {seconds:.1f} s of CPU so far)\n"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:  # a fresh process that has not even come to its preparations
        return ""


def _without_runner(stack: str) -> str:
    """Drop what called the rank's function: our own frames and, in a fork, all of the parent's."""
    kept, skipping = [], False
    for line in stack.splitlines():
        if not line.startswith("  "):
            skipping = False
        elif line.endswith((" in _run", " in rank_main")) and "_rank_child.py" in line:
            skipping = True
        if not skipping:
            kept.append(line)
    return "\n".join(kept)


def _stop(ranks: list[_Rank]) -> None:
    """End all that still runs, kindly first, and reap it. An interrupt in here must not leave a process behind."""
    started = [rank for rank in ranks if rank.process.pid is not None]
    try:
        for rank in started:
            rank.process.terminate()
        give_up = time.monotonic() + _TERM_GRACE_S
        for rank in started:
            rank.process.join(max(0.0, give_up - time.monotonic()))
    finally:
        for rank in started:
            rank.process.kill()
        for rank in started:
            rank.process.join()
            rank.process.close()
        for rank in ranks:
            rank.close_pipe()
