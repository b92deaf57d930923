"""The MPS daemon's life, played by a stand-in: a script that answers as the control program does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tileflux.errors import TransportUnavailable
from tileflux.testing import mps
from tileflux.testing.mps import MpsDaemon

STAND_IN = """\
    #!{python}
    import os, pathlib, signal, sys, time
    folder = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
    assert pathlib.Path(os.environ["CUDA_MPS_LOG_DIRECTORY"]).is_dir()
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in os.environ
    mode = pathlib.Path(__file__).with_name("mode").read_text()
    if sys.argv[1:] == ["-d"]:
        if mode == "refuses":
            sys.exit("no GPU for you")
        if os.fork() == 0:
            os.setsid()
            time.sleep(0.2)  # a daemon that is not ready at once
            (folder / "pid").write_text(str(os.getpid()))
            time.sleep(600)
    elif (folder / "pid").exists():
        command = sys.stdin.read().split()
        pathlib.Path(__file__).with_name("asked").write_text(" ".join(command))
        if command[0] == "quit" and mode != "stubborn":
            os.kill(int((folder / "pid").read_text()), signal.SIGTERM)
        elif command[0].startswith("get_"):
            print("100.0")
    else:
        sys.exit("Cannot find MPS control daemon process")
    """


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Puts the stand-in on PATH; write another word into the file returned to change how it behaves."""
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_text(textwrap.dedent(STAND_IN.format(python=sys.executable)))
    program.chmod(0o755)
    mode = tmp_path / "mode"
    mode.write_text("obeys")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(mps, "_QUIT_S", 1.0)
    monkeypatch.setattr(mps, "_START_S", 5.0)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    yield mode
    assert _daemons(tmp_path) == []
    assert list(tmp_path.glob("tileflux-mps-*")) == []


def _daemons(folder: Path) -> list[int]:
    program = str(folder / "nvidia-cuda-mps-control").encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if program in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def test_a_daemon_runs_between_enter_and_exit(stand_in: Path) -> None:
    with MpsDaemon() as daemon:
        variables = daemon.client_variables(25)
        assert len(_daemons(stand_in.parent)) == 1
        assert variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
        assert variables["CUDA_DEVICE_MAX_CONNECTIONS"] is None, "clients cannot have more queues than the default"
        assert Path(str(variables["CUDA_MPS_PIPE_DIRECTORY"])).is_dir()
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert _daemons(stand_in.parent) == []
    assert stand_in.with_name("asked").read_text().startswith("quit -t ")
    with pytest.raises(ValueError, match="not running"):
        daemon.client_variables(25)
    daemon.close()


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
def test_an_error_inside_ends_the_daemon(stand_in: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), MpsDaemon():
        raise error


def test_a_daemon_that_will_not_quit_is_killed(stand_in: Path) -> None:
    with MpsDaemon():
        stand_in.write_text("stubborn")


def test_another_daemon_is_left_alone(stand_in: Path) -> None:
    with MpsDaemon():
        (other,) = _daemons(stand_in.parent)
        with MpsDaemon():
            assert len(_daemons(stand_in.parent)) == 2
            stand_in.write_text("stubborn")  # so that the inner one is killed, which must not hit the outer one
        assert _daemons(stand_in.parent) == [other]
        stand_in.write_text("obeys")


def test_a_daemon_that_does_not_start_says_what_it_printed(stand_in: Path) -> None:
    stand_in.write_text("refuses")
    with pytest.raises(TransportUnavailable, match="code 1; no daemon answers: no GPU for you.*To fix"), MpsDaemon():
        pass


def test_no_program_no_daemon(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(TransportUnavailable, match="not on PATH. To fix: install"), MpsDaemon():
        pass


def test_leaving_python_ends_the_daemon(stand_in: Path) -> None:
    script = "from tileflux.testing.mps import MpsDaemon; MpsDaemon().__enter__(); raise SystemExit(7)"
    environment = {**os.environ, "TMPDIR": str(stand_in.parent)}
    assert subprocess.run([sys.executable, "-c", script], env=environment, check=False).returncode == 7


def test_a_daemon_that_died_by_itself_is_no_error(stand_in: Path) -> None:
    with MpsDaemon():
        (pid,) = _daemons(stand_in.parent)
        os.kill(pid, signal.SIGKILL)
