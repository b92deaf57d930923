"""Whether a process is gone, told from its number and its start."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

from tileflux.symm.processes import Process


def test_the_living_the_dead_and_the_replaced() -> None:
    this = Process.this(0)
    assert not this.is_gone()
    assert replace(this, started="1").is_gone(), "a process id that was used again"
    assert not replace(this, started="1", host="elsewhere").is_gone(), "nobody can tell across hosts"
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with open(f"/proc/{child.pid}/stat") as file:
        started = file.read().rpartition(")")[2].split()[19]
    process = Process(this.host, child.pid, started, 1)
    assert not process.is_gone()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process.is_gone(), "a zombie is gone, though it still has a number"
    child.wait()
    assert process.is_gone()
