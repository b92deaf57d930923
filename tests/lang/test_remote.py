"""The device's integer functions are the plan's, and a run is copied at any alignment."""

import pytest
import torch
import triton
import triton.language as tl

from tileflux import env
from tileflux.kernels.plan import gather_plan, part
from tileflux.lang.remote import copy_run
from tileflux.lang.remote import extent as device_extent
from tileflux.lang.remote import part as device_part
from tileflux.testing import interpreter

pytestmark = pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")


@triton.jit
def _part_kernel(out_ptr, nbytes):
    begin, length = device_part(nbytes.to(tl.int64), tl.program_id(0), tl.num_programs(0))
    tl.store(out_ptr + 2 * tl.program_id(0), begin)
    tl.store(out_ptr + 2 * tl.program_id(0) + 1, length)


@triton.jit
def _extent_kernel(out_ptr, table_ptr, ragged, nbytes, stride, SIDE: tl.constexpr, WORLD: tl.constexpr):
    peer = tl.program_id(0)
    offset, length = device_extent(table_ptr, ragged, nbytes.to(tl.int64), stride.to(tl.int64), peer, SIDE, WORLD)
    tl.store(out_ptr + 2 * peer, offset)
    tl.store(out_ptr + 2 * peer + 1, length)


@triton.jit
def _copy_kernel(dst, src, nbytes, BLOCK: tl.constexpr):
    copy_run(dst.to(tl.int64), src.to(tl.int64), nbytes.to(tl.int64), BLOCK)


@pytest.mark.parametrize("num_lanes", [1, 2, 7])
@pytest.mark.parametrize("nbytes", [0, 1, 15, 16, 17, 100, 4096, 4097])
def test_parts_are_the_plans(num_lanes: int, nbytes: int) -> None:
    interpreter.install()
    out = torch.full((num_lanes, 2), -1, dtype=torch.int64)
    _part_kernel[(num_lanes,)](out, nbytes)
    expected = [part(nbytes, lane, num_lanes) for lane in range(num_lanes)]
    assert out.tolist() == [[each.offset, each.nbytes] for each in expected]


@pytest.mark.parametrize("sizes", [(5, 0, 9), (8, 8, 8)])
@pytest.mark.parametrize("side", [0, 1])
def test_extents_are_the_plans(sizes: tuple[int, ...], side: int) -> None:
    interpreter.install()
    plan = gather_plan(1, sizes)
    out = torch.full((3, 2), -1, dtype=torch.int64)
    numbers = plan.even or (0, 0, 0, 0)
    table = torch.tensor(plan.table, dtype=torch.int64)
    _extent_kernel[(3,)](out, table, int(plan.even is None), *numbers[2 * side : 2 * side + 2], side, 3)
    runs = (plan.send, plan.recv)[side]
    assert out.tolist() == [[run.offset, run.nbytes] for run in runs]


@pytest.mark.parametrize("nbytes", [0, 1, 8, 15, 16, 24, 64, 100, 300])
@pytest.mark.parametrize(("to", "source"), [(0, 0), (16, 32), (4, 8), (1, 0), (0, 3), (2, 6)])
def test_runs_of_any_alignment(nbytes: int, to: int, source: int) -> None:
    interpreter.install()
    src = torch.randint(0, 256, (400,), dtype=torch.uint8)
    dst = torch.full((400,), 77, dtype=torch.uint8)
    _copy_kernel[(1,)](dst.data_ptr() + to, src.data_ptr() + source, nbytes, 16)
    assert torch.equal(dst[to : to + nbytes], src[source : source + nbytes])
    assert dst[:to].eq(77).all() and dst[to + nbytes :].eq(77).all(), "bytes beside the run were written"
