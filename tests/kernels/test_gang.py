"""All virtual ranks of a collective in one launch, for compute-sanitizer.

The sanitizer does not let a kernel of one stream start while a kernel of another waits for it, so virtual ranks on
streams of their own cannot run under it. Programs of one launch can: here a second grid dimension is the rank, and each
program looks up its rank's arguments and runs the library's kernel. Without the sanitizer these are ordinary tests.
"""

import pytest
import torch
import triton
import triton.language as tl

import tileflux
from tileflux import CommConfig
from tileflux.kernels.copy import _move_kernel
from tileflux.kernels.launch import launch_arguments, launch_settings
from tileflux.kernels.plan import MovePlan, gather_plan, permute_plan, reduce_plan, split_rows, spread_plan
from tileflux.kernels.reduce import ELEMENTS, _reduce_kernel
from tileflux.ops._call import sum_in_rank_order
from tileflux.symm.group import Group
from tileflux.testing import poisoned
from tileflux.testing.collectives import random_inputs

CONFIG = CommConfig(num_lanes=4, slot_bytes=1024, min_lane_bytes=256)
SHAPES = [(1,), (7,), (13, 8), (12, 5), (65, 129)]


@triton.jit
def _gang_move_kernel(
    table, min_pieces: tl.int64, WORLD: tl.constexpr, LANES: tl.constexpr, SLOT_BYTES: tl.constexpr, BLOCK: tl.constexpr
):
    row = table + tl.program_id(1) * 10
    words = tl.pointer_type(tl.int64)
    _move_kernel(
        tl.load(row), tl.load(row + 1),
        tl.load(row + 2).to(words), tl.load(row + 3).to(words), tl.load(row + 4).to(words),
        0, tl.load(row + 5).to(tl.int32), tl.load(row + 6), tl.load(row + 7), tl.load(row + 8), tl.load(row + 9),
        min_pieces, WORLD, LANES, SLOT_BYTES, BLOCK,
    )  # fmt: skip


@triton.jit
def _gang_reduce_kernel(
    table,
    ELEMENT: tl.constexpr,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = table + tl.program_id(1) * 10
    words = tl.pointer_type(tl.int64)
    _reduce_kernel(
        tl.load(row), tl.load(row + 1),
        tl.load(row + 2).to(words), tl.load(row + 3).to(words), tl.load(row + 4).to(words),
        0, tl.load(row + 5).to(tl.int32), tl.load(row + 6), tl.load(row + 7), tl.load(row + 8), tl.load(row + 9),
        ELEMENT, WORLD, LANES, SLOT_BYTES, BLOCK,
    )  # fmt: skip


def launch(groups: list[Group], xs, outs, plans: list[MovePlan], *, sums: bool = False, min_pieces: int = 0) -> None:
    """One launch that does on all ranks what ``move`` or ``reduce`` does on one."""
    rows = []
    for group, x, out, plan in zip(groups, xs, outs, plans, strict=True):
        given = launch_arguments(group, "gang", x, out, plan)
        values = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in given]
        rows.append(values[:5] + values[6:])  # all but the op's number, which is 0 for all
    torch.cuda.synchronize()
    table = torch.tensor(rows, dtype=torch.int64, device="cuda")
    grid = (plans[0].num_lanes(CONFIG), len(groups))
    if sums:
        _gang_reduce_kernel[grid](table, ELEMENT=ELEMENTS[xs[0].dtype], **launch_settings(groups[0]))
    else:
        _gang_move_kernel[grid](table, min_pieces, **launch_settings(groups[0]))
    torch.cuda.synchronize()
    for group in groups:
        with torch.cuda.stream(group.stream):
            group.ensure_usable()


def _movers(xs: list[torch.Tensor]) -> list[tuple[list[MovePlan], list[torch.Tensor]]]:
    """(plans, expected outputs) by rank, of every mover."""
    ranks = range(len(xs))
    size = xs[0].nbytes
    row = size // len(xs[0])
    runs = tuple(count * row for count in split_rows(len(xs[0]), len(xs)))
    cut = [x.split(split_rows(len(x), len(xs))) for x in xs]
    return [
        ([gather_plan(rank, (size,) * len(xs)) for rank in ranks], [torch.cat(xs)] * len(xs)),
        ([spread_plan(rank, len(xs), 1, size) for rank in ranks], [xs[1]] * len(xs)),
        (
            [permute_plan(rank, runs, (runs[rank],) * len(xs), False) for rank in ranks],
            [torch.cat([cut[source][rank] for source in ranks]) for rank in ranks],
        ),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_movers(world_size: int) -> None:
    groups = tileflux.local_groups(world_size, "cuda", timeout_s=60, config=CONFIG)
    for number, shape in enumerate(SHAPES):
        xs = [x.cuda() for x in random_inputs(world_size, shape, torch.bfloat16, number)]
        for plans, expected in _movers(xs):
            outs = [poisoned(tuple(each.shape), torch.bfloat16, torch.device("cuda")) for each in expected]
            launch(groups, xs, outs, plans)
            for out, each in zip(outs, expected, strict=True):
                assert torch.equal(out, each), f"{shape} {plans[0]}"
    nothing = [permute_plan(rank, (0,) * world_size, (0,) * world_size, True) for rank in range(world_size)]
    empty = [torch.empty(0, device="cuda")] * world_size
    launch(groups, empty, empty, nothing, min_pieces=1)
    for group in groups:
        group.close()


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_reducers(world_size: int) -> None:
    groups = tileflux.local_groups(world_size, "cuda", timeout_s=60, config=CONFIG)
    ranks = range(world_size)
    for number, shape in enumerate(SHAPES):
        xs = [x.cuda() for x in random_inputs(world_size, shape, torch.bfloat16, number)]
        total = sum_in_rank_order(xs)
        rows = split_rows(len(total), world_size)
        row = total.nbytes // len(total)
        scattered = [reduce_plan(rank, tuple(count * row for count in rows), True) for rank in ranks]
        whole = [reduce_plan(rank, (total.nbytes,) * world_size, False) for rank in ranks]
        for plans, expected in ((scattered, list(total.split(rows))), (whole, [total] * world_size)):
            outs = [poisoned(tuple(each.shape), torch.bfloat16, torch.device("cuda")) for each in expected]
            launch(groups, xs, outs, plans, sums=True)
            for out, each in zip(outs, expected, strict=True):
                assert torch.equal(out, each), f"{shape} {plans[0]}"
    for group in groups:
        group.close()
