"""Kernels for ``test_compile_gate``: right ones, and one for every rule to break. Imported by child processes only."""

import os
import sys
import time

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from tileflux.lang.signal import signal, wait

WAIT_FOR_BULK_STORES = tl.constexpr("cp.async.bulk.wait_group 0; mov.u32 $0, 0;")
PROXY_FENCE = tl.constexpr("fence.proxy.async.global; mov.u32 $0, 0;")


@triton.jit
def store_and_signal(src, dst, flag, epoch, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offsets, tl.load(src + offsets))
    signal(flag + tl.program_id(0), epoch)


@triton.jit
def wait_and_load(src, dst, flag, epoch, guard, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait(flag + tl.program_id(0), epoch, 1, guard, 3)
    tl.store(dst + offsets, tl.load(src + offsets))


@triton.jit
def exchange(src, dst, inbox, flag, ack, epoch, guard, num_chunks, BLOCK: tl.constexpr, SIGNAL: tl.constexpr = True):
    for chunk in range(num_chunks):
        offsets = chunk * BLOCK + tl.arange(0, BLOCK)
        tl.store(dst + offsets, tl.load(src + offsets))
        if SIGNAL:
            signal(flag + chunk, epoch)
        wait(ack + chunk, epoch, 1, guard, 3)
        tl.store(src + offsets, tl.load(inbox + offsets))


@triton.jit
def release_without_barrier(src, dst, flag, epoch, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offsets, tl.load(src + offsets))
    tl.atomic_xchg(flag, epoch, sem="release", scope="sys")


@triton.jit
def release_at_gpu_scope(src, dst, flag, epoch, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offsets, tl.load(src + offsets))
    tl.debug_barrier()
    tl.atomic_xchg(flag, epoch, sem="release", scope="gpu")


@triton.jit
def wait_without_acquire(src, dst, flag, epoch, BLOCK: tl.constexpr):
    while tl.atomic_add(flag, 0, sem="relaxed", scope="sys") < epoch:
        pass
    offsets = tl.arange(0, BLOCK)
    tl.store(dst + offsets, tl.load(src + offsets))


@triton.jit
def look_once(src, dst, flag, epoch, num_chunks, BLOCK: tl.constexpr):
    for chunk in range(num_chunks):
        if tl.atomic_add(flag + chunk, 0, sem="acquire", scope="sys") >= epoch:
            offsets = chunk * BLOCK + tl.arange(0, BLOCK)
            tl.store(dst + offsets, tl.load(src + offsets))


@triton.jit
def tma_store_and_signal(src_desc, dst_desc, flag, epoch, BLOCK: tl.constexpr, COMPLETE: tl.constexpr):
    dst_desc.store([0, 0], src_desc.load([0, 0]) * 2)
    if COMPLETE:
        tl.inline_asm_elementwise(WAIT_FOR_BULK_STORES, "=r,r", [epoch], dtype=tl.int32, is_pure=False, pack=1)
    signal(flag, epoch)


@triton.jit
def wait_and_tma_load(src_desc, dst, flag, epoch, guard, BLOCK: tl.constexpr, FENCE: tl.constexpr):
    wait(flag, epoch, 1, guard, 3)
    if FENCE:
        tl.inline_asm_elementwise(PROXY_FENCE, "=r,r", [epoch], dtype=tl.int32, is_pure=False, pack=1)
    offsets = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(dst + offsets, src_desc.load([0, 0]))


@triton.jit
def many_registers(src, dst, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    values = tl.load(src + offsets)
    tl.debug_barrier()
    tl.store(dst + offsets, values + tl.sum(values, axis=0))


@gluon.jit
def much_shared_memory(src, dst, ROWS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, 256, gl.SliceLayout(0, layout))
    offsets = rows[:, None] * 256 + columns[None, :]
    buffer = gl.allocate_shared_memory(gl.float32, [ROWS, 256], shared)
    buffer.store(gl.load(src + offsets))
    gl.store(dst + offsets, buffer.load(layout))


@gluon.jit
def hopper_only(dst):
    operand: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    a = gl.allocate_shared_memory(gl.float16, [64, 64], operand)
    b = gl.allocate_shared_memory(gl.float16, [64, 64], operand)
    product = warpgroup_mma(a, b, gl.zeros([64, 64], gl.float32, layout))
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    columns = gl.arange(0, 64, gl.SliceLayout(0, layout))
    gl.store(dst + rows[:, None] * 64 + columns[None, :], product)


@triton.jit
def convert(src, dst, policy: tl.constexpr, dtype: tl.constexpr, shape: tl.constexpr):
    offsets = tl.arange(0, shape[0])
    tl.store(dst + offsets, policy(tl.load(src + offsets)).to(dtype))


@triton.jit
def double(x):
    return x + x


def make_store_and_signal():
    print("a module may print", flush=True)
    return store_and_signal


def exit_with_three():
    print("note: before\nsource.mlir:1:2: error: the reason\nnote: after", file=sys.stderr, flush=True)
    os._exit(3)


def hang():
    time.sleep(600)


not_a_kernel = 3
