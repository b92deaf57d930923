"""The ops of experts among ghosts: who plays, by which plan, and what comes of it. What needs no GPU is tried here."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tileflux
from tileflux import ops
from tileflux.config import GemmConfig
from tileflux.kernels import combine
from tileflux.kernels.plan import split_rows
from tileflux.kernels.shards import gather_shards
from tileflux.ops.routing import Routing, route_gathered
from tileflux.symm.group import Group
from tileflux.testing import assert_close, bench, ghost_moe, run_ranks
from tileflux.testing.bench import BenchCase, RankTimes, measure
from tileflux.testing.contenders import draw
from tileflux.testing.ghost import ghost_group
from tileflux.testing.ghost_moe import GhostMoeGather, GhostMoeScatter
from tileflux.testing.moe_contenders import router
from tileflux.testing.moe_rows import Assignment
from tileflux.testing.shapes import Mixture
from tileflux.tune.lookup import STRATEGIES

CPU = torch.device("cpu")
WORLD = 4
MIXTURE = Mixture(8, 2, 2, "skewed")
SHAPE = (66, 24, 16)
CASES = tuple(
    BenchCase(op, m, n, 256, "bfloat16", STRATEGIES, 2, mixture)
    for op, n in (("moe_ag_gemm", 256), ("moe_gemm_rs", 640))
    for m in (512, 301)
    for mixture in (Mixture(8, 2), Mixture(8, 2, 2, "skewed"))
)
"""With 301 tokens shards differ, and are less than a tile."""


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


def bare_scatter(rank: int = 1, **others: Any) -> Any:
    """``moe_gemm_rs`` likewise, on the CPU."""
    m, n, k = SHAPE
    task = object.__new__(GhostMoeScatter)
    task.rank, task.world_size, task.rows, task.op = rank, WORLD, split_rows(m, WORLD), "moe_gemm_rs"
    task.shape, task.dtype, task.sizes, task.here, task.device = SHAPE, torch.float32, list(task.rows), None, CPU
    task.assignment = Assignment(m, WORLD, MIXTURE)
    width = task.assignment.share(rank, k)
    task.weight = draw(200 + rank, (4, n, width), torch.float32, CPU)
    task.cut(width)
    with pytest.MonkeyPatch.context() as patch:
        real = torch.empty
        patch.setattr(torch, "empty", lambda *given, pin_memory=False, **named: real(*given, **named))
        task.bring(width)
    for name, value in others.items():
        setattr(task, name, value)
    return task


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_baselines_of_sums_are_right_and_poison_is_not(rank: int) -> None:
    task = bare_scatter(rank)

    def communicate() -> None:
        for to, source, target, mine in task.copies():
            to.copy_(source)
            target.copy_(mine)

    def add_up() -> None:
        torch.sum(task._slots, 0, out=task.out)

    def by_shards() -> None:
        for (owner, _), (to, source, target, mine) in zip(task._steps(), task.copies(), strict=True):
            task.make(owner, task.whole[task.place(owner)])
            to.copy_(source)
            target.copy_(mine)
        task.make(rank, task._slots[rank])
        add_up()

    task.communicate = communicate
    for run in (task.sequential, by_shards):
        task.poison()
        task.whole.fill_(torch.nan)
        task._slots.fill_(torch.nan)
        with pytest.raises(AssertionError):
            task.check()
        run()
        task.check()
        for peer in task.peers:
            assert_close(task._outbox[peer], task.exact[task.place(peer)], reduction=SHAPE[2] * MIXTURE.top_k)
        task.out[-1, 0] += 1.0
        with pytest.raises(AssertionError, match="off by more than rounding explains"):
            task.check()


def _sums_as_by_the_op(group: Group) -> None:
    """What is expected of ours is what real ranks get of these rows, when peers' add what ghosts would send."""
    task = bare_scatter(group.rank)
    routing = router(group, task.assignment)()
    assert routing.capacity == len(task.x)
    ops.moe_gemm_rs(task.x, task.weight, routing, out=task.out)
    whole = torch.stack([bare_scatter(rank).exact[task.place(group.rank)] for rank in range(WORLD)]).sum(0)
    assert_close(task.out, whole, reduction=SHAPE[2] * MIXTURE.top_k * WORLD)


def test_sums_for_peers_are_those_of_real_ranks() -> None:
    run_ranks(_sums_as_by_the_op, WORLD)


