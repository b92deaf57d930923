"""``tileflux doctor``: what this machine has, what works on it, and how to mend what does not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tileflux import env
from tileflux.cli._console import Progress, fail, make_console
from tileflux.cli._machine import Link, Machine, inspect_machine
from tileflux.cli._probes import Check, Probe, Status, make_probes, run_probe

__all__ = ["as_json", "doctor"]

_MARKS = {Status.OK: ("green", "ok"), Status.FAILED: ("bold red", "FAILED"), Status.NOT_APPLICABLE: ("dim", "n/a")}


def doctor(
    as_object: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Say what this machine has, prove what works on it, and how to mend what does not.

    Every transport that could work here carries an all_gather and an all_reduce between two ranks, and the results are
    checked. What needs a GPU is "not applicable" without one. The exit status is 1 if something fails that should work.

    \b
    Examples:
      tileflux doctor
      tileflux doctor --json > report.json    for a bug report
    """
    try:
        env.timeout_s(), env.check(), env.cpu_backend(), env.transport()
    except ValueError as error:
        fail("doctor", str(error), 2)
    console = make_console()
    machine = inspect_machine()
    if not as_object:
        _show_machine(console, machine)
    checks = _run(console, list(make_probes(machine)), quiet=as_object)
    if as_object:
        typer.echo(json.dumps(as_json(machine, checks), indent=2))
    else:
        _show_checks(console, checks)
    if any(check.status is Status.FAILED for check in checks):
        raise typer.Exit(1)


def as_json(machine: Machine, checks: Sequence[Check]) -> dict[str, Any]:
    """The report of ``--json``. Fields are added over time; none changes its meaning or goes."""
    return {
        "ok": all(check.status is not Status.FAILED for check in checks),
        **dataclasses.asdict(machine),
        "checks": [dataclasses.asdict(check) for check in checks],
    }


def _run(console: Console, probes: Sequence[Probe], quiet: bool) -> list[Check]:
    checks: list[Check] = []

    def describe() -> str:
        return f"trying: {probes[min(len(checks), len(probes) - 1)].title}"

    with Progress(Console(quiet=True) if quiet else console, describe):
        for probe in probes:
            checks.append(run_probe(probe))
    return checks


def _show_machine(console: Console, machine: Machine) -> None:
    facts = {name: version or "none" for name, version in machine.versions.items()}
    facts["MPS"] = machine.mps_control or "no control program on PATH"
    for gpu in machine.gpus:
        multicast = ", multicast" if gpu.multicast else ""
        memory = f"{gpu.memory_bytes / (1 << 30):.0f} GiB"
        chip = f"{gpu.name}, sm_{gpu.capability.replace('.', '')}"
        facts[f"GPU {gpu.index}"] = f"{chip}, {gpu.num_sms} SMs, {memory}{multicast}"
    if not machine.gpus:
        facts["GPUs"] = "none that torch can use"
    for pairs, text in _grouped(machine.links).items():
        facts[f"links {pairs}"] = text
    facts |= machine.variables
    table = _grid()
    for name, value in facts.items():
        table.add_row(Text(name, "bold"), escape(value))
    console.print(table)
    console.print()


def _grid() -> Table:
    return Table.grid(padding=(0, 2, 0, 0))


def _grouped(links: Sequence[Link]) -> dict[str, str]:
    """Pairs of GPUs by what joins them: most machines have one kind of link, and 28 pairs."""
    by_text: dict[str, list[str]] = {}
    for link in links:
        text = f"{link.kind}, {'peer access' if link.peer_access else 'no peer access'}"
        by_text.setdefault(text, []).append("-".join(map(str, link.gpus)))
    if len(by_text) == 1 and len(links) > 1:
        return {"all": next(iter(by_text))}
    return {" ".join(pairs): text for text, pairs in by_text.items()}


def _show_checks(console: Console, checks: Sequence[Check]) -> None:
    table = _grid()
    for check in checks:
        style, label = _MARKS[check.status]
        detail = Text(check.detail)
        if check.fix:
            detail.append(f"\nto fix: {check.fix}", "yellow")
        table.add_row(Text(label, style), check.title, detail)
    console.print(table)
    failed = sum(check.status is Status.FAILED for check in checks)
    expected = sum(check.status is not Status.NOT_APPLICABLE for check in checks)
    console.print()
    if failed:
        console.print(f"[bold red]{failed} of {expected} things that should work here do not.[/]")
    else:
        beside = len(checks) - expected
        note = f" {beside} need what this machine does not have." if beside else ""
        console.print(f"[bold green]All {expected} things that should work here do.[/]{note}")
