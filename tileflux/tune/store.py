"""Measured choices: what an entry is, how entries lie in JSON files, and which of them speak for a problem.

Ranks of one call ask with what they have, and must get the same answer, so an entry is found by what all ranks share.
What they need not share (``_UNSHARED``: N of ``ag_gemm``, K of the sums) finds nothing: of several entries that differ
in it alone, the largest decides, since most time is spent there. For ``ag_gemm``, where tiles are a rank's own affair,
an entry of the rank's own N and activation may add its tiles.

Sizes need not be those measured. M goes by buckets, the powers of two and their midpoints, and the nearest bucket
within a factor of two is taken. N and K count as the same if they differ by at most a 32nd of the larger.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tileflux.config import GemmConfig, GemmProblem

__all__ = [
    "FORMAT",
    "STRATEGIES",
    "Entry",
    "Match",
    "are_close",
    "bucket",
    "check_writable",
    "find",
    "load",
    "load_shipped",
    "save",
]

FORMAT = 1
"""Version of the files. One of another version is left alone, and not read."""
STRATEGIES = ("sequential", "pipelined", "fused")

_MAX_RATIO = 2
_CLOSENESS = 32
_SHIPPED = Path(__file__).parent / "configs"
_ALIKE = ("op", "world_size", "dtype", "arch", "num_sms", "gpu", "link")
_SHARED = {"ag_gemm": ("k",), "gemm_rs": ("n",), "gemm_ar": ("n",), "gemm": ("n", "k")}
_UNSHARED = {"ag_gemm": "n", "gemm_rs": "k", "gemm_ar": "k"}
_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "str": (str,), "bool": (bool,), "int | None": (int, type(None))}
_UNREADABLE = (KeyError, TypeError, ValueError, AttributeError)
_log = logging.getLogger("tileflux")

_Fields = TypeVar("_Fields", GemmConfig, GemmProblem)


@dataclass(frozen=True)
class Entry:
    """What was quickest for a problem, and by how much."""

    problem: GemmProblem
    """As it was measured, exact sizes included."""
    strategy: str
    algorithm: str
    """Of ``gemm_ar``: ``one_shot`` or ``two_shot``; empty for the other ops."""
    config: GemmConfig
    seconds: Mapping[str, float]
    """The best time of each strategy, in rounds in which they took turns."""
    date: str
    """Of the measurement, as 2026-11-15."""
    versions: Mapping[str, str]
    """Of tileflux, torch and triton."""
    with_ghosts: bool = False
    """Whether the peers were played, and all but the slowest link between ranks was real (``testing/ghost.py``)."""

    def __post_init__(self) -> None:
        if self.problem.op not in _SHARED or self.strategy not in STRATEGIES:
            raise ValueError(f"there is no {self.strategy} {self.problem.op}")
        if self.algorithm not in (("one_shot", "two_shot") if self.problem.op == "gemm_ar" else ("",)):
            raise ValueError(f"algorithm={self.algorithm!r} is none of {self.problem.op}")
        if min(self.problem.m, self.problem.n, self.problem.k) < 1:
            raise ValueError("sizes should be at least 1")
        if self.strategy not in self.seconds or not all(0 < took < math.inf for took in self.seconds.values()):
            raise ValueError("seconds should be positive, and there for the strategy that won")

    @property
    def verdict(self) -> str:
        """What won, over ``sequential``; if that is what won, over the next best."""
        others = {name: took for name, took in self.seconds.items() if name != self.strategy}
        if not others:
            return f"{self.strategy} with the quickest tiles"
        rival = "sequential" if "sequential" in others else min(others, key=lambda name: others[name])
        ratio = others[rival] / self.seconds[self.strategy]
        return f"{self.strategy} {ratio:.2f}x over {rival}" if ratio >= 1.005 else f"{self.strategy} level with {rival}"


@dataclass(frozen=True)
class Match:
    """Who speaks for a problem."""

    leader: Entry
    """Decides what all ranks have to do alike."""
    tiles: GemmConfig | None
    """Of the leader, or of an entry that is nearer and does the same otherwise; None if there is none."""


def bucket(m: int) -> int:
    """The power of two, or midpoint of two of them, that is nearest to ``m`` as a ratio."""
    low = 1 << (m.bit_length() - 1)
    return min((low, 3 * low // 2, 2 * low), key=lambda size: max(size / m, m / size))


def are_close(first: int, second: int) -> bool:
    """Whether two sizes count as the same."""
    return _CLOSENESS * abs(first - second) <= max(first, second)


def find(entries: Sequence[Entry], problem: GemmProblem) -> Match | None:
    """The entries that speak for ``problem``, which has M and all shared sizes of at least 1."""
    op, wanted = problem.op, bucket(problem.m)
    near = [
        (ratio, bucket(entry.problem.m), entry)
        for entry in entries
        if _is_alike(entry.problem, problem)
        and (ratio := _ratio(bucket(entry.problem.m), wanted)) <= _MAX_RATIO
        and (op != "gemm" or entry.problem.is_heavy == problem.is_heavy)
    ]
    if not near:
        return None
    nearest = min(near, key=lambda each: each[:2])[1]
    entries = [entry for _, size, entry in near if size == nearest]
    axis = _UNSHARED.get(op)
    if axis is None:
        leader = min(entries, key=lambda entry: abs(entry.problem.n - problem.n) + abs(entry.problem.k - problem.k))
        return Match(leader, leader.config)
    leader = max(entries, key=lambda entry: (getattr(entry.problem, axis), not entry.problem.is_heavy, entry.date))
    if op != "ag_gemm":
        return Match(leader, leader.config)
    own = [
        entry
        for entry in entries
        if entry.problem.is_heavy == problem.is_heavy
        and are_close(entry.problem.n, problem.n)
        and (entry.strategy, entry.config.num_chunks) == (leader.strategy, leader.config.num_chunks)
    ]
    best = min(own, key=lambda entry: abs(entry.problem.n - problem.n), default=None)
    return Match(leader, None if best is None else best.config)


def _is_alike(first: GemmProblem, second: GemmProblem) -> bool:
    return all(getattr(first, name) == getattr(second, name) for name in _ALIKE) and all(
        are_close(getattr(first, axis), getattr(second, axis)) for axis in _SHARED[first.op]
    )


def _ratio(first: int, second: int) -> float:
    return max(first, second) / min(first, second)


@functools.cache
def load(folder: str) -> tuple[Entry, ...]:
    """All entries in a folder's files, once per process: a choice that changes within a run would part the ranks.

    What cannot be read is told once in the log, and left out.
    """
    entries: list[Entry] = []
    for file in _files(folder):
        try:
            found, problems = _read(file)
        except (OSError, ValueError) as error:
            _log.warning("%s is left out, so auto knows nothing of what was measured there: %s", file, error)
            continue
        if problems:
            _log.warning("%s: %d entries are left out; the first: %s", file, len(problems), problems[0])
        entries += found
    return tuple(entries)


def load_shipped() -> tuple[Entry, ...]:
    """The entries that come with the package."""
    return load(str(_SHIPPED))


def _files(folder: str) -> list[Path]:
    if not folder:
        return []
    try:
        return sorted(file for file in Path(folder).iterdir() if file.suffix == ".json")
    except FileNotFoundError:
        return []
    except OSError as error:
        _log.warning("measured entries are left out: %s", error)
        return []


def _read(file: Path) -> tuple[list[Entry], list[str]]:
    """The entries of a file, and what is wrong with the others; ``ValueError`` if there is no telling."""
    entries, problems = [], []
    for number, each in enumerate(_as_written(file)):
        try:
            entries.append(_entry(each))
        except _UNREADABLE as error:
            problems.append(f"entry {number}: {type(error).__name__} {error}")
    return entries, problems


def _as_written(file: Path) -> list[Any]:
    """The entries of a file as JSON, also those that cannot be read; ``ValueError`` if it is no such file."""
    whole = json.loads(file.read_text())  # its errors, and those of decoding, are ValueErrors
    version = whole.get("version") if isinstance(whole, dict) else None
    if version != FORMAT or not isinstance(whole.get("entries"), list):
        raise ValueError(f"its version is {version}, and this tileflux reads {FORMAT}")
    return list(whole["entries"])


def _entry(given: Any) -> Entry:
    texts = {name: str(given[name]) for name in ("strategy", "algorithm", "date")}
    return Entry(
        problem=_fields(GemmProblem, given["problem"]),
        config=_fields(GemmConfig, _as_of_now(given["config"])),
        seconds={str(name): float(took) for name, took in given["seconds"].items()},
        versions={str(name): str(version) for name, version in given["versions"].items()},
        with_ghosts=bool(given.get("with_ghosts", False)),
        **texts,
    )


def _as_of_now(config: Any) -> dict[str, Any]:
    """An older configuration without the switches that are gone, which it must not have used."""
    kept = {**config}
    if kept.pop("streams", False) is not False:
        raise ValueError("it was measured with streams=True, tiles cut along K, which are no more")
    return kept


def _fields(kind: type[_Fields], given: Any) -> _Fields:
    """A dataclass from JSON, with every type as it should be: a kernel would fail on 3.5 stages much later."""
    types = {field.name: _TYPES[str(field.type)] for field in dataclasses.fields(kind)}
    for name, value in given.items():
        if name in types and type(value) not in types[name]:
            raise ValueError(f"{name}={value!r} is no {types[name][0].__name__}")
    return kind(**given)


def check_writable(folder: str) -> None:
    """Make the folder. ``OSError`` if nothing can be kept there."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written")


