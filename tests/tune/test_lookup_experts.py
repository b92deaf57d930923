"""lookup, for ops of experts."""

from __future__ import annotations

import dataclasses

import pytest

from tileflux.config import GemmProblem
from tileflux.tune.lookup import once_routed, rule, stage_span, usual_slabs

H100 = {"arch": 90, "num_sms": 132}


@pytest.mark.parametrize("link", ["PCIe", "NVLink", "network", "same GPU", "same process"])
@pytest.mark.parametrize("op", ["moe_ag_gemm", "moe_gemm_rs"])
def test_experts_go_in_launches_of_their_own_on_a_gpu(op: str, link: str) -> None:
    problem = GemmProblem(op, 8192, 8192, 1024, 8, "bfloat16", link=link, **H100)
    assert rule(problem).strategy == "pipelined"
    assert rule(dataclasses.replace(problem, m=800)).strategy == "sequential"
    assert rule(GemmProblem(op, 8192, 8192, 1024, 8, "bfloat16", link=link)).strategy == "fused"


@pytest.mark.parametrize(
    ("n", "block_n", "arch", "strategy", "link", "num_slabs"),
    [(8192, 256, 90, "pipelined", "PCIe", 1), (8192, 256, 90, "pipelined", "network", 1),
     (8192, 256, 90, "pipelined", "NVLink", 4), (1024, 128, 90, "pipelined", "NVLink", 4),
     (8192, 256, 90, "pipelined", "same GPU", 8),
     (2048, 128, 90, "pipelined", "same GPU", 8), (1024, 128, 90, "pipelined", "same GPU", 4),
     (64, 128, 90, "pipelined", "PCIe", 1), (8192, 256, 90, "fused", "PCIe", 4), (8192, 1024, 0, "pipelined", "", 4)],
)  # fmt: skip
def test_slabs_of_a_launch_each_are_two_tiles_wide(
    n: int, block_n: int, arch: int, strategy: str, link: str, num_slabs: int
) -> None:
    problem = GemmProblem("moe_gemm_rs", 8192, n, 1024, 8, "bfloat16", arch=arch, num_sms=132, link=link)
    assert usual_slabs(problem, strategy, block_n) == num_slabs


@pytest.mark.parametrize(
    ("n", "link", "num_rows", "num_experts", "span"),
    [
        (4096, "PCIe", 32768, 32, 2),  # 128 rows of an expert from each rank
        (4096, "PCIe", 32768, 128, 7),
        (4096, "PCIe", 65536, 32, 1),
        (1024, "PCIe", 32768, 32, 1),  # tokens take longer than the product
        (1024, "NVLink", 32768, 32, 2),
        (4096, "PCIe", 0, 32, 1),
    ],
)
def test_tokens_of_several_ranks_go_through_the_experts_together(
    n: int, link: str, num_rows: int, num_experts: int, span: int
) -> None:
    problem = GemmProblem("moe_ag_gemm", 8192, n, 8192, 8, "bfloat16", link=link, **H100)
    assert stage_span(problem, num_rows, num_experts) == span
    assert stage_span(dataclasses.replace(problem, arch=0), num_rows, num_experts) == 1


@pytest.mark.parametrize(
    ("n", "link", "top_k", "strategy"),
    [(1024, "PCIe", 4, "fused"), (1024, "PCIe", 2, "fused"), (4096, "PCIe", 4, "pipelined"),
     (1024, "NVLink", 4, "pipelined"), (1024, "same GPU", 1, "pipelined")],
)  # fmt: skip
def test_tokens_that_take_longer_than_their_product_are_used_as_they_come(
    n: int, link: str, top_k: int, strategy: str
) -> None:
    problem = GemmProblem("moe_ag_gemm", 8192, n, 8192, 8, "bfloat16", link=link, **H100)
    usual = rule(problem)
    choice = once_routed(usual, problem, 8192 * top_k)
    assert (usual.strategy, choice.strategy) == ("pipelined", strategy)
    assert choice == usual or "take longer" in choice.reason
    few = dataclasses.replace(problem, m=800)
    assert once_routed(rule(few), few, 800 * top_k).strategy == "sequential"
    back = dataclasses.replace(problem, op="moe_gemm_rs")
    assert once_routed(rule(back), back, 8192 * top_k).strategy == "pipelined"
