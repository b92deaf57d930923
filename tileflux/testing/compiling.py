"""Kernels compiled before they are launched, by processes side by side, without a GPU.

Compiling a GEMM takes a core a second or more, and tuning launches a hundred of them. The processes here go through
the launcher itself (``kernels/gemm_launch.py``), with a driver that knows the architecture and nothing to launch on: so
what Triton keeps on disk has the key that the launch will ask for. A variant that is missed, for whatever reason, the
launch compiles.
"""

from __future__ import annotations

import dataclasses
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tileflux.config import GemmConfig, GemmProblem
from tileflux.kernels import gemm_hopper_launch, gemm_launch, gemm_shared, prepared, roles
from tileflux.kernels.gemm_shared import Launch
from tileflux.kernels.loading import settle_keys
from tileflux.kernels.operands import Operands
from tileflux.kernels.plan import split_rows
from tileflux.kernels.prepared import Kept
from tileflux.kernels.shards import scatter_shards
from tileflux.symm.group import Group
from tileflux.testing import _compiling_child
from tileflux.tune.search import Candidate
from tileflux.tune.store import load_shipped

__all__ = ["Compilers", "Variant", "pretend", "shipped_variants", "variants"]

_GRACE_S = 60.0  # for a compilation that has begun
_CLOSING_S = 10.0


@dataclass(frozen=True)
class Variant:
    """What decides how a GEMM is compiled, as far as these ways to launch it differ.

    Of sizes that is what is left when they are divided by what tiles have and what is loaded at once: many shapes have
    the same variants.
    """

    role: str
    """A name in ``kernels/roles.py``."""
    dtype: str
    config: GemmConfig
    num_columns: int
    depth: int
    world_size: int
    num_sms: int
    arch: int
    is_virtual: bool
    shares_gpu: bool = False
    rows: tuple[int, ...] = (16,)
    """By rank, as far as Hopper's loop cares: whether tiles come out even."""

    def compile(self) -> None:
        """Compile it into Triton's cache, in a process that has called ``pretend``."""
        role, group, turn = getattr(roles, self.role), None if self.world_size == 1 else self._group(), self.turn()
        gemm_launch.launch_gemm(
            self.operands(), role, self.config, group=group, turn=turn, releases=self._releases(), load_only=True
        )

    def plan(self) -> Launch:
        """What is decided about its launch, also in a process that is to launch others."""
        use_tma = self.arch >= 90 and gemm_launch._fits_tma(self.operands(), self.config)
        return gemm_launch._plan(
            self.operands(), getattr(roles, self.role), self.config, self._group(), self.turn(), self._releases(),
            use_tma, load_only=True,
        )  # fmt: skip

    def is_for_hopper(self) -> bool:
        """Whether Hopper's own loop runs it."""
        role, plan = getattr(roles, self.role), self.plan()
        is_wanted = self.config.hopper and self.arch == 90 and plan.use_tma and not plan.fetches
        return is_wanted and gemm_hopper_launch.why_not_hopper(self.operands(), role, self.config) is None

    def operands(self) -> Operands:
        """As far as they matter: of few rows."""
        dtype = getattr(torch, self.dtype)
        x, weight = torch.empty(16, self.depth, dtype=dtype), torch.empty(self.num_columns, self.depth, dtype=dtype)
        return Operands(x, weight, torch.empty(16, self.num_columns, dtype=dtype))

    def turn(self) -> Any:
        """In the place of a ``Turn``; None for the product alone."""
        if self.world_size == 1 or getattr(roles, self.role) is roles.PLAIN:
            return None
        plan = SimpleNamespace(
            rows=self.rows, num_chunks=1, chunk_rows=max(self.rows), has_even_slabs=lambda num_columns: True
        )
        return SimpleNamespace(plan=plan, launches=Kept(), table=torch.zeros(1, dtype=torch.int64))

    def _group(self) -> Any:
        traits = SimpleNamespace(num_sms=self.num_sms or 1024, links=("same GPU",) if self.shares_gpu else ())
        return SimpleNamespace(
            name="", world_size=self.world_size, traits=traits, stream=object() if self.is_virtual else None,
            device=torch.device("cuda"),
        )  # fmt: skip

    def _releases(self) -> bool:
        is_alone = self.world_size == 1 or self.role == "PLAIN"
        return not is_alone and self.role not in ("SEND", "STAGE")  # whose calls end with the sum


