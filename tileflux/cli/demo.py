"""``tileflux demo``: every op on what is here, checked, then timed. What a rank does is in ``_measure.py``."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

import tileflux
from tileflux import env
from tileflux.cli._console import Progress, fail, make_console
from tileflux.cli._measure import DTYPE, RankReport, measure, names, sizes
from tileflux.cli._worlds import Place, World, attempt, choose, cpu_processes, run
from tileflux.cli.profile import record
from tileflux.errors import TilefluxError
from tileflux.testing.bench import BenchCase
from tileflux.testing.collectives import COLLECTIVES

__all__ = ["Row", "demo", "merge"]

_TIMEOUT_S = 240.0
_MAX_RANKS = 16
_PICTURE_RANKS, _PICTURE, _PICTURE_LINK = 4, (2048, 2048, 2048), "200MB/s,50us"


@dataclass(frozen=True)
class Row:
    """One collective at one size, or one dense op, over all ranks."""

    name: str
    size: int | tuple[int, int, int]
    """Bytes of the largest message of a rank; or M, N and K of the whole product."""
    checked: tuple[str, ...]
    problems: tuple[str, ...]
    seconds: float | None
    """Of the slowest rank; None where a result was wrong."""


def demo(
    world: Annotated[int, typer.Option("--world", min=1, max=_MAX_RANKS, help="Number of ranks.")] = 4,
    where: Annotated[
        Place,
        typer.Option(
            "--where",
            help="auto: a GPU each if there are enough, else one GPU shared, else the CPU. cpu: processes over shared "
            "memory. local: virtual ranks in one process. mps: processes sharing one GPU.",
        ),
    ] = Place.AUTO,
    picture: Annotated[
        bool, typer.Option("--picture/--no-picture", help="End with a picture of overlap: CPU ranks, emulated link.")
    ] = True,
) -> None:
    """Run every collective, and every strategy of the dense ops, on this machine; check each result, and time it.

    Results are compared with what all ranks' inputs say they must be and, between processes, with torch.distributed.
    Collectives are compared bit for bit, products within the rounding of their type.
    A wrong result gets no time, and the exit status is 1. Then 4 CPU ranks multiply over an emulated link, one step
    after the other and fused, and a page shows when each tile ran.

    \b
    Examples:
      tileflux demo                  4 ranks on the best that is here
      tileflux demo --where cpu      4 CPU processes, also beside a GPU
      tileflux demo --world 2        two ranks
    """
    console = make_console()
    try:
        chosen = _choose(where, world)
    except ValueError as error:
        fail("demo", str(error), 2)
    start = time.monotonic()
    may_fall_back = where is Place.AUTO
    chosen, reports = attempt("demo", console, chosen, lambda world: _run(console, world), may_fall_back=may_fall_back)
    rows = merge(reports)
    _show(console, rows, chosen.on_gpu)
    wrong = sum(1 for row in rows if row.problems)
    place = f"{chosen.text} ({reports[0].device_name})" if chosen.on_gpu else chosen.text
    if wrong:
        console.print(f"[bold red]{wrong} of {len(rows)} results are wrong[/] on {place}.")
        raise typer.Exit(1)
    took = time.monotonic() - start
    console.print(f"[bold green]All {len(rows)} results are right[/] on {place}, in {took:.1f} s.")
    if picture:
        _draw(console)


def _draw(console: Console) -> None:
    """What overlap is, on any machine: the same product with its communication in front of it, and inside it."""
    world, case = cpu_processes(_PICTURE_RANKS), BenchCase("ag_gemm", *_PICTURE, "float32", ("fused",), 5)
    page = Path(tempfile.gettempdir(), "tileflux-demo.html")
    try:
        with env.scoped({"TILEFLUX_LINK": _PICTURE_LINK}), Progress(console, lambda: "recording a call tile by tile"):
            drawn = record(world, case, "cpu")
        drawn.write(page, None)
    except (TilefluxError, OSError) as error:
        fail("demo", f"no picture: {str(error).partition(chr(10))[0]}", 1)
    result = drawn.measured.result
    assert result is not None
    plain, fused = result.find("sequential"), result.find("ours fused")
    assert plain is not None and fused is not None and result.comm is not None
    share = result.hidden(fused) or 0.0
    console.print(
        f"\nag_gemm {_size_text(_PICTURE)} on {_PICTURE_RANKS} CPU ranks over an emulated link of {_PICTURE_LINK}: "
        f"{_time_text(result.comm.seconds)} to send, {_time_text(result.gemm.seconds)} to multiply. "
        f"One after the other {_time_text(plain.seconds)}, fused {_time_text(fused.seconds)}: "
        f"[bold]{100 * share:.0f} % of the communication is hidden[/].",
        width=min(80, console.width),
    )
    console.print(f"Every tile of it: {page}", soft_wrap=True)


def _choose(place: Place, size: int) -> World:
    # Asked for here, so that a wrong value is told before ranks start, and once.
    env.timeout_s(), env.check()
    world = choose(place, size)
    if not world.on_gpu and env.cpu_backend() != "host":
        raise ValueError("TILEFLUX_CPU_BACKEND=interpret would time Triton's interpreter; unset it for the demo")
    return world


def _run(console: Console, world: World) -> list[RankReport]:
    """The ranks' reports."""
    console.print(f"tileflux {tileflux.__version__} demo: {world.text}", soft_wrap=True)
    chosen = sizes(world.on_gpu, world.size)
    timed = names(chosen)
    with tempfile.TemporaryDirectory(prefix="tileflux-demo-") as folder:
        ticks = Path(folder, "ticks") if console.is_terminal else None

        def describe() -> str:
            done = ticks.stat().st_size if ticks is not None and ticks.exists() else -1
            if done < 0:
                return "starting ranks and checking results"
            return f"timing {done + 1} of {len(timed)}: {timed[done]}" if done < len(timed) else "checking once more"

        with Progress(console, describe):
            return run(world, measure, (chosen, ticks), timeout_s=_TIMEOUT_S)


