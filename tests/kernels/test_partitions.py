"""What racecheck can tell of kernels divided into partitions, so that ``tests/hazards.py`` is right to sort it."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests import hazards


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["apart", "unordered"])
def test_racecheck_finds_what_is_not_ordered(name: str) -> None:
    """Only the wrong one has hazards of its own; of the right one nothing is said but how it is divided."""
    if (sanitizer := shutil.which("compute-sanitizer")) is None:
        pytest.skip("needs compute-sanitizer")
    command = [
        sanitizer,
        "--tool",
        "racecheck",
        "--print-limit",
        "1000",
        sys.executable,
        "-m",
        "tests.kernels.partitions",
    ]
    done = subprocess.run([*command, name], capture_output=True, text=True, timeout=120, cwd=hazards.ROOT, check=False)
    mine = hazards.ours(hazards.reports(done.stdout))
    assert bool(mine) == (name == "unordered"), done.stdout
