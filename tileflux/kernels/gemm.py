"""The GEMM main loop in Triton: persistent programs, one tile after another, and three policies.

ORDER says which tile comes next (``lang/schedule.py``), WAIT what must have arrived before it, FINISH what happens to
it (``lang/policy.py``). Every fused op is a choice of these; ``kernels/gemm_host.py`` keeps the contract on the CPU.
Addresses and sizes are plain numbers that make no variant of the kernel; everything that does is in SPEC.

Where a rank has its SMs to itself, a program takes every ``num_programs``-th step of the order. Where ranks share a GPU
(``SPEC.fetches``) it may begin only when a program of another rank has ended; should that one wait for a tile of the
late program, neither would ever end. So there programs fetch their steps from a counter, and those that run do the
work. This cannot lock up, however few programs of each rank run, as long as there is one:

- Steps are given out in sequence, to programs that run, and each does its own in sequence. So whoever waits in a step
  holds only later ones, and every earlier step is done or with somebody else.
- In ``twice_order`` only sums wait, for tiles that have been multiplied, and those come first on every rank: nobody who
  waits holds one, so each is done by a program that runs and waits for nothing of this call. Then the waits end.
- In ``departure_order`` the same holds: own tiles wait and come last, and tiles for peers are what is waited for.
- In ``arrival_order`` nobody waits for a tile, but for feeders. These have the first numbers, since a GPU begins
  programs in that order, and wait for nothing but acks of the call before.

A program that begins when all steps are given out does nothing but leave.
"""

import triton
import triton.language as tl

from tileflux.lang.epilogue import activate, scaled
from tileflux.lang.remote import typed
from tileflux.lang.signal import clock_ns, taken
from tileflux.lang.tiles import cut, feed_rows, leave_launch, locate, num_steps_of, picked_rows
from tileflux.lang.trace import note_tile
from tileflux.lang.turn import SCALES, data, fetch, shard

__all__ = ["NUMBERS"]

NUMBERS = (
    "a", "b", "out", "bias", "scale_a", "scale_b", "rows", "N", "K", "stride_a", "stride_b", "trace", "table_ptr"
)  # fmt: skip
"""Arguments that must not make a variant of the kernel by their value."""


@triton.jit(do_not_specialize=NUMBERS)
def _gemm_kernel(
    a: tl.int64,
    b: tl.int64,
    out: tl.int64,
    bias: tl.int64,
    scale_a: tl.int64,
    scale_b: tl.int64,
    rows: tl.int64,
    N: tl.int32,
    K: tl.int32,
    stride_a: tl.int64,
    stride_b: tl.int64,
    a_desc,
    rows_desc,
    b_desc,
    trace: tl.int64,
    table_ptr,
    ORDER: tl.constexpr,
    WAIT: tl.constexpr,
    FINISH: tl.constexpr,
    SPEC: tl.constexpr,
):
    """The first programs feed the peers, if the op has feeders; the others multiply. SPEC is a ``GemmSpec``.

    ``rows`` is how many there are; where they are grouped by expert, the address of their list of tiles.
    """
    program = tl.program_id(0) - SPEC.num_feeders
    if SPEC.num_feeders > 0:  # noqa: SIM102 - `and` does not keep the compiler from what follows
        if program < 0:
            feed_rows(a, scale_a, K, table_ptr, trace, SPEC)
    if program >= 0:
        _multiply_tiles(
            program, (a, b, out, bias, scale_a, scale_b), (rows, N, K), (stride_a, stride_b),
            (a_desc, rows_desc, b_desc), trace, table_ptr, ORDER, WAIT, FINISH, SPEC,
        )  # fmt: skip
    leave_launch(table_ptr, SPEC)