def variants(problem: GemmProblem, candidates: Sequence[Candidate], group: Group) -> list[Variant]:
    """What the candidates launch of our GEMM, each once, in their order; nothing on the CPU."""
    if not problem.arch:
        return []
    found: list[Variant] = []
    for candidate in candidates:
        # First the product alone, by which it is found out whether the tiles fit.
        roles = [("PLAIN", 1)]
        is_virtual = group.stream is not None
        if is_virtual and candidate.strategy != "fused":
            roles.append(("PLAIN", problem.world_size))  # what virtual ranks multiply with instead of the library
        if candidate.strategy == "fused" and problem.world_size > 1:
            roles.append((_fused_role(problem.op, candidate, group), problem.world_size))
        for role, world_size in roles:
            found.append(_variant(problem, candidate.config, role, world_size, is_virtual and world_size > 1))
    return list(dict.fromkeys(found))


def shipped_variants() -> list[Variant]:
    """What the entries that come with the package launch of our GEMM, each once.

    The product alone, and fused also where another strategy was quicker: who insists on fused gets the entry's tiles.
    """
    found: list[Variant] = []
    for entry in load_shipped():
        # Only a GPU of one's own has copies that take no SM, as ``symm/cuda.py`` has it.
        traits = SimpleNamespace(copies_need_sms=entry.problem.link == "same GPU")
        group: Any = SimpleNamespace(stream=None, traits=traits)
        found += variants(entry.problem, [Candidate("fused", entry.algorithm, entry.config)], group)
    return list(dict.fromkeys(found))


def _variant(problem: GemmProblem, config: GemmConfig, role: str, world_size: int, is_virtual: bool) -> Variant:
    rows = _typical_rows(problem, config, role) if config.hopper and role != "PLAIN" else (16,) * world_size
    # What the kernel is not compiled for; feeders are, as far as it has them.
    config = dataclasses.replace(config, num_chunks=1, num_sms=None)
    num_sms = problem.num_sms
    if role != "GATHER":
        config, num_sms = dataclasses.replace(config, num_feeders=1), 0
    # What neither loop asks is left as it is, so that variants that are alike are compiled once.
    fetches = config.fetches or getattr(roles, role).num_turns > 1
    shares_gpu = fetches and role != "PLAIN" and problem.link == "same GPU"
    return Variant(
        role, problem.dtype, config, 1024 + problem.n % 1024, 1024 + problem.k % 1024, world_size, num_sms,
        problem.arch, is_virtual, shares_gpu, rows,
    )  # fmt: skip


def _typical_rows(problem: GemmProblem, config: GemmConfig, role: str) -> tuple[int, ...]:
    """Rows by rank with which ``gemm_hopper_launch`` decides as with the problem's."""
    rows = tuple(split_rows(problem.m, problem.world_size))
    is_even = not any(count % config.block_m for count in rows)
    if role == "STAGE":
        itemsize = getattr(torch, problem.dtype).itemsize
        plan = scatter_shards(problem.op, rows, problem.n, itemsize, config, by_copies=True)
        is_even &= plan.has_even_slabs(problem.n)
    return (config.block_m + (0 if is_even else 1),) * len(rows)


def _fused_role(op: str, candidate: Candidate, group: Group) -> str:
    """As ``kernels/dense.py`` and ``scatter.py`` take them; a test compares."""
    if op == "gemm_ar" and candidate.algorithm == "one_shot":
        return "SPREAD"
    by_copies = not group.traits.copies_need_sms
    if op == "ag_gemm":
        return "ARRIVING" if by_copies else "GATHER"
    if by_copies:
        return "STAGE"
    return "SEND" if candidate.config.sums_apart else "SCATTER"


