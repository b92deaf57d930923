"""``tileflux bench``: ours against plain baselines and torch, checked, then timed in a world that the user picks.

What is asked for is checked in ``_request.py``; what a rank does is in ``testing/bench.py``, and what becomes of its
times in ``_report.py`` and ``_plot.py``.
"""

from __future__ import annotations

import contextlib
import json as json_module
import os
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console

import tileflux
from tileflux import env
from tileflux.cli import _host
from tileflux.cli._console import Progress, fail, make_console
from tileflux.cli._machine import inspect_machine
from tileflux.cli._plot import plot as draw
from tileflux.cli._report import Measured, Session, as_csv, as_json, count_rounds, merge, sentence, show
from tileflux.cli._request import (
    GHOST_WORLD,
    STDOUT,
    WORLD,
    Dtype,
    Op,
    Options,
    Request,
    RoutingKind,
    ShapeSet,
    Strategy,
)
from tileflux.cli._worlds import BenchPlace, World, attempt, reason, run, run_here, torchrun_world
from tileflux.errors import TilefluxError
from tileflux.symm.group import Group
from tileflux.testing.bench import measure
from tileflux.testing.host import NUM_BATCHES, HostTimes, measure_host
from tileflux.testing.timing import MAX_ROUNDS, MIN_ROUNDS, STEADY

__all__ = ["bench"]

# Waits have deadlines of their own. This one is for ranks that neither wait nor end, and must not cut a sweep short.
_TIMEOUT_S = 6 * 3600.0
_MAX_RANKS = 64
_WHERE = {"fork": "cpu", "virtual": "local", "spawn": "gpus"}  # ways to start ranks, as users know them

_Size = Annotated[int | None, typer.Argument(min=1, show_default=False, help="Of the whole product.")]
_WorldSize = Annotated[
    int | None,
    typer.Option("--world", min=1, max=_MAX_RANKS, help=f"Number of ranks; {WORLD}, or {GHOST_WORLD} with ghosts."),
]
_Where = Annotated[
    BenchPlace,
    typer.Option(
        "--where",
        help="auto, cpu, local and mps: as in the demo. ghost: one rank with a whole GPU, and peers behind PCIe. "
        "torchrun: the processes that torchrun started.",
    ),
]
_Dtype = Annotated[Dtype | None, typer.Option("--dtype", help="Default: bfloat16 on GPUs, float32 on the CPU.")]
_Sweep = Annotated[
    list[str] | None,
    typer.Option("--sweep", metavar="AXIS=SIZES", help="m=512:8192, doubling, or m=512,4096. Also n and k."),
]
_Iters = Annotated[
    int | None,
    typer.Option(
        "--iters",
        min=1,
        help=f"Timed rounds; in each, everything runs once. Default: {MIN_ROUNDS} to {MAX_ROUNDS}, until medians are "
        f"known to {100 * STEADY:g} %.",
    ),
]
_Strategy = Annotated[list[Strategy] | None, typer.Option("--strategy", help="Which of ours; all, if none is named.")]
_Shapes = Annotated[ShapeSet | None, typer.Option("--shapes", help="Layers of known models instead of M N K.")]
_LinkText = Annotated[
    str | None, typer.Option("--link", metavar="RATE,LATENCY", help="Emulated between CPU processes: 2GB/s,20us.")
]
_Host = Annotated[
    bool, typer.Option("--host", help="Instead: how long calls of ours hold the host, and what of that launches are.")
]
_Experts = Annotated[int | None, typer.Option("--experts", min=1, help="Of ops of experts: how many there are.")]
_TopK = Annotated[int | None, typer.Option("--top-k", min=1, help="Experts that every token chooses.")]
_Ep = Annotated[
    int | None,
    typer.Option("--ep", min=1, help="Sets of experts; ranks that share one divide its experts. Default: 1."),
]
_Routing = Annotated[
    RoutingKind | None,
    typer.Option("--routing", help="How tokens choose; skewed: few experts get most. Default: uniform."),
]
_Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Everything, raw rounds too; - prints it.")]
_Csv = Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="A line per contender; - prints it.")]
_Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Speed-ups as a .png, .svg or .pdf.")]


