"""The GEMM main loop for Hopper, in Gluon: the contract and the policies of ``kernels/gemm.py``.

A program is divided into two partitions. The *producer*, one warp, waits for rows and loads blocks of K by TMA into a
ring of stages; only it waits for other ranks. The *consumer* multiplies them with WGMMA and finishes tiles. Neither
waits for the other but at the ring, so the next tile's loads run while a tile is finished.

Where tiles do not come out even, the first ones are *streamed* (``lang/schedule.py``): programs share them out along K
too. Who has the end of a tile leaves its sum in fp32 in the workspace, and who has its beginning adds it.
"""

import triton.language as tl

from tileflux.lang.epilogue import activate, scaled
from tileflux.lang.hopper import (
    PIECE,
    add_partial,
    fence_async_shared,
    gl,
    gluon,
    halves,
    mbarrier,
    piece_buffers,
    span,
    store_partial,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
    whole,
)
from tileflux.lang.schedule import next_piece, num_streamed, streamed_part
from tileflux.lang.signal import await_neighbour, clock_ns, signal
from tileflux.lang.trace import note_tile
from tileflux.lang.turn import CHUNK_ROWS, NUM_CHUNKS, RANK, confirm_call, feed, release, shard, word

__all__ = ["NUMBERS"]

NUMBERS = (
    "a", "out", "bias", "scale_a", "scale_b", "M", "N", "K", "flags", "partials", "trace", "table_ptr"
)  # fmt: skip
"""Arguments that must not make a variant of the kernel by their value."""

_COPY_BLOCK = gl.constexpr(2048)