@pytest.mark.parametrize("strategy", ["fused", "pipelined"])
@pytest.mark.parametrize("config", [None, GemmConfig(32, 16, 32, num_chunks=1)])
def test_ghosts_send_slabs_by_the_plan_of_the_op(
    config: GemmConfig | None, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever slabs and tiles it has; by the plan that the op comes to when it is asked for the same."""
    played: list[Any] = []
    ghosts = SimpleNamespace(
        start=lambda: played.append("start"), num_calls=lambda op: 5,
        scatter=lambda here, slabs, order, leaving: played.append((here.plan, slabs, order, leaving)),
        join=lambda: played.append("join"),
    )  # fmt: skip
    (group,) = tileflux.local_groups(1)
    routing = route_gathered(
        (task := bare_scatter()).assignment.expert_ids, task.assignment.weights, num_experts=8, group=group,
        sizes=(SHAPE[0],), block_m=32,
    )  # fmt: skip
    usual = SimpleNamespace(strategy="fused", config=GemmConfig(64, 32, 32))
    task = bare_scatter(ghosts=ghosts, group=group, routing=routing, choice=usual)
    called: list[Any] = []
    monkeypatch.setattr(ghost_moe, "turn", lambda group, plan: SimpleNamespace(plan=plan))
    monkeypatch.setattr(ops, "moe_gemm_rs", lambda *given, **named: called.append((given, named)))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    task.caller(strategy, config)()
    ((given, named),) = called
    assert given[0] is task.x and given[1] is task.weight and given[2] is routing
    assert named == {"strategy": strategy, "config": config, "out": task.out} and named["out"] is task.out
    start, (plan, slabs, order, leaving), join = played
    assert (start, join, task.epoch) == ("start", "join", 5) and task.here.plan is plan
    assert leaving == (None if strategy == "fused" else [])
    owners = [(task.rank + hop) % WORLD for hop in range(1, WORLD)]
    if strategy == "pipelined" and len(plan.slabs(SHAPE[1])) == 1:
        owners.reverse()
    assert order == [(owner, range(i, i + 1)) for i in range(len(plan.slabs(SHAPE[1]))) for owner in owners]
    assert plan == plan_of_op(monkeypatch, task, routing, usual.config, config, strategy)
    assert len(slabs) == WORLD
    for source, each in enumerate(slabs):
        whole, num_rows = task.partials[source], len(each)
        assert each.is_contiguous() and each.shape == whole.shape
        for columns in plan.slabs(SHAPE[1]):
            slab = each.view(-1)[num_rows * columns.start : num_rows * columns.stop].view(num_rows, -1)
            assert torch.equal(slab, whole[:, columns.start : columns.stop])


def plan_of_op(
    monkeypatch: pytest.MonkeyPatch, task: Any, routing: Routing, usual: GemmConfig, config: GemmConfig | None,
    strategy: str,
) -> Any:  # fmt: skip
    """By which plan the op goes among ranks whose copies need no SM, with all that it would launch left out."""
    module = import_module("tileflux.ops.moe_gemm_rs")
    plans: list[Any] = []

    class Stop(Exception):
        pass

    def turn(group: object, plan: object) -> None:
        plans.append(plan)
        raise Stop

    def run(group: Group, operands: Any, rows: Any, strategy: str, tiles: GemmConfig) -> None:
        many = SimpleNamespace(
            device=torch.device("cuda"), world_size=WORLD, rank=1, traits=SimpleNamespace(copies_need_sms=False)
        )
        combine.run_combine(many, operands, task.rows, strategy, tiles)  # type: ignore[arg-type]

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(combine, "turn", turn)
        patch.setattr(module, "run_combine", run)
        choice = SimpleNamespace(strategy=strategy, config=config or usual)
        patch.setattr(module._dense, "choose", lambda *given: choice)
        module.moe_gemm_rs(task.x, task.weight[:1].expand(8, -1, -1).contiguous(), routing, config=config)
    return plans[0]


def _route_alone(group: Group) -> None:
    """The routing of what is known of all ranks is that of ranks that tell each other."""
    task = bare(group.rank, group=group, device=group.device)
    known, told = task.router(MIXTURE)(), router(group, task.assignment)()
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


def _repeat(rank: int, world_size: int) -> None:
    """Twenty calls on top of each other, of two problems and strategies in any order, and then right results."""
    cases = [case for case in CASES if case.op == "moe_gemm_rs"]
    with ghost_group(WORLD, timeout_s=5) as group:
        suites = [bench.make_suite(group, case) for case in cases]
        for suite in suites:
            assert bench.check_suite(group, suite) == ""
        ours = [
            [each for each in suite.contenders if each.name in ("ours fused", "ours pipelined")] for suite in suites
        ]
        for call in range(20):
            number, way = int(torch.randint(len(suites), ())), int(torch.randint(2, ()))
            suites[number].poison()
            ours[number][way].run()
            if call % 7 == 6:
                torch.cuda.current_stream().synchronize()  # ghosts have blocks of flags for eight calls
        group.synchronize()
        ours[number][way].check()


@pytest.mark.gpu
def test_sums_call_after_call() -> None:
    on_gpu(_repeat)


@pytest.mark.gpu
def test_every_contender_is_right() -> None:
    for case, times in zip(CASES, on_gpu(_measure, CASES), strict=True):
        assert times.problem == "", f"{case}: {times.problem}"
        ours = [f"ours {each}" for each in STRATEGIES if each != "sequential"]
        assert list(times.rounds) == ["route", "gemm", "comm", "beside", "sequential", "pipelined", *ours]
        assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in times.rounds.values())
        assert set(times.skipped) == {"torch", "ours sequential"} and all(times.skipped.values())