def bench(
    op: Annotated[Op, typer.Argument(show_default=False, help="What to measure.")],
    m: _Size = None,
    n: _Size = None,
    k: _Size = None,
    world: _WorldSize = None,
    where: _Where = BenchPlace.AUTO,
    dtype: _Dtype = None,
    sweep: _Sweep = None,
    iters: _Iters = None,
    strategy: _Strategy = None,
    shapes: _Shapes = None,
    link: _LinkText = None,
    host: _Host = False,
    experts: _Experts = None,
    top_k: _TopK = None,
    ep: _Ep = None,
    routing: _Routing = None,
    json: _Json = None,
    csv: _Csv = None,
    plot: _Plot = None,
) -> None:
    """Time an op against plain baselines and torch, after checking every result.

    M, N and K are of the whole product: ranks divide N for ag_gemm and moe_ag_gemm, and K for the others. Of ops of
    experts M is the number of tokens, and N and K are an expert's; ep, which sends tokens to their experts' ranks and
    back, takes M and the width of a token.
    A wrong result gets no time, and the exit status is 1. How to read the table is in docs/bench.md.

    \b
    Examples:
      tileflux bench ag_gemm 4096 49152 12288 --world 8
      tileflux bench gemm_rs 4096 8192 28672 --sweep m=512:8192
      tileflux bench gemm_ar --shapes decode --csv decode.csv
      tileflux bench moe_ag_gemm 8192 14336 4096 --experts 8 --top-k 2
      tileflux bench ep 512 7168 --experts 64 --top-k 8 --where mps
      tileflux bench ag_gemm 256 512 512 --where cpu --link 1GB/s,50us
      tileflux bench ag_gemm 512 49152 12288 --where mps --host
      torchrun --nproc-per-node 8 -m tileflux bench gemm_rs --shapes flux
    """
    options = Options(
        op, (m, n, k), world, where, dtype, sweep or (), iters, strategy or (), shapes, link, json, csv, plot,
        host, experts, top_k, ep, routing,
    )  # fmt: skip
    try:
        request = Request.check(options)
    except ValueError as error:
        if where in ("auto", "torchrun") and env.torchrun_present() and env.local_rank() != 0:
            raise typer.Exit(2) from None  # one of its processes says it for all
        fail("bench", str(error), 2)
    console, found, ranks = _measure(request)
    if host:
        _finish_host(request, console, found, ranks)
    else:
        _finish(request, console, found, merge(request.cases, found.size, ranks))


def _measure(request: Request) -> tuple[Console, World, list[Any]]:
    """Run the ranks. Processes of torchrun other than its rank 0 leave from here."""
    is_piped = STDOUT in (request.options.json, request.options.csv)
    console = Console(stderr=True, highlight=False) if is_piped else make_console()
    if request.world.where == "torchrun":
        world, ranks = _join(console, request)
    else:
        may_fall_back = request.options.where is BenchPlace.AUTO and not request.options.host
        world, ranks = attempt(
            "bench", console, request.world, lambda world: _start(console, request, world), may_fall_back=may_fall_back
        )
    return console, world, ranks


def _function(request: Request) -> Callable[..., list[Any]]:
    """What ranks do."""
    return measure_host if request.options.host else measure


def _start(console: Console, request: Request, world: World) -> list[Any]:
    """The ranks' times."""
    _announce(console, request, world)
    changes = {"TILEFLUX_LINK": str(request.link)} if request.link is not None else {}
    with env.scoped(changes):
        return _watched(
            console, request, lambda ticks: run(world, _function(request), (request.cases, ticks), timeout_s=_TIMEOUT_S)
        )


def _join(console: Console, request: Request) -> tuple[World, list[Any]]:
    """The same as one of a launcher's processes."""
    try:
        with Group.from_env() as group:
            world = torchrun_world(group.world_size)
            try:
                request.check_ranks(group.world_size)
            except ValueError as error:
                if group.rank:
                    raise typer.Exit(2) from None
                fail("bench", str(error), 2)
            if group.rank == 0:
                _announce(console, request, world)
                ranks = _watched(
                    console, request, lambda ticks: run_here(group, _function(request), (request.cases, ticks))
                )
            else:
                ranks = run_here(group, _function(request), (request.cases, None))
            is_first = group.rank == 0
    except TilefluxError as error:
        fail("bench", reason(error), 1)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if not is_first:
        raise typer.Exit
    return world, ranks


def _announce(console: Console, request: Request, world: World) -> None:
    case = request.cases[0]
    link = f", link {request.link}" if request.link is not None else ""
    rounds = count_rounds([case.num_rounds] if case.num_rounds else [MIN_ROUNDS, MAX_ROUNDS])
    if request.options.host:
        rounds = f"host time, {case.num_rounds or NUM_BATCHES} batches of calls"
    how = f"{world.text}{link}, {case.dtype}, {rounds}"
    console.print(f"tileflux {tileflux.__version__} bench {case.op}: {how}", soft_wrap=True)