@gluon.jit(do_not_specialize=NUMBERS)
def _gemm_hopper_kernel(
    a: tl.int64,
    out: tl.int64,
    bias: tl.int64,
    scale_a: tl.int64,
    scale_b: tl.int64,
    M: tl.int32,
    N: tl.int32,
    K: tl.int32,
    a_desc,
    rows_desc,
    b_desc,
    out_desc,
    flags: tl.int64,
    partials: tl.int64,
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
    sizes = (M, N, K)
    target = out
    if SPEC.out_by_tma:
        target = (out_desc, piece_buffers(out_desc))
    factors = (bias, scale_a, scale_b)
    workspace = (flags, partials)
    gl.warp_specialize(
        [
            (_consume, (ring, sizes, a, target, factors, workspace, trace, table_ptr, ORDER, FINISH, SPEC)),
            (_produce, (ring, sizes, a_desc, rows_desc, b_desc, flags, table_ptr, ORDER, WAIT, SPEC)),
        ],
        [1],
        [SPEC.producer_registers],
    )  # fmt: skip


@gluon.jit
def _produce(
    ring, sizes, a_desc, rows_desc, b_desc, flags, table,
    ORDER: gl.constexpr, WAIT: gl.constexpr, SPEC: gl.constexpr,
):  # fmt: skip
    """Load what the consumer will multiply, as soon as it is there."""
    a_ring, b_ring, empty, full = ring
    cursor, end, step, num_steps, num_k = _begin(sizes, flags, table, SPEC)
    count = num_steps * 0
    ready = count - 1
    while (cursor < end) | (step < num_steps):
        this, first_k, end_k, cursor, step = next_piece(cursor, end, step, num_k, _num_multipliers(SPEC))
        owner, chunk, m, n, turn, first_row, row, end_row, slab, rank = _locate(this, sizes, table, ORDER, SPEC)
        if row < end_row:
            if slab != ready:
                WAIT(table, owner, chunk, SPEC)
                ready = slab
            own = owner == rank
            a_row = first_row + row
            if SPEC.gathers:  # noqa: SIM102 - `and` does not keep the compiler from what follows
                if own:
                    a_row = row
            column = n * SPEC.block_n
            for index in range(first_k, end_k * (1 - turn)):
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
                    tma.async_copy_global_to_shared(b_desc, [k, column], full.index(stage), b_ring.index(stage))
                count += 1


@gluon.jit
def _consume(
    ring, sizes, a, target, factors, workspace, trace, table,
    ORDER: gl.constexpr, FINISH: gl.constexpr, SPEC: gl.constexpr,
):  # fmt: skip
    """Multiply what the producer has loaded, and finish tiles."""
    M, N, K = sizes
    LAYOUT: gl.constexpr = SPEC.accumulator_layout
    BLOCK_M: gl.constexpr = SPEC.block_m
    BLOCK_N: gl.constexpr = SPEC.block_n
    cursor, end, step, num_steps, num_k = _begin(sizes, workspace[0], table, SPEC)
    program = gl.program_id(0) - SPEC.num_feeders
    if SPEC.num_feeders > 0:  # noqa: SIM102 - `and` does not keep the compiler from what follows
        if program < 0:
            row_bytes = K.to(gl.int64) * (SPEC.a_type.primitive_bitwidth // 8)
            feeders = num_steps * 0 + SPEC.num_feeders
            feed(
                a, factors[1], row_bytes, table, gl.program_id(0), feeders, trace,
                False, SPEC.world_size, _COPY_BLOCK, SPEC.records,
            )  # fmt: skip
    count = num_steps * 0
    while (cursor < end) | (step < num_steps):
        this, first_k, end_k, cursor, step = next_piece(cursor, end, step, num_k, _num_multipliers(SPEC))
        owner, chunk, m, n, turn, first_row, row, end_row, slab, rank = _locate(this, sizes, table, ORDER, SPEC)
        if row < end_row:
            if SPEC.records:
                begin = clock_ns()
                _await_first(ring, count, turn, SPEC)
                start = clock_ns()
            total = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, LAYOUT)
            total, count = _multiply(total, count, (end_k - first_k) * (1 - turn), ring, SPEC)
            if SPEC.streams:  # noqa: SIM102
                if end_k < num_k:
                    flag, sums = _partial_of(workspace, program - 1, SPEC)
                    await_neighbour(flag)
                    # Not before: WGMMA waits after every instruction for an accumulator that others have written to.
                    total = add_partial(total, sums)
            if SPEC.records:
                computed = clock_ns()
            if SPEC.streams:  # noqa: SIM102
                if first_k > 0:
                    flag, sums = _partial_of(workspace, program, SPEC)
                    store_partial(total, sums)
                    signal(flag, 1)
            if first_k == 0:
                column = n * SPEC.block_n
                value = _epilogue(total, first_row + row, first_row + end_row, column, N, factors, SPEC)
                num_m, num_n = _num_tiles(sizes, table, SPEC)
                place = (owner, first_row, row, column, end_row, N, (chunk * num_m + m) * num_n + n, turn)
                FINISH(value, target, place, table, SPEC)
                if SPEC.records:
                    note_tile(trace, SPEC.world_size, this, program, owner, chunk, m, n, turn, begin, start, computed)
    if SPEC.out_by_tma:
        tma.store_wait(pendings=0)
    if SPEC.releases:
        release(table, SPEC.world_size)
    elif SPEC.has_table:
        confirm_call(table)


@gluon.jit
def _multiply(total, count, num_k, ring, SPEC: gl.constexpr):
    """(Sum of the products of the next ``num_k`` stages, stages so far). ``total`` is zero."""
    a_ring, b_ring, empty, full = ring
    STAGES: gl.constexpr = SPEC.num_stages
    BLOCK_M: gl.constexpr = SPEC.block_m
    BLOCK_N: gl.constexpr = SPEC.block_n
    LAYOUT: gl.constexpr = SPEC.accumulator_layout
    for index in range(num_k):
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
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=index > 0)
        count += 1
    if SPEC.a_type.primitive_bitwidth != 8:
        total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=num_k > 0)
    return total, count