def save(folder: str, entries: Sequence[Entry]) -> list[Path]:
    """Add entries to the folder's file for their op, in place of those of the same key; returns the files.

    What else is in the file stays as it was written, also entries that only another version can read. A file that
    this version cannot read at all is not overwritten: ``ValueError``.
    """
    check_writable(folder)
    files = []
    with _locked(Path(folder)):
        for op in dict.fromkeys(entry.problem.op for entry in entries):
            file = Path(folder) / f"{op}.json"
            new = [entry for entry in entries if entry.problem.op == op]
            try:
                kept = [(_problem_of(each), each) for each in _as_written(file)] if file.exists() else []
            except ValueError as error:
                raise ValueError(f"{file} is not a file of entries; move it away: {error}") from None
            for entry in new:  # also of the new ones only the last of a key stays
                kept = [each for each in kept if each[0] is None or not _is_same_key(each[0], entry.problem)]
                kept.append((entry.problem, dataclasses.asdict(entry)))
            text = json.dumps({"version": FORMAT, "entries": [written for _, written in kept]}, indent=1)
            # In one step: whoever reads meanwhile finds the old file or the new one.
            whole = file.with_suffix(f".{os.getpid()}.tmp")
            whole.write_text(text + "\n")
            whole.replace(file)
            files.append(file)
    return files


def _problem_of(written: Any) -> GemmProblem | None:
    """What an entry is of, whether or not the rest of it can be read; None if there is no telling."""
    try:
        problem = _fields(GemmProblem, written["problem"])
    except _UNREADABLE:
        return None
    return problem if min(problem.m, problem.n, problem.k) >= 1 else None


def _is_same_key(first: GemmProblem, second: GemmProblem) -> bool:
    return (
        _is_alike(first, second)
        and bucket(first.m) == bucket(second.m)
        and first.is_heavy == second.is_heavy
        and are_close(first.n, second.n)
        and are_close(first.k, second.k)
    )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Alone among the processes that write here: of two that read, add and write, one would lose the other's."""
    import fcntl

    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
