"""Messages of chosen rows as plain integers: every byte of every row once, within its slot, known to both ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tileflux.config import ROWS, CommConfig
from tileflux.kernels.rows_plan import RowsPlan, plan_rows

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=8).map(tuple)
CONFIGS = st.builds(
    CommConfig, num_lanes=st.integers(1, 5), slot_bytes=st.sampled_from((256, 512, 4096)), min_lane_bytes=st.just(50)
)
ROW_BYTES = st.one_of(st.integers(0, 300), st.integers(0, 10**4))
NOTES = st.one_of(st.none(), st.integers(0, 17))


def _check(plan: RowsPlan, config: CommConfig) -> None:
    assert 1 <= plan.num_lanes <= config.num_lanes
    for source, size in enumerate(plan.sizes):
        covered = [[0] * max(1, plan.row_bytes) for _ in range(size)]
        for lane in range(plan.num_lanes):
            count = plan.num_pieces(source, lane)
            assert plan.piece(source, lane, count) is None and count <= plan.num_steps(lane)
            assert count or not plan.has_head
            for step in range(count):
                piece = plan.piece(source, lane, step)
                assert piece is not None
                assert len(piece.tokens) <= plan.rows_per_piece and piece.nbytes <= plan.slab_bytes
                for token in piece.tokens:
                    for place in range(piece.begin, piece.begin + piece.nbytes):
                        covered[token][place] += 1
        assert all(count == 1 for row in covered for count in row[: plan.row_bytes])


@given(SIZES, ROW_BYTES, NOTES, CONFIGS)
def test_every_byte_goes_once_and_has_room(
    sizes: tuple[int, ...], row_bytes: int, notes: int | None, config: CommConfig
) -> None:
    plan = plan_rows(sizes, row_bytes, notes, config)
    words = 0 if notes is None else 1 + notes
    assert plan.has_head == (notes is not None)
    assert plan.places >= (4 * len(sizes) if plan.has_head else 0)
    assert plan.rows >= plan.places + 4 * words * plan.rows_per_piece
    assert plan.rows + plan.rows_per_piece * plan.slab_bytes <= config.slot_bytes
    assert plan.places % 16 == plan.rows % 16 == plan.slab_bytes % 16 == 0
    _check(plan, config)


def test_short_rows_share_a_message_and_long_ones_are_cut() -> None:
    config = CommConfig(num_lanes=4, slot_bytes=4096, min_lane_bytes=64)
    assert plan_rows((64, 64), 128, 4, config).rows_per_piece > 20
    long = plan_rows((64, 64), 10_000, 4, config)
    assert long.rows_per_piece == 1 and long.num_slabs == 3
    assert plan_rows((1, 2), 10_000, 4, config).num_lanes == 2  # no more than there are tokens
    assert plan_rows((0, 0), 128, None, config).num_steps(0) == 0
    assert plan_rows((0, 5), 128, 4, config).num_pieces(0, 0) == 1  # its counts go all the same


def test_what_kernels_read() -> None:
    plan = plan_rows((3, 0, 5), 40, 2, CommConfig(slot_bytes=256))
    assert len(plan.words) == ROWS.num_words(3)
    assert plan.words[ROWS.arrays :] == [3, 0, 5, 0, 3, 3]
    assert plan.words[ROWS.row_bytes] == 40 and plan.words[ROWS.note_words] == 2 and plan.words[ROWS.min_pieces] == 1


def test_a_slot_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="slot_bytes=256 has no room for the counts of 64 ranks"):
        plan_rows((1,) * 64, 64, 2, CommConfig(slot_bytes=256))
    with pytest.raises(ValueError, match="70 words of a token and some of its row: give the group's CommConfig"):
        plan_rows((1, 1), 64, 70, CommConfig(slot_bytes=256))
