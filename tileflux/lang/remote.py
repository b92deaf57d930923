"""Runs of bytes: where a lane's share of a message lies, and copying one.

The integer functions are the device's twins of ``kernels/plan.py``; a test compares the two.
"""

import triton
import triton.language as tl

__all__ = ["copy_run", "extent", "part", "typed"]


@triton.jit
def extent(table, nbytes, stride, peer, SIDE: tl.constexpr, WORLD: tl.constexpr, RAGGED: tl.constexpr):
    """(offset, length) in bytes of the run for ``peer``; SIDE 0 is what is sent, 1 what is received."""
    if RAGGED:
        offset = tl.load(table + (2 * SIDE) * WORLD + peer)
        length = tl.load(table + (2 * SIDE + 1) * WORLD + peer)
    else:
        offset = peer.to(tl.int64) * stride
        length = nbytes
    return offset, length


@triton.jit
def part(nbytes, lane, num_lanes):
    """(offset, length) of the part of a message of ``nbytes`` that ``lane`` carries."""
    share = tl.cdiv(nbytes, num_lanes.to(tl.int64) * 16) * 16
    begin = tl.minimum(nbytes, lane.to(tl.int64) * share)
    return begin, tl.minimum(share, nbytes - begin)


@triton.jit
def typed(address, like, ALIGNED: tl.constexpr):
    """An address as a pointer to elements of ``like``'s type. Without ALIGNED stores through it are element-wide."""
    pointer = address.to(tl.pointer_type(like.dtype.element_ty))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def copy_run(dst, src, nbytes, BLOCK_BYTES: tl.constexpr):
    """Copy ``nbytes`` between pointers of one element type."""
    ELEMENT_BYTES: tl.constexpr = src.dtype.element_ty.primitive_bitwidth // 8
    BLOCK: tl.constexpr = BLOCK_BYTES // ELEMENT_BYTES
    num_elements = nbytes // ELEMENT_BYTES
    num_blocks = num_elements // BLOCK
    lanes = tl.arange(0, BLOCK)
    for block in range(0, num_blocks):
        # Whole blocks carry no mask: a mask of unknown alignment would make every access element-wide.
        offsets = block * BLOCK + lanes
        tl.store(dst + offsets, tl.load(src + offsets))
    if num_blocks * BLOCK < num_elements:
        offsets = num_blocks * BLOCK + lanes
        inside = offsets < num_elements
        tl.store(dst + offsets, tl.load(src + offsets, mask=inside), mask=inside)
