"""What a kernel writes down about itself when it is recorded: which tile ran where, and when it passed from one state
to the next. Read by ``kernels/recording.py``; compiled in only where ``SPEC.records`` says so.

The clock is the GPU's own, the same for all its SMs. One thread's reading stands for its program.
"""

import triton
import triton.language as tl

from tileflux.config import MAX_CHUNKS, TRACE
from tileflux.lang.signal import clock_ns, sm_number

__all__ = ["note_tile", "note_transfer"]

_RECORD_WORDS = tl.constexpr(TRACE.tile_words)
_MAX_CHUNKS = tl.constexpr(MAX_CHUNKS)


@triton.jit
def note_tile(trace, WORLD: tl.constexpr, step, program, owner, chunk, m, n, turn, begin, ready, computed):
    """A tile that has just been finished; see ``config.TraceLayout``."""
    first = WORLD * _MAX_CHUNKS * 2 + step.to(tl.int64) * _RECORD_WORDS
    words = trace.to(tl.int64).to(tl.pointer_type(tl.int64)) + first
    tl.store(words, clock_ns())
    tl.store(words + 1, begin)
    tl.store(words + 2, ready)
    tl.store(words + 3, computed)
    tl.store(words + 4, _pair(sm_number(), program))
    tl.store(words + 5, _pair(owner, chunk))
    tl.store(words + 6, _pair(m, n))
    tl.store(words + 7, _pair(turn, turn))


@triton.jit
def note_transfer(trace, peer, chunk, begin):
    """A chunk for ``peer`` that has just been announced."""
    words = trace.to(tl.int64).to(tl.pointer_type(tl.int64)) + (peer * _MAX_CHUNKS + chunk) * 2
    tl.store(words, begin)
    tl.store(words + 1, clock_ns())


@triton.jit
def _pair(low, high):
    return tl.cast(low, tl.int64) | (tl.cast(high, tl.int64) << 32)
