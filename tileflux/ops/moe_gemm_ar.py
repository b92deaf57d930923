"""Grouped GEMM + sum of a token's choices + all-reduce: ``moe_gemm_rs`` for batches that every rank needs whole.

    h        [capacity, F / TP]         rows in the order of ``routing``
    weight   [E / EP, H, F / TP]        this rank's experts, and its part of each
    out      [T, H] everywhere          all ranks' tokens, in rank order

    out = all_gather(moe_gemm_rs(h, weight, routing))

Each rank adds up the tokens it owns, and the sums are gathered: two steps, with the fewest bytes. Who writes and who
waits is as in ``moe_gemm_rs`` and ``all_gather``, and so is the gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from tileflux.config import GemmConfig
from tileflux.ops.all_gather import all_gather, all_gather_reference
from tileflux.ops.moe_gemm_rs import moe_gemm_rs, moe_gemm_rs_reference
from tileflux.ops.routing import Routing

__all__ = ["moe_gemm_ar", "moe_gemm_ar_reference"]


def moe_gemm_ar(
    h: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    *,
    scale_h: torch.Tensor | float | None = None,
    scale_weight: torch.Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    strategy: str = "auto",
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """All ranks' tokens: the products of all their choices, on whatever rank, weighted and added up."""
    own = moe_gemm_rs(
        h, weight, routing,
        scale_h=scale_h, scale_weight=scale_weight, out_dtype=out_dtype, strategy=strategy, config=config,
    )  # fmt: skip
    return all_gather(own, group=routing.group, sizes=routing.sizes)


def moe_gemm_ar_reference(
    h: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    *,
    process_group: Any = None,
    scale_h: torch.Tensor | float | None = None,
    scale_weight: torch.Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The same over ``torch.distributed``."""
    own = moe_gemm_rs_reference(
        h, weight, routing,
        process_group=process_group, scale_h=scale_h, scale_weight=scale_weight, out_dtype=out_dtype,
    )  # fmt: skip
    return all_gather_reference(own, process_group, routing.sizes)
