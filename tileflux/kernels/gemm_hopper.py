"""The GEMM main loop for Hopper, in Gluon: the contract and the policies of ``kernels/gemm.py``.

A program is divided into two partitions. The *producer*, one warp, waits for rows and loads blocks of K by TMA into a
ring of stages; only it waits for other ranks. The *consumer* multiplies them with WGMMA and finishes tiles. Neither
waits for the other but at the ring, so the next tile's loads run while a tile is finished. Where somebody is told of a
finished tile (``SPEC.settles``), that is during the next one's first stages, when it has been written.
"""

import triton.language as tl

from tileflux.lang.epilogue import activate, scaled
from tileflux.lang.hopper import (
    PIECE,
    fence_async_shared,
    gl,
    gluon,
    halves,
    mbarrier,
    piece_buffers,
    span,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
    whole,
)
from tileflux.lang.policy import count_settled, settling_counter
from tileflux.lang.signal import clock_ns
from tileflux.lang.tiles import cut, feed_rows, leave_launch, locate, num_steps_of
from tileflux.lang.trace import note_tile
from tileflux.lang.turn import SCALES, data

__all__ = ["NUMBERS"]

NUMBERS = ("a", "out", "bias", "scale_a", "scale_b", "rows", "N", "K", "trace", "table_ptr")
"""Arguments that must not make a variant of the kernel by their value."""

_SETTLING = gl.constexpr(8)  # stages, some 5 us: longer than a tile takes to be written


@gluon.jit(do_not_specialize=NUMBERS)
def _gemm_hopper_kernel(
    a: tl.int64,
    out: tl.int64,
    bias: tl.int64,
    scale_a: tl.int64,
    scale_b: tl.int64,
    rows: tl.int64,
    N: tl.int32,
    K: tl.int32,
    a_desc,
    rows_desc,
    b_desc,
    out_desc,
    own_desc,
    trace: tl.int64,
    table_ptr,
    ORDER: tl.constexpr,
    WAIT: tl.constexpr,
    FINISH: tl.constexpr,
    SPEC: tl.constexpr,
):
    """SPEC is a ``HopperSpec``."""
    STAGES: gl.constexpr = SPEC.num_stages
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES] + a_desc.block_type.shape, a_desc.layout)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(empty.index(stage), count=1)
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()  # TMA counts in them
    ring = (a_ring, b_ring, empty, full)
    sizes = (rows, N, K)
    target = out
    if SPEC.out_by_tma and not SPEC.settles:
        target = (out_desc, piece_buffers(out_desc))
    if SPEC.settles:
        target = (out_desc, own_desc, piece_buffers(out_desc))
    factors = (bias, scale_a, scale_b)
    gl.warp_specialize(
        [
            (_consume, (ring, sizes, a, target, factors, trace, table_ptr, ORDER, FINISH, SPEC)),
            (_produce, (ring, sizes, a_desc, rows_desc, b_desc, table_ptr, ORDER, WAIT, SPEC)),
        ],
        [1],
        [SPEC.producer_registers],
    )  # fmt: skip


