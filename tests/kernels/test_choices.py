"""Tokens' choices added up by the kernel, against torch's functions: the same sums in the same order."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tileflux import env
from tileflux.kernels.groups import sum_choices
from tileflux.testing import assert_close

needs_interpreter = pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")
INTERPRETED = {"TILEFLUX_CPU_BACKEND": "interpret"}
TYPES = (torch.float32, torch.float16, torch.bfloat16)


pytestmark = pytest.mark.usefixtures("interpreter_installed")


def drawn(
    draws: random.Random, num_tokens: int, width: int, top_k: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows with garbage behind those that are used, positions of which some are nowhere, and weights."""
    num_rows, num_free = draws.choice((0, 1, 50)), draws.choice((0, 3))
    rows = torch.randn(num_rows + num_free, width)
    rows[num_rows:] = torch.nan
    positions = torch.randint(-1, max(0, num_rows), (num_tokens, top_k), dtype=torch.int32)
    weights = torch.randn(num_tokens, top_k)
    weights[positions < 0] = torch.nan
    return rows.to(dtype), positions, weights


@needs_interpreter
@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from([0, 1, 3, 4, 9, 33]), st.sampled_from([1, 7, 8, 64, 513, 520]), st.integers(1, 8),
    st.sampled_from(TYPES), st.sampled_from(TYPES), st.booleans(), st.integers(0, 2**32),
)  # fmt: skip
def test_interpreted(
    num_tokens: int, width: int, top_k: int, dtype: torch.dtype, out: torch.dtype, weighted: bool, seed: int
) -> None:
    draws = random.Random(seed)
    rows, positions, shares = drawn(draws, num_tokens, width, top_k, dtype)
    if draws.random() < 0.3:
        rows = torch.cat((rows, rows), dim=1)[:, draws.randrange(width) :][:, :width]
    weights = shares if weighted else None
    right = sum_choices(rows, positions, weights, out)
    with env.scoped(INTERPRETED):
        found = sum_choices(rows, positions, weights, out)
    assert found.dtype == right.dtype == out and not right.isnan().any()
    assert torch.equal(found, right)


@needs_interpreter
def test_types_that_the_kernel_has_not_are_torch_s() -> None:
    rows, positions, weights = drawn(random.Random(1), 9, 5, 3, torch.float64)
    right = sum_choices(rows, positions, weights)
    with env.scoped(INTERPRETED):
        assert torch.equal(sum_choices(rows, positions, weights), right)
        assert torch.equal(sum_choices(rows.float(), positions.long(), weights.double().float()), right)


@needs_interpreter
def test_a_gradient_is_torch_s() -> None:
    rows, positions, weights = torch.randn(7, 5, requires_grad=True), torch.tensor([[0, 3], [-1, 6]]), torch.rand(2, 2)
    with env.scoped(INTERPRETED):
        sum_choices(rows, positions, weights).sum().backward()
    assert rows.grad is not None
    assert torch.equal(rows.grad[:, 0], torch.stack([weights[0, 0], *[weights[0, 0] * 0] * 2, weights[0, 1],
                                                     *[weights[0, 0] * 0] * 2, weights[1, 1]]))  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    draws = random.Random(2)
    for num_tokens, width, top_k in ((1, 1, 1), (100, 520, 8), (1000, 4096, 2), (33, 77, 5), (0, 8, 1)):
        rows, positions, weights = drawn(draws, num_tokens, width, top_k, dtype)
        right = sum_choices(rows, positions, weights)
        found = sum_choices(rows.cuda(), positions.cuda(), weights.cuda(), dtype)
        assert_close(found.cpu(), right.double(), dtype=dtype, reduction=top_k, what=f"{num_tokens} x {width}")
