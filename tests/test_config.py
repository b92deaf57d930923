"""Valid and invalid configurations, and a mailbox whose parts do not overlap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tileflux.config import NUM_SLOTS, CommConfig, MailboxLayout


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_lanes": 0}, "num_lanes=0 should be between"),
        ({"num_lanes": 1025}, "num_lanes=1025"),
        ({"slot_bytes": 100}, "slot_bytes=100 should be a positive multiple of 256"),
        ({"slot_bytes": 0}, "slot_bytes=0"),
        ({"min_lane_bytes": 0}, "min_lane_bytes=0"),
    ],
)
def test_invalid_settings_say_what_would_be_right(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CommConfig(**settings)


def test_lanes_follow_the_message() -> None:
    config = CommConfig(num_lanes=8, min_lane_bytes=1000)
    assert [config.lanes_for(nbytes) for nbytes in (0, 1, 1000, 1001, 7999, 10**9)] == [1, 1, 1, 2, 8, 8]


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([256, 1024]))
def test_mailbox_parts_do_not_overlap(world_size: int, num_lanes: int, slot_bytes: int) -> None:
    layout = MailboxLayout(world_size, num_lanes, slot_bytes)
    kinds = (layout.data, layout.ack, layout.sent, layout.taken)
    lanes, ranks = range(num_lanes), range(world_size)
    words = [4 * layout.word(kind, lane, peer) for kind in kinds for lane in lanes for peer in ranks]
    assert len(set(words)) == len(words) and max(words) + 4 <= layout.header_bytes
    slots = [layout.slot(lane, peer, seq) for lane in lanes for peer in ranks for seq in range(NUM_SLOTS)]
    assert len(set(slots)) == len(slots)
    assert min(slots) == layout.header_bytes and max(slots) + slot_bytes == layout.nbytes
    assert all(slot % 256 == 0 for slot in slots)


def test_flags_have_names() -> None:
    layout = MailboxLayout(4, 3, 256)
    assert layout.describe(4 * layout.word(layout.data, 2, 1)) == "data[lane 2, rank 1]"
    assert layout.describe(4 * layout.word(layout.ack, 0, 3)) == "ack[lane 0, rank 3]"
