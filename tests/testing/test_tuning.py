"""On a rank: proved, then timed; a wrong or impossible way never wins, whichever rank finds it so."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from tileflux import env, ops
from tileflux.config import GemmConfig
from tileflux.symm.group import Group
from tileflux.testing import run_ranks, tuning
from tileflux.testing.bench import BenchCase
from tileflux.testing.ghost import ghost_group
from tileflux.testing.ghost_contenders import GhostTask
from tileflux.testing.tuning import Journal, Tuned, tune
from tileflux.tune import store
from tileflux.tune.search import Candidate, candidates


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEFLUX_TUNE_DIR", "")


def make_case(op: str, m: int = 65, n: int = 50, k: int = 35, dtype: str = "float32") -> BenchCase:
    return BenchCase(op, m, n, k, dtype, (), 1)


def test_ranks_come_to_the_same_winner(tmp_path: Path) -> None:
    """With three ranks none of the sizes divides."""
    cases = [make_case(op) for op in ("ag_gemm", "gemm_rs", "gemm_ar")] + [make_case("gemm_rs", m=8, dtype="bfloat16")]
    journal = Journal(tmp_path)
    found = run_ranks(tune, 3, args=(cases, 0.2, 2, journal))
    assert found[1] == found[2] == found[0]
    for case, tuned in zip(cases, found[0], strict=True):
        problem, outcome = tuned.problem, tuned.outcome
        assert (problem.op, problem.m, problem.dtype, problem.world_size) == (case.op, case.m, case.dtype, 3)
        assert (problem.n, problem.k) == ((17, 35) if case.op == "ag_gemm" else (50, 12))
        assert problem.link == "shared memory" and tuned.wrong == ()
        assert outcome is not None and outcome.winner in outcome.seconds and tuned.before in outcome.seconds
        assert set(outcome.best()) == {"sequential", "pipelined", "fused"}
        assert all(0 < took < math.inf for took in outcome.seconds.values())
    assert journal.ticks().count("\n") == len(cases)
    assert journal.found() == dict(enumerate(found[0]))
    outcomes = [tuned.outcome for tuned in found[0]]
    assert journal.ticks().count(".") == sum(outcome.num_tried for outcome in outcomes if outcome is not None)


def _alone(group: Group, case: BenchCase) -> Tuned:
    return tune(group, [case], 0.0, 2)[0]


def test_a_plain_product_is_tuned_too() -> None:
    (found,) = run_ranks(_alone, 1, args=(make_case("gemm"),))
    assert (found.problem.op, found.problem.world_size, found.problem.link) == ("gemm", 1, "")
    assert found.outcome is not None and found.outcome.winner == found.before


def _with_broken(group: Group, op: str, strategies: tuple[str, ...], how: str) -> Tuned:
    right = getattr(ops, op)

    def wrong(*arguments: Any, out: torch.Tensor, **named: Any) -> None:
        if how == "nothing" and named["strategy"] in strategies:
            return
        right(*arguments, out=out, **named)
        if group.rank == 1 and named["strategy"] in strategies:
            out[-1, -1] = torch.nan if how == "left out" else out[-1, -1] + 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, op, wrong)
        return tune(group, [make_case(op)], 60.0 if how == "nothing" else 0.0, 2)[0]


@pytest.mark.parametrize(("op", "how"), [("ag_gemm", "left out"), ("gemm_rs", "added"), ("gemm_ar", "added")])
def test_what_is_wrong_on_one_rank_wins_on_none(op: str, how: str) -> None:
    first, second = run_ranks(_with_broken, 2, args=(op, ("fused", "pipelined"), how))
    assert first.outcome == second.outcome and first.outcome is not None
    assert {candidate.strategy for candidate in first.outcome.seconds} == {"sequential"}
    assert first.outcome.num_tried > len(first.outcome.seconds)
    assert first.wrong == () and second.wrong
    assert all(text.startswith(("fused", "pipelined")) and "rank 1" in text for text in second.wrong)


def test_what_does_nothing_does_not_win_by_the_last_ones_result() -> None:
    for rank, found in enumerate(run_ranks(_with_broken, 2, args=("gemm_rs", ("fused", "sequential"), "nothing"))):
        assert found.outcome is not None and found.outcome.winner.strategy == "pipelined"
        assert all(f"rank {rank}" in text for text in found.wrong) and len(found.wrong) >= 2


def _recorded(group: Group, op: str) -> tuple[Tuned, list[Candidate]]:
    right = getattr(ops, op)
    called: list[Candidate] = []

    def record(*arguments: Any, strategy: str, config: GemmConfig, algorithm: str = "", **named: Any) -> None:
        called.append(Candidate(strategy, algorithm, config))
        more = {"algorithm": algorithm} if algorithm else {}
        right(*arguments, strategy=strategy, config=config, **more, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, op, record)
        return tune(group, [make_case(op)], 60.0, 2)[0], called


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_ar"])
def test_a_candidate_is_called_as_it_is(op: str) -> None:
    for found, called in run_ranks(_recorded, 2, args=(op,)):
        assert set(called) >= set(candidates(found.problem))
        assert found.outcome is not None and len(set(called)) == found.outcome.num_tried


def test_where_everything_is_wrong_there_is_no_winner() -> None:
    for found in run_ranks(_with_broken, 2, args=("gemm_rs", ("fused", "pipelined", "sequential"), "added")):
        assert found.outcome is None


def _with_unfit(group: Group) -> Tuned:
    def fit(trial: tuning._Trial, candidate: Candidate) -> float:
        return tuning._UNFIT if trial.group.rank == 0 and candidate.strategy == "fused" else tuning._RIGHT

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning._Trial, "_fit", fit)
        return _alone(group, make_case("ag_gemm"))


def test_what_does_not_fit_on_one_rank_is_run_on_none() -> None:
    first, second = run_ranks(_with_unfit, 2)
    assert first.outcome == second.outcome and first.outcome is not None
    assert {candidate.strategy for candidate in first.outcome.seconds} == {"sequential", "pipelined"}
    assert first.wrong == second.wrong == ()


def test_a_kernel_that_the_gpu_refuses_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = tuning._Trial.__new__(tuning._Trial)
    trial.group = SimpleNamespace(device=torch.device("cuda"), synchronize=lambda: None)  # type: ignore[assignment]
    trial._task = SimpleNamespace(x=None, weight=None)
    candidate = Candidate("fused", "", GemmConfig())

    def refuse(*arguments: object, config: object) -> None:
        assert config is candidate.config
        raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(ops, "gemm", lambda *arguments, config: None)
    assert trial._fit(candidate) == tuning._RIGHT
    monkeypatch.setattr(ops, "gemm", refuse)
    assert trial._fit(candidate) == tuning._UNFIT


def test_what_auto_took_before_is_what_was_measured_before(tmp_path: Path) -> None:
    (first, _) = run_ranks(_alone, 2, args=(make_case("gemm_rs"),))
    assert first.outcome is not None and first.before.strategy == "fused"
    config = dataclasses.replace(first.before.config, block_m=16, block_n=32)
    seconds = {"sequential": 1.0}
    store.save(str(tmp_path), [store.Entry(first.problem, "sequential", "", config, seconds, "2026-11-15", {})])
    with env.scoped({"TILEFLUX_TUNE_DIR": str(tmp_path)}):
        (second, _) = run_ranks(_alone, 2, args=(make_case("gemm_rs"),))
    assert second.before == Candidate("sequential", "", config)
    assert second.outcome is not None and second.before in second.outcome.seconds


class Played(GhostTask):
    """A ghost world's task on the CPU: a product, whatever way is asked for; one way sends nothing to the ghosts."""

    def __init__(self, group: object, op: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        m, n, k = shape
        self.op, self.shape, self.asked = op, shape, list[tuple[str, GemmConfig | None]]()
        self.x, self.weight, self.out = torch.randn(m, k), torch.randn(n, k), torch.empty(m, n)
        self.expected, self.here = self.x @ self.weight.t(), None
        self.choice = SimpleNamespace(strategy="fused", config=GemmConfig())  # type: ignore[assignment]
        self.sizes, self.last = None, ""

    def sequential(self) -> None:
        torch.mm(self.x, self.weight.t(), out=self.out)

    def play(self, strategy: str, config: GemmConfig, asked: dict[str, Any]) -> Any:
        self.asked.append((asked["strategy"], asked["config"]))

        def call() -> None:
            self.sequential()
            self.last = strategy

        return call

    def check_departed(self) -> None:
        assert self.last != "pipelined", "nothing has left"

    multiply = copies = pipelined = departed = check_departed  # type: ignore[assignment]


def test_among_ghosts_every_way_is_tried_against_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Played] = []

    def make(*arguments: Any) -> Played:
        made.append(Played(*arguments))
        return made[-1]

    monkeypatch.setattr(tuning, "ghost_task", make)
    traits = SimpleNamespace(links=("self", *["PCIe"] * 7), kinds=frozenset(), num_sms=132)
    group = SimpleNamespace(
        transport="ghost", rank=0, world_size=8, device=torch.device("cpu"), traits=traits,
        synchronize=lambda: None, barrier=lambda: None,
    )  # fmt: skip
    (found,) = tune(group, [make_case("ag_gemm", 256, 64, 32)], 60.0, 2)  # type: ignore[arg-type]
    # As a group of eight whose GPUs are joined by PCIe asks.
    problem = found.problem
    assert (problem.link, problem.world_size, problem.m, problem.n, problem.k) == ("PCIe", 8, 256, 8, 32)
    assert found.outcome is not None and set(found.outcome.best()) == {"sequential", "fused"}
    assert all(text.startswith("pipelined: nothing has left") for text in found.wrong) and found.wrong
    tried = {(each.strategy, each.config) for each in candidates(problem) if each.strategy != "sequential"}
    assert set(made[0].asked) >= tried


