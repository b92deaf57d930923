"""``explain``: which strategy a call would take, with which tiles, and why. Asks nobody and launches nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from tileflux.config import SWAPPED_BYTES, GemmConfig, GemmProblem
from tileflux.symm.group import Group
from tileflux.tune.lookup import Choice, grouped_tiles, lookup, once_routed, problem_for, rows_of_tiles, usual_slabs

__all__ = ["Explanation", "explain"]

OPS = ("ag_gemm", "gemm_ar", "gemm_rs", "moe_ag_gemm", "moe_gemm_ar", "moe_gemm_rs")
_WITH_EXPERTS = ("moe_ag_gemm", "moe_gemm_ar", "moe_gemm_rs")


@dataclass(frozen=True)
class Explanation:
    """What ``strategy="auto"`` would do. Prints as a few lines."""

    op: str
    strategy: str
    algorithm: str
    reason: str
    config: GemmConfig
    symmetric_bytes: int
    """Symmetric memory per rank that the strategy needs for this problem, shared by all layers."""

    def __str__(self) -> str:
        how = f"{self.strategy}, {self.algorithm}" if self.algorithm else self.strategy
        tile = f"{self.config.block_m} x {self.config.block_n} x {self.config.block_k}"
        return (
            f"{self.op} would run {how}: {self.reason}.\n"
            f"Tiles of {tile}, {self.symmetric_bytes / 2**20:.1f} MiB of symmetric memory per rank."
        )


def explain(
    op: str,
    m: int,
    n: int,
    k: int,
    *,
    group: Group,
    dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
    num_experts: int | None = None,
    top_k: int | None = None,
) -> Explanation:
    """What ``op`` would do with ``m`` rows in all, and ``n`` columns and a depth of ``k`` on this rank.

    Of ops of experts ``m`` is the number of all ranks' tokens, each of which chooses ``top_k`` of ``num_experts``.
    """
    if op not in OPS:
        raise ValueError(f"explain: op={op!r} is not one of {', '.join(OPS)}")
    if min(m, n, k) < 0:
        raise ValueError(f"explain: m={m}, n={n} and k={k} should be at least 0")
    _check_experts(op, num_experts, top_k)
    if op == "moe_gemm_ar":
        first = explain(
            "moe_gemm_rs", m, n, k,
            group=group, dtype=dtype, out_dtype=out_dtype, activation=activation, num_experts=num_experts, top_k=top_k,
        )  # fmt: skip
        return dataclasses.replace(first, op=op, reason=f"{first.reason}; then each rank's tokens are gathered")
    problem = problem_for(op, m, n, k, dtype, group.device, group, activation)
    choice = lookup(problem)
    config = choice.config
    if num_experts and top_k:
        choice = once_routed(choice, problem, m * top_k)
        config = _grouped(problem, choice, rows_of_tiles(m * top_k, num_experts, group.device))
    itemsize = (out_dtype or (dtype if dtype.itemsize > 1 else torch.bfloat16)).itemsize
    nbytes = _symmetric_bytes(op, choice.strategy, choice.algorithm, (m, n, k), group.world_size, dtype, itemsize)
    if choice.strategy == "sequential" and group.device.type == "cuda" and group.traits.copies_need_sms:
        nbytes = _direct_bytes(op, choice.algorithm, (m, n, k), group.world_size, dtype, itemsize)
    if op == "moe_gemm_rs" and group.device.type == "cuda" and not group.traits.copies_need_sms:
        nbytes //= 2  # what copies send they take from memory of the rank's own, and slots are there once
    return Explanation(op, choice.strategy, choice.algorithm, choice.reason, config, nbytes)


def _check_experts(op: str, num_experts: int | None, top_k: int | None) -> None:
    if op not in _WITH_EXPERTS:
        if num_experts is not None or top_k is not None:
            raise ValueError(f"explain: {op} has no experts; leave num_experts and top_k away")
    elif num_experts is None or top_k is None or min(num_experts, top_k) < 1:
        raise ValueError(
            f"explain: what {op} does depends on num_experts and top_k, both at least 1, not {num_experts} and {top_k}"
        )


def _grouped(problem: GemmProblem, choice: Choice, block_m: int) -> GemmConfig:
    config = grouped_tiles(problem, choice.config, block_m)
    if problem.op != "moe_gemm_rs":
        return config
    return dataclasses.replace(config, num_chunks=usual_slabs(problem, choice.strategy, config.block_n))


def _direct_bytes(
    op: str, algorithm: str, shape: tuple[int, int, int], world_size: int, dtype: torch.dtype, itemsize: int
) -> int:
    """Of the sequential strategy where SMs copy (``kernels/direct.py``)."""
    m, n, k = shape
    if world_size == 1 or algorithm == "two_shot":
        return 0
    if op in ("ag_gemm", "moe_ag_gemm"):
        return m * k * dtype.itemsize
    few = op == "gemm_ar" and m * n * itemsize <= SWAPPED_BYTES
    return (2 * world_size if few else 1) * m * n * itemsize


def _symmetric_bytes(
    op: str,
    strategy: str,
    algorithm: str,
    shape: tuple[int, int, int],
    world_size: int,
    dtype: torch.dtype,
    itemsize: int,
) -> int:
    """Of the op's own buffers; mailboxes, flags and scales (4 bytes a row) not counted."""
    m, n, k = shape
    if strategy == "sequential" or world_size == 1:
        return 0
    if op in ("ag_gemm", "moe_ag_gemm"):
        return m * k * dtype.itemsize
    if algorithm == "one_shot":
        return 2 * world_size * m * n * itemsize
    return 2 * world_size * -(-m // world_size) * n * itemsize
