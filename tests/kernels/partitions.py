"""Two kernels divided into partitions, one of which is wrong: what racecheck says of each, ``test_partitions.py`` asks.

``python -m tests.kernels.partitions apart|unordered`` runs one of them.
"""

import sys

import torch

from tileflux.lang.hopper import gl, gluon

NUM_WORDS = gl.constexpr(128)


@gluon.jit
def _apart_kernel(out_ptr):
    """Partitions that share nothing."""
    gl.warp_specialize([(_store_first, (out_ptr,)), (_store_second, (out_ptr,))], [1], [24])


@gluon.jit
def _store_first(out_ptr):
    gl.store(out_ptr, 1)


@gluon.jit
def _store_second(out_ptr):
    gl.store(out_ptr + 1, 2)


@gluon.jit
def _unordered_kernel(out_ptr):
    """What one partition writes, the other reads, and nothing orders them."""
    words = gl.allocate_shared_memory(gl.int32, [NUM_WORDS], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    gl.warp_specialize([(_read_words, (words, out_ptr)), (_write_words, (words,))], [1], [24])


@gluon.jit
def _write_words(words):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    words.store(gl.arange(0, NUM_WORDS, layout))


@gluon.jit
def _read_words(words, out_ptr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gl.store(out_ptr + gl.arange(0, NUM_WORDS, layout), words.load(layout))


KERNELS = {"apart": _apart_kernel, "unordered": _unordered_kernel}


def main(name: str) -> None:
    """Run it once, on the GPU."""
    out = torch.zeros(NUM_WORDS.value, dtype=torch.int32, device="cuda")
    KERNELS[name][(1,)](out, num_warps=4)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
