"""The device's addresses are the layout's."""

import pytest
import torch
import triton
import triton.language as tl

from tileflux import env
from tileflux.config import NUM_SLOTS, MailboxLayout
from tileflux.lang.mailbox import advance_channels, first_sent, first_taken, slot_address
from tileflux.testing import interpreter

pytestmark = pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")


@triton.jit
def _address_kernel(
    out_ptr, boxes, owner, source, sequence, WORLD: tl.constexpr, LANES: tl.constexpr, SLOT: tl.constexpr
):
    lane = tl.program_id(0)
    tl.store(out_ptr + lane, slot_address(boxes, owner, lane, source, sequence, WORLD, LANES, SLOT))


@triton.jit
def _count_kernel(out_ptr, boxes, rank, peer, num_sent, num_taken, WORLD: tl.constexpr, LANES: tl.constexpr):
    lane = tl.program_id(0)
    tl.store(out_ptr + 2 * lane, first_sent(boxes, rank, lane, peer, WORLD, LANES))
    tl.store(out_ptr + 2 * lane + 1, first_taken(boxes, rank, lane, peer, WORLD, LANES))
    advance_channels(boxes, rank, lane, peer, num_sent, num_taken, WORLD, LANES)


@pytest.mark.parametrize(("world_size", "num_lanes"), [(2, 1), (3, 5), (8, 32)])
@pytest.mark.parametrize("sequence", [0, 1, 6, 2**31 - 1, -(2**31), -1])
def test_slots_are_the_layouts(world_size: int, num_lanes: int, sequence: int) -> None:
    interpreter.install()
    layout = MailboxLayout(world_size, num_lanes, 512)
    boxes = torch.arange(1, world_size + 1) << 32
    out = torch.zeros(num_lanes, dtype=torch.int64)
    _address_kernel[(num_lanes,)](out, boxes, 1, world_size - 1, sequence, world_size, num_lanes, 512)
    expected = [(2 << 32) + layout.slot(lane, world_size - 1, sequence) for lane in range(num_lanes)]
    assert out.tolist() == expected
    assert NUM_SLOTS & (NUM_SLOTS - 1) == 0, "the device takes the slot by masking"


def test_counts_are_read_and_advanced_in_place() -> None:
    interpreter.install()
    layout = MailboxLayout(3, 2, 256)
    memory = torch.zeros(layout.nbytes // 4, dtype=torch.int32)
    for lane in range(2):
        memory[layout.word(layout.sent, lane, 2)] = 10 + lane
        memory[layout.word(layout.taken, lane, 2)] = 20 + lane
    before = memory.clone()
    boxes = torch.tensor([0, memory.data_ptr(), 0])
    out = torch.zeros(2, 2, dtype=torch.int32)
    _count_kernel[(2,)](out, boxes, 1, 2, 3, 4, 3, 2)
    assert out.tolist() == [[10, 20], [11, 21]]
    changed = {index: int(memory[index]) for index in (memory != before).nonzero().flatten().tolist()}
    assert changed == {
        layout.word(layout.sent, 0, 2): 13,
        layout.word(layout.sent, 1, 2): 14,
        layout.word(layout.taken, 0, 2): 24,
        layout.word(layout.taken, 1, 2): 25,
    }
