"""One table of shapes, for tests, benchmarks and tuning alike: a case that once broke something is added here."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["GEMM_SHAPES", "MESSAGE_SHAPES", "GemmShape", "MessageShape"]


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


class GemmShape(NamedTuple):
    """A whole product, before ranks divide it: ``[m, k] @ [k, n]``."""

    name: str
    m: int
    n: int
    k: int
    why: str


GEMM_SHAPES: tuple[GemmShape, ...] = (
    GemmShape("no_rows", 0, 24, 32, "nothing to compute, yet every rank must still be told so"),
    GemmShape("no_columns", 16, 0, 32, "no rank has a weight; in a grid, a division by zero tiles"),
    GemmShape("no_terms", 12, 20, 0, "a sum of nothing: zero, or the bias, and never what was in the output before"),
    GemmShape("one", 1, 1, 1, "one of everything: all ranks but one have no row, no column or no term"),
    GemmShape("few_rows", 3, 96, 64, "fewer rows than 4 ranks, as in decoding: some ranks bring or get none"),
    GemmShape("primes", 13, 17, 7, "no dimension that a world of 2 to 6 ranks divides; in 8, some have no term"),
    GemmShape("uneven_rows", 50, 32, 64, "whole columns and terms per rank, but rows that 3, 4 and 8 do not divide"),
    GemmShape("odd_k", 24, 40, 129, "rows that are no multiple of 16 bytes in any dtype: pointers, not TMA"),
    GemmShape("short_block", 40, 48, 80, "rows of whole 16-byte units in every dtype, but not of whole blocks of 64"),
    GemmShape("one_tile", 128, 128, 64, "exactly one tile and one block of terms: nothing is masked"),
    GemmShape("past_tile", 129, 129, 65, "one more than a tile in every dimension, so nothing is aligned either"),
    GemmShape("past_tile_aligned", 129, 144, 80, "the same, with columns and terms of whole 16-byte units: TMA"),
    GemmShape("several_tiles", 300, 200, 136, "3 by 2 tiles of 3 blocks, all of them cut; in fp8 no 16-byte rows"),
    GemmShape("tall", 1024, 8, 32, "many tiles of rows over a sliver of columns"),
    GemmShape("wide", 8, 1024, 32, "many tiles of columns over a sliver of rows"),
    GemmShape("deep", 16, 16, 2048, "long sums into one small tile: the accumulator, and a pipeline that wraps round"),
)
"""Products for the dense ops, from nothing to several tiles, cheap on a CPU. Every dtype and world size should pass."""
