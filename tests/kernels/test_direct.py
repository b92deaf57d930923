"""Gathering into the peers' buffers, and sums read out of theirs: call after call, under random schedules."""

from __future__ import annotations

import pytest
import torch

from tileflux import env
from tileflux.errors import Deadlock
from tileflux.kernels import direct, steps
from tileflux.symm.group import Group
from tileflux.testing import poisoned

pytestmark = pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")

ROWS = [(5, 3), (300, 0, 260), (1, 7, 2, 4)]


def simulate(function: object, world_size: int, seed: int, *args: object) -> list:
    """As the simulator's, which cannot be imported where kernels are compiled."""
    from tileflux.testing import simulator

    return simulator.simulate(function, world_size, seed=seed, args=args)


def _gather(group: Group, rows: tuple[int, ...], depth: int, scaled: bool, seed: int) -> None:
    """Three calls: a rank that is ahead must not overwrite what a peer still reads."""
    for call in range(3):
        generator = torch.Generator().manual_seed(seed + call)
        xs = [torch.randn(count, depth, generator=generator).to(torch.bfloat16) for count in rows]
        scales = [torch.rand(count, generator=generator) for count in rows]
        scale = scales[group.rank] if scaled else None
        here, _ = direct.gather(group, "ag_gemm", xs[group.rank], scale, rows)
        assert torch.equal(here.gathered(torch.bfloat16, depth), torch.cat(xs)), "one's own rows are among them"
        assert not scaled or torch.equal(here.gathered_scales(), torch.cat(scales))
        steps.launch_release(here, group.world_size)
        assert here.epoch() == call + 1


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("depth", [3, 64])
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_rows_of_all_ranks_are_gathered(rows: tuple[int, ...], depth: int, scaled: bool) -> None:
    """300 rows of 64 are blocks that are loaded once, and a rest."""
    for seed in range(3):
        simulate(_gather, len(rows), seed, rows, depth, scaled, seed)


def _pull(group: Group, rows: tuple[int, ...], width: int, dtype: torch.dtype, everything: bool, seed: int) -> None:
    from tileflux.testing import interpreter

    for call in range(3):
        generator = torch.Generator().manual_seed(seed + call)
        partials = torch.randn(group.world_size, sum(rows), width, generator=generator).to(dtype)
        here = direct.pull_turn(group, "gemm_rs", rows, width, dtype)
        direct.open_pull(group, here, dtype)
        mine = here.gathered(dtype, width)
        conductor = interpreter.conductor()
        assert conductor is not None
        conductor.touch("write", mine)  # in the place of the product
        mine.copy_(partials[group.rank])
        total = torch.zeros(sum(rows), width)
        for partial in partials:
            total += partial.float()
        first = 0 if everything else here.plan.first_rows[group.rank]
        count = sum(rows) if everything else rows[group.rank]
        room = poisoned((count + 2, width), dtype)
        direct.pull(group, here, room[1:-1], first)
        assert torch.equal(room[1:-1], total[first : first + count].to(dtype))
        assert room[0].isnan().all() and room[-1].isnan().all(), "wrote beside the result"
        assert here.epoch() == call + 1


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "width"), [((5, 3), 7), ((0, 700, 2), 8), ((2, 2, 2, 2), 8)], ids=str)
def test_partial_sums_are_read_where_they_are(
    rows: tuple[int, ...], width: int, dtype: torch.dtype, everything: bool
) -> None:
    for seed in range(2):
        simulate(_pull, len(rows), seed, rows, width, dtype, everything, seed)


def _swap(group: Group, size: int, dtype: torch.dtype, shift: int, seed: int) -> None:
    """Four calls: the third comes back to the half of the first. Addresses are whole units of 16 bytes, or not."""
    for call in range(4):
        generator = torch.Generator().manual_seed(seed + call)
        partials = torch.randn(group.world_size, size, generator=generator).to(dtype)
        room = poisoned((size + shift + 2,), dtype)
        given = (room[shift + 1 : -1] if shift else room[:-2]).view(1, size)
        here = direct.swap_turn(group, "gemm_ar", given)
        mine = here.own_rows(dtype, size)
        mine.copy_(partials[group.rank])
        total = torch.zeros(size)
        for partial in partials:
            total += partial.float()
        direct.swap(group, here, given)
        assert torch.equal(given, total.to(dtype).view(1, size))
        assert room.isnan().sum() == shift + 2, "wrote beside the result"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("world_size", "size", "shift", "num_programs"),
    [(2, 5, 0, 128), (3, 9000, 0, 128), (2, 8192, 1, 128), (4, 4096, 0, 128), (2, 21000, 0, 4)],
)
def test_few_sums_are_swapped(
    world_size: int, size: int, shift: int, num_programs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less than a block, a block or several for each program, with and without a rest."""
    monkeypatch.setattr(direct, "_SWAP_PROGRAMS", num_programs)
    for seed in range(2):
        simulate(_swap, world_size, seed, size, dtype, shift, seed)


def _one_has_no_sums(group: Group) -> None:
    here = direct.pull_turn(group, "gemm_rs", (2, 2), 4, torch.float32)
    if group.rank == 0:
        direct.pull(group, here, torch.zeros(2, 4), 0)


def test_a_pull_waits_for_every_peer() -> None:
    with pytest.raises(Deadlock, match="rank 0 gemm_rs, sequential.flags"):
        simulate(_one_has_no_sums, 2, 0)
