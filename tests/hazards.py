"""What racecheck reports, sorted: ``python -m tests.hazards LOG`` says which of it is ours, and fails if any is.

Triton tells each warp of a divided kernel (``gl.warp_specialize``) its partition by a byte of shared memory. Accesses
to it are ordered by ``barrier.sync 1``, which waits for all threads, some of them at another place of the program;
racecheck does not always count that as order, and reports the byte of a kernel that has nothing wrong with it. The
compiler attributes these accesses to the line that begins the kernel and to the one that divides it, on which no
consumer's are.
What racecheck says of partitions, and what it does not see: results/2026-11-16-racecheck.md.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
_ACCESS = re.compile(
    r"(?P<kind>Read|Write|Atomic) access at (?P<kernel>\S+?)\+0x[0-9a-f]+ in (?P<file>\S+?):(?P<line>\d+)"
)
_DISPLAYED = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed")
_DIVIDING = ("def ", "gl.warp_specialize(")


class Access(NamedTuple):
    """Of shared memory: what it is, in which kernel, and the line it belongs to."""

    kind: str
    kernel: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.kind.lower()} in {self.file}:{self.line} ({self.kernel})"


class Report(NamedTuple):
    """An access, and those that it is not in order with."""

    accesses: tuple[Access, ...]

    def __str__(self) -> str:
        first, *others = self.accesses
        return f"{first}, and {', '.join(str(each) for each in dict.fromkeys(others))}"


def reports(log: str) -> list[Report]:
    """All that the log of racecheck has; ``ValueError`` if it does not end, or has fewer than it counted."""
    displayed = _DISPLAYED.search(log)
    if displayed is None:
        raise ValueError("the log has no RACECHECK SUMMARY: racecheck did not end")
    found: list[list[Access]] = []
    for text in log.splitlines():
        begins = "Race reported between" in text
        if not begins and not (found and re.search(r"=\s+and (Read|Write|Atomic) access", text)):
            continue
        match = _ACCESS.search(text)
        if match is None:
            raise ValueError(f"not understood: {text.strip()!r}")
        if begins:
            found.append([])
        found[-1].append(Access(match["kind"], match["kernel"], Path(match["file"]).name, int(match["line"])))
    if len(found) != int(displayed[1]):
        raise ValueError(f"{len(found)} reports, where the summary has {displayed[1]}: raise --print-limit")
    return [Report(tuple(each)) for each in found]


def is_dividing(access: Access) -> bool:
    """Whether it is to a word by which Triton divides a kernel: on a line of the source that nothing else is on."""
    files = [file for top in ("tileflux", "tests") for file in (ROOT / top).rglob(access.file)]
    lines = files[0].read_text().splitlines() if len(files) == 1 else []
    return access.line <= len(lines) and lines[access.line - 1].strip().startswith(_DIVIDING)


def ours(found: list[Report]) -> list[Report]:
    """Those that are not about how a kernel is divided."""
    return [report for report in found if not all(is_dividing(access) for access in report.accesses)]


def main(log: str) -> int:
    """Print a line on what ``log`` has, and what is ours, if anything; 1 if there is, or it cannot be told."""
    try:
        found = reports(log)
    except ValueError as error:
        print(f"racecheck: {error}")
        return 1
    mine = ours(found)
    print(f"racecheck: {len(mine)} hazards; {len(found) - len(mine)} reports of how Triton divides a kernel")
    for report in mine[:5]:
        print(f"  {report}")
    return 1 if mine else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).read_text()))
