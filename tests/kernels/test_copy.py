"""The mover's kernel: interpreted across processes, under the simulator, and against its host twin."""

from __future__ import annotations

import re
import time

import pytest
import torch

import tileflux
from tileflux import CommConfig, env
from tileflux.errors import PeerTimeout
from tileflux.symm.group import Group
from tileflux.testing import run_ranks
from tileflux.testing.collectives import COLLECTIVES, check_collectives, random_inputs

pytestmark = pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")

SMALL = CommConfig(num_lanes=2, slot_bytes=256, min_lane_bytes=128)
SHAPES = [(0,), (1,), (7,), (13, 8), (12, 5), (48, 16)]
DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn]
MOVERS = [collective for collective in COLLECTIVES if not collective.sums]


def _interpreted(group: Group) -> int:
    with env.scoped({"TILEFLUX_CPU_BACKEND": "interpret"}):
        return check_collectives(group, SHAPES, DTYPES, collectives=MOVERS)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_interpreted_across_processes(world_size: int) -> None:
    from tileflux.testing import interpreter

    interpreter.install()
    counts = run_ranks(_interpreted, world_size, group_kwargs={"config": SMALL}, timeout_s=120)
    assert counts == [len(SHAPES) * len(DTYPES) * len(MOVERS)] * world_size


def _host_meets_kernel(group: Group) -> None:
    """Even ranks run the host twin, odd ranks the kernel: they speak the same protocol."""
    with env.scoped({"TILEFLUX_CPU_BACKEND": "interpret" if group.rank % 2 else "host"}):
        check_collectives(group, SHAPES, DTYPES)


def test_host_twin_and_kernel_speak_the_same_protocol() -> None:
    from tileflux.testing import interpreter

    interpreter.install()
    run_ranks(_host_meets_kernel, 3, group_kwargs={"config": SMALL}, timeout_s=120)


def test_autograd_notices_an_output_that_a_kernel_overwrites() -> None:
    """A kernel writes through an address; the host twin uses torch, which counts versions by itself."""
    from tileflux.testing import interpreter

    interpreter.install()
    (group,) = tileflux.local_groups(1)
    saved = torch.ones(4, requires_grad=True) * 2
    product = saved * saved
    with torch.no_grad(), env.scoped({"TILEFLUX_CPU_BACKEND": "interpret"}):
        tileflux.all_gather(torch.zeros(4), group=group, out=saved)
    assert saved.tolist() == [0.0] * 4
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    group.close()


def _one_comes_late(group: Group) -> str:
    """Rank 0 gives up and goes on; rank 1 comes later, never has to wait, and must still be told."""
    with env.scoped({"TILEFLUX_CPU_BACKEND": "interpret"}):
        x = torch.full((1000,), float(group.rank + 1))
        if group.rank == 1:
            time.sleep(2.0)
        tileflux.all_gather(x, group=group)
        with pytest.raises(PeerTimeout) as caught:
            group.synchronize()
        assert caught.value.peer == 1
        return str(caught.value)


def test_a_late_rank_is_told_that_what_it_got_is_worthless() -> None:
    from tileflux.testing import interpreter

    interpreter.install()
    early, late = run_ranks(_one_comes_late, 2, group_kwargs={"config": SMALL, "timeout_s": 0.5})
    waited = re.search(r"rank 0 waited (\d+(\.\d+)?) s for rank 1", early)
    # On a busy machine it is longer before the rank looks at the clock, and notices that it has waited long enough.
    assert waited is not None and 0.5 <= float(waited[1]) < 2.0, early
    assert "rank 0 had given up waiting for rank 1" in late


def _simulated(group: Group, names: tuple[str, ...], shape: tuple[int, ...]) -> None:
    """Several collectives in a row on the same channels; each result compared."""
    for number, collective in enumerate(each for each in COLLECTIVES if each.name in names):
        drawn = collective.prepare(random_inputs(group.world_size, shape, torch.float32, number))
        expected = collective.expect(drawn, group.rank)
        out = torch.full(tuple(expected.shape), float("nan"))
        collective.run(group, drawn, out)
        assert torch.equal(out, expected), collective.name
    tileflux.barrier(group=group)


@pytest.mark.parametrize(("world_size", "num_seeds"), [(1, 5), (2, 40), (3, 15), (4, 8), (8, 1)])
def test_every_schedule_moves_every_byte(world_size: int, num_seeds: int) -> None:
    from tileflux.testing.simulator import simulate

    names = ("all_gather", "all_to_all, uneven", "broadcast")
    for seed in range(num_seeds):
        simulate(_simulated, world_size, seed=seed, args=(names, (24, 16)), config=SMALL)