@gluon.jit
def _await_first(ring, count, turn, SPEC: gl.constexpr):
    """Wait for a tile's first stage, if it has one."""
    a_ring, b_ring, empty, full = ring
    mbarrier.wait(full.index(count % SPEC.num_stages), (count // SPEC.num_stages) & 1, pred=turn == 0)


@gluon.jit
def _begin(sizes, flags, table, SPEC: gl.constexpr):
    """(cursor and end of the streamed part, first whole step, number of steps, blocks of K in a tile).

    A program that feeds has nothing to multiply. Without flags nothing is streamed.
    """
    M, N, K = sizes
    num_m, num_n = _num_tiles(sizes, table, SPEC)
    num_chunks = num_m * 0 + 1
    if SPEC.num_shards > 1:
        num_chunks = word(table, NUM_CHUNKS)
    num_steps = SPEC.num_turns * SPEC.num_shards * num_chunks * num_m * num_n
    num_k = gl.cdiv(K, SPEC.block_k)
    program = gl.program_id(0) - SPEC.num_feeders
    count = num_m * 0
    if SPEC.streams:  # noqa: SIM102
        if flags != 0:
            count = num_streamed(num_steps, _num_multipliers(SPEC))
    cursor, end = streamed_part(program, _num_multipliers(SPEC), count, num_k)
    step = count + program
    if program < 0:
        cursor = end
        step = num_steps
    return cursor, end, step, num_steps, num_k


@gluon.jit
def _num_multipliers(SPEC: gl.constexpr):
    return gl.num_programs(0) - SPEC.num_feeders


@gluon.jit
def _num_tiles(sizes, table, SPEC: gl.constexpr):
    """Tiles of a chunk, down and across."""
    M, N, K = sizes
    rows = M
    if SPEC.num_shards > 1:
        rows = word(table, CHUNK_ROWS)
    return gl.cdiv(rows, SPEC.block_m), gl.cdiv(N, SPEC.block_n)


@gluon.jit
def _locate(step, sizes, table, ORDER: gl.constexpr, SPEC: gl.constexpr):
    """(owner, chunk, m, n, turn, first row of the shard, row in it, end of the rows, number of the chunk, rank)."""
    M, N, K = sizes
    num_m, num_n = _num_tiles(sizes, table, SPEC)
    rank = step * 0
    num_chunks = rank + 1
    first_row = rank
    num_rows = M
    chunk_rows = M
    if SPEC.has_table:
        rank = word(table, RANK)
    if SPEC.num_shards > 1:
        num_chunks = word(table, NUM_CHUNKS)
        chunk_rows = word(table, CHUNK_ROWS)
    owner, chunk, m, n, turn = ORDER(step, rank, SPEC.num_shards, num_chunks, num_m, num_n, SPEC.group_m)
    if SPEC.num_shards > 1:
        first_row, num_rows = shard(table, owner, SPEC.world_size)
    row = chunk * chunk_rows + m * SPEC.block_m
    # No tile goes past its chunk: the rows behind it are another flag's.
    end_row = min(num_rows, (chunk + 1) * chunk_rows)
    return owner, chunk, m, n, turn, first_row, row, end_row, owner * num_chunks + chunk, rank


@gluon.jit
def _epilogue(total, first_row, end, column, N, factors, SPEC: gl.constexpr):
    """Scales, bias and activation, a piece at a time: a whole tile's would not fit in registers beside it."""
    if total.shape[1] == PIECE:
        bias, scale_a, scale_b = factors
        rows = first_row + span(total.shape[0])
        columns = column + span(total.shape[1])
        value = scaled(total, rows, rows < end, columns, columns < N, scale_a, scale_b, bias, SPEC)
        value = activate(value, value, SPEC)
    else:
        left, right = halves(total)
        left = _epilogue(left, first_row, end, column, N, factors, SPEC)
        right = _epilogue(right, first_row, end, column + total.shape[1] // 2, N, factors, SPEC)
        value = whole(left, right, total)
    return value


@gluon.jit
def _partial_of(workspace, program, SPEC: gl.constexpr):
    """(flag, address of the sums) that ``program`` leaves to the next."""
    flags, partials = workspace
    flag = flags.to(gl.pointer_type(gl.int32)) + program
    return flag, partials + program.to(gl.int64) * (SPEC.block_m * SPEC.block_n * 4)