@triton.jit
def _multiply_tiles(
    program, addresses, sizes, strides, descriptors, trace, table,
    ORDER: tl.constexpr, WAIT: tl.constexpr, FINISH: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Every tile of this program, in the order's sequence."""
    parts = cut(sizes[0], sizes[1], table, SPEC)
    num_steps = num_steps_of(parts, SPEC)
    ready = num_steps * 0 - 1
    if SPEC.fetches:
        step = taken(fetch(table, SPEC.world_size))
        while step < num_steps:
            # One ahead, so that it is there when this tile is done, and no further: a slow program would keep tiles.
            ticket = fetch(table, SPEC.world_size)
            ready = _tile(
                step, ready, program, parts, addresses, sizes, strides, descriptors, trace, table,
                ORDER, WAIT, FINISH, SPEC,
            )  # fmt: skip
            step = taken(ticket)
    else:
        for step in range(program, num_steps, tl.num_programs(0) - SPEC.num_feeders):
            ready = _tile(
                step, ready, program, parts, addresses, sizes, strides, descriptors, trace, table,
                ORDER, WAIT, FINISH, SPEC,
            )  # fmt: skip
    if SPEC.is_grouped and SPEC.awaits_rows:  # noqa: SIM102
        # Also those that no tile needs: this rank's buffer is not free before they have come.
        if ready != SPEC.world_size - 1:
            WAIT(table, num_steps * 0 + (SPEC.world_size - 1), 0, SPEC)


@triton.jit
def _tile(
    step, ready, program, parts, addresses, sizes, strides, descriptors, trace, table,
    ORDER: tl.constexpr, WAIT: tl.constexpr, FINISH: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """The tile of a step. ``ready`` is the chunk that this program has waited for last; returns it anew."""
    rank, num_chunks, _, num_m, num_n = parts
    a, b, out, bias, scale_a, scale_b = addresses
    given_rows, N, K = sizes
    stride_a, stride_b = strides
    a_desc, rows_desc, b_desc = descriptors
    owner, chunk, m, n, turn, first_row, row, end, expert = locate(step, parts, given_rows, N, table, ORDER, SPEC)
    if row < end:
        if SPEC.records:
            begin = clock_ns()
        slab = owner * num_chunks + chunk
        if slab != ready:
            WAIT(table, owner, chunk, SPEC)
            ready = slab
        if SPEC.records:
            start = clock_ns()
        column = n * SPEC.block_n
        inside = row + tl.arange(0, SPEC.block_m) < end
        if SPEC.picks_rows:
            buffer, scales, a_row = a, scale_a, row
            offsets = _picked(a, scale_a, stride_a, K, given_rows, row, inside, table, rank, SPEC)[0]
        else:
            buffer, scales, pitch, a_row = _a_rows(a, scale_a, stride_a, K, table, owner, rank, first_row, row, SPEC)
            offsets = (a_row + tl.arange(0, SPEC.block_m)).to(tl.int64) * pitch
        if SPEC.use_tma:
            desc = a_desc
            if SPEC.gathers and not SPEC.picks_rows:  # noqa: SIM102
                if owner != rank:
                    desc = rows_desc
        else:
            desc = a_desc
        # A tile that is only to be summed multiplies nothing.
        depth = K * (1 - turn)
        weight = _weight_of(expert, N, K, SPEC)
        total, gate = _multiply(
            (buffer, offsets, inside, a_row), (b, column, weight), N, depth, stride_b, desc, b_desc, SPEC
        )
        if SPEC.records:
            computed = clock_ns()
        # Made anew: kept over the loop, they would take registers that its tiles need.
        rows = a_row + tl.arange(0, SPEC.block_m)
        inside = rows < a_row + end - row
        if SPEC.picks_rows:
            rows = _picked(a, scale_a, stride_a, K, given_rows, row, inside, table, rank, SPEC)[1]
        if SPEC.combines:
            # Where tokens are added up, there are no rows of x, nor scales of them.
            inside = inside & (turn == 0)
        value = _epilogue(total, gate, rows, inside, column, N, weight[0], scales, scale_b, bias, SPEC)
        number = (chunk * num_m + m) * num_n + n
        place = (owner, first_row, row, column, end, N, number, turn)
        if SPEC.combines:
            number = m * tl.cdiv(N, SPEC.block_n) + n
            place = (owner, first_row, row, column, end, N, number, turn)
            wanted = num_m * min(num_n, tl.cdiv(N, SPEC.block_n) - chunk * num_n)
            FINISH(value, (out, given_rows, chunk, wanted), place, table, SPEC)
        else:
            FINISH(value, out, place, table, SPEC)
        if SPEC.records:
            note_tile(trace, SPEC.world_size, step, program, owner, chunk, m, n, turn, begin, start, computed)
    return ready


@triton.jit
def _a_rows(a, scale_a, stride_a, K, table, owner, rank, first_row, row, SPEC: tl.constexpr):
    """(address, address of the scales, row pitch, row) of a tile's rows: own ones in place, others as they arrived."""
    a_row = first_row + row
    if SPEC.gathers:
        if owner == rank:
            a_row = row
        else:
            buffer = data(table, rank, SPEC.world_size)
            a = buffer
            stride_a = K.to(tl.int64)
            if SPEC.scale_a == "channel":
                scale_a = buffer + tl.load(table + SCALES)
    return a, scale_a, stride_a, a_row


@triton.jit
def _picked(a, scale_a, stride_a, K, given_rows, row, inside, table, rank, SPEC: tl.constexpr):
    """(elements from ``a``, numbers from ``scale_a``) of a tile's rows, which are picked from anywhere in x.

    Of gathered rows, own ones are in place and others where they have arrived: also counted from ``a``.
    """
    numbers = picked_rows(given_rows, row + tl.arange(0, SPEC.block_m), inside).to(tl.int64)
    rows = numbers
    offsets = numbers * stride_a
    if SPEC.gathers:
        first, count = shard(table, rank, SPEC.world_size)
        buffer = data(table, rank, SPEC.world_size)
        is_own = (numbers >= first) & (numbers < first + count)
        arrived = (buffer - a) // (SPEC.a_type.primitive_bitwidth // 8) + numbers * K
        offsets = tl.where(is_own, (numbers - first) * stride_a, arrived)
        if SPEC.scale_a == "channel":
            scales = buffer + tl.load(table + SCALES)
            rows = tl.where(is_own, numbers - first, (scales - scale_a) // 4 + numbers)
    return offsets, rows


@triton.jit
def _weight_of(expert, N, K, SPEC: tl.constexpr):
    """(rows, elements of K) before an expert's weight: all experts' weights are one matrix, below each other."""
    num_rows = N
    if SPEC.is_gated:
        num_rows = 2 * N
    rows = expert * num_rows
    depth = expert * 0
    if SPEC.is_grouped and not SPEC.k_major:
        depth = expert * K
    return rows, depth


@triton.jit
def _multiply(left_rows, right_rows, N, depth, stride_b, a_desc, b_desc, SPEC: tl.constexpr):
    """The main loop: (sum over k of a and b's tile, the same of the gate's tile or 0)."""
    BLOCK_M: tl.constexpr = SPEC.block_m
    BLOCK_N: tl.constexpr = SPEC.block_n
    a, offsets, inside, a_row = left_rows
    b, column, weight = right_rows
    first, first_k = weight
    if not SPEC.k_major:
        first = first * 0
    total = tl.zeros((BLOCK_M, BLOCK_N), SPEC.accumulator)
    gate = total
    inner = tl.arange(0, SPEC.block_k)
    if SPEC.k_aligned and (SPEC.picks_rows or not SPEC.use_tma):
        # So that the compiler can tell: a mask of unknown alignment makes every load one element wide.
        depth = depth // (128 // SPEC.a_type.primitive_bitwidth) * (128 // SPEC.a_type.primitive_bitwidth)
    a_ptrs = _grid(typed(a, SPEC.a_type, SPEC.a_aligned), offsets, inner, SPEC.a_type, SPEC.a_aligned)
    row_mask = inside[:, None]
    if SPEC.use_tma:
        for k in range(0, depth, SPEC.block_k):
            if SPEC.picks_rows:
                left = _load(a_ptrs, row_mask, (inner < depth - k)[None, :], SPEC)
                a_ptrs += SPEC.block_k
            else:
                left = a_desc.load([a_row, k])
            if SPEC.is_gated:
                gate = _dot(left, _b_tile(b_desc, first + column, first_k + k, SPEC), gate, SPEC)
                total = _dot(left, _b_tile(b_desc, first + N + column, first_k + k, SPEC), total, SPEC)
            else:
                total = _dot(left, _b_tile(b_desc, first + column, first_k + k, SPEC), total, SPEC)
    else:
        columns = column + tl.arange(0, SPEC.block_n)
        column_mask = (columns < N)[None, :]
        b_ptrs = _b_grid(b, first + columns, first_k + inner, stride_b, SPEC)
        up_ptrs = _b_grid(b, first + N + columns, first_k + inner, stride_b, SPEC)
        for k in range(0, depth, SPEC.block_k):
            left = _load(a_ptrs, row_mask, (inner < depth - k)[None, :], SPEC)
            right = _load(b_ptrs, column_mask, (inner < depth - k)[:, None], SPEC)
            if SPEC.is_gated:
                gate = _dot(left, right, gate, SPEC)
                up = _load(up_ptrs, column_mask, (inner < depth - k)[:, None], SPEC)
                total = _dot(left, up, total, SPEC)
                up_ptrs += _b_step(stride_b, SPEC)
            else:
                total = _dot(left, right, total, SPEC)
            a_ptrs += SPEC.block_k
            b_ptrs += _b_step(stride_b, SPEC)
    return total, gate


@triton.jit
def _dot(left, right, total, SPEC: tl.constexpr):
    if SPEC.accumulator == tl.int32:
        total = tl.dot(left, right, total, out_dtype=tl.int32)
    elif SPEC.a_type.primitive_bitwidth == 8:
        total = tl.dot(left, right, total, max_num_imprecise_acc=SPEC.num_coarse)
    else:
        total = tl.dot(left, right, total, input_precision=SPEC.precision)
    return total


@triton.jit
def _b_tile(b_desc, column, k, SPEC: tl.constexpr):
    if SPEC.k_major:  # noqa: SIM108 - a constexpr picks the branch, not the value
        tile = b_desc.load([column, k]).T
    else:
        tile = b_desc.load([k, column])
    return tile


@triton.jit
def _b_grid(b, columns, inner, stride_b, SPEC: tl.constexpr):
    """Pointers to a tile of b, ``[block_k, block_n]``, whichever of its dimensions is contiguous."""
    base = typed(b, SPEC.b_type, SPEC.b_aligned)
    if SPEC.k_major:
        pointers = _grid(base, columns.to(tl.int64) * stride_b, inner, SPEC.b_type, SPEC.b_aligned).T
    else:
        pointers = _grid(base, inner.to(tl.int64) * stride_b, columns, SPEC.b_type, SPEC.b_aligned)
    return pointers


@triton.jit
def _b_step(stride_b, SPEC: tl.constexpr):
    step = tl.full((), SPEC.block_k, tl.int64)
    if not SPEC.k_major:
        step = step * stride_b
    return step


@triton.jit
def _grid(base, outer, inner, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers to elements ``outer + inner`` from ``base``."""
    if ALIGNED:
        # A multiple of 16 bytes, so that the compiler can tell: else it loads element by element, and not ahead.
        outer = outer // (128 // TYPE.primitive_bitwidth) * (128 // TYPE.primitive_bitwidth)
    return base + outer[:, None] + inner[None, :]


@triton.jit
def _load(pointers, outer_mask, inner_mask, SPEC: tl.constexpr):
    if not SPEC.even_k:
        outer_mask = outer_mask & inner_mask
    if SPEC.accumulator == tl.int32:
        tile = tl.load(pointers, mask=outer_mask, other=0)
    else:
        tile = tl.load(pointers, mask=outer_mask, other=0.0)  # an integer would not become fp8
    return tile


@triton.jit
def _epilogue(total, gate, rows, row_mask, column, N, first, scale_a, scale_b, bias, SPEC: tl.constexpr):
    columns = column + tl.arange(0, SPEC.block_n)
    mask = columns < N
    columns += first
    if SPEC.is_gated:
        gate = scaled(gate, rows, row_mask, columns, mask, scale_a, scale_b, bias, SPEC)
        value = scaled(total, rows, row_mask, N + columns, mask, scale_a, scale_b, bias, SPEC)
    else:
        value = scaled(total, rows, row_mask, columns, mask, scale_a, scale_b, bias, SPEC)
    return activate(value, gate, SPEC)
