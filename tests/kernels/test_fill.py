"""Numbers reach device memory as arguments of a launch, whatever their size and how many there are."""

from __future__ import annotations

import pytest
import torch

from tileflux.kernels.fill import launch_fill, load_fill


@pytest.mark.parametrize("count", [1, 7, 8, 9, 48])
def test_words_arrive_and_nothing_else_changes(count: int) -> None:
    from tileflux.testing import interpreter

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        interpreter.install()
    words = torch.randint(-(2**62), 2**62, (count,)).tolist()
    rows = torch.full((3, count), -1, dtype=torch.int64, device=device)
    load_fill(rows[1])
    assert rows.unique().tolist() == [-1]
    launch_fill(rows[1], words)
    assert rows[1].tolist() == words
    assert rows[0].tolist() == rows[2].tolist() == [-1] * count


def test_values_that_triton_would_make_variants_of() -> None:
    """1, multiples of 16 and 32-bit numbers are arguments like all others."""
    from tileflux.testing import interpreter

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        interpreter.install()
    row = torch.zeros(8, dtype=torch.int64, device=device)
    for words in ([1] * 8, [16 * i for i in range(8)], [0, 1, 2**31 - 1, 2**31, -1, -(2**31), 2**63 - 1, -(2**63)]):
        launch_fill(row, words)
        assert row.tolist() == words
