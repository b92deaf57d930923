"""Every kernel compiled for every architecture, on a machine that need not have a GPU, and judged.

A case passes on an architecture if it compiles, keeps within its bound of spilled bytes, asks for no more shared
memory than the chip has, and obeys the rules of ``ptx_lint``. Triton itself compiles a kernel that asks for too much
shared memory, and finds out at the launch.

Compiling happens in fresh processes (``_compile_child``): some faults abort the process, and ``TRITON_INTERPRET`` is
read when ``@triton.jit`` runs, so a process that interprets kernels has nothing left to compile. This module imports
neither Triton nor a kernel.
"""

from __future__ import annotations

import json
import os
import queue
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tileflux import env
from tileflux.errors import CompileGateError
from tileflux.testing import _compile_child, ptx_lint

__all__ = [
    "ARCHITECTURES",
    "SHARED_MEMORY_BYTES",
    "CompileCase",
    "CompileReport",
    "Imported",
    "assert_clean",
    "gate_library",
    "run_gate",
]

ARCHITECTURES = (80, 89, 90, 100)
"""What a kernel compiles for unless its case says otherwise: sm_80, sm_89, sm_90, sm_100."""

SHARED_MEMORY_BYTES: Mapping[int, int] = MappingProxyType(
    {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448, 120: 101_376}
)
"""The most shared memory one program may ask for, by architecture."""

_TENSOR_MEMORY_COLUMNS = 512  # of sm_100; older chips have none, and ask for none
_KERNEL_PATH = re.compile(r"[^:]+:[A-Za-z_][\w.]*(\(\))?")
_START_DEADLINE_S = 120.0  # for a child to import torch and Triton on a busy machine


@dataclass(frozen=True)
class Imported:
    """A constexpr that is an object of a module, such as a dtype or a jit function: ``triton.language:bfloat16``."""

    path: str

    def __post_init__(self) -> None:
        _check_path(self.path)


@dataclass(frozen=True)
class CompileCase:
    """One specialisation of a kernel, and what it is held to.

    ``kernel`` is ``module:name``, ``file.py:name``, or ``module:name()`` where a function makes the kernel.
    ``signature`` maps run-time arguments to types (``"*bf16"``, ``"i64"``, ``"tensordesc<bf16[128,64]>"``) and
    ``constexprs`` the others to values; constexprs with a default may be left out. ``divisible_by_16`` names the
    arguments known to be multiples of 16, by default all pointers. ``options`` go to the compiler: ``num_warps``,
    ``num_stages``, ``maxnreg``. ``waits``, ``signals`` and ``counts`` say what must be found in the PTX;
    ``announces_tma=False``, that what is stored by TMA is announced by the end of the launch alone.
    """

    name: str
    kernel: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, object] = field(default_factory=dict)
    divisible_by_16: tuple[str, ...] | None = None
    options: Mapping[str, int] = field(default_factory=dict)
    architectures: tuple[int, ...] = ARCHITECTURES
    waits: bool = False
    signals: bool = False
    counts: bool = False
    announces_tma: bool = True
    max_spill_bytes: int = 0

    def __post_init__(self) -> None:
        _check_path(self.kernel)
        _check_architectures(self.architectures)
        both = sorted(self.signature.keys() & self.constexprs.keys())
        if both:
            raise ValueError(f"{self.name}: {', '.join(both)} should be in signature or in constexprs, not in both")
        unknown = [name for name in self.divisible_by_16 or () if name not in self.signature]
        if unknown:
            raise ValueError(f"{self.name}: divisible_by_16 names {', '.join(unknown)}, which signature has not")
        if self.max_spill_bytes < 0:
            raise ValueError(f"{self.name}: max_spill_bytes={self.max_spill_bytes} should be at least 0")
        self.request(self.architectures[0])  # fails for constexprs that cannot be sent

    def request(self, arch: int) -> dict[str, object]:
        """What the child process is asked, as JSON types."""
        return {
            "kernel": self.kernel,
            "signature": dict(self.signature),
            "constexprs": {name: _encode(value) for name, value in self.constexprs.items()},
            "divisible_by_16": self.divisible_by_16,
            "options": dict(self.options),
            "arch": arch,
        }


