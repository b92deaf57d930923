"""What is compared of the ops of experts: all of it right, and nothing wrong passes its check."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tileflux import ops
from tileflux.symm.group import Group
from tileflux.testing import moe_contenders as module
from tileflux.testing import run_ranks
from tileflux.testing.moe import expected_ag, expected_rs, moe_ag_case, moe_routing, moe_rs_case
from tileflux.testing.moe_contenders import grouped_suite, moe_suite
from tileflux.testing.numerics import assert_close
from tileflux.testing.shapes import Mixture
from tileflux.tune.lookup import STRATEGIES

from .suites import passes, try_all

OPS = ("moe_ag_gemm", "moe_gemm_rs")
OURS = dict.fromkeys(OPS, STRATEGIES)
LAYOUTS = [(2, Mixture(4, 2)), (3, Mixture(6, 1)), (4, Mixture(8, 3, 2, "skewed")), (2, Mixture(4, 2, 2))]
"""Ranks and experts. With three ranks nothing divides; with sets of experts there are fewer rows than there is room."""
SHAPE = (65, 50, 34)


def _try_all(group: Group, op: str, mixture: Mixture, dtype: str) -> dict[str, Any]:
    suite = moe_suite(group, op, SHAPE, mixture, dtype, OURS[op])
    try_all(group, suite)
    names = [contender.name for contender in suite.contenders]
    return {"names": names, "parts": list(suite.parts), "skipped": suite.skipped, "auto": suite.auto}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("world_size", "mixture"), LAYOUTS, ids=str)
def test_every_contender_is_right(world_size: int, mixture: Mixture, op: str, dtype: str) -> None:
    for found in run_ranks(_try_all, world_size, args=(op, mixture, dtype)):
        assert found["names"] == ["sequential", "pipelined", *(f"ours {strategy}" for strategy in OURS[op])]
        assert found["parts"] == ["route", "gemm", "comm", "beside"]
        assert found["auto"] in OURS[op][1:] and found["skipped"] == {"torch": "torch has no fused op for experts"}


def _wrong_element(group: Group, op: str, at: int) -> list[str]:
    """One element of one rank's result is wrong, after the right call. Who notices?"""
    right, failed = getattr(ops, op), []

    def wrong(*arguments: object, out: torch.Tensor, **named: object) -> None:
        right(*arguments, out=out, **named)
        if group.rank == at:
            out[3, -1] += 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, op, wrong)
        suite = moe_suite(group, op, SHAPE, Mixture(4, 2), "float32", OURS[op])
        for contender in suite.contenders:
            suite.poison()
            group.barrier()
            contender.run()
            failed += [] if passes(suite, contender.name) else [contender.name]
    return failed


@pytest.mark.parametrize("op", OPS)
def test_one_wrong_element_on_one_rank_is_seen_there(op: str) -> None:
    assert run_ranks(_wrong_element, 2, args=(op, 1)) == [[], [f"ours {strategy}" for strategy in OURS[op]]]


def _wrong_baselines(group: Group, op: str) -> list[str]:
    """All products of torch's have two rows in each other's place."""
    right, failed = module.multiply_by_expert, []

    def wrong(rows: torch.Tensor, *others: Any) -> torch.Tensor:
        found = right(rows, *others)
        return found[[1, 0, *range(2, len(found))]] if len(found) > 1 else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "multiply_by_expert", wrong)
        suite = moe_suite(group, op, SHAPE, Mixture(4, 2), "float32", ("fused",))
        for contender in suite.contenders:
            suite.poison()
            group.barrier()
            contender.run()
            failed += [] if passes(suite, contender.name) else [contender.name]
            group.barrier()
    return failed


@pytest.mark.parametrize("op", OPS)
def test_a_wrong_baseline_is_seen_too(op: str) -> None:
    assert run_ranks(_wrong_baselines, 2, args=(op,)) == [["sequential", "pipelined"]] * 2


