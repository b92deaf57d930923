"""The reducer's kernel: interpreted across processes, and under the simulator."""

from __future__ import annotations

import pytest
import torch

from tileflux import CommConfig, env
from tileflux.symm.group import Group
from tileflux.testing import run_ranks
from tileflux.testing.collectives import COLLECTIVES, check_collectives, random_inputs

pytestmark = pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")

SMALL = CommConfig(num_lanes=2, slot_bytes=256, min_lane_bytes=128)
SHAPES = [(0,), (1,), (7,), (13, 8), (12, 5), (48, 16)]
SUMMED = [torch.float32, torch.float16, torch.bfloat16]
REDUCERS = [collective for collective in COLLECTIVES if collective.sums]


def _interpreted(group: Group) -> int:
    with env.scoped({"TILEFLUX_CPU_BACKEND": "interpret"}):
        return check_collectives(group, SHAPES, SUMMED, collectives=REDUCERS)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_interpreted_across_processes(world_size: int) -> None:
    from tileflux.testing import interpreter

    interpreter.install()
    counts = run_ranks(_interpreted, world_size, group_kwargs={"config": SMALL}, timeout_s=120)
    assert counts == [len(SHAPES) * len(SUMMED) * len(REDUCERS)] * world_size


def _simulated(group: Group) -> None:
    for number, collective in enumerate(REDUCERS):
        drawn = collective.prepare(random_inputs(group.world_size, (9, 16), torch.bfloat16, number))
        expected = collective.expect(drawn, group.rank)
        out = torch.full(tuple(expected.shape), float("nan"), dtype=torch.bfloat16)
        collective.run(group, drawn, out)
        assert torch.equal(out, expected), collective.name


@pytest.mark.parametrize(("world_size", "num_seeds"), [(1, 5), (2, 40), (3, 15), (4, 8), (8, 1)])
def test_every_schedule_sums_in_rank_order(world_size: int, num_seeds: int) -> None:
    from tileflux.testing.simulator import simulate

    for seed in range(num_seeds):
        simulate(_simulated, world_size, seed=seed, config=SMALL)