def _watched(console: Console, request: Request, work: Callable[[Path | None], list[Any]]) -> list[Any]:
    """``work`` with a file to tick in, and on a terminal a line that says how far it is."""
    num_rounds, num_cases = request.cases[0].num_rounds, len(request.cases)
    if request.options.host:
        num_rounds = num_rounds or NUM_BATCHES
    with contextlib.ExitStack() as stack:
        ticks = None
        if console.is_terminal:
            ticks = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tileflux-bench-")), "ticks")

        def describe() -> str:
            text = ticks.read_text() if ticks is not None and ticks.exists() else ""
            if not text:
                return "starting ranks and checking results"
            *done, now = text.split("\n")
            shape = f"timing shape {min(len(done), num_cases - 1) + 1} of {num_cases}"
            if num_rounds is None:
                return f"{shape}: round {len(now or done[-1])}"
            return f"{shape}: {100 * text.count('.') / (num_rounds * num_cases):.0f} % of all rounds"

        with Progress(console, describe):
            return work(ticks)


def _finish(request: Request, console: Console, world: World, measured: Sequence[Measured]) -> None:
    """Print, write, and leave with the right status."""
    show(console, measured)
    device = _device(world)
    notes = [f"{world.text} on {device}."]
    if not world.on_gpu:
        notes += ["Times of CPU ranks do not tell which strategy is quicker on a GPU."]
        if world.size > (cores := len(os.sched_getaffinity(0))):
            notes += [f"{world.size} ranks share {cores} cores, so a rank that waits also waits for a core."]
    console.print(" ".join(notes), style="dim", width=min(80, console.width))
    console.print()
    results = [each.result for each in measured if each.result is not None]
    if results:
        console.print(f"[bold]{sentence(results)}[/]", soft_wrap=True)
    _write_all(request, world, measured)
    wrong = len(measured) - len(results)
    if wrong:
        console.print(f"[bold red]{wrong} of {len(measured)} shapes gave a wrong result.[/]")
        raise typer.Exit(1)


def _finish_host(request: Request, console: Console, world: World, ranks: Sequence[Sequence[HostTimes]]) -> None:
    """The same of the host's times."""
    found, session, options = _host.merge(request.cases, ranks), _session(request, world), request.options
    _host.show(console, found, world.on_gpu)
    host = f", its host {_cpu_name()}" if world.on_gpu else ""
    console.print(f"{world.text} on {session.device}{host}.", style="dim", width=min(80, console.width))
    console.print()
    console.print(f"[bold]{_host.sentence(found)}[/]", soft_wrap=True)
    try:
        if options.json is not None:
            _write(options.json, json_module.dumps(_host.as_json(session, found), indent=2) + "\n")
        if options.csv is not None:
            _write(options.csv, _host.as_csv(session, found))
    except OSError as error:
        fail("bench", f"cannot write {error.filename}: {error.strerror}", 1)
    if wrong := sum(bool(each.problems) for each in found):
        console.print(f"[bold red]{wrong} of {len(found)} shapes gave a wrong result.[/]")
        raise typer.Exit(1)


def _device(world: World) -> str:
    return torch.cuda.get_device_name(0) if world.on_gpu else _cpu_name()


def _session(request: Request, world: World) -> Session:
    return Session(
        command=request.command,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        where=_WHERE.get(world.where, world.where),
        world=world.text,
        world_size=world.size,
        device=_device(world),
        link="" if request.link is None else str(request.link),
        versions=inspect_machine().versions,
    )


def _write_all(request: Request, world: World, measured: Sequence[Measured]) -> None:
    options, session = request.options, _session(request, world)
    results = [each.result for each in measured if each.result is not None]
    try:
        if options.json is not None:
            _write(options.json, json_module.dumps(as_json(session, measured), indent=2) + "\n")
        if options.csv is not None:
            _write(options.csv, as_csv(session, measured))
        if options.plot is not None and results:
            link = f", link {session.link}" if session.link else ""
            draw(results, f"{world.text}{link}, {session.device}", options.plot)
    except OSError as error:
        fail("bench", f"cannot write {error.filename}: {error.strerror}", 1)


def _write(file: Path, text: str) -> None:
    if file == STDOUT:
        typer.echo(text, nl=False)
    else:
        file.write_text(text)


def _cpu_name() -> str:
    """The processor's model as the system tells it, and how many cores of it this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} cores of {models[0] if models else 'an unknown CPU'}"
