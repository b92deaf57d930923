"""``moe_ag_gemm`` among ghosts: who plays, by which plan, and what must come of it. What needs no GPU is tried here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tileflux import ops
from tileflux.config import GemmConfig
from tileflux.kernels.plan import split_rows
from tileflux.kernels.turns import gather_shards
from tileflux.ops.routing import Routing
from tileflux.symm.group import Group
from tileflux.testing import ghost_moe, run_ranks
from tileflux.testing.bench import BenchCase, RankTimes, measure
from tileflux.testing.contenders import draw
from tileflux.testing.ghost import ghost_group
from tileflux.testing.ghost_moe import GhostMoeGather, ghost_moe_suite
from tileflux.testing.moe_contenders import router
from tileflux.testing.moe_rows import Assignment
from tileflux.testing.shapes import Mixture
from tileflux.tune.lookup import STRATEGIES

CPU = torch.device("cpu")
WORLD = 4
MIXTURE = Mixture(8, 2, 2, "skewed")
SHAPE = (66, 24, 16)
CASES = tuple(
    BenchCase("moe_ag_gemm", m, 256, 256, "bfloat16", STRATEGIES, 2, mixture)
    for m in (512, 301)
    for mixture in (Mixture(8, 2), Mixture(8, 2, 2, "skewed"))
)
"""With 301 tokens shards differ, and are less than a tile."""


def test_what_ghosts_do_not_play_is_refused() -> None:
    with pytest.raises(ValueError, match="moe_gemm_rs is not played by ghosts; of the ops of experts moe_ag_gemm is"):
        ghost_moe_suite(None, "moe_gemm_rs", (8, 8, 8), Mixture(2, 1), "bfloat16", ())  # type: ignore[arg-type]


def bare(rank: int = 1, **others: Any) -> Any:
    """A task without a GPU: everything but streams, pinned memory and a routing."""
    m, n, k = SHAPE
    task = object.__new__(GhostMoeGather)
    task.rank, task.world_size, task.rows, task.op = rank, WORLD, split_rows(m, WORLD), "moe_ag_gemm"
    task.shape, task.dtype, task.sizes, task.here = SHAPE, torch.float32, list(task.rows), None
    task.assignment = Assignment(m, WORLD, MIXTURE)
    everything = draw(1, (m, k), torch.float32, CPU)
    task.weight = draw(2, (4, task.assignment.share(rank, n), k), torch.float32, CPU)
    task.x, task.gathered = everything[task.place(rank)].clone(), everything.clone()
    task.out = torch.full((m * MIXTURE.top_k, task.weight.shape[1]), torch.nan)
    task.cut(everything)
    for name, value in others.items():
        setattr(task, name, value)
    return task


def test_baselines_are_right_and_poison_is_not() -> None:
    task = bare()
    for run, check in (
        (task.multiply, task.check_sequential),
        (lambda: [task.multiply_shard(source) for source in task.order], task.check_pipelined),
    ):
        task.poison()
        for each in (task.check_sequential, task.check_pipelined, task.check):
            with pytest.raises(AssertionError):
                each()
        run()
        check()
        task._found[0][0, 0] += 1.0
        with pytest.raises(AssertionError, match="off by more than rounding explains"):
            check()
    assert task.order == [1, 2, 3, 0]


def _as_by_the_op(group: Group) -> None:
    """What is expected of ours is what the op gives among real ranks, with the rows of its routing."""
    task = bare(group.rank)
    routing = router(group, task.assignment)()
    ops.moe_ag_gemm(task.x, task.weight, routing, out=task.out)
    task.check()
    task.out[-1, 0] = 0.0
    with pytest.raises(AssertionError, match="rows behind the last one are written"):
        task.check()


def test_what_is_expected_is_what_real_ranks_get() -> None:
    run_ranks(_as_by_the_op, WORLD)


@pytest.mark.parametrize("strategy", ["fused", "pipelined"])
def test_ghosts_play_by_the_plan_of_the_op(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """600 rows of a rank are three chunks, as lookup has it."""
    played: list[Any] = []
    ghosts = SimpleNamespace(
        start=lambda: played.append("start"),
        gather=lambda here, rows: played.append((here.plan, rows)),
        join=lambda: played.append("join"),
    )
    chosen = SimpleNamespace(strategy="fused", config=GemmConfig(num_chunks=3))
    task = bare(ghosts=ghosts, group="group", routing="routing", ghost_rows="rows", choice=chosen, rows=(600,) * WORLD)
    called: list[Any] = []
    monkeypatch.setattr(ghost_moe, "turn", lambda group, plan: SimpleNamespace(plan=plan))
    monkeypatch.setattr(ops, "moe_ag_gemm", lambda *given, **named: called.append((given, named)))
    task.caller(strategy)()
    ((given, named),) = called
    assert given[0] is task.x and given[1] is task.weight and given[2] == "routing"
    assert named == {"strategy": strategy, "config": None, "out": task.out} and named["out"] is task.out
    plan = gather_shards("moe_ag_gemm", task.rows, SHAPE[2] * 4, False, 3)
    assert played == ["start", (plan, "rows"), "join"] and plan.num_chunks == 3
    assert task.caller("sequential") == task.sequential and task.checker("sequential") == task.check_sequential


def _route_alone(group: Group) -> None:
    """The routing of what is known of all ranks is that of ranks that tell each other."""
    task = bare(group.rank, group=group, device=group.device)
    known, told = task._router(MIXTURE)(), router(group, task.assignment)()
    assert isinstance(known, Routing) and torch.equal(known.groups.index, told.groups.index)
    assert known.capacity == told.capacity and torch.equal(known.rows.starts, told.rows.starts)


def test_the_routing_is_that_of_real_ranks() -> None:
    run_ranks(_route_alone, WORLD)


def on_gpu(function: object, *args: object) -> Any:
    """In a process of its own, which can be stopped if a stream never ends."""
    found = run_ranks(
        function, 1, args=args, where="spawn", device="cuda:0", make_group=False, timeout_s=300  # type: ignore[arg-type]
    )  # fmt: skip
    return found[0]


def _measure(rank: int, world_size: int, cases: tuple[BenchCase, ...]) -> list[RankTimes]:
    with ghost_group(WORLD, timeout_s=5) as group:
        return measure(group, cases, None)


@pytest.mark.gpu
def test_every_contender_is_right() -> None:
    for case, times in zip(CASES, on_gpu(_measure, CASES), strict=True):
        assert times.problem == "", f"{case}: {times.problem}"
        ours = ["ours auto", "ours pipelined", "ours fused"]
        assert list(times.rounds) == ["route", "gemm", "comm", "beside", "sequential", "pipelined", *ours]
        assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in times.rounds.values())
        assert set(times.skipped) == {"torch", "ours sequential"} and all(times.skipped.values())
