"""The way back of chosen rows under the simulator, with bugs planted; and its kernel speaks with the host twin."""

import random
from typing import Any

import pytest
import torch
import triton

import tileflux
from tests.kernels.test_spread import ONE, _eager_message, _eager_slot
from tests.ops.ep_cases import FLOATS, NARROW, dispatch, drawn_case, drawn_rows, with_room
from tileflux import env
from tileflux.errors import DataRace
from tileflux.kernels import gather
from tileflux.lang import mailbox
from tileflux.symm.group import Group
from tileflux.testing import run_ranks

pytestmark = pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")


def _simulated(group: Group, seed: int, num_calls: int, tokens: int) -> None:
    """There and back, several times."""
    draws, waiting = random.Random(seed), []
    for _ in range(num_calls):
        case = drawn_case(group.world_size, draws.choice(FLOATS), draws, tokens, top_k=2)
        rows = drawn_rows(case, draws.choice(FLOATS), draws.randrange(2**32), draws.choice((3, 8, 90)))
        found = dispatch(group, case)
        padded = with_room(rows[group.rank], found.capacity * found.top_k)
        waiting.append((case, rows, tileflux.ep_combine(padded, found)))
    for case, rows, result in waiting:
        assert torch.equal(result, case.combined(group.rank, rows))


def _simulate(world_size: int, seed: int, num_calls: int = 2, tokens: int = 4, config: Any = NARROW) -> None:
    from tileflux.testing.simulator import simulate

    simulate(_simulated, world_size, seed=seed, args=(seed, num_calls, tokens), config=config)


@pytest.mark.parametrize(("world_size", "num_seeds"), [(1, 2), (2, 6), (3, 2), (4, 1)])
def test_every_schedule_adds_up_every_row(world_size: int, num_seeds: int) -> None:
    for seed in range(num_seeds):
        _simulate(world_size, seed)


@triton.jit
def _by_arrival(sent, rank, token, count):
    """Adds up what every rank has in its slot, whether it has sent it or not."""
    return token >= 0


@pytest.mark.parametrize(
    ("name", "planted", "error"),
    [
        ("acquire_slot", _eager_slot, DataRace),
        ("await_message", _eager_message, DataRace),
        ("goes_to", _by_arrival, AssertionError),
    ],
)
def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, name: str, planted: Any, error: Any) -> None:
    monkeypatch.setattr(mailbox if name == "await_message" else gather, name, planted)
    with pytest.raises(error):
        for seed in range(20):
            _simulate(2, seed, num_calls=4, config=ONE)


def _host_meets_kernel(group: Group, seed: int) -> None:
    with env.scoped({"TILEFLUX_CPU_BACKEND": "interpret" if group.rank % 2 else "host"}):
        _simulated(group, seed, 6, 12)


def test_host_twin_and_kernel_speak_the_same_protocol() -> None:
    from tileflux.testing import interpreter

    interpreter.install()
    run_ranks(_host_meets_kernel, 3, args=(random.randrange(2**30),), group_kwargs={"config": NARROW}, timeout_s=120)
