"""What tests, the demo and benchmarks share: running ranks, comparing numbers, shapes, simulated kernels."""

from __future__ import annotations

from tileflux.testing.mps import MpsDaemon
from tileflux.testing.numerics import assert_close, nan_like, poisoned, tolerance
from tileflux.testing.ranks import Died, run_ranks
from tileflux.testing.shapes import MESSAGE_SHAPES, MessageShape

__all__ = [
    "MESSAGE_SHAPES",
    "Died",
    "MessageShape",
    "MpsDaemon",
    "assert_close",
    "nan_like",
    "poisoned",
    "run_ranks",
    "tolerance",
]
