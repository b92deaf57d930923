"""The mover of chosen rows under the simulator, with bugs planted; and its kernel speaks with the host twin."""

import random
from typing import Any

import pytest
import triton
import triton.language as tl

from tests.ops.ep_cases import FLOATS, NARROW, check_dispatched, dispatch, drawn_case
from tileflux import CommConfig, env
from tileflux.errors import DataRace, TilefluxError
from tileflux.kernels import spread
from tileflux.lang.mailbox import release_message, slot_address
from tileflux.symm.group import Group
from tileflux.testing import run_ranks

pytestmark = pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")

ONE = CommConfig(num_lanes=1, slot_bytes=512, min_lane_bytes=64)


def _simulated(group: Group, seed: int, num_calls: int, tokens: int) -> None:
    """Calls in a row, of other sizes and routings: every slot is used again."""
    draws, waiting = random.Random(seed), []
    for _ in range(num_calls):
        case = drawn_case(group.world_size, draws.choice(FLOATS), draws, tokens, top_k=2)
        waiting.append((case, dispatch(group, case)))
    for case, found in waiting:
        check_dispatched(group, case, found)


def _simulate(world_size: int, seed: int, num_calls: int = 3, tokens: int = 4, config: Any = NARROW) -> None:
    from tileflux.testing.simulator import simulate

    simulate(_simulated, world_size, seed=seed, args=(seed, num_calls, tokens), config=config)


@pytest.mark.parametrize(("world_size", "num_seeds"), [(1, 2), (2, 8), (3, 3), (4, 1)])
def test_every_schedule_brings_every_row(world_size: int, num_seeds: int) -> None:
    for seed in range(num_seeds):
        _simulate(world_size, seed)


@triton.jit
def _eager_slot(
    boxes, guard, op, rank, lane, peer, sequence, WORLD: tl.constexpr, LANES: tl.constexpr, SLOT_BYTES: tl.constexpr
):
    """Does not wait until the slot has been read."""
    return slot_address(boxes, peer, lane, rank, sequence, WORLD, LANES, SLOT_BYTES)


@triton.jit
def _eager_message(
    boxes, guard, op, rank, lane, peer, sequence, WORLD: tl.constexpr, LANES: tl.constexpr, SLOT_BYTES: tl.constexpr
):
    """Does not wait until there is one."""
    return slot_address(boxes, rank, lane, peer, sequence, WORLD, LANES, SLOT_BYTES)


_take = spread._take


@triton.jit
def _hasty_take(
    slot, out, out_notes, arrived, base, capacity, step, table, source, WORLD: tl.constexpr, BLOCK: tl.constexpr
):
    """Notes the rows of one token too few."""
    _take(slot, out, out_notes, arrived, base + 1, capacity, step, table, source, WORLD, BLOCK)


@triton.jit
def _no_release(boxes, rank, lane, peer, sequence, WORLD: tl.constexpr, LANES: tl.constexpr):
    """Keeps every slot."""
    if sequence < 0:
        release_message(boxes, rank, lane, peer, sequence, WORLD, LANES)


@pytest.mark.parametrize(
    ("name", "planted", "error"),
    [
        ("acquire_slot", _eager_slot, DataRace),
        ("await_message", _eager_message, DataRace),
        ("release_message", _no_release, TilefluxError),
        ("_take", _hasty_take, (AssertionError, IndexError)),
    ],
)
def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, name: str, planted: Any, error: Any) -> None:
    monkeypatch.setattr(spread, name, planted)
    with pytest.raises(error):
        for seed in range(20):
            _simulate(2, seed, num_calls=4, config=ONE)


def _host_meets_kernel(group: Group, seed: int) -> None:
    """Even ranks run the host twin, odd ranks the kernel: they speak the same protocol."""
    with env.scoped({"TILEFLUX_CPU_BACKEND": "interpret" if group.rank % 2 else "host"}):
        _simulated(group, seed, 6, 12)


def test_host_twin_and_kernel_speak_the_same_protocol() -> None:
    from tileflux.testing import interpreter

    interpreter.install()
    run_ranks(_host_meets_kernel, 3, args=(random.randrange(2**30),), group_kwargs={"config": NARROW}, timeout_s=120)
