"""Shards that travel hop by hop: each rank's rows are used once, when they are there; sums are those of all ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tileflux import env
from tileflux.config import GemmConfig
from tileflux.kernels.plan import split_rows
from tileflux.symm.group import Group
from tileflux.testing import assert_close, interpreter, poisoned, run_ranks
from tileflux.testing.contenders import draw
from tileflux.testing.moe_pipelines import send_off, take_in

CONFIG = GemmConfig(num_chunks=2)


def _take_in(group: Group, num_rows: int) -> list[int]:
    rows = split_rows(num_rows, group.world_size)
    used = []
    for call in range(4):
        drawn = [draw(10 * call + rank, (count, 24), torch.float32, group.device) for rank, count in enumerate(rows)]
        gathered = poisoned((num_rows, 24), torch.float32, group.device)
        found = {}

        def use(source: int, arrived: torch.Tensor, found: dict[int, torch.Tensor] = found) -> None:
            found[source] = arrived.clone()
            used.append(source)

        take_in(group, drawn[group.rank], rows, CONFIG, gathered, use)
        group.synchronize()
        assert len(found) == group.world_size
        assert all(torch.equal(found[rank].cpu(), each.cpu()) for rank, each in enumerate(drawn)), f"call {call}"
    return used[: group.world_size]


def _send_off(group: Group, num_rows: int) -> list[int]:
    rows, made = split_rows(num_rows, group.world_size), list[int]()
    for call in range(4):

        def shard(source: int, owner: int, call: int = call) -> torch.Tensor:
            return draw(100 * call + 10 * source + owner, (rows[owner], 24), torch.bfloat16, group.device)

        def make(owner: int) -> torch.Tensor:
            made.append(owner)
            return shard(group.rank, owner)

        out = poisoned((rows[group.rank], 24), torch.bfloat16, group.device)
        send_off(group, rows, CONFIG, out, make)
        group.synchronize()
        wanted = sum(shard(source, group.rank).double() for source in range(group.world_size))
        assert isinstance(wanted, torch.Tensor)
        assert_close(out, wanted, reduction=group.world_size, what=f"call {call}")
        group.barrier()
    return made[: group.world_size]


@pytest.mark.parametrize(("world_size", "num_rows"), [(1, 5), (2, 8), (3, 11), (4, 2)])
def test_rows_are_used_in_the_order_in_which_they_come(world_size: int, num_rows: int) -> None:
    """Uneven ones, and fewer rows than ranks, too."""
    for rank, used in enumerate(run_ranks(_take_in, world_size, args=(num_rows,))):
        assert used == [(rank + hop) % world_size for hop in range(world_size)]


@pytest.mark.parametrize(("world_size", "num_rows"), [(1, 5), (2, 8), (3, 11), (4, 2)])
def test_ones_own_sums_are_made_last(world_size: int, num_rows: int) -> None:
    for rank, made in enumerate(run_ranks(_send_off, world_size, args=(num_rows,))):
        assert made == [(rank + 1 + hop) % world_size for hop in range(world_size)]


def _interpreted(group: Group, function: Callable[[Group, int], list[int]], num_rows: int) -> list[int]:
    with env.scoped({"TILEFLUX_CPU_BACKEND": "interpret"}):
        return function(group, num_rows)


@pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")
@pytest.mark.parametrize("function", [_take_in, _send_off])
@pytest.mark.parametrize(("world_size", "num_rows"), [(2, 600), (3, 11)])
def test_by_the_steps_that_gpus_take(
    world_size: int, num_rows: int, function: Callable[[Group, int], list[int]]
) -> None:
    """The kernels of the dense ops, interpreted. 300 rows of a rank are two chunks."""
    interpreter.install()
    first = 1 if function is _send_off else 0
    for rank, order in enumerate(run_ranks(_interpreted, world_size, args=(function, num_rows), timeout_s=120)):
        assert order == [(rank + first + hop) % world_size for hop in range(world_size)]


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["virtual", "mps"])
@pytest.mark.parametrize("function", [_take_in, _send_off])
def test_on_a_gpu(function: object, where: str) -> None:
    run_ranks(function, 2, args=(1030,), where=where, device="cuda:0", timeout_s=120)  # type: ignore[arg-type]
