"""explain says what a call then does, and how much memory it then holds."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tileflux
from tileflux import Explanation, explain
from tileflux.config import GemmProblem
from tileflux.kernels.plan import split_rows
from tileflux.symm.group import Group
from tileflux.testing import run_ranks
from tileflux.testing.dense import ag_case, rs_case
from tileflux.testing.moe import moe_ag_case, moe_routing, moe_rs_case
from tileflux.tune import store
from tileflux.tune.lookup import rule

from .entries import make_entry

REGIONS = {
    ("ag_gemm", ""): "ag_gemm.data",
    ("gemm_rs", ""): "gemm_rs.data",
    ("gemm_ar", "one_shot"): "gemm_ar.data",
    ("gemm_ar", "two_shot"): "gemm_rs.data",
}


def _as_explained(group: Group, op: str, shape: tuple[int, int, int], dtype: torch.dtype, options: Any) -> Explanation:
    m, n, k = shape
    rank, world_size = group.rank, group.world_size
    case = ag_case(world_size, shape, dtype, 1) if op == "ag_gemm" else rs_case(world_size, shape, dtype, 1)
    own = (m, len(case.weights[rank]), k) if op == "ag_gemm" else (m, n, case.xs[rank].shape[1])
    before = group.memory_summary().heap_bytes
    told = explain(op, *own, group=group, dtype=dtype, **options)
    assert group.memory_summary().heap_bytes == before
    getattr(tileflux, op)(**case.arguments(op, rank), group=group, **options)
    held = group.memory_summary().region_bytes
    region = REGIONS[op, told.algorithm]
    assert held.get(region, 0) == told.symmetric_bytes, f"{told} holds {held}"
    assert not [name for name in REGIONS.values() if name in held and name != region]
    return told


@pytest.mark.parametrize(
    ("op", "shape", "dtype", "options"),
    [
        ("ag_gemm", (64, 96, 40), torch.bfloat16, {}),
        ("ag_gemm", (64, 96, 40), torch.int8, {}),
        ("ag_gemm", (0, 96, 40), torch.bfloat16, {}),
        ("gemm_rs", (64, 96, 40), torch.bfloat16, {}),
        ("gemm_rs", (62, 96, 40), torch.float32, {"out_dtype": torch.bfloat16}),
        ("gemm_rs", (64, 96, 40), torch.int8, {}),
        ("gemm_rs", (64, 0, 40), torch.int8, {}),
        ("gemm_rs", (64, 96, 1), torch.float32, {}),
        ("gemm_ar", (64, 96, 40), torch.float32, {}),
        ("gemm_ar", (1024, 512, 40), torch.bfloat16, {}),
    ],
)
def test_a_call_holds_what_was_said(op: str, shape: Any, dtype: torch.dtype, options: dict[str, Any]) -> None:
    told = run_ranks(_as_explained, 4, args=(op, shape, dtype, options), group_kwargs={"timeout_s": 5.0})
    assert len({(each.strategy, each.algorithm) for each in told}) == 1
    assert all(each.op == op for each in told)


@pytest.mark.parametrize(
    ("op", "strategy", "shape"),
    [
        ("ag_gemm", "sequential", (64, 98, 40)),
        ("gemm_rs", "pipelined", (64, 96, 38)),
        ("gemm_ar", "fused", (64, 96, 38)),
    ],
)
def test_what_was_measured_is_said_and_done(
    op: str, strategy: str, shape: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over ranks of which two have a column, or a term, less than the others."""
    m, n, k = shape
    own = {"m": m, "n": 25, "k": k} if op == "ag_gemm" else {"m": m, "n": n, "k": 10}
    cpu = {"world_size": 4, "dtype": "float32", "arch": 0, "num_sms": 0, "gpu": "", "link": "shared memory"}
    store.save(str(tmp_path), [make_entry(strategy, op=op, **own, **cpu)])
    monkeypatch.setenv("TILEFLUX_TUNE_DIR", str(tmp_path))
    told = run_ranks(_as_explained, 4, args=(op, shape, torch.float32, {}), group_kwargs={"timeout_s": 5.0})
    assert {each.strategy for each in told} == {strategy}
    assert {each.algorithm for each in told} == {"two_shot" if op == "gemm_ar" else ""}
    assert all("measured on the CPU, 2026-11-15: " in str(each) for each in told)


