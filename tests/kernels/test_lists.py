"""The list of tiles made by kernels, against torch's functions, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tileflux import env
from tileflux.config import GROUPS
from tileflux.kernels import lists
from tileflux.kernels.groups import SortedRows, cut_counts, cut_tiles, offsets_of

needs_interpreter = pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")
INTERPRETED = {"TILEFLUX_CPU_BACKEND": "interpret"}
GARBAGE = (-1, -(2**31), 2**31 - 1)


pytestmark = pytest.mark.usefixtures("interpreter_installed")


def right_cut(counts: torch.Tensor, num_rows: int, block_m: int) -> torch.Tensor:
    starts = offsets_of(counts, num_rows)
    return cut_tiles(SortedRows(starts[:0], starts[:0], starts, len(counts), 1), num_rows, block_m).index


def drawn_counts(draws: random.Random, num_experts: int, dtype: torch.dtype) -> torch.Tensor:
    """Of experts with no rows, few or many; some of them garbage."""
    pool = ((0, 0, 1, 2, 15, 16, 17, 130) if num_experts < 100 else (0, 0, 0, 0, 1, 17)) + (
        GARBAGE if draws.random() < 0.3 else ()
    )
    counts = torch.tensor([draws.choice(pool) for _ in range(num_experts)], dtype=dtype)
    return counts if draws.random() < 0.5 else torch.stack((counts, counts), dim=1)[:, 0]


@needs_interpreter
@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([1, 3, 32, 33, 200, 1024]), st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from([1, 3, 16, 128]), st.integers(0, 2**32),
)  # fmt: skip
def test_sorted_rows_are_cut(num_experts: int, dtype: torch.dtype, block_m: int, seed: int) -> None:
    draws = random.Random(seed)
    counts = drawn_counts(draws, num_experts, dtype)
    needed = min(4000, int(counts.clamp(0, 200).sum()))
    num_rows = draws.choice((needed, needed + 9, 0, draws.randint(0, needed)))
    with env.scoped(INTERPRETED):
        found = cut_counts(counts, num_rows, block_m)
    assert torch.equal(found.index, right_cut(counts, num_rows, block_m))
    assert torch.equal(found.index, cut_counts(counts, num_rows, block_m).index)
    assert (found.capacity, found.block_m, found.num_experts, found.picks_rows) == (
        num_rows,
        block_m,
        num_experts,
        False,
    )


@needs_interpreter
@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(0, 500), st.integers(0, 20))
def test_stages_are_taken_out(per_stage: list[int], num_behind: int, num_spare: int) -> None:
    """Of lists that end in tiles of nobody, with other words behind them."""
    stages = [stage for stage, count in enumerate(per_stage) for _ in range(count)]
    tiles = torch.randint(0, 10**6, (len(stages) + num_spare, GROUPS.tile_words), dtype=torch.int32)
    tiles[:, GROUPS.stage] = torch.tensor(stages + [len(per_stage)] * num_spare, dtype=torch.int32)
    header = torch.randint(0, 10**6, (GROUPS.tiles,), dtype=torch.int32)
    rest = torch.randint(0, 10**6, (num_behind,), dtype=torch.int32)
    index = torch.cat((header, tiles.flatten(), rest))
    num_stages = len(per_stage)
    bands = [range(1), range(num_stages), range(num_stages // 2, num_stages)]
    bands += [range(stage, stage + 1) for stage in reversed(range(num_stages))]  # more than one launch makes
    with env.scoped(INTERPRETED):
        all_found = lists.launch_stages(index, len(tiles), bands)
    for band, found in zip(bands, all_found, strict=True):
        is_wanted = (tiles[:, GROUPS.stage] >= band.start) & (tiles[:, GROUPS.stage] < band.stop)
        header[GROUPS.num_tiles] = is_wanted.sum()
        wanted = tiles[is_wanted]
        wanted = wanted[torch.sort(wanted[:, GROUPS.first], stable=True).indices]
        assert torch.equal(found, torch.cat((header, wanted.flatten(), tiles[~is_wanted].flatten(), rest)))


@needs_interpreter
def test_stages_of_many_ranks_are_taken_out() -> None:
    """Numbers that fill 8 bits, at the end of those that are handed over together; and some that do not fit."""
    stages = [3, 254, 256, 70_000]
    tiles = torch.zeros((len(stages), GROUPS.tile_words), dtype=torch.int32)
    tiles[:, GROUPS.stage] = torch.tensor(stages, dtype=torch.int32)
    index = torch.cat((torch.zeros(GROUPS.tiles, dtype=torch.int32), tiles.flatten()))
    bands = [range(4), range(4, 256), range(256, 70_000), range(70_000, 70_001), range(100_000)]
    with env.scoped(INTERPRETED):
        found = lists.launch_stages(index, len(tiles), bands)
    assert [int(each[GROUPS.num_tiles]) for each in found] == [1, 1, 1, 1, 4]
    assert [int(each[GROUPS.tiles + GROUPS.stage]) for each in found[:4]] == stages
    with env.scoped(INTERPRETED):
        found = lists.launch_stages(
            index, len(tiles), [range(first, 255) for first in (0, 4, 100, 128, 200, 253, 255, 254)]
        )
    assert [int(each[GROUPS.num_tiles]) for each in found] == [2, 1, 1, 1, 1, 1, 0, 1]


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    draws = random.Random(5)
    for num_experts in (1, 8, 64, 1024):
        for dtype in (torch.int32, torch.int64):
            counts = drawn_counts(draws, num_experts, dtype).cuda()
            for num_rows in (0, 100, 16384):
                found = cut_counts(counts, num_rows, 64)
                assert torch.equal(found.index, right_cut(counts, num_rows, 64))
