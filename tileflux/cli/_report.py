"""What ``tileflux bench`` makes of its ranks' times: a table, a sentence, JSON and CSV. The picture: ``_plot.py``."""

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

from tileflux.perf.figures import BASELINES, OURS, CaseResult, Duel, Timing, Verdict, judge, summarize
from tileflux.testing.bench import BenchCase, RankTimes
from tileflux.testing.timing import MAX_ROUNDS, STEADY, median_error

__all__ = ["Measured", "Session", "as_csv", "as_json", "count_rounds", "labels", "merge", "sentence", "show"]

_PARTS = ("gemm", "comm", "beside")
_APART = "route"  # timed beside the parts, and in nobody's time
_SHORT = {"sequential": "seq.", "pipelined": "pipe.", "torch": "torch"}
_MAX_LOSSES = 3
_MAX_UNSTEADY = 4
_LEGEND = (
    "total: median over {} of the slowest rank. over: how many times as quick. spread: half the distance between "
    "the quartiles of the rounds."
)
_LEGEND_OF_OVERLAP = (
    " ECT: exposed communication, total less T_gemm. hidden: share of T_comm that is not exposed. limit: the longer of "
    "T_gemm and T_comm."
)
_LEGEND_OF_ROUTING = " T_route: what makes the routing, which everybody here is given."
_LEGEND_OF_INDEX = " T_index: finding out who goes where and who has come, which is in everybody's time."


@dataclass(frozen=True)
class Measured:
    """One case over all ranks."""

    case: BenchCase
    result: CaseResult | None
    """None where a result was wrong: there is no speed then."""
    problems: tuple[str, ...]
    rounds: Mapping[str, list[list[float]]]
    """Seconds by name, then by rank, then by round."""

    @property
    def num_rounds(self) -> int:
        """Rounds that were timed."""
        return len(next(iter(self.rounds.values()))[0]) if self.rounds else 0

    @property
    def unsteady(self) -> list[tuple[str, float]]:
        """Contenders whose median is not known well enough although there were as many rounds as there may be."""
        if self.result is None or self.case.num_rounds is not None:
            return []
        errors = {each.name: median_error(each.spread, self.num_rounds) for each in self.result.contenders}
        return [(name, error) for name, error in errors.items() if error >= STEADY]


@dataclass(frozen=True)
class Session:
    """Where the numbers are from."""

    command: str
    """All options as they were taken, so that the same call gives the same again."""
    date: str
    where: str
    world: str
    world_size: int
    device: str
    link: str
    """The emulated link between CPU ranks; empty if there is none."""
    versions: Mapping[str, str]


def merge(cases: Sequence[BenchCase], world_size: int, ranks: Sequence[Sequence[RankTimes]]) -> list[Measured]:
    """Put together what every rank saw: a case is right if it is on all of them, and timed if it was on all."""
    return [_merge_one(case, world_size, times) for case, times in zip(cases, zip(*ranks, strict=True), strict=True)]


def _merge_one(case: BenchCase, world_size: int, times: Sequence[RankTimes]) -> Measured:
    problems = tuple(dict.fromkeys(each.problem for each in times if each.problem))
    if problems:
        return Measured(case, None, problems, {})
    skipped = {name: why for each in times for name, why in each.skipped.items()}
    for name in {name: None for each in times for name in each.rounds}:
        if not all(each.rounds.get(name) for each in times):
            skipped.setdefault(name, "not timed on every rank")
    # A part that a case does not have took no time: a plain product moves nothing.
    missing = [name for name in (*_PARTS, _APART) if not any(any(each.rounds.get(name, ())) for each in times)]
    names = [name for name in times[0].rounds if name not in skipped and name not in missing]
    rounds = {name: [each.rounds[name] for each in times] for name in names}
    timings = {name: summarize(name, rounds[name]) for name in names}
    contenders = sorted((timings[name] for name in names if name not in (*_PARTS, _APART)), key=_place)
    result = CaseResult(
        case.op, case.m, case.n, case.k, world_size, case.dtype,
        timings.get("gemm", Timing("gemm", 0.0, 0.0)), timings.get("comm"), timings.get("beside"),
        tuple(contenders), tuple(skipped.items()), times[0].auto, case.variant, timings.get(_APART),
    )  # fmt: skip
    return Measured(case, result, (), rounds)


def _place(timing: Timing) -> tuple[bool, int]:
    """Baselines first, in their order; then ours, in the order they were timed."""
    return timing.is_ours, BASELINES.index(timing.name) if timing.name in BASELINES else len(BASELINES)