def _experts_as_explained(group: Group, op: str, shape: tuple[int, int, int], dtype: torch.dtype, top_k: int) -> Any:
    """What a call of an op of experts hands to its kernels, beside what was said of it."""
    (m, n, k), rank, num_experts = shape, group.rank, 4
    routing = moe_routing(split_rows(m, group.world_size), num_experts, top_k, 3)
    case = moe_ag_case(routing, k, n, dtype, 1) if op == "moe_ag_gemm" else moe_rs_case(routing, n, k, dtype, 1)
    _, columns, depth = case.weights[rank].shape
    told = explain(op, m, columns, depth, group=group, dtype=dtype, num_experts=num_experts, top_k=top_k)
    module = import_module(f"tileflux.ops.{op}")
    name, taken = {"moe_ag_gemm": "run_gather", "moe_gemm_rs": "run_combine"}[op], []
    right = getattr(module, name)

    def noted(group: Group, operands: Any, rows: Any, strategy: str, config: Any, *others: Any) -> None:
        taken.append((strategy, config))
        right(group, operands, rows, strategy, config, *others)

    routed = tileflux.route(**routing.arguments(rank), group=group)
    before = dict(group.memory_summary().region_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, noted)
        arguments = list(case.arguments(rank).values())
        getattr(tileflux, op)(*arguments, routed)
    held = {name: size for name, size in group.memory_summary().region_bytes.items() if name not in before}
    assert held.get(f"{op}.data", 0) == told.symmetric_bytes, f"{told} holds {held}"
    assert taken == [(told.strategy, told.config)]
    return told


@pytest.mark.parametrize(
    ("op", "shape", "dtype", "top_k"),
    [
        ("moe_ag_gemm", (64, 96, 40), torch.bfloat16, 2),
        ("moe_ag_gemm", (62, 96, 40), torch.float32, 1),
        ("moe_gemm_rs", (64, 96, 40), torch.bfloat16, 2),
        ("moe_gemm_rs", (64, 96, 40), torch.float32, 3),
    ],
)
def test_ops_of_experts_do_and_hold_what_was_said(op: str, shape: Any, dtype: torch.dtype, top_k: int) -> None:
    for told in run_ranks(_experts_as_explained, 4, args=(op, shape, dtype, top_k), group_kwargs={"timeout_s": 5.0}):
        assert (told.op, told.strategy) == (op, "fused") and told.symmetric_bytes > 0