@dataclass(frozen=True)
class CompileReport:
    """What came of one case on one architecture. Figures are None, and ``ptx`` empty, if it did not compile."""

    case: str
    arch: int
    problems: tuple[str, ...]
    registers: int | None = None
    stack_bytes: int | None = None
    shared_bytes: int | None = None
    ptx: str = field(default="", repr=False)
    seconds: float = 0.0

    def check(self) -> None:
        """Raise ``CompileGateError`` if there is a problem."""
        assert_clean([self])


def assert_clean(reports: Sequence[CompileReport]) -> None:
    """Raise ``CompileGateError`` with every problem of every report."""
    if not reports:
        raise ValueError("no reports: a gate that judged nothing should not pass")
    problems = [f"{report.case} sm_{report.arch}: {problem}" for report in reports for problem in report.problems]
    if problems:
        raise CompileGateError("\n".join([f"{len(problems)} problem(s) in {len(reports)} compilations", *problems]))


def gate_library(archs: Sequence[int] | None = None, jobs: int = 2) -> list[CompileReport]:
    """Judge every case of ``testing/compile_cases.py``; raises ``CompileGateError`` if one has a problem."""
    cases: Sequence[CompileCase] = import_module("tileflux.testing.compile_cases").CASES
    reports = run_gate(cases, archs, jobs)
    assert_clean(reports)
    return reports


def run_gate(
    cases: Sequence[CompileCase],
    archs: Sequence[int] | None = None,
    jobs: int = 2,
    *,
    deadline_s: float = 120.0,
    cache_dir: Path | None = None,
) -> list[CompileReport]:
    """Compile each case for each of its architectures, or for those among ``archs``; one report each, in order.

    ``jobs`` processes work side by side. A compilation that outlasts ``deadline_s``, or takes its process with it,
    is a report with a problem like any other. With ``cache_dir`` Triton keeps what it compiled there, and a second
    run takes it back; by default nothing is kept, so that every verdict is on what is there now.
    """
    if jobs < 1:
        raise ValueError(f"jobs={jobs} should be at least 1")
    if archs is not None:
        _check_architectures(archs)
    names = [case.name for case in cases]
    if len(set(names)) < len(names):
        raise ValueError(f"case names {sorted(name for name in set(names) if names.count(name) > 1)} are not unique")
    work = [(case, arch) for case in cases for arch in case.architectures if archs is None or arch in archs]
    reports: dict[int, CompileReport] = {}
    pending: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(work)):
        pending.put(index)

    def serve(child: _Child) -> None:
        with suppress(queue.Empty):
            while True:
                index = pending.get_nowait()
                reports[index] = child.compile(*work[index], deadline_s)

    with tempfile.TemporaryDirectory(prefix="tileflux-gate-") as folder:
        cache = cache_dir or Path(folder, "cache")
        children = [_Child(Path(folder, f"child{number}"), cache) for number in range(min(jobs, len(work)))]
        try:
            with ThreadPoolExecutor(jobs) as pool:
                running = [pool.submit(serve, child) for child in children]
                try:
                    for future in running:
                        future.result()
                except BaseException:  # an interrupt: the pool ends only when there is nothing left to do
                    with suppress(queue.Empty):
                        while True:
                            pending.get_nowait()
                    for child in children:
                        child.kill()
                    raise
        finally:
            for child in children:
                child.stop()
    return [reports[index] for index in range(len(work))]


class _ChildLost(Exception):
    """The child process died or did not answer; says how."""