def show(console: Console, measured: Sequence[Measured]) -> None:
    """The table, case by case, and below it what is wrong, what was skipped and what ``auto`` missed."""
    names = labels([each.case for each in measured])
    first = True
    for each in measured:
        result, case = each.result, each.case
        console.print()
        sizes = " x ".join(str(size) for size in (case.m, case.n, case.k) if size)
        heading = f"[bold]{case.op} {sizes}[/]" + (f", {case.variant}" if case.variant else "")
        if result is None:
            console.print(f"{heading}: [bold red]WRONG[/], so no times: {escape(each.problems[0])}", soft_wrap=True)
            continue
        console.print(heading + (f" (auto takes {result.auto})" if result.auto else ""), soft_wrap=True)
        console.print(_parts_text(result), soft_wrap=True)
        console.print(_table(result, with_heading=first))
        first = False
    console.print()
    results = {name: each.result for name, each in zip(names, measured, strict=True) if each.result is not None}
    moves = any(result.comm is not None for result in results.values())
    rounds = count_rounds([each.num_rounds for each in measured if each.result is not None])
    legend = [_LEGEND.format(rounds) + (_LEGEND_OF_OVERLAP if moves else "")] if results else []
    if any(result.route is not None for result in results.values()):
        legend[0] += _LEGEND_OF_ROUTING if any(each.multiplies for each in results.values()) else _LEGEND_OF_INDEX
    unsteady = _unsteady_notes(dict(zip(names, measured, strict=True)))
    for note in [*_skipped_notes(results), *_auto_notes(results), *unsteady, *legend]:
        console.print(escape(note), style="dim", width=min(80, console.width))


def _parts_text(result: CaseResult) -> str:
    if not result.multiplies and result.route is not None:
        return f"T_index {_time(result.route.seconds)}"
    parts = [f"T_gemm {_time(result.gemm.seconds)}"]
    if result.comm is not None:
        parts.append(f"T_comm {_time(result.comm.seconds)}")
    if result.beside is not None:
        parts.append(f"T_beside {_time(result.beside.seconds)}")
    parts += [f"limit {_time(result.limit)}"] if result.comm is not None else []
    return ", ".join(parts) + ("" if result.route is None else f"; T_route {_time(result.route.seconds)}")


