"""What is compared of tokens there and back: all of it right, and nothing wrong passes its check."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tileflux import ops
from tileflux.symm.group import Group
from tileflux.testing import ep_contenders as module
from tileflux.testing import run_ranks
from tileflux.testing.ep_contenders import ep_suite
from tileflux.testing.shapes import Mixture

from .suites import passes, try_all

OURS = ("sequential", "fused", "auto")
LAYOUTS = [(1, Mixture(4, 2)), (2, Mixture(4, 2)), (3, Mixture(6, 1)), (4, Mixture(8, 3, routing="skewed"))]
SHAPE = (65, 0, 34)
NAMES = ["sequential", "torch", *(f"ours {strategy}" for strategy in OURS)]


def _try_all(group: Group, mixture: Mixture, dtype: str, shape: tuple[int, int, int] = SHAPE) -> tuple[Any, ...]:
    suite = ep_suite(group, shape, mixture, dtype, OURS)
    try_all(group, suite)
    return [each.name for each in suite.contenders], list(suite.parts), suite.skipped, suite.auto


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("world_size", "mixture"), LAYOUTS, ids=str)
def test_every_contender_is_right(world_size: int, mixture: Mixture, dtype: str) -> None:
    for found in run_ranks(_try_all, world_size, args=(mixture, dtype)):
        assert found == (NAMES, ["route"], {}, "fused")


def test_virtual_ranks_have_no_all_to_all_of_torchs() -> None:
    why = "ranks without a process group have no all_to_all_single"
    for found in run_ranks(_try_all, 2, args=(Mixture(4, 2), "float32"), where="virtual"):
        assert found == ([NAMES[0], *NAMES[2:]], ["route"], {"torch": why}, "fused")


def _planted(group: Group, what: str) -> list[str]:
    """Something is wrong on rank 1. Who notices?"""
    dispatch, combine, all_to_all, by_torch = ops.ep_dispatch, ops.ep_combine, ops.all_to_all, module._by_torch
    is_here = group.rank == 1

    def bad_tokens(*given: Any, **named: Any) -> Any:
        found = dispatch(*given, **named)
        if is_here and what == "tokens":
            found.tokens[3, 5] += 1.0
        if is_here and what == "counts":
            return dataclasses.replace(found, counts=found.counts.flip(0) + 1)
        return found

    def bad_sums(*given: Any, out: torch.Tensor, **named: Any) -> None:
        combine(*given, out=out, **named)
        if is_here and what == "sums":
            out[3, 5] += 1.0

    def bad_exchange(*given: Any, out: torch.Tensor, **named: Any) -> None:
        all_to_all(*given, out=out, **named)
        if is_here and what == "exchange" and out.is_floating_point():
            out[:2] = out[:2].flip(0)

    def bad_torch(come: torch.Tensor, *given: Any) -> None:
        by_torch(come, *given)
        if is_here and what == "torch" and come.is_floating_point():
            come[-1] += 1.0

    failed = []
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, wrong in (
            (ops, "ep_dispatch", bad_tokens), (ops, "ep_combine", bad_sums), (ops, "all_to_all", bad_exchange),
            (module, "_by_torch", bad_torch),
        ):  # fmt: skip
            patch.setattr(owner, name, wrong)
        suite = ep_suite(group, SHAPE, Mixture(4, 2), "float32", OURS)
        for contender in suite.contenders:
            suite.poison()
            group.barrier()
            contender.run()
            failed += [] if passes(suite, contender.name) else [contender.name]
            group.barrier()
    return failed


@pytest.mark.parametrize(
    ("what", "who"),
    [("tokens", NAMES[2:]), ("counts", NAMES[2:]), ("sums", NAMES[2:]), ("exchange", NAMES[:1]), ("torch", NAMES[1:2])],
)
def test_what_is_wrong_on_one_rank_is_seen_there(what: str, who: list[str]) -> None:
    _, there = run_ranks(_planted, 2, args=(what,))
    assert there == who


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["virtual", "mps"])
def test_on_a_gpu(where: str) -> None:
    arguments = (Mixture(16, 4), "bfloat16", (512, 0, 256))
    for names, parts, _, auto in run_ranks(
        _try_all, 4, args=arguments, where=where, device="cuda:0", timeout_s=300  # type: ignore[arg-type]
    ):  # fmt: skip
        assert names[0] == "sequential" and names[-3:] == NAMES[2:] and (parts, auto) == (["route"], "fused")
