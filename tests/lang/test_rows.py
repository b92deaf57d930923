"""The device's pieces are the plan's, tokens have the numbers they should, and a row is copied at any alignment."""

import pytest
import torch
import triton
import triton.language as tl

from tileflux import CommConfig, env
from tileflux.kernels.rows_plan import plan_rows
from tileflux.lang.rows import copy_row, first_token, goes_to, num_pieces, num_steps, number_of, piece, totals
from tileflux.testing import interpreter

pytestmark = pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")


@triton.jit
def _pieces_kernel(out_ptr, counts_ptr, table_ptr, source, WORLD: tl.constexpr, ROOM: tl.constexpr):
    lane = tl.program_id(0)
    count = num_pieces(table_ptr, source)
    tl.store(counts_ptr + 3 * lane, count)
    tl.store(counts_ptr + 3 * lane + 1, num_steps(table_ptr, WORLD))
    tl.store(counts_ptr + 3 * lane + 2, first_token(table_ptr, source, WORLD))
    for step in range(count):
        begin, tokens, shift, nbytes = piece(table_ptr, source, step)
        place = out_ptr + (lane * ROOM + step) * 4
        tl.store(place, begin)
        tl.store(place + 1, tokens)
        tl.store(place + 2, shift)
        tl.store(place + 3, nbytes)


@triton.jit
def _numbers_kernel(out_ptr, goes_ptr, totals_ptr, sent, count, WORLD: tl.constexpr):
    rank = tl.program_id(0)
    tokens = tl.arange(0, 16)
    inside = tokens < count
    tl.store(out_ptr + rank * count + tokens, number_of(sent.to(tl.int64), rank, tokens, count, inside), mask=inside)
    for token in range(count):
        tl.store(goes_ptr + rank * count + token, goes_to(sent.to(tl.int64), rank, token, count).to(tl.int32))
    ranks = tl.arange(0, 4)
    tl.store(totals_ptr + ranks, totals(sent.to(tl.int64), ranks, count, WORLD), mask=ranks < WORLD)


@triton.jit
def _copy_kernel(dst, src, nbytes, BLOCK: tl.constexpr):
    copy_row(dst.to(tl.int64), src.to(tl.int64), nbytes.to(tl.int64), BLOCK)


@pytest.mark.parametrize("notes", [None, 0, 4])
@pytest.mark.parametrize(("sizes", "row_bytes"), [((7, 0, 20), 40), ((1, 1, 1), 0), ((3, 9, 2), 700)])
def test_pieces_are_the_plans(sizes: tuple[int, ...], row_bytes: int, notes: int | None) -> None:
    interpreter.install()
    plan = plan_rows(sizes, row_bytes, notes, CommConfig(num_lanes=3, slot_bytes=256, min_lane_bytes=16))
    table, room = torch.tensor(plan.words), 40
    for source in range(3):
        out = torch.full((plan.num_lanes, room, 4), -1)
        counts = torch.full((plan.num_lanes, 3), -1)
        _pieces_kernel[(plan.num_lanes,)](out, counts, table, source, 3, room)
        for lane in range(plan.num_lanes):
            steps = range(plan.num_pieces(source, lane))
            assert counts[lane].tolist() == [len(steps), plan.num_steps(lane), plan.firsts[source]]
            pieces = [plan.piece(source, lane, step) for step in steps]
            right = [[p.tokens.start, len(p.tokens), p.begin, p.nbytes] for p in pieces if p is not None]
            assert out[lane, : len(steps)].tolist() == right


def test_tokens_have_their_numbers() -> None:
    interpreter.install()
    goes = torch.rand(3, 11) < 0.5
    sent = torch.zeros(3, 12, dtype=torch.int32)
    sent[:, 1:] = goes.cumsum(1)
    numbers, seen, found = (torch.full(shape, -7, dtype=torch.int32) for shape in ((3, 11), (3, 11), (3,)))
    _numbers_kernel[(3,)](numbers, seen, found, sent.data_ptr(), 11, 3)
    assert torch.equal(numbers, torch.where(goes, sent[:, :-1], -1)) and torch.equal(seen, goes.int())
    assert found.tolist() == goes.sum(1).tolist()


@pytest.mark.parametrize("nbytes", [0, 1, 16, 33, 48, 160, 5000])
@pytest.mark.parametrize(("to", "source"), [(0, 0), (16, 0), (4, 8), (3, 0)])
def test_a_row_is_copied_and_nothing_else(nbytes: int, to: int, source: int) -> None:
    interpreter.install()
    src, dst = torch.randint(256, (5100,), dtype=torch.uint8), torch.zeros(5100, dtype=torch.uint8)
    _copy_kernel[(1,)](dst.data_ptr() + to, src.data_ptr() + source, nbytes, 64)
    right = torch.zeros_like(dst)
    right[to : to + nbytes] = src[source : source + nbytes]
    assert torch.equal(dst, right)