@gluon.jit
def _produce(
    ring, sizes, a_desc, rows_desc, b_desc, table, ORDER: gl.constexpr, WAIT: gl.constexpr, SPEC: gl.constexpr
):
    """Load what the consumer will multiply, as soon as it is there."""
    a_ring, b_ring, empty, full = ring
    rows, N, K = sizes
    parts = cut(rows, N, table, SPEC)
    rank, num_chunks, _, _, _ = parts
    step, stride, num_steps = _steps(parts, SPEC)
    num_k = gl.cdiv(K, SPEC.block_k)
    count = num_steps * 0
    ready = count - 1
    while step < num_steps:
        owner, chunk, m, n, turn, first_row, row, end_row, expert = locate(step, parts, rows, N, table, ORDER, SPEC)
        if row < end_row:
            slab = owner * num_chunks + chunk
            if slab != ready:
                WAIT(table, owner, chunk, SPEC)
                ready = slab
            own = owner == rank
            a_row = first_row + row
            if SPEC.gathers:  # noqa: SIM102 - `and` does not keep the compiler from what follows
                if own:
                    a_row = row
            column = n * SPEC.block_n
            before = expert * 0
            if SPEC.k_major:
                column += expert * N
            else:
                before = expert * K
            for index in range(num_k * (1 - turn)):
                k = index * SPEC.block_k
                stage = count % SPEC.num_stages
                mbarrier.wait(empty.index(stage), ((count // SPEC.num_stages) & 1) ^ 1)
                mbarrier.expect(full.index(stage), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
                if SPEC.gathers:
                    tma.async_copy_global_to_shared(
                        a_desc, [a_row, k], full.index(stage), a_ring.index(stage), pred=own
                    )
                    tma.async_copy_global_to_shared(
                        rows_desc, [a_row, k], full.index(stage), a_ring.index(stage), pred=owner != rank
                    )
                else:
                    tma.async_copy_global_to_shared(a_desc, [a_row, k], full.index(stage), a_ring.index(stage))
                if SPEC.k_major:
                    tma.async_copy_global_to_shared(b_desc, [column, k], full.index(stage), b_ring.index(stage))
                else:
                    tma.async_copy_global_to_shared(
                        b_desc, [before + k, column], full.index(stage), b_ring.index(stage)
                    )
                count += 1
        step += stride


@gluon.jit
def _consume(
    ring, sizes, a, target, factors, trace, table, ORDER: gl.constexpr, FINISH: gl.constexpr, SPEC: gl.constexpr
):
    """Multiply what the producer has loaded, and finish tiles."""
    rows, N, K = sizes
    LAYOUT: gl.constexpr = SPEC.accumulator_layout
    BLOCK_M: gl.constexpr = SPEC.block_m
    BLOCK_N: gl.constexpr = SPEC.block_n
    parts = cut(rows, N, table, SPEC)
    step, stride, num_steps = _steps(parts, SPEC)
    num_k = gl.cdiv(K, SPEC.block_k)
    program = gl.program_id(0) - SPEC.num_feeders
    if SPEC.num_feeders > 0:  # noqa: SIM102 - `and` does not keep the compiler from what follows
        if program < 0:
            feed_rows(a, factors[1], K, table, trace, SPEC)
    count = num_steps * 0
    unsettled = count.to(gl.int64)
    while step < num_steps:
        owner, chunk, m, n, turn, first_row, row, end_row, expert = locate(step, parts, rows, N, table, ORDER, SPEC)
        if row < end_row:
            if SPEC.records:
                begin = clock_ns()
                _await_first(ring, count, turn, SPEC)
                start = clock_ns()
            total = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, LAYOUT)
            if SPEC.settles:
                num_first = min(num_k, _SETTLING)
                total, count = _multiply(total, count, 0, num_first, ring, SPEC)
                count_settled(unsettled)
                total, count = _multiply(total, count, num_first, num_k, ring, SPEC)
            else:
                total, count = _multiply(total, count, 0, num_k * (1 - turn), ring, SPEC)
            if SPEC.records:
                computed = clock_ns()
            column = n * SPEC.block_n
            scale_a, a_row = _scales_of(factors[1], table, owner, parts[0], first_row, row, SPEC)
            scales = (factors[0], scale_a, factors[2])
            value = _epilogue(total, a_row, a_row + end_row - row, column, N, expert * N, scales, SPEC)
            number = (chunk * parts[3] + m) * parts[4] + n
            place = (owner, first_row, row, column, end_row, N, number, turn)
            FINISH(value, target, place, table, SPEC)
            if SPEC.settles:
                unsettled = settling_counter(place, table, SPEC)
            if SPEC.records:
                note_tile(trace, SPEC.world_size, step, program, owner, chunk, m, n, turn, begin, start, computed)
        step += stride
    if SPEC.settles:
        count_settled(unsettled)
    elif SPEC.out_by_tma:
        tma.store_wait(pendings=0)
    leave_launch(table, SPEC)


@gluon.jit
def _multiply(total, count, first, end, ring, SPEC: gl.constexpr):
    """(``total`` and the products of a tile's stages from ``first`` to ``end``, stages so far). Done when it returns.

    What ``total`` has before stage 0 does not count.
    """
    a_ring, b_ring, empty, full = ring
    STAGES: gl.constexpr = SPEC.num_stages
    BLOCK_M: gl.constexpr = SPEC.block_m
    BLOCK_N: gl.constexpr = SPEC.block_n
    LAYOUT: gl.constexpr = SPEC.accumulator_layout
    for index in range(first, end):
        stage = count % STAGES
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        left = a_ring.index(stage)
        right = b_ring.index(stage)
        if SPEC.k_major:
            right = right.permute((1, 0))
        if SPEC.a_type.primitive_bitwidth == 8:
            # Hopper adds products of fp8 with 14 bits: one stage's, which then go to fp32.
            products = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, LAYOUT)
            products = warpgroup_mma(left, right, products, use_acc=False, is_async=True)
            total += warpgroup_mma_wait(0, deps=(products,))
            mbarrier.arrive(empty.index(stage), count=1)
        else:
            total = warpgroup_mma(left, right, total, use_acc=index > 0, is_async=True)
            # One product may be under way; the one before is done, and its stage free.
            total = warpgroup_mma_wait(1, deps=(total,))
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=index > first)
        count += 1
    if SPEC.a_type.primitive_bitwidth != 8:
        total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=end > first)
    return total, count


