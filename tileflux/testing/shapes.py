"""One table of shapes, for tests, benchmarks and tuning alike: a case that once broke something is added here."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["MESSAGE_SHAPES", "MessageShape"]


class MessageShape(NamedTuple):
    """What one rank brings to a collective."""

    name: str
    shape: tuple[int, ...]
    why: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


MESSAGE_SHAPES: tuple[MessageShape, ...] = (
    MessageShape("empty", (0,), "nothing to send, yet every rank must still be told so"),
    MessageShape("empty_rows", (0, 16), "no rows: sizes computed by division by the row count break"),
    MessageShape("one", (1,), "one element: every rank but one gets an empty part"),
    MessageShape("odd", (7,), "an odd number of bytes in fp8: nothing after it is aligned"),
    MessageShape("prime_rows", (13, 8), "rows that no world of 2 to 12 ranks divides"),
    MessageShape("odd_columns", (12, 5), "rows of every common world, but no row is a multiple of 16 bytes"),
    MessageShape("aligned", (48, 128), "divides by every world of 2, 3, 4, 6 or 8 ranks, in whole 16-byte units"),
    MessageShape("past_slot", (257, 129), "66,306 bytes in bf16: just over one slot of 64 KiB"),
    MessageShape("many_slots", (1031, 192), "six slots of 64 KiB in bf16, and a little of a seventh"),
)
"""Per-rank messages for collectives, from nothing to several slots. Every dtype and world size should pass all."""
