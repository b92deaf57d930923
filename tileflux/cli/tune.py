"""``tileflux tune``: try the ways an op can run here, and let ``strategy="auto"`` take the quickest from now on.

What is asked for is checked as for bench, in ``_request.py``; what a rank does is in ``testing/tuning.py``, and where
the winners are kept in ``tune/store.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json as json_module
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import tileflux
from tileflux import env
from tileflux.cli._console import Progress, fail, make_console
from tileflux.cli._machine import inspect_machine
from tileflux.cli._request import GHOST_WORLD, STDOUT, WITH_EXPERTS, WORLD, Dtype, Op, Options, Request, ShapeSet
from tileflux.cli._worlds import BenchPlace, World, attempt, run
from tileflux.testing import tuning
from tileflux.testing.bench import BenchCase
from tileflux.testing.tuning import Journal, Tuned
from tileflux.tune import store
from tileflux.tune.lookup import forget, lookup
from tileflux.tune.search import Candidate
from tileflux.tune.store import Entry

__all__ = ["tune"]

_TIMEOUT_S = 6 * 3600.0  # for ranks that neither wait nor end; waits have deadlines of their own
_MAX_RANKS = 64
_VERSIONS = ("tileflux", "torch", "triton")

_Size = Annotated[int | None, typer.Argument(min=1, show_default=False, help="Of the whole product.")]
_Where = Annotated[
    BenchPlace, typer.Option("--where", help="auto, cpu, local and mps: as in the demo. ghost: as in bench.")
]
_Sweep = Annotated[
    list[str] | None,
    typer.Option("--sweep", metavar="AXIS=SIZES", help="m=512:8192, doubling, or m=512,4096. Also n and k."),
]
_Budget = Annotated[float, typer.Option("--budget", min=0.0, metavar="SECONDS", help="For each shape.")]
_Jobs = Annotated[
    int | None, typer.Option("--jobs", min=1, metavar="N", help="Processes that compile for GPUs; as many as cores.")
]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Measure, and keep nothing.")]
_Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="What was found; - prints it.")]


def tune(
    op: Annotated[Op, typer.Argument(show_default=False, help="What to tune.")],
    m: _Size = None,
    n: _Size = None,
    k: _Size = None,
    world: Annotated[
        int | None,
        typer.Option("--world", min=1, max=_MAX_RANKS, help=f"Number of ranks; {WORLD}, or {GHOST_WORLD} with ghosts."),
    ] = None,
    where: _Where = BenchPlace.AUTO,
    dtype: Annotated[
        Dtype | None, typer.Option("--dtype", help="Default: bfloat16 on GPUs, float32 on the CPU.")
    ] = None,
    sweep: _Sweep = None,
    shapes: Annotated[
        ShapeSet | None, typer.Option("--shapes", help="Layers of known models instead of M N K.")
    ] = None,
    budget: _Budget = 60.0,
    jobs: _Jobs = None,
    dry_run: _DryRun = False,
    json: _Json = None,
) -> None:
    """Try strategies and tiles, and let strategy="auto" take the quickest from now on.

    M, N and K are of the whole product, as in bench. Every way is checked before it is timed: a wrong result is never
    kept, and the exit status is 1. What an entry holds for, and where it is kept, is in docs/tune.md.

    \b
    Examples:
      tileflux tune ag_gemm 4096 49152 12288 --world 8
      tileflux tune gemm_rs --shapes llama --sweep m=512:8192
      tileflux tune gemm_ar 16 8192 8192 --budget 20 --dry-run
    """
    options = Options(op, (m, n, k), world, where, dtype, sweep or (), 1, (), shapes, None, json, None, None)
    try:
        request = _check(options, dry_run)
    except ValueError as error:
        if where in ("auto", "torchrun") and env.torchrun_present() and env.local_rank() != 0:
            raise typer.Exit(2) from None  # one of its processes says it for all
        fail("tune", str(error), 2)
    console = Console(stderr=True, highlight=False) if json == STDOUT else make_console()
    num_jobs = len(os.sched_getaffinity(0)) if jobs is None else jobs
    with tempfile.TemporaryDirectory(prefix="tileflux-tune-") as folder:
        journal = Journal(Path(folder))
        try:
            request, found = _search(console, request, budget, num_jobs, journal)
        except KeyboardInterrupt:
            _finish_early(console, request, journal.found(), dry_run)
            raise
    _finish(console, request, found, dry_run)


def _check(options: Options, dry_run: bool) -> Request:
    if options.op in WITH_EXPERTS:
        dense = ", ".join(op for op in Op if op not in WITH_EXPERTS)
        raise ValueError(f"{options.op} is not tuned: a kept entry knows nothing of experts; {dense} are")
    request = Request.check(options)
    if request.world.where == "torchrun":
        raise ValueError("torchrun's ranks are not tuned; without it, --where auto starts a process for each GPU")
    if request.world.size < 2 and options.op is not Op.GEMM:
        raise ValueError("--world 1: one rank has nothing to wait for, and nothing to tune; gemm has")
    if dry_run:
        return request
    if request.link is not None:
        raise ValueError(f"TILEFLUX_LINK={request.link} is not a machine's own; only --dry-run goes with it")
    if not env.tune_dir():
        raise ValueError("TILEFLUX_TUNE_DIR is empty, so nothing can be kept; name a folder, or use --dry-run")
    try:
        store.check_writable(env.tune_dir())
    except OSError as error:
        raise ValueError(f"nothing can be kept: {error}; set TILEFLUX_TUNE_DIR, or use --dry-run") from None
    return request


def _search(
    console: Console, request: Request, budget_s: float, num_jobs: int, journal: Journal
) -> tuple[Request, list[Tuned]]:
    """Run the ranks: what they found, and in which world."""
    cases = request.cases

    def work(world: World) -> list[list[Tuned]]:
        how = f"{world.text}, {cases[0].dtype}, {budget_s:g} s a shape"
        console.print(f"tileflux {tileflux.__version__} tune {cases[0].op}: {how}", soft_wrap=True)
        with Progress(console, lambda: _progress(journal.ticks(), len(cases))):
            return run(world, tuning.tune, (cases, budget_s, num_jobs, journal), timeout_s=_TIMEOUT_S)

    may_fall_back = request.options.where is BenchPlace.AUTO
    world, ranks = attempt("tune", console, request.world, work, may_fall_back=may_fall_back)
    found = [_merge(each) for each in zip(*ranks, strict=True)]
    return dataclasses.replace(request, world=world), found


def _progress(ticks: str, num_cases: int) -> str:
    """How far it is, for a terminal."""
    *done, now = ticks.split("\n")
    if not ticks:
        return "starting ranks and compiling"
    return f"shape {min(len(done) + 1, num_cases)} of {num_cases}: {len(now)} ways tried"


def _finish_early(console: Console, request: Request, found: Mapping[int, Tuned], dry_run: bool) -> None:
    """Interrupted: keep and show the shapes that are done."""
    if not found:
        return
    console.print(f"interrupted after {len(found)} of {len(request.cases)} shapes", style="dim")
    done = dataclasses.replace(request, cases=tuple(request.cases[index] for index in found))
    with contextlib.suppress(typer.Exit):  # the status is that of an interruption
        _finish(console, done, list(found.values()), dry_run)


def _merge(found: Sequence[Tuned]) -> Tuned:
    """All ranks came to the same; each knows only its own wrong results."""
    wrong = tuple(dict.fromkeys(text for each in found for text in each.wrong))
    return dataclasses.replace(found[0], wrong=wrong)


def _finish(console: Console, request: Request, found: Sequence[Tuned], dry_run: bool) -> None:
    """Print, keep, write, and leave with the right status."""
    date = datetime.now(UTC).date().isoformat()
    versions = {name: version for name, version in inspect_machine().versions.items() if name in _VERSIONS}
    with_ghosts = request.world.where == "ghost"
    entries = [_entry(each, date, versions, with_ghosts) for each in found]
    kept = [entry for entry in entries if entry is not None]
    _show(console, request.cases, found)
    files: list[Path] = []
    if kept and not dry_run:
        try:
            files = store.save(env.tune_dir(), kept)
        except (OSError, ValueError) as error:
            fail("tune", f"nothing was kept: {error}", 1)
        forget()
        for note in _disagreements(kept):
            console.print(note, style="dim", width=min(80, console.width))
    console.print(f"[bold]{_sentence(found, files)}[/]", soft_wrap=True)
    if request.options.json is not None:
        _write(request.options.json, _as_json(request, found, entries, files))
    if len(kept) < len(found) or any(each.wrong for each in found):
        raise typer.Exit(1)


def _entry(tuned: Tuned, date: str, versions: dict[str, str], with_ghosts: bool) -> Entry | None:
    outcome = tuned.outcome
    if outcome is None:
        return None
    winner = outcome.winner
    # The winner's own time: of those that are level another may be a little quicker.
    seconds = outcome.best() | {winner.strategy: outcome.seconds[winner]}
    return Entry(tuned.problem, winner.strategy, winner.algorithm, winner.config, seconds, date, versions, with_ghosts)


def _show(console: Console, cases: Sequence[BenchCase], found: Sequence[Tuned]) -> None:
    console.print()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in ("shape", "auto took", "quickest"):
        table.add_column(f"\n{heading}", overflow="fold")
    for heading in ("over\nbefore", "over\nseq.", "\ntried"):
        table.add_column(heading, justify="right", no_wrap=True)
    for case, each in zip(cases, found, strict=True):
        shape, outcome = f"{case.m} x {case.n} x {case.k}", each.outcome
        before = _label(case.op, each.before)
        if outcome is None:
            table.add_row(shape, before, "[bold red]nothing ran right[/]", "", "", "")
            continue
        ways = f"{outcome.num_tried} of {outcome.num_tried + outcome.num_left_out}"
        over = [_times(_over_before(each)), _times(_over_sequential(each)) if case.op != "gemm" else ""]
        table.add_row(shape, before, _label(case.op, outcome.winner), *over, ways)
    console.print(table)
    console.print()
    for text in dict.fromkeys(text for each in found for text in each.wrong):
        console.print(f"[bold red]WRONG[/] {escape(text)}", soft_wrap=True)
    console.print(
        "over: how many times as quick, by the median of rounds in which all took turns, slowest rank. What is level "
        "within 1 % stays as it was. tried: ways within the budget, each checked first.",
        style="dim", width=min(80, console.width),
    )  # fmt: skip
    console.print()


def _label(op: str, candidate: Candidate) -> str:
    config = candidate.config
    return f"{config.block_m}x{config.block_n}x{config.block_k}" if op == "gemm" else str(candidate)


def _over_before(tuned: Tuned) -> float | None:
    outcome = tuned.outcome
    if outcome is None or tuned.before not in outcome.seconds:
        return None
    return outcome.seconds[tuned.before] / outcome.seconds[outcome.winner]


def _over_sequential(tuned: Tuned) -> float | None:
    outcome = tuned.outcome
    took = None if outcome is None else outcome.best().get("sequential")
    return None if outcome is None or took is None else took / outcome.seconds[outcome.winner]


def _times(speedup: float | None) -> str:
    return "" if speedup is None else f"{speedup:.2f}x"


def _disagreements(kept: Sequence[Entry]) -> list[str]:
    """Shapes where ``auto`` takes something else than was quickest: ranks may differ in N or K, and not in that."""
    notes = []
    for entry in kept:
        choice, problem = lookup(entry.problem), entry.problem
        if (choice.strategy, choice.algorithm) != (entry.strategy, entry.algorithm):
            how = f"{entry.strategy} was quickest, but auto takes {choice.strategy}: {choice.reason}."
            notes.append(f"{problem.m} x {problem.n} x {problem.k} on a rank: {how}")
    return notes


def _sentence(found: Sequence[Tuned], files: Sequence[Path]) -> str:
    speedups = [each for each in map(_over_before, found) if each is not None]
    faster = [each for each in found if each.outcome is not None and each.outcome.winner != each.before]
    if not speedups:
        text = "Nothing was found that runs right"
    elif not faster:
        text = "auto took the quickest already" + (f" at all {len(found)} shapes" if len(found) > 1 else "")
    else:
        mean = f"{statistics.geometric_mean(speedups):.2f}x over before"
        where = f"at {len(faster)} of {len(found)} shapes, {mean} in the geometric mean" if len(found) > 1 else mean
        text = f"auto gets quicker: {where}"
    return f"{text}; kept in {', '.join(map(str, files))}." if files else f"{text}; nothing was kept."


def _as_json(
    request: Request, found: Sequence[Tuned], entries: Sequence[Entry | None], files: Sequence[Path]
) -> dict[str, Any]:
    """The object of ``--json``. Fields are added over time; none changes its meaning or goes. Times are seconds."""
    return {
        "ok": all(each.outcome is not None and not each.wrong for each in found),
        "world": request.world.text,
        "world_size": request.world.size,
        "summary": _sentence(found, files),
        "files": [str(file) for file in files],
        "shapes": [
            {
                "op": case.op, "m": case.m, "n": case.n, "k": case.k, "dtype": case.dtype,
                "before": dataclasses.asdict(each.before),
                "over_before": _over_before(each),
                "over_sequential": _over_sequential(each),
                "num_tried": 0 if each.outcome is None else each.outcome.num_tried,
                "num_left_out": 0 if each.outcome is None else each.outcome.num_left_out,
                "wrong": list(each.wrong),
                "entry": None if entry is None else dataclasses.asdict(entry),
            }
            for case, each, entry in zip(request.cases, found, entries, strict=True)
        ],
    }  # fmt: skip


def _write(file: Path, whole: dict[str, Any]) -> None:
    text = json_module.dumps(whole, indent=2) + "\n"
    if file == STDOUT:
        typer.echo(text, nl=False)
        return
    try:
        file.write_text(text)
    except OSError as error:
        fail("tune", f"cannot write {error.filename}: {error.strerror}", 1)
