"""``tileflux bench`` of the ops of experts: real ranks, sets of experts, rows that are picked, wrong results."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tileflux import ops

from .bench_cases import LAUNCHER, invoke, launch, rows_of

OURS = ["ours sequential", "ours fused", "ours auto"]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHER, "TILEFLUX_LINK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("op", ["moe_ag_gemm", "moe_gemm_rs"])
def test_ops_of_experts(op: str, tmp_path: Path) -> None:
    """Two sets of experts, of two ranks each; tokens and widths that do not divide."""
    file = tmp_path / "a.json"
    result = invoke(op, "33", "27", "25", "--experts", "4", "--top-k", "2", "--ep", "2", "--routing", "skewed",
                    "--where", "cpu", "--world", "4", "--iters", "2", "--json", str(file), "--csv", "-")  # fmt: skip
    assert result.exit_code == 0, result.output
    names = ["sequential", "pipelined", *OURS]
    names[3:3] = ["ours pipelined"]
    assert [re.split(r"  +", row)[0] for row in rows_of(result.stderr)] == names
    assert f"{op} 33 x 27 x 25, E=4 top=2 EP=2 skewed (auto takes " in result.stderr
    assert re.search(r"T_gemm .* us, T_comm .*, T_beside .*, limit .*; T_route [\d.]+ .s$", result.stderr, re.MULTILINE)
    assert "torch: skipped, torch has no fused op for experts" in result.stderr
    (case,) = json.loads(file.read_text())["cases"]
    assert case["mixture"] == {"num_experts": 4, "top_k": 2, "ep_size": 2, "routing": "skewed", "is_picked": False}
    assert set(case["parts"]) == {"gemm", "comm", "beside", "route"} and case["parts"]["route"]["seconds"] > 0
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert {row["variant"] for row in rows} == {"E=4 top=2 EP=2 skewed"} and all(float(row["route"]) for row in rows)


def test_a_wrong_result_of_an_op_of_experts_gets_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    true_op = ops.moe_gemm_rs

    def planted(*given: Any, out: torch.Tensor, strategy: str) -> None:
        true_op(*given, out=out, strategy=strategy)
        if strategy == "fused":
            out[3, 5] += 1

    monkeypatch.setattr(ops, "moe_gemm_rs", planted)
    result = invoke("moe_gemm_rs", "32", "24", "24", "--experts", "4", "--top-k", "2", "--where", "cpu", "--world", "2",
                    "--iters", "1")  # fmt: skip
    assert result.exit_code == 1 and rows_of(result.output) == []
    assert "E=4 top=2: WRONG, so no times: ours fused: rank 0: off by more than rounding" in result.output


def test_a_grouped_product_with_and_without_picked_rows() -> None:
    result = invoke(
        "grouped_gemm", "32", "24", "24", "--experts", "4", "--top-k", "2", "--where", "cpu", "--iters", "2"
    )
    assert result.exit_code == 0, result.output
    assert "bench grouped_gemm: one CPU process, float32, 2 rounds" in result.output.splitlines()[0]
    assert [row.split()[0] for row in rows_of(result.output)] == ["torch", "ours"] * 2
    headings = [line for line in result.output.splitlines() if line.startswith("grouped_gemm 32")]
    assert headings == ["grouped_gemm 32 x 24 x 24, E=4 top=2", "grouped_gemm 32 x 24 x 24, E=4 top=2 picked"]
    assert re.search(r"x as quick as torch\._grouped_mm in .* at E=4 top=2 picked", result.output.splitlines()[-1])


def test_under_torchrun_experts_must_divide_among_its_ranks() -> None:
    """How many there are is known when they have met."""
    first, second = launch("moe_ag_gemm", "32", "24", "24", "--experts", "6", "--top-k", "2", "--ep", "3")
    assert (first[0], second[0]) == (2, 2)
    assert first[2] == "tileflux bench: --ep 3 should divide the 2 ranks and the 6 experts\n" and second[1:] == ("", "")


def test_tokens_there_and_back(tmp_path: Path) -> None:
    """Of two shapes, neither of which divides; no product, so nothing to hide behind one."""
    file = tmp_path / "a.json"
    result = invoke("ep", "33", "27", "--experts", "4", "--top-k", "2", "--routing", "skewed", "--sweep", "m=33,65",
                    "--where", "cpu", "--world", "2", "--iters", "2", "--json", str(file), "--csv", "-")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert [re.split(r"  +", row)[0] for row in rows_of(result.stderr)] == ["sequential", "torch", *OURS] * 2
    assert "ep 33 x 27, E=4 top=2 skewed (auto takes fused)" in result.stderr
    assert re.search(r"^T_index [\d.]+ .s$", result.stderr, re.MULTILINE) and "T_gemm" not in result.stderr
    assert "T_index: finding out who goes where" in " ".join(result.stderr.split()) and "T_route" not in result.stderr
    assert re.search(r"over sequential in the geometric mean", result.stderr.splitlines()[-1])
    report = json.loads(file.read_text())
    assert report["command"].startswith("tileflux bench ep 33 27 --where cpu --dtype float32 --iters 2 --world 2 ")
    for case in report["cases"]:
        assert case["n"] == 0 and case["parts"]["gemm"] is None and case["parts"]["route"]["seconds"] > 0
        assert all(each["ect"] is each["limit_share"] is None for each in case["contenders"])
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert {row["m"] for row in rows} == {"33", "65"} and {(row["gemm"], row["comm"]) for row in rows} == {("", "")}


def test_under_torchrun_every_rank_gets_as_many_experts() -> None:
    first, second = launch("ep", "32", "24", "--experts", "5", "--top-k", "2")
    assert (first[0], second[0]) == (2, 2)
    assert first[2] == "tileflux bench: --experts 5 should be a multiple of the 2 ranks\n" and second[1:] == ("", "")


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["local", "mps"])
def test_tokens_there_and_back_on_a_gpu(where: str) -> None:
    result = invoke("ep", "512", "256", "--experts", "8", "--top-k", "2", "--where", where, "--world", "4",
                    "--iters", "3")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "ours fused" in [re.split(r"  +", row)[0] for row in rows_of(result.output)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "where"),
    [("moe_ag_gemm", "local"), ("moe_ag_gemm", "mps"), ("moe_ag_gemm", "ghost"), ("moe_gemm_rs", "local"),
     ("moe_gemm_rs", "mps"), ("moe_gemm_rs", "ghost"), ("grouped_gemm", "local")],
)  # fmt: skip
def test_ops_of_experts_on_a_gpu(op: str, where: str) -> None:
    world = () if op == "grouped_gemm" else ("--world", "2")
    result = invoke(op, "512", "512", "256", "--experts", "8", "--top-k", "2", "--where", where, *world, "--iters", "3")
    assert result.exit_code == 0, result.output
    assert ("ours" if op == "grouped_gemm" else "ours fused") in [
        re.split(r"  +", row)[0] for row in rows_of(result.output)
    ]