@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k", "block_m"),
    [(256, 32, 2, 16), (256, 8, 2, 64), (512, 8, 2, 128), (8192, 8, 2, 128)],
)
def test_tiles_on_a_gpu_are_as_high_as_an_expert_fills(
    tokens: int, num_experts: int, top_k: int, block_m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A made-up H200, whose product alone decides about the rest of a tile."""
    traits = SimpleNamespace(copies_need_sms=False)
    group: Any = SimpleNamespace(device=torch.device("cuda", 0), world_size=4, traits=traits)
    hopper = {"arch": 90, "num_sms": 132, "link": "NVLink"}

    def problem_for(op: str, m: int, n: int, k: int, *others: object) -> GemmProblem:
        return GemmProblem(op, m, n, k, 4, "bfloat16", **hopper)  # type: ignore[arg-type]

    monkeypatch.setattr("tileflux.tune.explain.problem_for", problem_for)
    told = explain("moe_ag_gemm", tokens, 2048, 4096, group=group, num_experts=num_experts, top_k=top_k)
    alone = rule(GemmProblem("gemm", tokens if block_m == 128 else block_m, 2048, 4096, 1, "bfloat16", **hopper)).config  # type: ignore[arg-type]
    assert told.config.block_m == block_m
    assert (told.config.block_n, told.config.block_k) == (alone.block_n, alone.block_k)
    assert told.strategy == ("sequential" if tokens < 512 else "pipelined")


@pytest.mark.parametrize("copies_need_sms", [True, False])
def test_what_copies_send_is_not_in_symmetric_memory(copies_need_sms: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    traits = SimpleNamespace(copies_need_sms=copies_need_sms)
    group: Any = SimpleNamespace(device=torch.device("cuda", 0), world_size=4, traits=traits)
    problem = GemmProblem("moe_gemm_rs", 1024, 2048, 512, 4, "bfloat16", arch=90, num_sms=132)
    monkeypatch.setattr("tileflux.tune.explain.problem_for", lambda *arguments: problem)
    told = explain("moe_gemm_rs", 1024, 2048, 512, group=group, num_experts=8, top_k=2)
    assert told.strategy == "pipelined"
    assert told.symmetric_bytes == (2 if copies_need_sms else 1) * 1024 * 2048 * 2


@pytest.mark.parametrize(
    ("op", "m", "num_elements"),
    [("ag_gemm", 512, 512 * 256), ("gemm_rs", 512, 512 * 2048), ("gemm_ar", 8, 2 * 4 * 8 * 2048),
     ("gemm_ar", 1024, 1024 * 2048)],
)  # fmt: skip
def test_what_peers_read_or_write_directly_is_symmetric(
    op: str, m: int, num_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    traits = SimpleNamespace(copies_need_sms=True)
    group: Any = SimpleNamespace(device=torch.device("cuda", 0), world_size=4, traits=traits)
    problem = GemmProblem(op, m, 2048, 256, 4, "bfloat16", arch=90, num_sms=33, link="same GPU")
    monkeypatch.setattr("tileflux.tune.explain.problem_for", lambda *arguments: problem)
    told = explain(op, m, 2048, 256, group=group)
    assert (told.strategy, told.symmetric_bytes) == ("sequential", 2 * num_elements)


def test_one_rank_holds_nothing() -> None:
    (group,) = tileflux.local_groups(1)
    with group:
        told = explain("gemm_ar", 64, 64, 64, group=group)
        assert (told.strategy, told.symmetric_bytes) == ("sequential", 0)


def test_it_prints_as_two_sentences() -> None:
    groups = tileflux.local_groups(4)
    text = str(explain("ag_gemm", 8192, 4096, 4096, group=groups[0]))
    assert re.fullmatch(
        r"ag_gemm would run fused: 2048 rows per rank: tiles can start while other rows are still on their way\.\n"
        r"Tiles of \d+ x \d+ x \d+, 64\.0 MiB of symmetric memory per rank\.",
        text,
    )
    assert str(explain("gemm_ar", 8, 512, 512, group=groups[0])).startswith(
        "gemm_ar would run fused, one_shot: each rank takes in 24576 bytes of partial sums: "
    )
    for group in groups:
        group.close()


def test_refusals() -> None:
    (group,) = tileflux.local_groups(1)
    with group:
        with pytest.raises(ValueError, match="op='gemm' is not one of ag_gemm, gemm_ar, gemm_rs, moe_ag_gemm, moe_gem"):
            explain("gemm", 1, 1, 1, group=group)
        with pytest.raises(ValueError, match="explain: m=1, n=-1 and k=1 should be at least 0"):
            explain("gemm_rs", 1, -1, 1, group=group)
        with pytest.raises(ValueError, match="explain: gemm_rs has no experts; leave num_experts and top_k away"):
            explain("gemm_rs", 1, 1, 1, group=group, top_k=2)
        for given in ({}, {"num_experts": 4}, {"top_k": 2}, {"num_experts": 4, "top_k": 0}):
            with pytest.raises(
                ValueError, match="what moe_ag_gemm does depends on num_experts and top_k, both at least"
            ):
                explain("moe_ag_gemm", 1, 1, 1, group=group, **given)  # type: ignore[arg-type]


def test_sums_for_everybody_are_those_of_their_owners_gathered() -> None:
    (group,) = tileflux.local_groups(1)
    experts: dict[str, Any] = {"group": group, "num_experts": 8, "top_k": 2, "dtype": torch.float16}
    first, told = (explain(op, 64, 96, 40, **experts) for op in ("moe_gemm_rs", "moe_gemm_ar"))
    assert str(told) == str(first).replace("moe_gemm_rs", "moe_gemm_ar").replace(
        f"{first.reason}.", f"{first.reason}; then each rank's tokens are gathered."
    )
    assert told.config == first.config and told.symmetric_bytes == first.symmetric_bytes
    group.close()