def merge(reports: Sequence[RankReport]) -> list[Row]:
    """Rows of the table: a result is right if it is on every rank, and as slow as on the slowest."""
    rows = []
    for outcomes in zip(*(report.outcomes for report in reports), strict=True):
        problems = tuple(outcome.problem for outcome in outcomes if outcome.problem)
        seconds = None if problems else max(outcome.seconds for outcome in outcomes)
        size = max((outcome.size for outcome in outcomes), key=_as_number)
        rows.append(Row(outcomes[0].name, size, outcomes[0].checked, problems, seconds))
    return rows


def _show(console: Console, rows: Sequence[Row], on_gpu: bool) -> None:
    moved = [row for row in rows if isinstance(row.size, int)]
    multiplied = [row for row in rows if not isinstance(row.size, int)]
    console.print()
    if moved:
        table = _table("collective", "message", "time", "rate")
        for index, row in enumerate(moved):
            took = row.seconds
            rate = "" if took is None else _rate_text(_as_number(row.size) / took)
            table.add_row(row.name, _size_text(row.size), _time_text(took), rate, *_verdict(row))
            if (index + 1) % len(COLLECTIVES) == 0:
                table.add_row()
        console.print(table)
    if multiplied:
        table = _table("op", "product", "time")
        for row in multiplied:
            table.add_row(row.name, _size_text(row.size), _time_text(row.seconds), *_verdict(row))
        table.add_row()
        console.print(table)
    for row in rows:
        if row.problems:
            console.print(f"[red]{row.name}, {_size_text(row.size)}[/]: {escape(row.problems[0])}", soft_wrap=True)
    _show_legend(console, "torch" in rows[0].checked, on_gpu)


def _table(first: str, *numbers: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("checked", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    return table


def _verdict(row: Row) -> tuple[str, Text]:
    return ", ".join(row.checked), Text("WRONG", "bold red") if row.problems else Text("right", "green")


def _show_legend(console: Console, with_torch: bool, on_gpu: bool) -> None:
    dtype = str(DTYPE).removeprefix("torch.")
    notes = "bits: every bit as the inputs of all ranks say. fp64: as they say in fp64, within rounding."
    if with_torch:
        notes += " torch: the same from torch.distributed."
    if not on_gpu:
        notes += " Times of CPU ranks do not tell which strategy is quicker on a GPU."
    console.print(
        f"message: the larger of a rank's input and output. product: M x N x K of all ranks together. Both in {dtype}. "
        f"time: of one call, median of batches, slowest rank. rate: message over time. {notes}",
        style="dim", width=min(80, console.width),
    )  # fmt: skip
    console.print()


def _as_number(size: int | tuple[int, int, int]) -> int:
    return size if isinstance(size, int) else math.prod(size)


def _size_text(size: int | tuple[int, int, int]) -> str:
    return _bytes_text(size) if isinstance(size, int) else " x ".join(map(str, size))


def _bytes_text(nbytes: int) -> str:
    return f"{_figure(nbytes / 1024)} KiB" if nbytes < 1 << 20 else f"{_figure(nbytes / (1 << 20))} MiB"


def _time_text(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _rate_text(bytes_per_s: float) -> str:
    return f"{_figure(bytes_per_s / 1e6)} MB/s" if bytes_per_s < 1e9 else f"{_figure(bytes_per_s / 1e9)} GB/s"


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
