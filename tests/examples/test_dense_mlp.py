"""``examples/dense_mlp.py``: alone, under torchrun, and that it notices a wrong result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "dense_mlp.py"
TIMEOUT_S = 180
WHAT = "dense_mlp: 512 x 256 -> 1024 -> 256 on"


def run(*command: str | Path, visible_gpus: str = "") -> subprocess.CompletedProcess[str]:
    """As a reader's shell would, with nothing that this session set."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TILEFLUX_", "TRITON_INTERPRET"))}
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env={**kept, "CUDA_VISIBLE_DEVICES": visible_gpus, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


def torchrun(world_size: int, example: Path = EXAMPLE) -> subprocess.CompletedProcess[str]:
    return run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size), example)


def test_alone() -> None:
    done = run(EXAMPLE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{WHAT} 1 rank (local, cpu), sequential: agrees with fp32\n"


def test_under_torchrun() -> None:
    done = torchrun(2)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{WHAT} 2 ranks (shm, cpu), fused: agrees with fp32\n"


def test_a_wrong_result_is_noticed(tmp_path: Path) -> None:
    source, right = EXAMPLE.read_text(), 'activation="swiglu")'
    assert source.count(right) == 1
    broken = tmp_path / "broken.py"
    broken.write_text(source.replace(right, f"{right} * 1.05"))
    done = run(broken)
    assert done.returncode != 0 and done.stdout == ""
    assert "AssertionError" in done.stderr


@pytest.mark.gpu
def test_alone_on_a_gpu() -> None:
    done = run(EXAMPLE, visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{WHAT} 1 rank (local, cuda), sequential: agrees with fp32\n"
