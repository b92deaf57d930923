"""``tileflux profile``: one call from inside its kernels, as a trace for Perfetto and as a page to look at."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import tileflux
from tileflux import env
from tileflux.cli._console import Progress, fail, make_console
from tileflux.cli._report import Measured, merge
from tileflux.cli._request import Dtype, Op, Options, Request, Strategy
from tileflux.cli._worlds import BenchPlace, World, explain, run
from tileflux.errors import RankFailed, TilefluxError
from tileflux.perf.page import render
from tileflux.perf.timeline import Timeline
from tileflux.perf.trace import write_trace
from tileflux.testing import profile as profiling
from tileflux.testing.bench import BenchCase
from tileflux.testing.profile import RankProfile

__all__ = ["Picture", "profile", "record"]

_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Picture:
    """What a recorded call looks like, and what was measured around it."""

    timeline: Timeline
    others: tuple[Timeline, ...]
    measured: Measured
    cost: float
    """How much longer the call takes when it is recorded."""

    def write(self, html: Path | None, trace: Path | None) -> None:
        """Write the page, the trace, or both."""
        if html is not None:
            html.write_text(render(self.timeline, self.measured.result, self.others))
        if trace is not None:
            write_trace(self.timeline, trace)


def profile(
    op: Annotated[Op, typer.Argument(show_default=False, help="What to record.")],
    m: Annotated[int, typer.Argument(min=1, show_default=False, help="Of the whole product.")],
    n: Annotated[int, typer.Argument(min=1, show_default=False, help="Of the whole product.")],
    k: Annotated[int, typer.Argument(min=1, show_default=False, help="Of the whole product.")],
    world: Annotated[int | None, typer.Option("--world", min=2, max=16, help="Number of ranks.")] = None,
    where: Annotated[
        BenchPlace,
        typer.Option("--where", help="cpu, local, mps or ghost, as in bench; auto: as in the demo."),
    ] = BenchPlace.AUTO,
    dtype: Annotated[
        Dtype | None, typer.Option("--dtype", help="Default: bfloat16 on GPUs, float32 on the CPU.")
    ] = None,
    iters: Annotated[int, typer.Option("--iters", min=1, help="Timed rounds before the call is recorded.")] = 10,
    link: Annotated[
        str | None, typer.Option("--link", metavar="RATE,LATENCY", help="Emulated between CPU processes: 2GB/s,20us.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="The page. Default: tileflux-OP-MxNxK.html.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="For ui.perfetto.dev. Default: the page's, .json.")
    ] = None,
) -> None:
    """Record one fused call tile by tile: where each ran, what it waited for, and when its rows arrived.

    The op is checked and timed first, as bench does it. On the CPU the sequential strategy is recorded too.

    \b
    Examples:
      tileflux profile ag_gemm 4096 49152 12288 --where ghost --world 8
      tileflux profile gemm_rs 4096 8192 28672 --where mps
      tileflux profile ag_gemm 1024 1024 1024 --where cpu --link 1GB/s,50us
    """
    console = make_console()
    html = Path(f"tileflux-{op.value}-{m}x{n}x{k}.html") if html is None else html
    trace = html.with_suffix(".json") if trace is None else trace
    options = Options(
        op, (m, n, k), world, where, dtype, (), iters, [Strategy.SEQUENTIAL, Strategy.FUSED], None, link, trace, html,
        None,
    )  # fmt: skip
    try:
        request = _check(options)
    except ValueError as error:
        fail("profile", str(error), 2)
    (case,) = request.cases
    console.print(f"tileflux {tileflux.__version__} profile {op.value}: {request.world.text}", soft_wrap=True)
    changes = {"TILEFLUX_LINK": str(request.link)} if request.link is not None else {}
    try:
        with env.scoped(changes), Progress(console, lambda: "checking, timing, then recording one call"):
            picture = record(request.world, case, where.value)
    except TilefluxError as error:
        understood = not isinstance(error, RankFailed) or isinstance(error.cause, TilefluxError | None)
        fail("profile", explain(error)[0] if understood else str(error), 1)
    _finish(console, picture, html, trace)


def _check(options: Options) -> Request:
    if options.op not in (Op.AG_GEMM, Op.GEMM_RS):
        raise ValueError(f"{options.op} is not recorded; ag_gemm and gemm_rs are")
    request = Request.check(options)
    if request.world.where == "torchrun":
        raise ValueError("torchrun's ranks are not recorded; use --where cpu, local, mps or ghost")
    return request


def record(world: World, case: BenchCase, where: str) -> Picture:
    """Run the ranks and put together what they recorded: the fused call, and on the CPU the sequential one beside it.

    What a GPU's library does inside its product nobody can record.
    """
    strategies = ("fused",) if world.on_gpu else ("fused", "sequential")
    case = dataclasses.replace(case, strategies=strategies)
    profiles: list[RankProfile] = run(world, profiling.profile, (case, strategies), timeout_s=_TIMEOUT_S)
    (measured,) = merge((case,), world.size, [[each.times] for each in profiles])
    if measured.result is None:
        raise TilefluxError(f"a result is wrong, so nothing was recorded: {profiles[0].times.problem}")
    timelines = profiling.merge(case, where if where != "auto" else world.where, profiles, world.size)
    cost = max(each.calls[0].cost for each in profiles)
    return Picture(timelines[0], tuple(timelines[1:]), measured, cost)


def _finish(console: Console, picture: Picture, html: Path, trace: Path) -> None:
    try:
        picture.write(html, trace)
    except OSError as error:
        fail("profile", f"cannot write {error.filename}: {error.strerror}", 1)
    timeline, result = picture.timeline, picture.measured.result
    assert result is not None
    fused = result.find("ours fused")
    share = None if fused is None else result.hidden(fused)
    num_tiles = sum(len(rank.tiles) for rank in timeline.ranks)
    waited = sum(tile.waited for rank in timeline.ranks for tile in rank.tiles)
    busy = sum(tile.finished - tile.begin for rank in timeline.ranks for tile in rank.tiles)
    console.print(
        f"{num_tiles} tiles in {timeline.end / 1e3:.3f} ms; tiles wait {100 * waited / max(busy, 1e-9):.1f} % of their "
        f"time; recording cost {100 * picture.cost:+.1f} %.",
        soft_wrap=True,
    )
    if fused is not None and share is not None:
        console.print(f"[bold]{100 * share:.0f} % of the communication is hidden[/] ({1e3 * fused.seconds:.3f} ms).")
    console.print(f"page:  {html}\ntrace: {trace}  (open in ui.perfetto.dev)", soft_wrap=True)
