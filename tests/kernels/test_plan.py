"""Plans as plain integers: every byte once, both ends agree, the same number of lanes everywhere."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tileflux.config import CommConfig
from tileflux.kernels.plan import (
    GRAIN,
    MovePlan,
    gather_plan,
    num_pieces,
    part,
    permute_plan,
    reduce_plan,
    split_rows,
    spread_plan,
)

SIZES = st.lists(st.integers(0, 1000), min_size=1, max_size=16).map(tuple)
CONFIG = CommConfig(num_lanes=5, slot_bytes=256, min_lane_bytes=50)


@given(st.integers(0, 10**7), st.integers(1, 40))
def test_parts_cover_a_message_once(nbytes: int, num_lanes: int) -> None:
    parts = [part(nbytes, lane, num_lanes) for lane in range(num_lanes)]
    position = 0
    for each in parts:
        assert each.offset == position or each.nbytes == 0
        assert each.offset % GRAIN == 0 or each.nbytes == 0
        position += each.nbytes
    assert position == nbytes


@given(st.integers(0, 10**6), st.integers(1, 10**5))
def test_pieces_are_enough_and_no_more(nbytes: int, slot_bytes: int) -> None:
    count = num_pieces(nbytes, slot_bytes)
    assert (count - 1) * slot_bytes < nbytes or count == 0
    assert count * slot_bytes >= nbytes


def _check_pairs(plans: list[MovePlan]) -> None:
    """What rank r sends to q is what q expects of r, cut into as many lanes."""
    for plan in plans:
        for peer, other in enumerate(plans):
            assert plan.send[peer].nbytes == other.recv[plan.rank].nbytes
        assert plan.num_lanes(CONFIG) == plans[0].num_lanes(CONFIG)


@given(SIZES)
def test_gather(sizes: tuple[int, ...]) -> None:
    plans = [gather_plan(rank, sizes) for rank in range(len(sizes))]
    _check_pairs(plans)
    covered = sorted((extent.offset, extent.nbytes) for extent in plans[0].recv)
    assert sum(nbytes for _, nbytes in covered) == sum(sizes)
    assert plans[0].is_empty == (sum(sizes) == 0)


@given(st.data(), st.integers(1, 8))
def test_permute(data: st.DataObject, world_size: int) -> None:
    row = st.lists(st.integers(0, 100), min_size=world_size, max_size=world_size)
    matrix = data.draw(st.lists(row, min_size=world_size, max_size=world_size))
    columns = list(zip(*matrix, strict=True))
    plans = [permute_plan(rank, tuple(matrix[rank]), tuple(columns[rank]), False) for rank in range(world_size)]
    _check_pairs(plans)
    assert all(plan.widest is None for plan in plans), "no rank knows the sizes between two others"


@given(st.integers(1, 16), st.integers(0, 15), st.integers(0, 1000))
def test_spread(world_size: int, root: int, nbytes: int) -> None:
    root %= world_size
    plans = [spread_plan(rank, world_size, root, nbytes) for rank in range(world_size)]
    _check_pairs(plans)
    for plan in plans:
        assert sum(extent.nbytes for extent in plan.recv) == nbytes


@given(SIZES, st.booleans())
def test_reduce(sizes: tuple[int, ...], scatter: bool) -> None:
    if not scatter:
        sizes = (sizes[0],) * len(sizes)
    plans = [reduce_plan(rank, sizes, scatter) for rank in range(len(sizes))]
    _check_pairs(plans)
    for plan in plans:
        assert all(extent.offset == 0 and extent.nbytes == sizes[plan.rank] for extent in plan.recv)


@given(SIZES)
def test_even_plans_are_told_by_four_numbers(sizes: tuple[int, ...]) -> None:
    for plan in (gather_plan(0, sizes), gather_plan(0, (sizes[0],) * len(sizes)), reduce_plan(0, sizes, True)):
        if plan.even is None:
            continue
        send_bytes, send_stride, recv_bytes, recv_stride = plan.even
        for peer in range(len(sizes)):
            assert (plan.send[peer].offset, plan.send[peer].nbytes) == (peer * send_stride, send_bytes)
            assert (plan.recv[peer].offset, plan.recv[peer].nbytes) == (peer * recv_stride, recv_bytes)


def test_equal_sizes_are_even_and_others_are_not() -> None:
    assert gather_plan(1, (32, 32, 32)).even == (32, 0, 32, 32)
    assert gather_plan(1, (32, 16, 32)).even is None
    assert gather_plan(0, (1, 2)).table == (0, 0, 1, 1, 0, 1, 1, 2)


@given(st.integers(0, 1000), st.integers(1, 16))
def test_rows_split_as_torch_splits(num_rows: int, world_size: int) -> None:
    pieces = torch.empty(num_rows).tensor_split(world_size)
    assert split_rows(num_rows, world_size) == tuple(len(piece) for piece in pieces)
