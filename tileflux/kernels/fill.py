"""Writing a few numbers into device memory with a kernel that gets them as arguments.

Not with a copy: one that is queued behind a waiting kernel may hold up those of other ranks on the same GPU, which the
kernel is waiting for. A launch stays on its own stream.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

__all__ = ["launch_fill", "load_fill"]

_WORDS = 8


def launch_fill(row: torch.Tensor, words: Sequence[int]) -> None:
    """Set ``row``, int64 on a GPU, to ``words``, after what the current stream holds."""
    for first in range(0, len(words), _WORDS):
        part = list(words[first : first + _WORDS])
        _fill_kernel[(1,)](row, first, len(part), *part, *[0] * (_WORDS - len(part)), num_warps=1)


def load_fill(row: torch.Tensor) -> None:
    """Compile and load it, with nothing to do."""
    _fill_kernel[(0,)](row, 0, 0, *[0] * _WORDS, num_warps=1)


@triton.jit(do_not_specialize=("row_ptr", "first", "count", "w0", "w1", "w2", "w3", "w4", "w5", "w6", "w7"))
def _fill_kernel(
    row_ptr,
    first: tl.int32,
    count: tl.int32,
    w0: tl.int64,
    w1: tl.int64,
    w2: tl.int64,
    w3: tl.int64,
    w4: tl.int64,
    w5: tl.int64,
    w6: tl.int64,
    w7: tl.int64,
):
    lane = tl.arange(0, 8)
    low = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
    high = tl.where(lane == 4, w4, tl.where(lane == 5, w5, tl.where(lane == 6, w6, w7)))
    tl.store(row_ptr + first + lane, tl.where(lane < 4, low, high), mask=lane < count)
