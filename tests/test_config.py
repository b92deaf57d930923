"""Valid and invalid configurations, and a mailbox whose parts do not overlap."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tileflux.config import (
    CONTROL,
    MAX_CHUNKS,
    NUM_SLOTS,
    TABLE,
    CommConfig,
    GemmConfig,
    MailboxLayout,
)


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_m": 8}, "block_m=8 should be a power of two from 16 to 1024"),
        ({"block_n": 48}, "block_n=48 should be a power of two"),
        ({"block_k": 2048}, "block_k=2048 should be a power of two"),
        ({"num_warps": 3}, "num_warps=3 should be 1, 2, 4, 8 or 16"),
        ({"num_chunks": 0}, f"num_chunks=0 should be from 1 to {MAX_CHUNKS}"),
        ({"num_chunks": MAX_CHUNKS + 1}, f"num_chunks={MAX_CHUNKS + 1} should be"),
        ({"group_m": 0}, "group_m=0 should be at least 1"),
        ({"num_stages": 0}, "num_stages=0 should be at least 1"),
        ({"num_feeders": 0}, "num_feeders=0 should be at least 1"),
        ({"num_sms": 1}, "num_sms=1 should be at least 2: one program feeds, one multiplies"),
    ],
)
def test_invalid_tiles_say_what_would_be_right(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GemmConfig(**settings)


def test_the_edges_of_what_is_valid() -> None:
    GemmConfig(16, 16, 16, 1, 1, 1, 1, 1, 2)
    GemmConfig(1024, 1024, 1024, num_warps=16, num_chunks=MAX_CHUNKS)
    config = GemmConfig()
    assert hash(config) == hash(GemmConfig()) and config == GemmConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_m = 64  # type: ignore[misc]


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_words_of_a_fused_op_do_not_overlap(world_size: int) -> None:
    """Laid out by hand as the device reads them: ``lang/turn.py`` adds these up by itself."""
    acks = [CONTROL.ack + peer for peer in range(world_size)]
    counters = [CONTROL.counters(world_size) + i for i in range(world_size * MAX_CHUNKS)]
    words = [CONTROL.epoch, CONTROL.done, *acks, *counters]
    assert sorted(words) == list(range(len(words))) and CONTROL.nbytes(world_size) == 4 * len(words)
    single = [field.default for field in dataclasses.fields(TABLE) if field.name != "arrays"]
    assert sorted(single) == list(range(TABLE.arrays))
    assert TABLE.num_words(world_size) == len(single) + 5 * world_size