class _Child:
    """A process that compiles, started when first needed and again after it died."""

    def __init__(self, folder: Path, cache_dir: Path) -> None:
        folder.mkdir()
        self._folder, self._cache_dir, self._log = folder, cache_dir, folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def compile(self, case: CompileCase, arch: int, deadline_s: float) -> CompileReport:
        """One compilation, judged. Never raises for what the kernel or its compiler did."""
        start = time.monotonic()
        try:
            process = self._process or self._start()
            log_start = self._log.stat().st_size
            answer = self._ask(process, case.request(arch), deadline_s, log_start)
        except _ChildLost as lost:
            self.stop()
            return CompileReport(case.name, arch, (str(lost),), seconds=time.monotonic() - start)
        if "error" in answer:
            diagnosis = _diagnosis(self._log, log_start)
            return CompileReport(case.name, arch, (f"does not compile: {_shorten(answer['error'])}{diagnosis}",))
        return _judge(case, arch, answer)

    def kill(self) -> None:
        """End the process and a ptxas it may have started; whoever waits for an answer sees it die."""
        if (process := self._process) is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its number is its own until stop() reaps it

    def stop(self) -> None:
        """End the process and forget it."""
        self.kill()
        process, self._process = self._process, None
        if process is not None:
            process.communicate()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", _compile_child.__file__],  # the file: it needs none of our package
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env.compiler_environment(str(self._cache_dir), str(self._folder), sys.path),
                start_new_session=True,  # a group of its own, so that stop() reaches ptxas too
            )
        self._read_line(self._process, _START_DEADLINE_S, 0)
        return self._process

    def _ask(
        self, process: subprocess.Popen[bytes], request: object, deadline_s: float, log_start: int
    ) -> dict[str, Any]:
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # reading says better what happened
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._read_line(process, deadline_s, log_start))
        return answer

    def _read_line(self, process: subprocess.Popen[bytes], deadline_s: float, log_start: int) -> bytes:
        assert process.stdout is not None
        until = time.monotonic() + deadline_s
        line = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise _ChildLost(f"took longer than {deadline_s:g} s to compile")
                received = os.read(process.stdout.fileno(), 1 << 16)
                if not received:
                    end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
                    assert end is not None
                    exited = end.si_code == os.CLD_EXITED
                    how = f"exit status {end.si_status}" if exited else signal.Signals(end.si_status).name
                    raise _ChildLost(f"the compiling process died: {how}{_diagnosis(self._log, log_start)}")
                line += received
        return bytes(line)


def _judge(case: CompileCase, arch: int, answer: Mapping[str, Any]) -> CompileReport:
    problems = []
    if answer["stack_bytes"] > case.max_spill_bytes:
        problems.append(f"spills {answer['stack_bytes']} bytes a thread, allowed are {case.max_spill_bytes}")
    if answer["shared_bytes"] > SHARED_MEMORY_BYTES[arch]:
        problems.append(
            f"asks for {answer['shared_bytes']} bytes of shared memory, the chip has {SHARED_MEMORY_BYTES[arch]}"
        )
    problems += answer["complaints"]
    columns = answer["tensor_memory_columns"]
    if columns > _TENSOR_MEMORY_COLUMNS:
        problems.append(f"asks for {columns} columns of tensor memory, the chip has {_TENSOR_MEMORY_COLUMNS}")
    try:
        problems += ptx_lint.lint(
            answer["ptx"], waits=case.waits, signals=case.signals, counts=case.counts, announces_tma=case.announces_tma
        )
    except ValueError as error:
        problems.append(f"the lint cannot read the PTX: {error}")
    return CompileReport(
        case.name,
        arch,
        tuple(problems),
        registers=answer["registers"],
        stack_bytes=answer["stack_bytes"],
        shared_bytes=answer["shared_bytes"],
        ptx=answer["ptx"],
        seconds=answer["seconds"],
    )


def _diagnosis(log: Path, start: int) -> str:
    """What the compiler wrote to stderr about its failure, from ``start`` on, as the end of a message."""
    with log.open("rb") as file:
        file.seek(start)
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"LLVM ERROR|\berror:|Assertion|UNREACHABLE|Error:", line)]
    return f" ({_shorten((telling or lines)[-1])})" if lines else ""


def _shorten(text: str, limit: int = 500) -> str:
    """On one line; the end of a compiler's message says more than its beginning, but for ptxas's command line."""
    text = " | ".join(line.strip() for line in text.split("Repro command:")[0].splitlines() if line.strip())
    return text if len(text) <= limit else "..." + text[-limit:]


def _encode(value: object) -> object:
    if isinstance(value, Imported):
        return {"import": value.path}
    if isinstance(value, tuple):
        return {"tuple": [_encode(item) for item in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"constexpr {value!r} should be a number, a string, None, a tuple of those or Imported(...)")


def _check_path(path: str) -> None:
    if not _KERNEL_PATH.fullmatch(path):
        raise ValueError(f"{path!r} should be 'module:name', 'file.py:name' or 'module:name()'")


def _check_architectures(architectures: Sequence[int]) -> None:
    known = sorted(SHARED_MEMORY_BYTES)
    unknown = [arch for arch in architectures if arch not in known]
    if unknown:
        raise ValueError(f"architectures {unknown} should be among {known}")
    if not architectures:
        raise ValueError(f"no architectures: there should be at least one of {known}")
