"""What tests, the demo and benchmarks share: running ranks, comparing numbers, shapes, simulated kernels."""

from __future__ import annotations

from tileflux.testing.mps import MpsDaemon
from tileflux.testing.numerics import assert_close, nan_like, poisoned, tolerance
from tileflux.testing.ranks import Died, run_ranks
from tileflux.testing.shapes import GEMM_SHAPES, MESSAGE_SHAPES, GemmShape, MessageShape

__all__ = [
    "GEMM_SHAPES",
    "MESSAGE_SHAPES",
    "Died",
    "GemmShape",
    "MessageShape",
    "MpsDaemon",
    "assert_close",
    "nan_like",
    "poisoned",
    "run_ranks",
    "tolerance",
]
