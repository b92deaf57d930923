"""``examples/moe_layer.py``: alone, tensor- and expert-parallel, and that it notices a wrong result."""

from __future__ import annotations

from pathlib import Path

import pytest

from .test_dense_mlp import ROOT, run

EXAMPLE = ROOT / "examples" / "moe_layer.py"
WHAT = "moe_layer: 256 tokens, 2 of 8 experts each, on"


def test_alone() -> None:
    done = run(EXAMPLE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{WHAT} TP 1 x EP 1 (local, cpu): agrees with fp32\n"


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_under_torchrun(ep_size: int) -> None:
    done = run(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", EXAMPLE, str(ep_size)
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{WHAT} TP {4 // ep_size} x EP {ep_size} (shm, cpu): agrees with fp32\n"


def test_a_wrong_result_is_noticed(tmp_path: Path) -> None:
    source, right = EXAMPLE.read_text(), "tileflux.moe_gemm_rs(inner, down, routing)"
    assert source.count(right) == 1
    broken = tmp_path / "broken.py"
    broken.write_text(source.replace(right, f"{right} * 1.05"))
    done = run(broken)
    assert done.returncode != 0 and done.stdout == ""
    assert "AssertionError" in done.stderr
