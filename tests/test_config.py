"""Valid and invalid configurations, and a mailbox whose parts do not overlap."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tileflux.config import (
    CONTROL,
    MAX_CHUNKS,
    NUM_SLOTS,
    TABLE,
    TRACE,
    CommConfig,
    GemmConfig,
    GemmProblem,
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
        ({"span": 0}, "span=0 should be at least 1"),
        ({"alone": -2}, "alone=-2 should be at least -1"),
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
    GemmConfig(1024, 1024, 1024, num_warps=16, num_chunks=MAX_CHUNKS, alone=-1)
    config = GemmConfig()
    assert hash(config) == hash(GemmConfig()) and config == GemmConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_m = 64  # type: ignore[misc]


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_words_of_a_fused_op_do_not_overlap(world_size: int) -> None:
    """Laid out by hand as the device reads them: ``lang/turn.py`` adds these up by itself."""
    acks = [CONTROL.ack + peer for peer in range(world_size)]
    counters = [CONTROL.counters(world_size) + i for i in range(world_size * MAX_CHUNKS)]
    staged = [CONTROL.staged(world_size) + i for i in range(world_size * MAX_CHUNKS)]
    words = [CONTROL.epoch, CONTROL.done, CONTROL.next, CONTROL.fetched, *acks, *counters, *staged]
    assert sorted(words) == list(range(len(words))) and CONTROL.nbytes(world_size) == 4 * len(words)
    single = [field.default for field in dataclasses.fields(TABLE) if field.name != "arrays"]
    assert sorted(single) == list(range(TABLE.arrays))
    assert TABLE.num_words(world_size) == len(single) + 5 * world_size


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_a_recording_has_room_for_all_transfers_and_then_for_every_step(world_size: int) -> None:
    assert TRACE.first_tile(world_size) == 2 * world_size * MAX_CHUNKS
    assert TRACE.num_words(world_size, 0) == TRACE.first_tile(world_size)
    assert TRACE.num_words(world_size, 7) - TRACE.num_words(world_size, 6) == TRACE.tile_words == 4 + 4


def test_problems_differ_by_link_and_gpu_and_have_none_by_default() -> None:
    plain = GemmProblem("gemm_rs", 8, 8, 8, 2, "float32")
    assert (plain.link, plain.gpu) == ("", "")
    assert len({plain, dataclasses.replace(plain, link="PCIe"), dataclasses.replace(plain, gpu="NVIDIA H200")}) == 3


def test_a_hash_is_computed_once_and_is_that_of_equals() -> None:
    config = GemmConfig(64, 64)
    assert hash(config) == hash(GemmConfig(64, 64)) != hash(GemmConfig(64, 32))
    changed = dataclasses.replace(config, num_chunks=2)
    assert hash(changed) == hash(GemmConfig(64, 64, num_chunks=2)) != hash(config), "not that of what it was made from"
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config and vars(copy) == dataclasses.asdict(config), "texts hash differently in another process"
    object.__setattr__(config, "_hash", 7)
    assert hash(config) == 7
