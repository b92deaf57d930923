"""A rehearsal compiles what an op would launch, of every strategy and for every kind of rank, and runs none of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

import tileflux
from tileflux import GemmConfig
from tileflux.testing import run_ranks
from tileflux.testing.rehearsal import H200, rehearse, stand_in_for

TILES = GemmConfig(64, 64, 64, num_warps=4, num_stages=2, num_feeders=2)


def _call(rank: int, world_size: int, strategy: str, is_virtual: bool) -> tuple[bool, int]:
    rehearse(H200)
    group = stand_in_for(2, 1, is_virtual=is_virtual)
    x, weight = (torch.ones(size, 64, dtype=torch.bfloat16) for size in (64, 96))
    out = torch.full((128, 96), 7.0, dtype=torch.bfloat16)
    tileflux.ag_gemm(x, weight, group=group, strategy=strategy, config=TILES, out=out)
    return bool((out == 7).all()), group.traits.num_sms


@pytest.mark.parametrize(
    ("strategy", "is_virtual", "wanted"),
    [
        # A virtual rank loads what its peers may need before any of them waits: with TMA, without, and out of line.
        ("fused", True, {"_gemm_kernel": 3}),
        ("fused", False, {"_gemm_kernel": 1}),
        ("sequential", False, {"_gemm_kernel": 1, "_feed_all_kernel": 1, "_open_kernel": 1, "_release_kernel": 1}),
    ],
)
def test_what_is_launched_is_compiled(
    strategy: str, is_virtual: bool, wanted: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (untouched, num_sms), = run_ranks(
        _call, 1, args=(strategy, is_virtual), where="spawn", device="cpu", make_group=False, timeout_s=120
    )  # fmt: skip
    assert untouched and num_sms == H200.num_sms // 2
    found = Counter(file.stem for file in tmp_path.glob("*/*.cubin"))
    assert {name: found[name] for name in wanted} == wanted


def test_nothing_is_rehearsed_where_kernels_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1: .* unset it to rehearse"):
        rehearse(H200)
