"""What is tested on a GPU as Hopper's loop is run by it, and what falls back to Triton's is known to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_problems_for_hopper_run_on_its_loop() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.ops.dense_loops"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    lines = [line.split() for line in ran.stdout.splitlines()]
    wrong = [line for line in lines if line[6:] != (["triton"] if line[5] == "True" else ["hopper"])]
    assert not wrong
    on_hopper = {tuple(line[:4]) for line in lines if line[5] == "False"}
    wanted = {
        (world, kind, f"torch.{dtype}", op)
        for world, kind in (("2", "virtual"), ("4", "virtual"), ("8", "virtual"), ("2", "mps"), ("4", "mps"))
        for dtype in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
        for op in ("ag_gemm", "gemm_rs", "gemm_ar")
    }
    assert on_hopper == wanted
