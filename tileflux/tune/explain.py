"""``explain``: which strategy a call would take, with which tiles, and why. Asks nobody and launches nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tileflux.config import GemmConfig
from tileflux.symm.group import Group
from tileflux.tune.lookup import lookup, problem_for

__all__ = ["Explanation", "explain"]

OPS = ("ag_gemm", "gemm_ar", "gemm_rs")


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
) -> Explanation:
    """What ``op`` would do with ``m`` rows in all, and ``n`` columns and a depth of ``k`` on this rank."""
    if op not in OPS:
        raise ValueError(f"explain: op={op!r} is not one of {', '.join(OPS)}")
    if min(m, n, k) < 0:
        raise ValueError(f"explain: m={m}, n={n} and k={k} should be at least 0")
    choice = lookup(problem_for(op, m, n, k, dtype, group.device, group, activation))
    itemsize = (out_dtype or (dtype if dtype.itemsize > 1 else torch.bfloat16)).itemsize
    nbytes = _symmetric_bytes(op, choice.strategy, choice.algorithm, (m, n, k), group.world_size, dtype, itemsize)
    return Explanation(op, choice.strategy, choice.algorithm, choice.reason, choice.config, nbytes)


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
    if op == "ag_gemm":
        return m * k * dtype.itemsize
    if algorithm == "one_shot":
        return 2 * world_size * m * n * itemsize
    return 2 * world_size * -(-m // world_size) * n * itemsize
