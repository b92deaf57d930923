"""The check of the collectives finds wrong results: each kind is planted once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tileflux import ops
from tileflux.errors import RankFailed
from tileflux.symm.group import Group
from tileflux.testing import run_ranks
from tileflux.testing.collectives import COLLECTIVES, check_collectives, random_inputs

Op = Callable[..., torch.Tensor]


def _unwritten(real: Op) -> Op:
    return lambda x, *, group, out, **kwargs: out


def _one_bit(real: Op) -> Op:
    def wrong(x: torch.Tensor, *, group: Group, out: torch.Tensor, **kwargs: object) -> torch.Tensor:
        real(x, group=group, out=out, **kwargs)
        if out.numel():
            out.view(-1).view(torch.uint8)[-1] ^= 1
        return out

    return wrong


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"])
@pytest.mark.parametrize("plant", [_unwritten, _one_bit])
def test_wrong_results_are_found(op: str, plant: Callable[[Op], Op], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, op, plant(getattr(ops, op)))
    with pytest.raises(RankFailed, match=f"{op}.* of \\(13, 8\\) torch.bfloat16"):
        run_ranks(check_collectives, 2, args=([(13, 8)], [torch.bfloat16]), where="virtual")


def test_every_op_is_among_the_collectives() -> None:
    covered = {collective.name.split(",")[0] for collective in COLLECTIVES}
    dense = {"gemm", "ag_gemm", "gemm_rs", "gemm_ar"}  # their problems are in testing/dense.py
    experts = {"grouped_gemm", "Routing", "route", "moe_ag_gemm", "moe_gemm_rs", "moe_gemm_ar"}  # in testing/moe.py
    exchanges = {"Dispatched", "ep_dispatch", "ep_combine"}  # in tests/ops/ep_cases.py
    assert covered | {"barrier"} | dense | experts | exchanges == {
        name for name in ops.__all__ if not name.endswith("_reference")
    }


def test_inputs_differ_by_rank_and_repeat_by_seed() -> None:
    for dtype in (torch.float32, torch.bool, torch.float8_e4m3fn, torch.int64):
        first, second = random_inputs(2, (50,), dtype, 3)
        assert first.dtype == dtype
        assert not torch.equal(first.view(torch.uint8), second.view(torch.uint8))
        assert torch.equal(first.view(torch.uint8), random_inputs(2, (50,), dtype, 3)[0].view(torch.uint8))
