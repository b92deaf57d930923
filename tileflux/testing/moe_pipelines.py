"""Shards that travel beside products: what the pipelined baselines of the ops of experts are made of.

On GPUs they go as in the pipelined strategy of the dense ops, by the steps of ``kernels/steps.py``; the products
between them are torch's. On the CPU a thread exchanges them, hop by hop.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from tileflux import ops
from tileflux.config import GemmConfig
from tileflux.kernels import dense, scatter, steps
from tileflux.kernels.beside import beside, join
from tileflux.kernels.launch import on_host
from tileflux.kernels.loading import load_once
from tileflux.kernels.shards import gather_shards, scatter_shards
from tileflux.kernels.turns import Turn, turn
from tileflux.ops._call import begin, guarded
from tileflux.symm.group import Group

__all__ = ["send_off", "take_in"]

Rows = tuple[int, ...]


def take_in(
    group: Group,
    x: torch.Tensor,
    rows: Rows,
    config: GemmConfig,
    gathered: torch.Tensor,
    use: Callable[[int, torch.Tensor], object],
) -> None:
    """Gather ``x`` of all ranks, and ``use(rank, its rows)`` as soon as they are there, one's own first.

    ``gathered`` has room for all rows on the CPU; on a GPU they lie where they arrive.
    """
    rank, world_size = group.rank, group.world_size
    if on_host(group) or world_size == 1:
        _take_in_on_host(group, x, rows, gathered, use)
        return
    name = "bench, taking in"
    begin(name, group, (rows, x.shape[1], x.dtype))
    with guarded(group):
        here = turn(group, gather_shards(name, rows, x.shape[1] * x.element_size(), False, config.num_chunks))
        _load(group, here, x, x)
        dense._feed(group, here, x, None, config)
        buffer = here.gathered(x.dtype, x.shape[1])
        use(rank, x)
        for source in ((rank + hop) % world_size for hop in range(1, world_size)):
            for chunk in range(here.plan.num_chunks):
                if here.plan.chunk(source, chunk):
                    steps.launch_await(here, source, chunk, world_size)
            first = here.plan.first_rows[source]
            use(source, buffer[first : first + rows[source]])
        join(group)
        steps.launch_release(here, world_size)


def send_off(
    group: Group,
    rows: Rows,
    config: GemmConfig,
    out: torch.Tensor,
    make: Callable[[int], torch.Tensor],
) -> None:
    """Send ``make(rank)``, partial sums of its rows, to each rank as soon as they are made; ``out`` is all ranks'."""
    rank, world_size = group.rank, group.world_size
    if on_host(group) or world_size == 1:
        _send_off_on_host(group, rows, out, make)
        return
    name, tiles = "bench, sending off", dense.pipelined_tiles(config)
    begin(name, group, (rows, out.shape[1], out.dtype))
    with guarded(group):
        here = turn(group, scatter_shards(name, rows, out.shape[1], out.element_size(), tiles))
        _load(group, here, out, out)
        for owner in ((rank + 1 + hop) % world_size for hop in range(world_size)):
            sums = make(owner)
            with beside(group, sums):
                steps.launch_push(here, sums, owner, dense.num_feeders(group, config), world_size)
        join(group)
        steps.launch_sum(here, out, scatter.num_summers(group), world_size)


def _load(group: Group, here: Turn, x: torch.Tensor, out: torch.Tensor) -> None:
    key = ("steps", group.world_size, False, out.dtype)
    load_once(group.device, key, partial(steps.load, here, x, None, out, group.world_size), group)


def _take_in_on_host(
    group: Group, x: torch.Tensor, rows: Rows, gathered: torch.Tensor, use: Callable[[int, torch.Tensor], object]
) -> None:
    rank, world_size = group.rank, group.world_size
    hops = range(1, world_size)

    def receive(hop: int) -> torch.Tensor:
        source = (rank + hop) % world_size
        place = gathered[sum(rows[:source]) :][: rows[source]]
        _exchange(group, x, (rank - hop) % world_size, place, source)
        return place

    with ThreadPoolExecutor(1) as other:
        arriving = [other.submit(receive, hop) for hop in hops]
        use(rank, x)
        for hop, each in zip(hops, arriving, strict=True):
            use((rank + hop) % world_size, each.result())


def _send_off_on_host(group: Group, rows: Rows, out: torch.Tensor, make: Callable[[int], torch.Tensor]) -> None:
    rank, world_size = group.rank, group.world_size
    slots = out.new_empty((world_size, *out.shape))
    with ThreadPoolExecutor(1) as other:
        leaving = []
        for hop in range(1, world_size):
            owner, source = (rank + hop) % world_size, (rank - hop) % world_size
            leaving.append(other.submit(_exchange, group, make(owner), owner, slots[source], source))
        slots[rank] = make(rank)
        for each in leaving:
            each.result()
    out.copy_(slots.float().sum(0))


def _exchange(group: Group, x: torch.Tensor, target: int, out: torch.Tensor, source: int) -> None:
    """``x`` to one rank, and ``out`` from another."""
    ranks = range(group.world_size)
    sent, received = ([len(x) * (r == target) for r in ranks], [len(out) * (r == source) for r in ranks])
    ops.all_to_all(x, group=group, input_sizes=sent, output_sizes=received, out=out)