@gluon.jit
def _await_first(ring, count, turn, SPEC: gl.constexpr):
    """Wait for a tile's first stage, if it has one."""
    a_ring, b_ring, empty, full = ring
    mbarrier.wait(full.index(count % SPEC.num_stages), (count // SPEC.num_stages) & 1, pred=turn == 0)


@gluon.jit
def _steps(parts, SPEC: gl.constexpr):
    """(first step, distance of one to the next, end) of this program's tiles. A program that feeds has none."""
    num_steps = num_steps_of(parts, SPEC)
    step = gl.program_id(0) - SPEC.num_feeders
    if step < 0:
        step = num_steps
    return step, gl.num_programs(0) - SPEC.num_feeders, num_steps


@gluon.jit
def _scales_of(scale_a, table, owner, rank, first_row, row, SPEC: gl.constexpr):
    """(address of the scales, row) of a tile's rows: own ones in place, others as they arrived.

    Who waited for these is the producer; what it has seen is seen here too, behind the ring's barriers.
    """
    a_row = first_row + row
    if SPEC.gathers and SPEC.scale_a == "channel":
        if owner == rank:
            a_row = row
        else:
            scale_a = data(table, rank, SPEC.world_size) + tl.load(table + SCALES)
    return scale_a, a_row


@gluon.jit
def _epilogue(total, first_row, end, column, N, before, factors, SPEC: gl.constexpr):
    """Scales, bias and activation, a piece at a time: a whole tile's would not fit in registers beside it.

    ``before`` are columns of other experts in front of those whose scales and bias these are.
    """
    WIDTH: gl.constexpr = PIECE // 2 if SPEC.activation == "gelu" else PIECE  # gelu needs the most registers
    if total.shape[1] == WIDTH:
        bias, scale_a, scale_b = factors
        rows = first_row + span(total.shape[0])
        columns = column + span(total.shape[1])
        value = scaled(total, rows, rows < end, before + columns, columns < N, scale_a, scale_b, bias, SPEC)
        value = activate(value, value, SPEC)
    else:
        left, right = halves(total)
        left = _epilogue(left, first_row, end, column, N, before, factors, SPEC)
        right = _epilogue(right, first_row, end, column + total.shape[1] // 2, N, before, factors, SPEC)
        value = whole(left, right, total)
    return value
