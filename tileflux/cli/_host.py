"""What ``tileflux bench --host`` makes of its ranks' times: a table, a sentence, JSON and CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tileflux.cli._report import Session
from tileflux.testing.bench import BenchCase
from tileflux.testing.host import HostTimes

__all__ = ["HostCall", "HostResult", "as_csv", "as_json", "merge", "sentence", "show"]

_LEGEND_OF_GPUS = (
    "host: microseconds from a repeated call to its return, when its work is queued and not done; best: in the "
    "quickest batch. queued: kernels, products and copies of a call. bare: the same queued with nothing around them, "
    "kernels that wait for peers replaced by such that do not. beyond: host less bare."
)
_LEGEND_OF_CPUS = (
    "host: microseconds of a call. On the CPU nothing is queued: this is all of the call, product and waiting "
    "included, and says nothing of what a GPU's host needs. best: in the quickest batch."
)


@dataclass(frozen=True)
class HostCall:
    """One contender: seconds of the slowest rank, in the median of batches and in the best."""

    name: str
    seconds: float
    best: float
    num_queued: int | None
    """None where nothing is queued, or it is not known."""
    bare: float | None

    @property
    def beyond(self) -> float | None:
        """What a call takes beyond its launches."""
        return None if self.bare is None else self.seconds - self.bare


@dataclass(frozen=True)
class HostResult:
    """One case over all ranks."""

    case: BenchCase
    problems: tuple[str, ...]
    calls: tuple[HostCall, ...]
    """None of them where a result was wrong."""
    skipped: Mapping[str, str]
    auto: str
    batches: Mapping[str, list[list[float]]]
    """Seconds by name, then by rank, then by batch."""

    def find(self, name: str) -> HostCall | None:
        """A contender by name."""
        return next((call for call in self.calls if call.name == name), None)


def merge(cases: Sequence[BenchCase], ranks: Sequence[Sequence[HostTimes]]) -> list[HostResult]:
    """Put together what every rank saw: in each batch the slowest counts."""
    return [_merge_one(case, times) for case, times in zip(cases, zip(*ranks, strict=True), strict=True)]


def _merge_one(case: BenchCase, times: Sequence[HostTimes]) -> HostResult:
    first = times[0]
    problems = tuple(dict.fromkeys(each.problem for each in times if each.problem))
    calls = []
    for name in () if problems else first.batches:
        slowest = _slowest([each.batches[name] for each in times])
        bare = statistics.median(_slowest([each.bare[name] for each in times])) if name in first.bare else None
        calls.append(HostCall(name, statistics.median(slowest), min(slowest), first.launches.get(name), bare))
    batches = {name: [each.batches[name] for each in times] for name in first.batches}
    return HostResult(case, problems, tuple(calls), first.skipped, first.auto, batches)


def _slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    return [max(batch) for batch in zip(*ranks, strict=True)]


def show(console: Console, results: Sequence[HostResult], on_gpu: bool) -> None:
    """The table, case by case, and below it what is wrong and what was skipped."""
    first = True
    for result in results:
        case = result.case
        console.print()
        heading = f"[bold]{case.op} {case.m} x {case.n} x {case.k}[/]"
        if result.problems:
            console.print(f"{heading}: [bold red]WRONG[/], so no times: {escape(result.problems[0])}", soft_wrap=True)
            continue
        console.print(heading + (f" (auto takes {result.auto})" if result.auto else ""), soft_wrap=True)
        console.print(_table(result, on_gpu, with_heading=first))
        first = False
    console.print()
    notes = dict.fromkeys(f"{name}: skipped, {why}" for result in results for name, why in result.skipped.items())
    for note in [*notes, _LEGEND_OF_GPUS if on_gpu else _LEGEND_OF_CPUS]:
        console.print(escape(note), style="dim", width=min(80, console.width))


def _table(result: HostResult, on_gpu: bool, with_heading: bool) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", show_header=with_heading)
    table.add_column("\nwhat", width=15, no_wrap=True)
    headings = ["host\nus", "best\nus", *(["\nqueued", "bare\nus", "beyond\nus"] if on_gpu else [])]
    for heading in headings:
        table.add_column(heading, width=9, justify="right", no_wrap=True)
    for call in result.calls:
        cells = [_micros(call.seconds), _micros(call.best)]
        if on_gpu:
            queued = "" if call.num_queued is None else str(call.num_queued)
            cells += [queued, _micros(call.bare), _micros(call.beyond)]
        table.add_row(call.name, *cells)
    return table


def _micros(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e6 * seconds:.1f}"


def sentence(results: Sequence[HostResult]) -> str:
    """What a call costs the host at most, over all shapes, and what of that its launches are."""
    by_name: dict[str, list[HostCall]] = {}
    for result in results:
        for call in result.calls:
            by_name.setdefault(call.name, []).append(call)
    ours = [name for name in by_name if name.startswith("ours")]
    name = next((each for each in ("ours auto", "ours fused", *ours) if each in by_name), None)
    if name is None:
        return "Nothing of ours was timed."
    worst = max(by_name[name], key=lambda call: call.seconds)
    text = f"A call of {name} holds the host for {1e6 * worst.seconds:.0f} us"
    if worst.bare is not None and worst.beyond is not None:
        text += f": {1e6 * worst.bare:.0f} us for the {worst.num_queued} things it queues"
        text += f", {1e6 * worst.beyond:.0f} us beyond them"
    if library := by_name.get("torch.mm"):
        text += f"; torch.mm for {1e6 * max(call.seconds for call in library):.0f} us"
    return text + (" (the longest of all shapes)." if len(results) > 1 else ".")


def as_json(session: Session, results: Sequence[HostResult]) -> dict[str, Any]:
    """The object of ``--json``. Fields are added over time; none changes its meaning or goes. Times are seconds."""
    return {
        "ok": not any(result.problems for result in results),
        **dataclasses.asdict(session),
        "summary": sentence(results),
        "cases": [
            {
                **_shape(result.case),
                "problems": list(result.problems),
                "auto": result.auto,
                "skipped": dict(result.skipped),
                "calls": [
                    {**dataclasses.asdict(call), "beyond": call.beyond, "batches": result.batches[call.name]}
                    for call in result.calls
                ],
            }
            for result in results
        ],
    }


def as_csv(session: Session, results: Sequence[HostResult]) -> str:
    """A line per case and contender. Times are seconds; wrong cases have no line."""
    lines = [
        {
            **_shape(result.case),
            "world_size": session.world_size,
            "where": session.where,
            "contender": call.name,
            "seconds": call.seconds,
            "best": call.best,
            "num_queued": call.num_queued,
            "bare": call.bare,
            "beyond": call.beyond,
        }
        for result in results
        for call in result.calls
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]) if lines else ["op"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _shape(case: BenchCase) -> dict[str, Any]:
    return {name: getattr(case, name) for name in ("op", "m", "n", "k", "dtype")}
