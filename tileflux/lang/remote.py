"""Runs of bytes: where a lane's share of a message lies, and copying one.

The integer functions are the device's twins of ``kernels/plan.py``; a test compares the two. Addresses are plain
64-bit integers: a kernel compiled for pointers would come in a variant per alignment, and the first launch of a
variant, which loads it, does not start while another virtual rank's kernel waits on the same GPU. Alignment is
looked at while running.
"""

import triton
import triton.language as tl

from tileflux.lang.hopper import lanes

__all__ = ["copy_run", "extent", "part", "typed"]


@triton.jit
def extent(table, ragged, nbytes, stride, peer, SIDE: tl.constexpr, WORLD: tl.constexpr):
    """(offset, length) in bytes of the run for ``peer``; SIDE 0 is what is sent, 1 what is received."""
    offset = peer.to(tl.int64) * stride
    length = nbytes
    if ragged != 0:
        offset = tl.load(table + (2 * SIDE) * WORLD + peer)
        length = tl.load(table + (2 * SIDE + 1) * WORLD + peer)
    return offset, length


@triton.jit
def part(nbytes, lane, num_lanes):
    """(offset, length) of the part of a message of ``nbytes`` that ``lane`` carries."""
    share = tl.cdiv(nbytes, num_lanes.to(tl.int64) * 16) * 16
    begin = tl.minimum(nbytes, lane.to(tl.int64) * share)
    return begin, tl.minimum(share, nbytes - begin)


@triton.jit
def typed(address, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
    """An address as a pointer. ALIGNED promises 16 bytes; without it every access is one element wide."""
    # The address of nothing is 0, which the interpreter takes for a 32-bit number.
    pointer = address.to(tl.int64).to(tl.pointer_type(ELEMENT))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def copy_run(dst, src, nbytes, BLOCK: tl.constexpr):
    """Copy ``nbytes`` from address to address, as widely as the two addresses allow, BLOCK elements at a time."""
    if ((dst | src) & 15) == 0:
        copied = _copy_wide(dst, src, nbytes, BLOCK)
        _copy_narrow(dst + copied, src + copied, nbytes - copied, tl.int8, 8)
    elif ((dst | src | nbytes) & 3) == 0:
        _copy_narrow(dst, src, nbytes, tl.int32, BLOCK)
    else:
        _copy_narrow(dst, src, nbytes, tl.int8, BLOCK)


@triton.jit
def _copy_wide(dst, src, nbytes, BLOCK: tl.constexpr):
    """Copy in accesses of 16 bytes a thread; returns how many bytes were copied, all but the last few."""
    to = typed(dst, tl.int64, True)
    source = typed(src, tl.int64, True)
    num_elements = nbytes // 8
    num_blocks = num_elements // BLOCK
    numbers = lanes(BLOCK, 2)
    for block in range(num_blocks):
        # Whole blocks carry no mask: a mask of unknown alignment makes every access one element wide.
        offsets = block * BLOCK + numbers
        tl.store(to + offsets, tl.load(source + offsets))
    if num_blocks * BLOCK < num_elements:
        offsets = num_blocks * BLOCK + numbers
        inside = offsets < num_elements
        tl.store(to + offsets, tl.load(source + offsets, mask=inside), mask=inside)
    return num_elements * 8


@triton.jit
def _copy_narrow(dst, src, nbytes, ELEMENT: tl.constexpr, BLOCK: tl.constexpr):
    """Copy one element at a time."""
    to = typed(dst, ELEMENT, False)
    source = typed(src, ELEMENT, False)
    num_elements = nbytes // (ELEMENT.primitive_bitwidth // 8)
    for begin in range(0, num_elements, BLOCK):
        offsets = begin + lanes(BLOCK, 1)
        inside = offsets < num_elements
        tl.store(to + offsets, tl.load(source + offsets, mask=inside), mask=inside)
