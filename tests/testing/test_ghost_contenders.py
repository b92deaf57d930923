"""A ghost world's contenders: all right, and a result made of something else than expected does not pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tileflux import ops
from tileflux.config import GemmConfig
from tileflux.kernels import dense, scatter
from tileflux.kernels.operands import Operands
from tileflux.kernels.plan import split_rows
from tileflux.kernels.shards import ShardPlan
from tileflux.symm.group import Group
from tileflux.testing import bench, ghost_contenders, run_ranks
from tileflux.testing.bench import BenchCase, RankTimes, measure
from tileflux.testing.contenders import Suite
from tileflux.testing.ghost import ghost_group
from tileflux.testing.ghost_contenders import GhostGather, GhostScatter, GhostTask, ghost_suite, ghosts_of
from tileflux.tune.lookup import STRATEGIES

WORLD = 4
CASES = tuple(
    BenchCase(op, m, 256, 256, "bfloat16", STRATEGIES, 2) for op in ("ag_gemm", "gemm_rs") for m in (512, 301)
)
"""With 301 rows shards differ, and are less than a tile."""


def test_what_ghosts_do_not_play_is_refused() -> None:
    with pytest.raises(ValueError, match="gemm_ar is not played by ghosts; ag_gemm and gemm_rs are. Use --where mps"):
        ghost_suite(None, "gemm_ar", (8, 8, 8), "bfloat16", ())  # type: ignore[arg-type]


class Named(GhostTask):
    """A task of which only the strategy that ``auto`` takes is known."""

    chosen = "fused"

    def __init__(self, *arguments: object) -> None:
        self.choice = SimpleNamespace(strategy=self.chosen, config=GemmConfig())  # type: ignore[assignment]
        self.sizes, self.out = None, torch.empty(0)

    def nothing(self) -> Any:
        """In the place of what is not asked for here."""

    multiply = copies = sequential = pipelined = departed = check_departed = nothing

    def play(self, strategy: str, config: GemmConfig, asked: dict[str, Any]) -> Any:
        assert config == self.choice.config and asked["config"] is None
        return f"ours in {asked['strategy']}: {strategy}"


@pytest.mark.parametrize("chosen", ["fused", "sequential"])
def test_contenders_by_name(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ghost_contenders, "GhostGather", type("Gather", (Named,), {"chosen": chosen}))
    suite = ghost_suite(None, "ag_gemm", (8, 8, 8), "bfloat16", STRATEGIES)  # type: ignore[arg-type]
    runs = {each.name: each.run for each in suite.contenders}
    assert list(runs) == ["sequential", "pipelined", "ours auto", "ours pipelined", "ours fused"]
    assert runs["ours fused"] == "ours in fused: fused"
    assert runs["ours pipelined"] == "ours in pipelined: pipelined"
    # Ghosts have no mailboxes: where auto would take the collective, the baseline stands for it.
    assert runs["ours auto"] == (runs["sequential"] if chosen == "sequential" else "ours in auto: fused")
    assert suite.auto == chosen and set(suite.skipped) == {"torch", "ours sequential"}
    checks = {each.name: each.check.__name__ for each in suite.contenders}
    assert checks["ours fused"] == "check_ours" and checks["pipelined"] == "check_pipelined"
    assert checks["ours auto"] == ("check_sequential" if chosen == "sequential" else "check_ours")


class Playing:
    """In the place of ghosts: notes by which plan they are asked to play."""

    def __init__(self) -> None:
        self.played: list[tuple[str, ShardPlan, object]] = []

    def start(self) -> None:
        self.played.append(("start", None, None))  # type: ignore[arg-type]

    join = start

    def num_calls(self, op: str) -> int:
        return len(self.played)

    def gather(self, here: Any, x: torch.Tensor) -> None:
        self.played.append(("gather", here.plan, x))

    def scatter(
        self, here: Any, partials: list[torch.Tensor], *, order: list[tuple[int, range]], leaving: list[Any] | None
    ) -> None:
        shapes = [tuple(part.shape) for part in partials]
        self.played.append(("scatter", here.plan, (leaving, order, shapes)))


def plan_of_op(monkeypatch: pytest.MonkeyPatch, op: str, task: Any, asked: dict[str, Any]) -> ShardPlan:
    """By which plan the op goes among ranks whose copies need no SM, with all that it would launch left out."""
    plans: list[ShardPlan] = []

    class Stop(Exception):
        pass

    def turn(group: object, plan: ShardPlan) -> None:
        plans.append(plan)
        raise Stop

    traits = SimpleNamespace(copies_need_sms=False, num_sms=132)
    group = SimpleNamespace(device=torch.device("cuda"), world_size=4, rank=0, traits=traits)
    operands = Operands(task.x, task.weight, task.out)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(dense, "turn", turn)
        patch.setattr(scatter, "turn", turn)
        if op == "ag_gemm":
            dense.run_gather(group, [operands], task.rows, asked["strategy"], asked["config"])  # type: ignore[arg-type]
        else:
            scatter.run_scatter(group, operands, task.rows, asked["strategy"], asked["config"])  # type: ignore[arg-type]
    return plans[0]


@pytest.mark.parametrize("strategy", ["fused", "pipelined"])
@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
def test_ghosts_play_by_the_plan_of_the_way_that_is_tried(
    op: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever chunks and tiles it has, and whatever lookup would have taken."""
    m, n, k = 3000, 64, 32
    for config in (GemmConfig(64, 32, 32, num_chunks=1), GemmConfig(256, 16, 32, num_chunks=3, span=2)):
        ghosts, synchronized = Playing(), list[int]()
        group = SimpleNamespace(synchronize=lambda synchronized=synchronized: synchronized.append(1))
        usual = SimpleNamespace(strategy="sequential", config=GemmConfig(num_chunks=8))
        kind = GhostGather if op == "ag_gemm" else GhostScatter
        out = torch.empty(m if op == "ag_gemm" else m // 4, n)
        task = bare(
            kind, 0, m, 4, op=op, shape=(m, n, k), dtype=torch.float32, sizes=None, group=group, ghosts=ghosts,
            choice=usual, x=torch.ones(m // 4 if op == "ag_gemm" else m, k), weight=torch.ones(n, k), out=out,
            gathered=torch.ones(m, k), ghost_rows=torch.ones(m, k), partials=[torch.ones(m // 4, n)] * 4,
        )  # fmt: skip
        called: list[dict[str, Any]] = []
        monkeypatch.setattr(ghost_contenders, "turn", lambda group, plan: SimpleNamespace(plan=plan))
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
        monkeypatch.setattr(ops, op, lambda x, weight, called=called, **named: called.append(named))
        multiplied: list[int] = []
        monkeypatch.setattr(torch, "mm", lambda a, b, out, seen=multiplied: seen.append(len(a)))
        task.caller(strategy, config)()
        monkeypatch.undo()
        asked = {"group": group, "sizes": None, "strategy": strategy, "config": config, "out": out}
        assert called == [asked] and called[0]["out"] is out
        (start, (kind_of_play, plan, detail), join) = ghosts.played
        assert plan == plan_of_op(monkeypatch, op, task, asked)
        assert kind_of_play == ("gather" if op == "ag_gemm" else "scatter")
        if op == "ag_gemm":
            assert detail is task.ghost_rows
        else:
            in_slabs = config.num_chunks > 1 and strategy == "fused"
            # Four tiles: two slabs, of three at most. One band has all of them, the last owner's first slab first.
            order = [(owner, range(1)) for owner in (1, 2, 3)]
            if in_slabs:
                order = [(3, range(1)), (1, range(2)), (2, range(2)), (3, range(1, 2))]
            # What begins to leave is noted, unless ghosts go by what has been counted.
            assert detail == (None if strategy == "fused" else [], order, [(750, 64)] * 4)
        # 750 rows in chunks of 256 are two whole ones and a rest: the library has loaded both before anything waits.
        chunks = ([750] if config.num_chunks == 1 else [238, 256]) if (op, strategy) == ("ag_gemm", "pipelined") else []
        assert multiplied == chunks and len(synchronized) == bool(chunks)


def test_a_way_without_overlap_is_the_baseline() -> None:
    task = bare(GhostGather, 0, 8, 4, sizes=None, out=torch.empty(0), choice=SimpleNamespace(config=GemmConfig()))
    assert task.caller("sequential", GemmConfig(64)) == task.sequential
    assert task.checker("sequential") == task.check_sequential and task.checker("fused") == task.check_ours


@pytest.mark.parametrize("kind", [GhostGather, GhostScatter])
def test_what_an_earlier_call_has_sent_does_not_pass_for_the_next_ones(kind: type[GhostTask]) -> None:
    sent = [torch.zeros(10, 3) for _ in range(3)]
    here = SimpleNamespace(rows_at=lambda peer, *rest: sent[peer], slot=lambda peer, *rest: sent[peer])
    task = bare(kind, 1, 10, 3, here=None, epoch=0, dtype=torch.float32, shape=(10, 3, 3), out=torch.zeros(3, 3))
    task.poison()
    assert task.out.isnan().all() and not any(each.isnan().any() for each in sent)
    task.here = here
    task.poison()
    rows = {GhostGather: slice(4, 7), GhostScatter: None}[kind]
    for peer, each in enumerate(sent):
        poisoned = each.isnan().any(1).nonzero().flatten().tolist()
        place = rows or slice(0, task.rows[peer])
        assert poisoned == ([] if peer == 1 else list(range(place.start, place.stop)))


def bare(kind: type[GhostTask], rank: int, num_rows: int, world_size: int, **tensors: object) -> Any:
    """A task without a GPU: only what says which rows go where."""
    task = object.__new__(kind)
    task.rank, task.world_size, task.rows = rank, world_size, split_rows(num_rows, world_size)
    for name, value in tensors.items():
        setattr(task, name, value)
    return task


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(("num_rows", "world_size"), [(11, 4), (9, 3), (2, 4)])
def test_copies_bring_every_shard_once_and_take_ones_own_to_everybody(
    rank: int, num_rows: int, world_size: int
) -> None:
    everything = torch.randn(num_rows, 3)
    gathered = torch.full_like(everything, torch.nan)
    rows = split_rows(num_rows, world_size)
    outbox = [torch.full((rows[rank], 3), torch.nan) for _ in rows]
    task = bare(GhostGather, rank, num_rows, world_size, ghost_rows=everything, gathered=gathered, _outbox=outbox)
    place = task.place(rank)
    task.x = everything[place].clone()
    gathered[place] = task.x
    for to, source, target, mine in task.copies():
        to.copy_(source)
        target.copy_(mine)
    assert torch.equal(gathered, everything)
    for peer, received in enumerate(outbox):
        assert torch.equal(received, task.x) if peer != rank else received.isnan().all()
    assert [task.place(each) for each in range(world_size)] == [
        slice(sum(rows[:each]), sum(rows[: each + 1])) for each in range(world_size)
    ]


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(("num_rows", "world_size"), [(11, 4), (9, 3), (2, 4)])
def test_partial_sums_of_every_peer_come_and_every_peers_rows_leave(rank: int, num_rows: int, world_size: int) -> None:
    rows = split_rows(num_rows, world_size)
    partials = [torch.randn(rows[rank], 3) for _ in rows]
    slots = torch.full((world_size, rows[rank], 3), torch.nan)
    outbox = [torch.full((count, 3), torch.nan) for count in rows]
    whole = torch.randn(num_rows, 3)
    task = bare(GhostScatter, rank, num_rows, world_size, partials=partials, _slots=slots, _outbox=outbox, whole=whole)
    steps = task._steps()
    assert {owner for owner, _ in steps} == {source for _, source in steps} == set(range(world_size)) - {rank}
    for hop, (owner, source) in enumerate(steps):
        # A ghost sends at the step at which it would have come to these rows: one after its own right neighbour's.
        assert (owner - rank) % world_size == hop + 1 == (rank - source) % world_size
    for to, source_rows, target, mine in task.copies():
        to.copy_(source_rows)
        target.copy_(mine)
    for peer in range(world_size):
        if peer == rank:
            assert slots[peer].isnan().all() and outbox[peer].isnan().all()
        else:
            assert torch.equal(slots[peer], partials[peer]) and torch.equal(outbox[peer], whole[task.place(peer)])


def on_gpu(function: object, *args: object) -> Any:
    """In a process of its own, which can be stopped if a stream never ends."""
    found = run_ranks(
        function, 1, args=args, where="spawn", device="cuda:0", make_group=False, timeout_s=120  # type: ignore[arg-type]
    )  # fmt: skip
    return found[0]


def _measure(rank: int, world_size: int, cases: tuple[BenchCase, ...]) -> list[RankTimes]:
    with ghost_group(WORLD, timeout_s=5) as group:
        assert ghosts_of(group) is ghosts_of(group), "they count the calls of their group"
        return measure(group, cases, None)


@pytest.mark.gpu
def test_every_contender_is_right() -> None:
    for case, times in zip(CASES, on_gpu(_measure, CASES), strict=True):
        assert times.problem == "", f"{case}: {times.problem}"
        expected = ["gemm", "comm", "beside", "sequential", "pipelined", "ours auto", "ours pipelined", "ours fused"]
        assert list(times.rounds) == expected
        assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in times.rounds.values())
        assert times.auto == ("fused" if case.m == 512 else "sequential")
        assert set(times.skipped) == {"torch", "ours sequential"} and all(times.skipped.values())


def _repeat(rank: int, world_size: int) -> None:
    """Twenty calls on top of each other, in any order of strategies, and then a right result."""
    with ghost_group(WORLD, timeout_s=5) as group:
        for case in CASES:
            suite = bench.make_suite(group, case)
            assert bench.check_suite(group, suite) == ""
            ours = [each for each in suite.contenders if each.name in ("ours fused", "ours pipelined")]
            for call in range(20):
                suite.poison()
                contender = ours[int(torch.randint(2, ()))] if call else ours[0]
                contender.run()
                if call % 7 == 6:
                    torch.cuda.current_stream().synchronize()  # ghosts have blocks of flags for eight calls
            group.synchronize()
            contender.check()


@pytest.mark.gpu
def test_calls_back_to_back() -> None:
    on_gpu(_repeat)


def _suite(group: Group, case: BenchCase, break_it: str) -> Suite:
    """Right but for one thing, changed after it was decided what the result must be."""
    suite = bench.make_suite(group, case)
    task = suite.contenders[0].check.__self__  # type: ignore[attr-defined]
    if break_it == "what ghosts send":
        (task.ghost_rows if case.op == "ag_gemm" else task.partials[2])[-1].zero_()
    elif break_it == "one's own":
        task.x[-1].zero_()
    else:
        # The result stays right; what has left for the others is not what they must get.
        right = task.check_departed
        there = task.x if case.op == "ag_gemm" else task.exact
        kept = there.clone()

        def check_departed() -> None:
            there[0 if case.op == "ag_gemm" else -1] += 1.0
            try:
                right()
            finally:
                there.copy_(kept)

        task.check_departed = check_departed
    return suite


BROKEN = {
    ("ag_gemm", "what ghosts send"): "sequential: ag_gemm: off by more",
    ("gemm_rs", "what ghosts send"): "sequential: gemm_rs: off by more",
    ("ag_gemm", "one's own"): "ours auto: ag_gemm: off by more",
    ("ag_gemm", "what has left"): "ours auto: rank 1 did not get this rank's rows",
    ("gemm_rs", "what has left"): "ours auto: sums for rank 3, slab 0: off by more",
}


def _measure_broken(rank: int, world_size: int) -> dict[tuple[str, str], str]:
    found = {}
    with ghost_group(WORLD, timeout_s=5) as group:
        for op, how in BROKEN:
            case = BenchCase(op, 512, 256, 256, "bfloat16", STRATEGIES, 1)
            with pytest.MonkeyPatch.context() as patch:
                suite = _suite(group, case, how)
                patch.setattr(bench, "make_suite", lambda group, case, suite=suite: suite)
                (times,) = measure(group, [case], None)
            found[op, how] = times.problem
    return found


@pytest.mark.gpu
def test_a_wrong_ghost_is_reported() -> None:
    found = on_gpu(_measure_broken)
    for key, beginning in BROKEN.items():
        assert found[key].startswith(beginning), f"{key}: {found[key]}"
