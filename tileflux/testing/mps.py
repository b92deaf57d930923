"""An MPS daemon of one's own, so that several processes run on one GPU at the same time.

Without MPS the GPU gives whole time slices to one process after another: ranks that wait for each other's
flags make progress only at every switch. The daemon is told apart from any other by its private pipe
directory; nothing here can reach a daemon that somebody else started.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

from tileflux import env
from tileflux.errors import TransportUnavailable

__all__ = ["MpsDaemon"]

_CONTROL = "nvidia-cuda-mps-control"
_START_S = 20.0
_QUIT_S = 10.0


class MpsDaemon:
    """Runs between ``with`` and its end; children started with ``client_variables()`` are its clients."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    def client_variables(self, sm_share: int) -> dict[str, str | None]:
        """Environment of a process that should use this daemon and see ``sm_share`` percent of the SMs."""
        # Hardware queues come out of one stock for all clients: more than the default, and contexts run out of memory.
        # And what is meant for virtual ranks only makes them start late: no kernel of theirs loads beside another's.
        usual = {"CUDA_DEVICE_MAX_CONNECTIONS": None, "CUDA_MODULE_LOADING": None}
        return self._variables() | usual | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(sm_share)}

    def __enter__(self) -> MpsDaemon:
        if shutil.which(_CONTROL) is None:
            raise TransportUnavailable(
                f"ranks that share a GPU side by side need MPS, and {_CONTROL} is not on PATH",
                "install NVIDIA's driver utilities (in a container: driver capability 'utility'), or use virtual ranks",
            )
        self._folder = Path(tempfile.mkdtemp(prefix="tileflux-mps-"))
        atexit.register(self.close)
        try:
            for name in ("pipe", "log"):
                (self._folder / name).mkdir()
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Make the daemon quit, kill it if it does not, and remove its folder. May be called twice."""
        if self._folder is None:
            return
        try:
            if self._processes():
                # With a time limit, or the daemon waits for clients that hang.
                self._ask(f"quit -t {int(_QUIT_S) // 2}")
                self._wait_until_gone(_QUIT_S)
        finally:
            for pid in self._processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._wait_until_gone(_QUIT_S)
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
            atexit.unregister(self.close)

    def _start(self) -> None:
        # Its output goes to a file: the daemon keeps what it inherits open, and a pipe would never end.
        with env.scoped(self._variables()), open(self._path("start.log"), "wb") as log:
            started = subprocess.run([_CONTROL, "-d"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False)
        deadline = time.monotonic() + _START_S
        while started.returncode == 0 and time.monotonic() < deadline:
            if self._ask("get_default_active_thread_percentage").strip():
                return
            time.sleep(0.05)
        raise TransportUnavailable(
            f"{_CONTROL} -d ended with code {started.returncode}; no daemon answers: {self._logs() or 'empty logs'}",
            "check that this user may use the GPU, and that its compute mode is not Prohibited",
        )

    def _ask(self, command: str) -> str:
        """Send the daemon one command; an empty answer if it is not there."""
        with env.scoped(self._variables()):
            try:
                done = subprocess.run(
                    [_CONTROL], input=command + "\n", capture_output=True, text=True, timeout=_QUIT_S, check=False
                )
            except subprocess.TimeoutExpired:
                return ""
        return done.stdout if done.returncode == 0 else ""

    def _processes(self) -> list[int]:
        """The daemon and its servers: MPS processes whose environment names our pipe directory."""
        mark = f"CUDA_MPS_PIPE_DIRECTORY={self._path('pipe')}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if (
                    entry.name.isdigit()
                    and b"nvidia-cuda-mps" in (entry / "cmdline").read_bytes()
                    and mark in (entry / "environ").read_bytes().split(b"\0")
                ):
                    found.append(int(entry.name))
        return found

    def _wait_until_gone(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._processes() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _logs(self) -> str:
        assert self._folder is not None
        files = sorted(self._folder.rglob("*.log"))
        return " / ".join(text for file in files if (text := file.read_text(errors="replace").strip()))

    def _variables(self) -> dict[str, str | None]:
        return {
            "CUDA_MPS_PIPE_DIRECTORY": self._path("pipe"),
            "CUDA_MPS_LOG_DIRECTORY": self._path("log"),
            # In the daemon's own environment it would cap the share of every client.
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": None,
        }

    def _path(self, name: str) -> str:
        if self._folder is None:
            raise ValueError("this MpsDaemon is not running; use it in a with statement")
        return str(self._folder / name)
