"""lookup: the same for all ranks of a call, the same every time, and by rules that can be said."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tileflux.config import GemmProblem
from tileflux.tune import lookup as lookup_module
from tileflux.tune.lookup import STRATEGIES, lookup, problem_for

DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
H100 = {"arch": 90, "num_sms": 132}
GPUS = ({}, {"arch": 80, "num_sms": 108}, H100, {"arch": 100, "num_sms": 148})

sizes = st.sampled_from([0, 1, 128, 4096]) | st.integers(0, 20_000)


def problems(*ops: str) -> st.SearchStrategy[GemmProblem]:
    """Problems of these ops, from nothing to large, on any device."""
    return st.builds(
        lambda op, m, n, k, world_size, dtype, is_heavy, gpu: GemmProblem(
            op, m, n, k, world_size, dtype, is_heavy, **gpu
        ),
        st.sampled_from(ops or ("gemm", "ag_gemm", "gemm_rs", "gemm_ar")),
        sizes,
        sizes,
        sizes,
        st.sampled_from([1, 2, 3, 4, 8]),
        st.sampled_from(DTYPES),
        st.booleans(),
        st.sampled_from(GPUS),
    )


@given(problems())
def test_every_problem_has_a_valid_choice(problem: GemmProblem) -> None:
    choice = lookup(problem)
    assert choice.strategy in STRATEGIES[1:]
    assert choice.algorithm in (("one_shot", "two_shot") if problem.op == "gemm_ar" else ("",))
    assert choice.reason and choice.reason[-1] != "."
    assert lookup(dataclasses.replace(problem)) is choice  # cached by value: the hot path pays for a look, no more


def test_looking_up_touches_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_module, "device_info", None)
    assert lookup(GemmProblem("ag_gemm", 8192, 4097, 4096, 8, "bfloat16", **H100)).strategy == "fused"


@given(problems("gemm_rs", "gemm_ar"), sizes)
def test_ranks_of_a_sum_choose_alike_whatever_their_depth(problem: GemmProblem, other_depth: int) -> None:
    """Tiles are announced by number, and a strategy needs all ranks: one that has no terms included."""
    first, second = (lookup(dataclasses.replace(problem, k=k)) for k in (problem.k, other_depth))
    assert (first.strategy, first.algorithm, first.config) == (second.strategy, second.algorithm, second.config)


@given(problems("ag_gemm"), sizes)
def test_ranks_of_a_gather_choose_alike_whatever_their_width(problem: GemmProblem, other_width: int) -> None:
    first, second = (lookup(dataclasses.replace(problem, n=n)) for n in (problem.n, other_width))
    assert first.strategy == second.strategy
    assert first.config.num_chunks == second.config.num_chunks


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
def test_strategies(op: str) -> None:
    def strategy(m: int, n: int = 4096, k: int = 4096, world_size: int = 8, gpu: dict[str, int] = H100) -> str:
        return lookup(GemmProblem(op, m, n, k, world_size, "bfloat16", **gpu)).strategy

    assert strategy(8192) == "fused"
    assert strategy(8192, world_size=1) == "sequential"
    assert strategy(1024) == "fused" and strategy(1016) == "sequential"
    assert strategy(8, gpu={}) == "fused"
    assert strategy(0) == strategy(0, gpu={}) == "sequential"


def test_reasons_have_the_numbers_in_them() -> None:
    small = lookup(GemmProblem("gemm_rs", 800, 4096, 4096, 8, "bfloat16", **H100))
    assert small.reason == "100 rows per rank are less than one tile of 128: nothing to overlap"
    large = lookup(GemmProblem("gemm_rs", 8192, 4096, 4096, 8, "bfloat16", **H100))
    assert large.reason.startswith("1024 rows per rank: ")


def test_small_all_reduces_go_in_one_step() -> None:
    def choice(m: int, world_size: int) -> tuple[str, str]:
        found = lookup(GemmProblem("gemm_ar", m, 4096, 4096, world_size, "bfloat16", **H100))
        return found.strategy, found.algorithm

    assert choice(1, 8) == choice(8, 8) == ("fused", "one_shot")
    assert choice(10, 8) == ("sequential", "two_shot")
    assert choice(8192, 8) == ("fused", "two_shot")
    assert choice(8192, 2) == ("fused", "one_shot")
    assert choice(1, 1) == ("sequential", "one_shot")


@given(problems())
def test_tiles_fit_the_rows(problem: GemmProblem) -> None:
    """A tile is no taller than the rows there are for it, down to what a tensor core wants."""
    config = lookup(problem).config
    if problem.arch:
        rows = problem.m if problem.op in ("gemm", "gemm_ar") else problem.rows_per_rank
        assert 16 <= config.block_m <= 128 and (config.block_m == 16 or config.block_m < 2 * rows)
        assert 1 <= config.num_feeders <= problem.num_sms // 8
        stage = (config.block_m + config.block_n * (2 if problem.is_heavy else 1)) * config.block_k
        itemsize = {"float32": 4, "float16": 2, "bfloat16": 2}.get(problem.dtype, 1)
        assert stage * itemsize * config.num_stages <= 227 * 1024  # shared memory of Hopper


def test_a_problem_is_what_the_call_is() -> None:
    cpu = torch.device("cpu")
    assert problem_for("gemm", 3, 4, 5, torch.int8, cpu, None) == GemmProblem("gemm", 3, 4, 5, 1, "int8")
    assert problem_for("gemm", 3, 4, 5, torch.bfloat16, cpu, None, "swiglu").is_heavy
    assert not problem_for("gemm", 3, 4, 5, torch.bfloat16, cpu, None, "relu").is_heavy
    assert [GemmProblem("gemm_rs", m, 1, 1, 4, "int8").rows_per_rank for m in (0, 1, 4, 5)] == [0, 1, 1, 2]
