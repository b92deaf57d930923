"""Small kernels for test_hopper.py to compile: the same functions of ``lang/``, under Triton and under Gluon."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileflux.lang.hopper import halves, span, store_by_threads, warpgroup_mma, warpgroup_mma_wait, whole
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


@gluon.jit
def serialised_kernel(out_ptr, num_k):
    """WGMMA into an accumulator that others write to: the assembler waits after every instruction."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    left = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    rows = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    places = out_ptr + (rows[:, None] * 64 + columns[None, :])
    total = gl.zeros((64, 64), gl.float32, LAYOUT)
    for index in range(num_k):
        total = warpgroup_mma(left, left.permute((1, 0)), total, use_acc=index > 0, is_async=True)
        # One may be under way, and its accumulator is written to.
        total = warpgroup_mma_wait(1, deps=(total,)) * 1.5
    gl.store(places, total)
