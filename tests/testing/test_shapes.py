"""The table says what it claims."""

from __future__ import annotations

from tileflux.config import CommConfig
from tileflux.testing.shapes import MESSAGE_SHAPES

SHAPES = {entry.name: entry for entry in MESSAGE_SHAPES}


def test_names_are_unique_and_every_shape_has_a_reason() -> None:
    assert len(SHAPES) == len(MESSAGE_SHAPES)
    assert all(entry.why for entry in MESSAGE_SHAPES)


def test_the_reasons_are_true() -> None:
    slot_bytes = CommConfig().slot_bytes
    assert SHAPES["empty"].numel == SHAPES["empty_rows"].numel == 0
    assert SHAPES["one"].numel == 1
    assert SHAPES["odd"].numel % 2 == 1
    assert all(SHAPES["prime_rows"].shape[0] % world_size for world_size in range(2, 13))
    assert all(SHAPES["aligned"].shape[0] % world_size == 0 for world_size in (2, 3, 4, 6, 8))
    assert all(SHAPES["odd_columns"].shape[1] * size % 16 for size in (1, 2, 4))
    assert slot_bytes < 2 * SHAPES["past_slot"].numel < 1.1 * slot_bytes
    assert 6 * slot_bytes < 2 * SHAPES["many_slots"].numel < 6.1 * slot_bytes
