"""Small kernels for test_hopper.py to compile: the same functions of ``lang/``, under Triton and under Gluon."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileflux.lang.hopper import halves, span, store_by_threads, whole
from tileflux.lang.signal import signal, wait


@triton.jit
def _ramp(value, COUNT: tl.constexpr):
    """A block that another function has made, plus the number of its column."""
    return value + span(COUNT)[None, :]


@triton.jit
def triton_kernel(flag_ptr, guard_ptr, out_ptr):
    """As ``lang/signal.py`` is used by Triton's loop."""
    wait(flag_ptr, 1, 0, guard_ptr, 0)
    rows = tl.arange(0, 32)
    value = _ramp(rows[:, None] * 64 + tl.zeros((1, 64), tl.int32), 64)
    tl.store(out_ptr + rows[:, None] * 64 + tl.arange(0, 64)[None, :], value)
    signal(flag_ptr, 2)


@gluon.jit
def _one_warp(flag_ptr, guard_ptr):
    wait(flag_ptr, 1, 0, guard_ptr, 0)
    signal(flag_ptr, 3)


@gluon.jit
def _many_warps(flag_ptr, guard_ptr, out_ptr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [8, 1], [1, 0])
    value = _ramp(gl.full([32, 128], 1, gl.int32, LAYOUT), 128)
    left, right = halves(value)
    value = whole(left, right + 1, value)
    store_by_threads(value.to(gl.float32), out_ptr, 30, 96, 128, gl.bfloat16)
    wait(flag_ptr, 1, 0, guard_ptr, 0)
    signal(flag_ptr, 2)


@gluon.jit
def gluon_kernel(flag_ptr, guard_ptr, out_ptr):
    """A partition of eight warps, and one of one."""
    gl.warp_specialize(
        [(_many_warps, (flag_ptr, guard_ptr, out_ptr)), (_one_warp, (flag_ptr + 1, guard_ptr))], [1], [40]
    )