def _written_behind(group: Group) -> list[bool]:
    """Each of two ranks has half of the experts, so that half of the room is nobody's."""
    suite = moe_suite(group, "moe_ag_gemm", SHAPE, Mixture(4, 2, 2), "float32", ("fused",))
    (ours,) = (each for each in suite.contenders if each.name == "ours fused")
    found = []
    for place in (None, -1):
        suite.poison()
        group.barrier()
        ours.run()
        if place is not None:
            ours.check.__self__.out[place, 0] = 0.0  # type: ignore[attr-defined]
        found.append(passes(suite, "ours fused"))
    return found


def test_rows_behind_the_last_one_must_stay_as_they_were() -> None:
    assert run_ranks(_written_behind, 2) == [[True, False]] * 2


def _expected(group: Group, op: str, mixture: Mixture) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    task = module._TASKS[op](group, op, SHAPE, torch.float32, mixture)
    num_rows = len(task.picked.slots)
    return (task.x if op == "moe_ag_gemm" else task.x[:num_rows]), task.weight, task.expected


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("world_size", "mixture"), LAYOUTS[2:], ids=str)
def test_what_is_expected_is_what_the_oracle_says_of_what_ranks_hold(
    world_size: int, mixture: Mixture, op: str
) -> None:
    """Put together from what ranks bring, not from what the module says of its peers. F divides here."""
    m, n, k = SHAPE
    found = run_ranks(_expected, world_size, args=(op, mixture))
    sizes = [len(part) for part in torch.arange(m).tensor_split(world_size)]
    routing = moe_routing(
        sizes, mixture.num_experts, mixture.top_k, 1, ep_size=mixture.ep_size, kind=mixture.routing  # type: ignore[arg-type]
    )  # fmt: skip
    make, expect = (moe_ag_case, expected_ag) if op == "moe_ag_gemm" else (moe_rs_case, expected_rs)
    hidden, ffn = (k, n) if op == "moe_ag_gemm" else (n, k)
    case = make(routing, hidden, ffn, torch.float32, 0)
    for mine, theirs in ((case.xs, [x for x, _, _ in found]), (case.weights, [weight for _, weight, _ in found])):
        for own, given in zip(mine, theirs, strict=True):
            own.copy_(given)
    for rank, (_, _, expected) in enumerate(found):
        assert_close(expected, expect(case, rank).double(), reduction=k * mixture.top_k)


def _grouped(group: Group, mixture: Mixture, dtype: str) -> tuple[list[str], list[str]]:
    suite = grouped_suite(group, (33, 17, 40), mixture, dtype)
    for contender in suite.contenders:
        suite.poison()
        assert not passes(suite, contender.name), f"{contender.name}: poison passes"
        contender.run()
        contender.check()
    for part in suite.parts.values():
        part()
    failed = []
    op = "moe_ag_gemm" if mixture.is_picked else "grouped_gemm"
    right = getattr(ops, op)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, op, lambda *given, out: right(*given, out=out).add_(1.0))
        for contender in suite.contenders:
            suite.poison()
            contender.run()
            failed += [] if passes(suite, contender.name) else [contender.name]
    assert failed == ["ours"] and suite.auto == "" and suite.skipped == {}
    return [each.name for each in suite.contenders], list(suite.parts)


@pytest.mark.parametrize("is_picked", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_grouped_product_against_torchs(dtype: str, is_picked: bool) -> None:
    ((names, parts),) = run_ranks(_grouped, 1, args=(Mixture(5, 2, is_picked=is_picked), dtype))
    assert names == ["torch", "ours"] and parts == (["route", "gemm"] if is_picked else ["gemm"])


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["virtual", "mps"])
@pytest.mark.parametrize("op", OPS)
def test_on_a_gpu(op: str, where: str) -> None:
    mixture = Mixture(8, 2, 2)
    run_ranks(_try_all_large, 2, args=(op, mixture), where=where, device="cuda:0", timeout_s=300)  # type: ignore[arg-type]


def _try_all_large(group: Group, op: str, mixture: Mixture) -> None:
    suite = moe_suite(group, op, (512, 512, 256), mixture, "bfloat16", OURS[op])
    try_all(group, suite)
