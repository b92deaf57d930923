"""The command line as a whole: help, version, mistakes on one line, and leaving in every way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import tileflux
from tileflux.cli import app, main

ROOT = Path(__file__).parents[2]
demo_module = import_module("tileflux.cli.demo")


def invoke(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, list(arguments))


def test_version() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.output) == (0, f"tileflux {tileflux.__version__}\n")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["demo", "--help"], ["doctor", "--help"]])
def test_help_has_examples_and_fits_the_screen(arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 0
    assert "Examples:" in result.output
    assert f"tileflux {arguments[0] if len(arguments) > 1 else 'demo'} " in result.output
    assert max(len(line) for line in result.output.splitlines()) <= 80


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nope"], "tileflux: No such command 'nope'"),
        (["--nope"], "tileflux: No such option: --nope"),
        (["demo", "--nope"], "tileflux demo: No such option: --nope"),
        (["demo", "--world", "0"], "'--world'"),
        (["demo", "--world", "four"], "'--world'"),
        (["demo", "--where", "moon"], "'moon' is not one of 'auto', 'cpu', 'local', 'mps'"),
        (["doctor", "extra"], "extra"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err
    assert len(printed.err.splitlines()) == 1
    assert printed.err.endswith(" --help'.\n")


@pytest.mark.parametrize("command", ["demo", "doctor"])
def test_a_wrong_setting_is_one_line_and_status_2(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEFLUX_TIMEOUT_S", "soon")
    assert main([command]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"tileflux {command}: TILEFLUX_TIMEOUT_S='soon' is not a positive number")
    assert len(printed.err.splitlines()) == 1


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def _abort() -> None:
    raise typer.Abort  # what older versions of Typer make of an interrupt


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _stumble() -> None:
    raise LookupError("nobody expected this")


def _main_with(monkeypatch: pytest.MonkeyPatch, event: Callable[[], None]) -> int:
    """Run ``demo``, with ``event`` happening in place of the ranks."""

    def run(*args: object, **kwargs: object) -> None:
        event()
        time.sleep(5)

    monkeypatch.setattr(demo_module, "run", run)
    before = signal.getsignal(signal.SIGTERM)
    try:
        return main(["demo", "--where", "cpu"])
    finally:
        assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("event", [_interrupt, _abort])
def test_an_interrupt_is_status_130(
    event: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _main_with(monkeypatch, event) == 130
    assert capsys.readouterr().err == "tileflux: interrupted\n"


def test_a_request_to_end_unwinds(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as raised:
        _main_with(monkeypatch, _terminate)
    assert raised.value.code == 143


def test_a_defect_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LookupError, match="nobody expected"):
        _main_with(monkeypatch, _stumble)


IN_A_TERMINAL = """
import os, pty, sys
status = pty.spawn([sys.executable, "-m", "tileflux", "demo", "--where", "cpu"])
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_ctrl_c_in_a_terminal_leaves_nothing_running() -> None:
    """A real terminal, so that the interrupt reaches ranks as well, as it does when somebody presses the keys."""
    mark = f"mark-{os.getpid()}"
    with subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "TILEFLUX_TEST_MARK": mark},
    ) as terminal:
        assert terminal.stdin is not None and terminal.stdout is not None
        seen = b""
        while b"timing" not in seen:
            received = os.read(terminal.stdout.fileno(), 4096)
            assert received, f"ended without showing what it does: {seen.decode()}"
            seen += received
        assert len(_marked(mark)) > 4, "the ranks should be running"
        terminal.stdin.write(b"\x03")
        terminal.stdin.flush()
        rest = terminal.stdout.read()
        assert terminal.wait(timeout=20) == 130, rest.decode()
    assert b"Traceback" not in seen + rest
    assert rest.endswith(b"tileflux: interrupted\r\n")
    assert (seen + rest).rindex(b"\x1b[?25h") > (seen + rest).rindex(b"\x1b[?25l"), "the cursor should be back"
    assert _marked(mark) == []


def _marked(mark: str) -> list[int]:
    """Processes whose environment carries the mark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"TILEFLUX_TEST_MARK={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except OSError:
            continue
    return found
