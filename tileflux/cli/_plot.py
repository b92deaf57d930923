"""The picture of ``tileflux bench --plot``. Needs matplotlib, which only the extra ``plot`` installs."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tileflux.cli._report import labels
from tileflux.perf.figures import BASELINES, CaseResult, baseline_of

__all__ = ["PLOT_SUFFIXES", "can_plot", "plot"]

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
_AXES = {"m": "M, rows of all ranks", "n": "N, columns", "k": "K, terms"}
_COLOURS: dict[str | None, tuple[str, ...]] = {
    "sequential": ("#7f7f7f",),
    "pipelined": ("#a68a64",),
    "torch": ("#4d7ea8", "#9cbad3", "#2a4a66"),
    None: ("#d1495b", "#edae49", "#00798c", "#66a182", "#8d5b9f"),
}
"""By baseline; ours are none."""


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(results: Sequence[CaseResult], subtitle: str, file: Path) -> None:
    """Speed-ups against the size that varies, or by shape where several do; of a single shape the times."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = list(dict.fromkeys(timing.name for result in results for timing in result.contenders))
    names.sort(key=lambda name: baseline_of(name) is None)
    colours = _colours(names)
    varying = [axis for axis in (*_AXES, "variant") if len({getattr(result, axis) for result in results}) > 1]
    if len(results) == 1:
        _bars_of_times(axes, results[0], colours)
    elif len(varying) == 1 and varying[0] in _AXES:
        _lines(axes, results, names, colours, varying[0])
    else:
        _bars_of_speedups(axes, results, names, colours)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))  # beside the picture: it hides nothing there
    axes.set_title(f"{_title(results)}\n{subtitle}", fontsize=10)
    figure.savefig(file, dpi=150)


def _title(results: Sequence[CaseResult]) -> str:
    first = results[0]
    fixed = [axis for axis in _AXES if len({getattr(result, axis) for result in results}) == 1]
    sizes = " ".join(f"{axis.upper()}={getattr(first, axis)}" for axis in fixed)
    sizes += f" {first.variant}" if len({result.variant for result in results}) == 1 else ""
    return f"{first.op} {sizes} ({first.dtype}, world {first.world_size})".replace("  ", " ")


def _colours(names: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for baseline, palette in _COLOURS.items():
        same = [name for name in names if baseline_of(name) == baseline]
        found |= {name: palette[index % len(palette)] for index, name in enumerate(same)}
    return found


def _reference(results: Sequence[CaseResult]) -> str:
    """What speed-ups are over: the first baseline that ran at every shape, else the library's product alone."""
    return next((name for name in BASELINES if all(result.best(name) for result in results)), "")


def _seconds(result: CaseResult, reference: str) -> float:
    timing = result.best(reference)
    return result.gemm.seconds if timing is None else timing.seconds


def _lines(axes: Any, results: Sequence[CaseResult], names: Sequence[str], colours: dict[str, str], axis: str) -> None:
    ordered = sorted(results, key=lambda result: int(getattr(result, axis)))
    reference = _reference(ordered)
    sizes = [getattr(result, axis) for result in ordered]
    for name in names:
        found = [(result, timing) for result in ordered if (timing := result.find(name))]
        axes.plot(
            [getattr(result, axis) for result, _ in found],
            [_seconds(result, reference) / timing.seconds for result, timing in found],
            marker="o", markersize=4, color=colours[name], label=name,
            linestyle="-" if baseline_of(name) is None else "--",
        )  # fmt: skip
    if all(result.comm is not None for result in ordered):
        bounds = [_seconds(result, reference) / result.limit for result in ordered]
        axes.plot(sizes, bounds, color="black", linestyle=":", label="limit")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel(_AXES[axis])
    _finish_speedups(axes, reference)


def _bars_of_speedups(axes: Any, results: Sequence[CaseResult], names: Sequence[str], colours: dict[str, str]) -> None:
    reference, width = _reference(results), 0.8 / len(names)
    for index, name in enumerate(names):
        found = [(place, result, timing) for place, result in enumerate(results) if (timing := result.find(name))]
        axes.bar(
            [place + (index - (len(names) - 1) / 2) * width for place, _, _ in found],
            [_seconds(result, reference) / timing.seconds for _, result, timing in found],
            width, color=colours[name], label=name,
        )  # fmt: skip
    if all(result.comm is not None for result in results):
        bounds = [_seconds(result, reference) / result.limit for result in results]
        places = range(len(results))
        ends = [place - 0.4 for place in places], [place + 0.4 for place in places]
        axes.hlines(bounds, *ends, color="black", linestyle=":", label="limit")
    axes.set_xticks(range(len(results)), [label.replace(" ", "\n") for label in labels(results)], fontsize=8)
    _finish_speedups(axes, reference)


def _bars_of_times(axes: Any, result: CaseResult, colours: dict[str, str]) -> None:
    names = [timing.name for timing in result.contenders]
    times = [1e3 * timing.seconds for timing in result.contenders]
    errors = [1e3 * timing.seconds * timing.spread for timing in result.contenders]
    bars = axes.bar(names, times, yerr=errors, color=[colours[name] for name in names], capsize=3)
    axes.bar_label(bars, fmt="%.3g", fontsize=8, padding=2)
    if result.gemm.seconds:
        axes.axhline(1e3 * result.gemm.seconds, color="black", linestyle="--", label="T_gemm")
    if result.comm is not None:
        axes.axhline(1e3 * result.comm.seconds, color="black", linestyle=":", label="T_comm")
    axes.set_ylabel("time of one call, ms")
    axes.tick_params(axis="x", labelrotation=20)


def _finish_speedups(axes: Any, reference: str) -> None:
    axes.set_ylabel(f"speed-up over {reference or 'the library'} (times)")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