class Noted:
    """In the place of compilers: what each process of a rank is asked to compile, and for how long."""

    made: list[Noted] = []

    def __init__(self, num_processes: int) -> None:
        self.num_processes, self.is_closed = num_processes, False
        self.asked: list[tuple[list[object], float]] = []
        Noted.made.append(self)

    def __enter__(self) -> Noted:
        return self

    def __exit__(self, *error: object) -> None:
        self.is_closed = True

    def compile(self, wanted: list[object], limit_s: float) -> int:
        self.asked.append((wanted, limit_s))
        return len(wanted)


def _compiled_ahead(group: Group, op: str) -> tuple[int, list[tuple[list[object], float]], int]:
    """Candidates stand for what they launch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "Compilers", Noted)
        patch.setattr(tuning, "variants", lambda problem, tried, group: list(dict.fromkeys(tried)))
        (found,) = tune(group, [make_case(op)], 60.0, 7)
        (made,) = Noted.made
        assert made.is_closed and found.outcome is not None
        return made.num_processes, made.asked, len(candidates(found.problem))


def test_ranks_compile_ahead_each_its_part() -> None:
    ranks = run_ranks(_compiled_ahead, 2, args=("ag_gemm",))
    assert [num_processes for num_processes, _, _ in ranks] == [3, 3], "of seven for both"
    (_, first, num_candidates), (_, second, _) = ranks
    assert len(first) == len(second) >= 2, "all that is tried, then what the best are refined with"
    assert all(limit_s == 30.0 for _, limit_s in (*first, *second))
    assert len(first[0][0]) + len(second[0][0]) == num_candidates and not set(first[0][0]) & set(second[0][0])
    assert all(abs(len(one) - len(other)) <= 1 for (one, _), (other, _) in zip(first, second, strict=True))


def _tune_among_ghosts(rank: int, world_size: int, cases: list[BenchCase]) -> list[Tuned]:
    with ghost_group(4, timeout_s=10) as group:
        return tune(group, cases, 8.0, 16)


@pytest.mark.gpu
def test_among_ghosts_on_a_gpu() -> None:
    cases = [make_case(op, 2048, 1024, 1024, "bfloat16") for op in ("ag_gemm", "gemm_rs")]
    (found,) = run_ranks(
        _tune_among_ghosts, 1, args=(cases,), where="spawn", device="cuda:0", make_group=False, timeout_s=150
    )
    for tuned in found:
        assert tuned.wrong == () and tuned.outcome is not None and tuned.problem.link == "PCIe"
        assert set(tuned.outcome.best()) == {"sequential", "pipelined", "fused"}
