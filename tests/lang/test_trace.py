"""What a recorded kernel writes down, and where: the words that ``config.TraceLayout`` describes."""

import time

import pytest
import torch
import triton
import triton.language as tl

from tileflux import env
from tileflux.config import MAX_CHUNKS, TRACE
from tileflux.lang.signal import clock_ns
from tileflux.lang.trace import note_tile, note_transfer
from tileflux.testing import interpreter

pytestmark = pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")

UNTOUCHED = -7


@triton.jit
def _tile_kernel(trace, steps_ptr, WORLD: tl.constexpr):
    program = tl.program_id(0)
    step = tl.load(steps_ptr + program)
    begin = clock_ns()
    note_tile(
        trace, WORLD, step, program, step % 5, step % 3, step + 100, step + 200, step % 2, begin, begin + 1, begin + 2
    )


@triton.jit
def _transfer_kernel(trace, first_chunk):
    peer = tl.program_id(0)
    note_transfer(trace, peer, first_chunk + peer, clock_ns())


@triton.jit
def _clock_kernel(out_ptr):
    tl.store(out_ptr, clock_ns())
    tl.store(out_ptr + 1, clock_ns())


@pytest.fixture(autouse=True)
def repaired_interpreter() -> None:
    interpreter.install()


def blank(world_size: int, num_steps: int) -> torch.Tensor:
    return torch.full((TRACE.num_words(world_size, num_steps),), UNTOUCHED, dtype=torch.int64)


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_a_tile_is_written_at_its_step(world_size: int) -> None:
    trace, steps = blank(world_size, 9), torch.tensor([4, 0, 7, 8], dtype=torch.int32)
    before = time.perf_counter_ns()
    _tile_kernel[(4,)](trace.data_ptr(), steps, world_size)
    after = time.perf_counter_ns()
    first = TRACE.first_tile(world_size)
    assert trace[:first].eq(UNTOUCHED).all(), "transfers were overwritten"
    for number, words in enumerate(trace[first:].view(9, TRACE.tile_words).tolist()):
        if number not in steps.tolist():
            assert words == [UNTOUCHED] * TRACE.tile_words
            continue
        finished, begin, ready, computed, *pairs = words
        assert before <= begin < after and (ready, computed) == (begin + 1, begin + 2) and begin <= finished <= after
        program = steps.tolist().index(number)
        halves = [(pair & 0xFFFFFFFF, pair >> 32) for pair in pairs]
        turn = number % 2
        assert halves == [(0, program), (number % 5, number % 3), (number + 100, number + 200), (turn, turn)]


@pytest.mark.parametrize(("world_size", "first_chunk"), [(1, 0), (3, 0), (4, 2), (2, MAX_CHUNKS - 2)])
def test_a_transfer_is_written_by_peer_and_chunk(world_size: int, first_chunk: int) -> None:
    trace = blank(world_size, 2)
    before = time.perf_counter_ns()
    _transfer_kernel[(world_size,)](trace.data_ptr(), first_chunk)
    after = time.perf_counter_ns()
    first = TRACE.first_tile(world_size)
    assert trace[first:].eq(UNTOUCHED).all(), "tiles were overwritten"
    for place, (begin, end) in enumerate(trace[:first].view(-1, 2).tolist()):
        peer, chunk = divmod(place, MAX_CHUNKS)
        if chunk == first_chunk + peer:
            assert before <= begin <= end <= after
        else:
            assert begin == end == UNTOUCHED


def test_the_clock_goes_forward_in_nanoseconds() -> None:
    out = torch.zeros(2, dtype=torch.int64)
    before = time.perf_counter_ns()
    _clock_kernel[(1,)](out)
    assert before <= out[0].item() <= out[1].item() <= time.perf_counter_ns()
