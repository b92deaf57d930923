"""The sum of a token's rows, by the kernel (interpreted here) and on the CPU, against a loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tileflux.testing import assert_close, poisoned
from tileflux.testing.choice_sum import launch_sum, weighted_sum

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drawn(num_rows: int, num_tokens: int, top_k: int, num_columns: int, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """Every third choice is not here, and one token has none; rows of nobody are poisoned."""
    rows = torch.randn(num_rows, num_columns).to(dtype)
    positions = torch.randint(num_rows, (num_tokens, top_k), dtype=torch.int32)
    positions.view(-1)[::3] = -1
    positions[-1:] = -1
    used = set(positions.flatten().tolist())
    rows[[row for row in range(num_rows) if row not in used]] = torch.nan
    return rows, positions, torch.rand(num_tokens, top_k) + 0.5


def looped(rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(len(positions), rows.shape[1], dtype=torch.float64)
    for token, places in enumerate(positions.tolist()):
        for choice, place in enumerate(places):
            if place >= 0:
                out[token] += weights[token, choice].double() * rows[place].double()
    return out


@pytest.mark.parametrize("sum_up", [weighted_sum, launch_sum])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "top_k", "num_columns"), [(5, 2, 24), (7, 3, 1030), (1, 1, 1024), (3, 8, 2048)])
def test_against_a_loop(sum_up: Any, dtype: torch.dtype, num_tokens: int, top_k: int, num_columns: int) -> None:
    given = drawn(11, num_tokens, top_k, num_columns, dtype)
    out = poisoned((num_tokens, num_columns), dtype, DEVICE)
    sum_up(*(each.to(DEVICE) for each in given), out)
    assert_close(out.cpu(), looped(*given), reduction=top_k)
    assert not out[-1].any(), "a token none of whose choices is here"


def test_no_tokens() -> None:
    rows, positions, weights = (each.to(DEVICE) for each in drawn(4, 0, 2, 8, torch.float32))
    weighted_sum(rows, positions, weights, torch.empty(0, 8, device=DEVICE))
