"""What the commands share of the terminal: a console, a line that moves while ranks work, errors on one line."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

import typer
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner

__all__ = ["Progress", "fail", "make_console"]

_REFRESH_S = 0.1

# Held while drawing and while forking: a rank forked in the middle of a write would inherit the stream's lock, taken.
_drawing = threading.Lock()
os.register_at_fork(before=_drawing.acquire, after_in_parent=_drawing.release, after_in_child=_drawing.release)


def make_console() -> Console:
    """Standard output; without colour, and 80 columns wide, where that is no terminal."""
    return Console(highlight=False)


def fail(command: str, message: str, status: int) -> NoReturn:
    """Say on one line of standard error what is wrong, and leave with ``status``."""
    typer.echo(f"tileflux {command}: {message}", err=True)
    raise typer.Exit(status)


class Progress:
    """Shows ``describe()`` beside a spinner within a ``with`` block, on a terminal; elsewhere it does nothing."""

    def __init__(self, console: Console, describe: Callable[[], str]) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._spinner = Spinner("dots")
        self._describe = describe
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._live is not None:
            self._thread.join()
            self._live.stop()

    def _draw(self) -> None:
        assert self._live is not None
        while not self._ended.wait(_REFRESH_S):
            self._spinner.update(text=self._describe())
            with _drawing:
                self._live.update(self._spinner, refresh=True)