def _table(result: CaseResult, with_heading: bool) -> Table:
    """One case. Columns have fixed widths, so that several tables below each other read as one."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", show_header=with_heading)
    moves = result.comm is not None
    table.add_column("\nwhat", width=15, no_wrap=True)
    headings = [("total\nms", 8), *([("ECT\nms", 7), ("\nhidden", 7), ("limit/\ntotal", 6)] if moves else [])]
    rivals = BASELINES if moves else ("torch",) if result.multiplies else ("sequential", "torch")
    for heading, width in [*headings, *((f"over\n{_SHORT[name]}", 5) for name in rivals), ("\nspread", 6)]:
        table.add_column(heading, width=width, justify="right", no_wrap=True)
    best = min((timing.seconds for timing in result.contenders), default=0.0)
    for timing in result.contenders:
        cells = [_figure(1e3 * timing.seconds)]
        if moves:
            cells += [_figure(1e3 * result.ect(timing)), _percent(result.hidden(timing))]
            cells += [_percent(result.limit / timing.seconds)]
        cells += [_times(result.over(name, timing)) for name in rivals]
        table.add_row(timing.name, *cells, _percent(timing.spread), style="green" if timing.seconds == best else "")
    return table


def _skipped_notes(results: Mapping[str, CaseResult]) -> list[str]:
    at: dict[tuple[str, str], list[str]] = {}
    for label, result in results.items():
        for name, why in result.skipped:
            at.setdefault((name, why), []).append(label)
    return [
        f"{name}: skipped, {why}" + ("" if len(shapes) == len(results) else f" (at {'; '.join(shapes)})")
        for (name, why), shapes in at.items()
    ]


def count_rounds(numbers: Sequence[int]) -> str:
    """``20 rounds``, or ``20 to 45 rounds`` where shapes differ."""
    low, high = min(numbers, default=0), max(numbers, default=0)
    return f"{low} to {high} rounds" if low < high else f"{high} round{'' if high == 1 else 's'}"


def _unsteady_notes(measured: Mapping[str, Measured]) -> list[str]:
    found = [(error, name, label) for label, each in measured.items() for name, error in each.unsteady]
    if not found:
        return []
    worst = [f"{name} at {label} ({_percent(error)})" for error, name, label in sorted(found, reverse=True)]
    more = f", and {len(worst) - _MAX_UNSTEADY} more" if len(worst) > _MAX_UNSTEADY else ""
    said = f"Medians not known to {100 * STEADY:g} % after {MAX_ROUNDS} rounds, by their standard error"
    return [f"{said}: {', '.join(worst[:_MAX_UNSTEADY])}{more}."]


def _auto_notes(results: Mapping[str, CaseResult]) -> list[str]:
    """Shapes at which ``auto`` chose worse than it could have, by more than rounds differ."""
    notes = []
    for label, result in results.items():
        auto = result.find(f"{OURS} auto")
        others = [timing for timing in result.contenders if timing.is_ours and timing is not auto]
        best = min(others, key=lambda timing: timing.seconds, default=None)
        if auto and best and best.name != f"{OURS} {result.auto}" and Duel(result, auto, best).is_lost:
            by = 100 * (auto.seconds / best.seconds - 1)
            notes.append(f"auto takes {result.auto} at {label}, and {by:.0f} % longer than {best.name}.")
    return notes


def labels(cases: Sequence[BenchCase | CaseResult]) -> list[str]:
    """What tells each case from the others: M, N and K as far as they differ, and its variant if that does."""
    axes = [axis for axis in ("m", "n", "k") if len({getattr(case, axis) for case in cases}) > 1]
    differ = len({case.variant for case in cases}) > 1
    axes = axes if axes or differ else [axis for axis in ("m", "n", "k") if getattr(cases[0], axis)] if cases else []
    ends = [f" {case.variant}" if differ else "" for case in cases]
    texts = [" ".join(f"{axis.upper()}={getattr(case, axis)}" for axis in axes) for case in cases]
    return [(text + end).strip() for text, end in zip(texts, ends, strict=True)]


def sentence(results: Sequence[CaseResult]) -> str:
    """What won, and by how much."""
    verdict = judge(results)
    if verdict is None:
        return "Nothing of ours was timed, so there is nothing to compare."
    if len(verdict.duels) == 1:
        return _one_shape(verdict.duels[0])
    names = dict(zip([id(each) for each in results], labels(results), strict=True))
    if all(each.multiplies and each.comm is None and each.best("torch") for each in results):
        return _products(verdict, names)
    won, level, lost = (
        [duel for duel in verdict.duels if getattr(duel, kind)] for kind in ("is_won", "is_level", "is_lost")
    )
    text = f"{verdict.name} wins {len(won) or 'none'} of {len(verdict.duels)} shapes"
    if level:
        text += f", and is level with the quickest baseline at {len(level)}"
    baseline = next(name for name in BASELINES if verdict.over(name))
    speedups = verdict.over(baseline)
    text += f"; {statistics.geometric_mean(speedups):.2f}x over {baseline} in the geometric mean"
    text += f" ({min(speedups):.2f} to {max(speedups):.2f})"
    if lost:
        text += f"; loses {_losses(lost, names)}"
    return text + "."


def _products(verdict: Verdict, names: Mapping[int, str]) -> str:
    """Of plain products: the library's time over ours, in the mean, where it is worst and where it is best."""
    duels = sorted(verdict.duels, key=lambda duel: duel.speedup)
    mean = statistics.geometric_mean(duel.speedup for duel in duels)
    worst, best = (f"{duel.speedup:.2f}x at {names[id(duel.case)]}" for duel in (duels[0], duels[-1]))
    kinds = {"wins": "is_won", "is level at": "is_level", "loses": "is_lost"}
    counts = {word: sum(getattr(duel, kind) for duel in duels) for word, kind in kinds.items()}
    library = "torch.mm" if duels[0].case.op == "gemm" else "torch._grouped_mm"
    told = ", ".join(f"{word} {count}" for word, count in counts.items() if count)
    return (
        f"{verdict.name} is {mean:.2f}x as quick as {library} in the geometric mean of {len(duels)} shapes, "
        f"from {worst} to {best}; it {told}."
    )


def _losses(lost: Sequence[Duel], names: Mapping[int, str]) -> str:
    """To whom, where and by how much; the worst few."""
    worst = sorted(lost, key=lambda duel: duel.speedup)[:_MAX_LOSSES]
    at: dict[str, list[str]] = {}
    for duel in worst:
        at.setdefault(duel.rival.name, []).append(f"{names[id(duel.case)]} by {_lead(duel)}")
    text = ", ".join(f"to {rival} at {', '.join(shapes)}" for rival, shapes in at.items())
    return text + (f", and at {len(lost) - len(worst)} more" if len(lost) > len(worst) else "")