def pretend(arch: int) -> None:
    """Make this process one that compiles for ``arch``, and launches nothing: for good, so only in one of its own."""
    driver.set_active(_Nowhere(arch))
    settle_keys()

    run = JITFunction.run

    def only_compile(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *arguments, grid=grid, warmup=True, **options)

    def load(device: object, key: object, launch: Callable[[], object], group: object = None) -> None:
        launch()

    replaced: list[tuple[Any, str, Any]] = [
        (JITFunction, "run", only_compile),
        (prepared, "_KNOWS_LAUNCHER", False),  # nothing is loaded, so nothing can be launched again
        (gemm_hopper_launch, "load_once", load),
        (gemm_launch, "load_once", load),
        (gemm_launch, "is_hopper", lambda device: arch == 90),
        (gemm_launch, "_has_tma", lambda device: arch >= 90),
        (gemm_shared, "_is_interpreted", lambda group: False),
        (gemm_shared, "sms_for", lambda group: (0 if group is None else group.traits.num_sms) or 1024),
    ]
    for module, name, value in replaced:
        getattr(module, name)  # there to be replaced
        setattr(module, name, value)


class _Nowhere:
    """In the place of Triton's driver: what it compiles for, without a GPU to ask."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compilers:
    """Processes that compile, started when first needed, for as long as the ``with`` block."""

    def __init__(self, num_processes: int) -> None:
        self._idle: queue.SimpleQueue[_Process | None] = queue.SimpleQueue()
        self._num_processes = num_processes
        self._all: list[_Process] = []
        self._asked: set[Variant] = set()
        for _ in range(num_processes):
            self._idle.put(None)

    def __enter__(self) -> Compilers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._all:
            process.close()

    def compile(self, wanted: Sequence[Variant], limit_s: float) -> int:
        """Compile what has not been asked for before, in this order, until ``limit_s`` is over; returns how many.

        One alone is left to its launch, which is as quick.
        """
        new = [variant for variant in dict.fromkeys(wanted) if variant not in self._asked]
        if self._num_processes < 1 or len(new) < 2 or limit_s <= 0:
            return 0
        until = time.monotonic() + limit_s
        pending: queue.SimpleQueue[Variant] = queue.SimpleQueue()
        for variant in new:
            pending.put(variant)
        num_compiled: queue.SimpleQueue[int] = queue.SimpleQueue()

        def serve() -> None:
            process = self._idle.get() or self._start()
            with suppress(queue.Empty, OSError, EOFError):
                while time.monotonic() < until:
                    variant = pending.get_nowait()
                    self._asked.add(variant)
                    if process.compile(variant):
                        num_compiled.put(1)
            self._idle.put(process if process.is_alive() else None)

        threads = [threading.Thread(target=serve, daemon=True) for _ in range(min(self._num_processes, len(new)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until + _GRACE_S - time.monotonic()))
        if any(thread.is_alive() for thread in threads):  # a compiler that does not end: whoever waits sees it die
            for process in self._all:
                process.kill()
        return num_compiled.qsize()

    def _start(self) -> _Process:
        process = _Process()
        self._all.append(process)
        return process


class _Process:
    """One that compiles what it is sent."""

    def __init__(self) -> None:
        # By its path, and -P: of our package it imports what it is sent, by the same search path as this process.
        self._process = subprocess.Popen(
            [sys.executable, "-P", _compiling_child.__file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._send([path or "." for path in sys.path])

    def compile(self, variant: Variant) -> bool:
        """Whether it was compiled; a compiler that gave up says so, and ``EOFError`` one that died."""
        assert self._process.stdout is not None
        self._send(variant)
        answer = self._process.stdout.readline()
        if not answer:
            raise EOFError
        return answer == _compiling_child.COMPILED

    def is_alive(self) -> bool:
        """Whether it can be sent more."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def close(self) -> None:
        """Let it end, which it does when nothing more can come."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_CLOSING_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        self._process.stdout.close()

    def _send(self, what: object) -> None:
        assert self._process.stdin is not None
        pickle.dump(what, self._process.stdin)
        self._process.stdin.flush()
