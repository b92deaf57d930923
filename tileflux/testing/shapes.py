"""One table of shapes, for tests, benchmarks and tuning alike: a case that once broke something is added here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "GEMM_SHAPES",
    "MESSAGE_SHAPES",
    "MODEL_SHAPES",
    "MOE_SHAPES",
    "GemmShape",
    "MessageShape",
    "Mixture",
    "ModelShape",
    "MoeShape",
]


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


class ModelShape(NamedTuple):
    """A product of a model's layer as benchmarks name it, before ranks divide it: ``[m, k] @ [k, n]``."""

    name: str
    m: int
    n: int
    k: int
    ops: tuple[str, ...]
    """What the layer is made of when tensor-parallel. Column-parallel: N is divided; row-parallel: K."""
    why: str


_COLUMN = ("ag_gemm", "gemm")
_ROW = ("gemm_rs", "gemm_ar", "gemm")
_DECODE = ("gemm_ar", "gemm")

MODEL_SHAPES: Mapping[str, tuple[ModelShape, ...]] = {
    "flux": (
        *(ModelShape("gpt3_up", m, 49152, 12288, _COLUMN, "what Flux reports, M = 4096, and around it")
          for m in (512, 1024, 2048, 4096, 8192)),
        *(ModelShape("gpt3_down", m, 12288, 49152, _ROW, "its counterpart: the sum after the same MLP")
          for m in (512, 1024, 2048, 4096, 8192)),
    ),
    "gpt3": (
        ModelShape("qkv", 2048, 36864, 12288, _COLUMN, "GPT-3 175B, one sequence: queries, keys and values"),
        ModelShape("up", 2048, 49152, 12288, _COLUMN, "into the MLP, 4 times as wide as the model"),
        ModelShape("attention_out", 2048, 12288, 12288, _ROW, "96 heads of 128 back to the model's width"),
        ModelShape("down", 2048, 12288, 49152, _ROW, "out of the MLP: the longest sums"),
    ),
    "llama": (
        ModelShape("8b_qkv", 4096, 6144, 4096, _COLUMN, "Llama-3 8B: 32 heads of 128, 8 of keys, 8 of values"),
        ModelShape("8b_gate_up", 4096, 28672, 4096, _COLUMN, "both halves of its gated MLP of 14336"),
        ModelShape("70b_qkv", 4096, 10240, 8192, _COLUMN, "Llama-3 70B: 64 heads of 128, 8 of keys, 8 of values"),
        ModelShape("70b_gate_up", 4096, 57344, 8192, _COLUMN, "both halves of its gated MLP of 28672"),
        ModelShape("8b_attention_out", 4096, 4096, 4096, _ROW, "the least to hide anything behind"),
        ModelShape("8b_down", 4096, 4096, 14336, _ROW, "out of the MLP of 14336"),
        ModelShape("70b_attention_out", 4096, 8192, 8192, _ROW, "64 heads of 128 back to the model's width"),
        ModelShape("70b_down", 4096, 8192, 28672, _ROW, "out of the MLP of 28672; GEMM-RS that others lose at"),
    ),
    "decode": (
        *(ModelShape("70b_attention_out", m, 8192, 8192, _DECODE, "Llama-3 70B, one token of each of M sequences")
          for m in (1, 4, 16, 64, 256)),
        *(ModelShape("70b_down", m, 8192, 28672, _DECODE, "the same, out of the MLP: the weight's bytes are the time")
          for m in (1, 4, 16, 64, 256)),
    ),
}  # fmt: skip
"""Layers of known models by the name of a set, for ``tileflux bench --shapes``: far too large for tests on a CPU."""


@dataclass(frozen=True)
class Mixture:
    """Of an op of experts: how many there are, how tokens choose among them, and which ranks have them."""

    num_experts: int
    top_k: int
    """Experts that every token chooses."""
    ep_size: int = 1
    """Sets of experts; the ranks that share a set divide each of its experts among them."""
    routing: str = "uniform"
    """Of ``testing.moe.ROUTING_KINDS``."""
    is_picked: bool = False
    """Of ``grouped_gemm``: rows are not sorted yet, and picked from tokens."""

    def __str__(self) -> str:
        parts = [f"E={self.num_experts}", f"top={self.top_k}"]
        parts += [f"EP={self.ep_size}"] if self.ep_size > 1 else []
        parts += [self.routing] if self.routing != "uniform" else []
        return " ".join([*parts, *(["picked"] if self.is_picked else [])])


class MoeShape(NamedTuple):
    """A layer of experts as benchmarks name it, before ranks divide it."""

    name: str
    m: int
    """Tokens of all ranks."""
    hidden: int
    """Width of a token."""
    ffn: int
    """Width of a row between the two products of an expert."""
    num_experts: int
    top_k: int
    why: str

    def sizes(self, op: str) -> tuple[tuple[int, int, int], ...]:
        """M, N and K as ``op`` has them: of the product into the experts, of that out of them, or of both.

        An exchange of tokens has no N.
        """
        into, out_of = (self.m, self.ffn, self.hidden), (self.m, self.hidden, self.ffn)
        return {
            "moe_ag_gemm": (into,),
            "moe_gemm_rs": (out_of,),
            "grouped_gemm": (into, out_of),
            "ep": ((self.m, 0, self.hidden),),
        }.get(op, ())


_COMET = tuple(
    MoeShape(f"comet_e{num_experts}", 8192, 8192, 8192, num_experts, top_k, "a layer that COMET is measured with, TP 8")
    for num_experts, top_k in ((32, 4), (8, 2))
)
_MIXTRAL = tuple(
    MoeShape("mixtral_8x7b", m, 4096, 14336, 8, 2, "few experts, wide ones") for m in (2048, 4096, 8192, 16384)
)
_QWEN = tuple(
    MoeShape("qwen2_57b_a14b", m, 3584, 2560, 64, 8, "many narrow experts: few rows for each, and little to multiply")
    for m in (2048, 4096, 8192, 16384)
)
_PHI = tuple(MoeShape("phi_3.5_moe", m, 4096, 6400, 16, 2, "between the two") for m in (2048, 4096, 8192, 16384))

MOE_SHAPES: Mapping[str, tuple[MoeShape, ...]] = {
    "comet": _COMET,
    "mixtral": _MIXTRAL,
    "qwen-moe": _QWEN,
    "phi-moe": _PHI,
    "moe": (*_COMET, *_MIXTRAL, *_QWEN, *_PHI),
}
"""Layers of experts by the name of a set, as ``MODEL_SHAPES``; ``moe`` is all of them."""