def _one_shape(duel: Duel) -> str:
    name, rival = duel.ours.name, duel.rival.name
    found = {baseline: duel.case.over(baseline, duel.ours) for baseline in BASELINES}
    text = ", ".join(f"{value:.2f}x over {baseline}" for baseline, value in found.items() if value is not None)
    if duel.is_won:
        return f"{name} wins: {text}."
    if duel.is_level:
        return f"{name} is level with {rival}, within what rounds differ: {text}."
    return f"{name} loses to {rival} by {_lead(duel)}: {text}."


def _lead(duel: Duel) -> str:
    """By how much more time ours takes."""
    percent = 100 * (1 / duel.speedup - 1)
    return f"{percent:.0f} %" if percent >= 1 else f"{percent:.1f} %"


def as_json(session: Session, measured: Sequence[Measured]) -> dict[str, Any]:
    """The object of ``--json``. Fields are added over time; none changes its meaning or goes. Times are seconds."""
    results = [each.result for each in measured if each.result is not None]
    return {
        "ok": len(results) == len(measured),
        **dataclasses.asdict(session),
        "summary": sentence(results) if results else "",
        "cases": [_case_json(each) for each in measured],
    }


def _case_json(each: Measured) -> dict[str, Any]:
    case, result = dataclasses.asdict(each.case), each.result
    if result is None:
        return {**case, "problems": list(each.problems)}
    parts = {name: getattr(result, name) for name in (*_PARTS, *([_APART] if result.route else []))}
    return {
        **case,
        "num_rounds": each.num_rounds,
        "problems": [],
        "world_size": result.world_size,
        "auto": result.auto,
        "skipped": dict(result.skipped),
        "limit": result.limit,
        "parts": {
            name: None
            if timing is None or not timing.seconds
            else {**_timing_json(timing), "rounds": each.rounds[name]}
            for name, timing in parts.items()
        },
        "contenders": [
            {**_timing_json(timing), **_derived(result, timing), "rounds": each.rounds[timing.name]}
            for timing in result.contenders
        ],
    }


def _timing_json(timing: Timing) -> dict[str, Any]:
    return {"name": timing.name, "seconds": timing.seconds, "spread": timing.spread}


def _derived(result: CaseResult, timing: Timing) -> dict[str, float | None]:
    return {
        "ect": result.ect(timing) if result.multiplies else None,
        "hidden": result.hidden(timing),
        "limit_share": result.limit / timing.seconds if result.limit else None,
        **{f"over_{name}": result.over(name, timing) for name in BASELINES},
    }


def as_csv(session: Session, measured: Sequence[Measured]) -> str:
    """A line per case and contender, for spreadsheets and data frames. Times are seconds; wrong cases have no line."""
    lines: list[dict[str, Any]] = []
    for each in measured:
        if (result := each.result) is not None:
            timed = {name: getattr(result, name) for name in (*_PARTS, _APART)}
            parts = {name: timing if timing is not None and timing.seconds else None for name, timing in timed.items()}
            for timing in result.contenders:
                lines.append(
                    {
                        **{
                            name: getattr(result, name)
                            for name in ("op", "m", "n", "k", "variant", "world_size", "dtype")
                        },
                        "where": session.where,
                        "link": session.link,
                        "contender": timing.name,
                        "seconds": timing.seconds,
                        "spread": timing.spread,
                        **{name: None if part is None else part.seconds for name, part in parts.items()},
                        "limit": result.limit,
                        **_derived(result, timing),
                        "num_rounds": each.num_rounds,
                    }
                )
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]) if lines else ["op"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _figure(value: float) -> str:
    """Four digits or more, and never more than three of them behind the point."""
    size = abs(value)
    return f"{value:.3f}" if size < 100 else f"{value:.1f}" if size < 10_000 else f"{value:.0f}"


def _percent(share: float | None) -> str:
    """Fits its column, whatever the number: what is further off than this is only far off."""
    if share is None:
        return ""
    if not -100 < share < 10:
        return ">999%" if share > 0 else "<-9999%"
    return f"{100 * share:.1f}%" if abs(share) < 0.1 else f"{100 * share:.0f}%"


def _times(speedup: float | None) -> str:
    if speedup is None:
        return ""
    if speedup >= 1000:
        return ">999x"
    return f"{speedup:.2f}x" if speedup < 10 else f"{speedup:.1f}x" if speedup < 100 else f"{speedup:.0f}x"
