"""The ``tileflux`` command. Each command is a file; here they are put together, and errors become one line.

Exit status: 0 for success, 1 for a wrong result or something that does not work, 2 for a mistake in the call,
130 after Ctrl-C.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Annotated, NoReturn

import typer
from typer.main import get_command

import tileflux
from tileflux.cli.bench import bench
from tileflux.cli.demo import demo
from tileflux.cli.doctor import doctor
from tileflux.cli.profile import profile
from tileflux.cli.tune import tune

__all__ = ["app", "main"]

_INTERRUPTED = 130
_TERMINATED = 143

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
app.command()(bench)
app.command()(demo)
app.command()(doctor)
app.command()(profile)
app.command()(tune)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tileflux {tileflux.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Communication hidden inside computation, for PyTorch on GPUs.

    \b
    Examples:
      tileflux demo            run every op on this machine, and check it
      tileflux doctor          what works on this machine, and what does not
      tileflux doctor --json   the same for a bug report or a script
      tileflux bench ag_gemm 4096 49152 12288
                               how much of the communication is hidden
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: this process's arguments) and return its exit status."""
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        status = get_command(app).main(
            args=None if arguments is None else list(arguments), prog_name="tileflux", standalone_mode=False
        )
    except (KeyboardInterrupt, typer.Abort):
        status = _INTERRUPTED
    except Exception as error:
        # Typer's own errors have no common public base in all its versions, but all of them can do this.
        if not hasattr(error, "format_message"):
            raise
        message = " ".join(str(error.format_message()).split()).rstrip(".")
        command = getattr(getattr(error, "ctx", None), "command_path", "tileflux")
        typer.echo(f"{command}: {message}. See '{command} --help'.", err=True)
        status = int(getattr(error, "exit_code", 2))
    finally:
        signal.signal(signal.SIGTERM, before)
    if status == _INTERRUPTED:
        typer.echo("tileflux: interrupted", err=True)
    return status if isinstance(status, int) else 0


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Unwind, so that ranks end and an MPS daemon quits: by default SIGTERM would leave the daemon behind."""
    sys.exit(_TERMINATED)
