"""Multiply rows that are grouped by expert, add up every token's, and reduce-scatter tokens: ``moe_gemm_rs``.

sequential  the product, the sums of tokens' choices, then the collective
fused       one kernel; SMs store sums at their owners, or where copies need no SM the copy engine brings them there.
            Owners add them up in the same launch, or in one of its own (as in ``scatter.py``)
"""

from __future__ import annotations

from functools import partial

import torch

from tileflux.config import GemmConfig
from tileflux.kernels import gemm_host, steps
from tileflux.kernels.beside import join
from tileflux.kernels.dense import multiply, sends_by_copies
from tileflux.kernels.gemm_launch import launch_gemm
from tileflux.kernels.gemm_shared import sms_for
from tileflux.kernels.groups import Groups, sum_choices
from tileflux.kernels.launch import on_host
from tileflux.kernels.loading import load_once
from tileflux.kernels.operands import Operands
from tileflux.kernels.plan import reduce_plan
from tileflux.kernels.reduce import reduce
from tileflux.kernels.roles import COMBINE, COMBINE_SEND, COMBINE_STAGE
from tileflux.kernels.scatter import behind_count, num_summers, own_part
from tileflux.kernels.shards import combine_shards
from tileflux.kernels.turns import Turn, turn
from tileflux.symm.group import Group

__all__ = ["run_combine"]


def run_combine(group: Group, operands: Operands, rows: tuple[int, ...], strategy: str, config: GemmConfig) -> None:
    """``operands.out`` has this rank's tokens, of which all ranks have ``rows``."""
    groups, out = operands.groups, operands.out
    assert groups is not None
    if strategy != "fused" or group.world_size == 1:
        _sum_then_reduce(group, operands, groups, rows, config)
        return
    by_copies = sends_by_copies(group)
    by_slab = config.sums_apart and not on_host(group)
    shape = (groups.capacity, operands.num_columns, out.element_size())
    here = turn(group, combine_shards(COMBINE.name, rows, *shape, config, by_slab=by_slab, by_copies=by_copies))
    if by_copies:
        _copy_finished(group, here, operands, config)
    elif on_host(group):
        gemm_host.run_gemm(operands, COMBINE, config, group=group, turn=here, releases=True)
    elif by_slab:
        _send_finished(group, here, operands, config)
    else:
        launch_gemm(operands, COMBINE, config, group=group, turn=here, releases=True)


def _sum_then_reduce(
    group: Group, operands: Operands, groups: Groups, rows: tuple[int, ...], config: GemmConfig
) -> None:
    out = operands.out
    products = own_part(operands, groups.capacity)
    add_up = partial(sum_choices, products.out, groups.positions, groups.weights, out.dtype)
    if group.stream is not None:
        # Of what is in memory already. Whether columns are whole units of 16 bytes makes another kernel of it.
        load_once(group.device, (COMBINE.name, out.dtype, operands.num_columns % 8 == 0), add_up, group)
    multiply(group, products, config, load_only=True)
    multiply(group, products, config)
    sums = add_up()
    sizes = tuple(count * operands.num_columns * out.element_size() for count in rows)
    reduce(group, COMBINE.name, sums, out, reduce_plan(group.rank, sizes, scatter=True))


def _load_steps(group: Group, here: Turn, out: torch.Tensor) -> None:
    load = partial(steps.load_for_slabs, here, out, group.world_size)
    load_once(group.device, ("steps by slab", group.world_size, out.dtype), load, group)


def _send_finished(group: Group, here: Turn, operands: Operands, config: GemmConfig) -> None:
    """Add up into the owners' memory, and there, when all ranks' have come, in a launch of its own."""
    out, world_size = operands.out, group.world_size
    _load_steps(group, here, out)
    steps.launch_open(here, world_size)
    launch_gemm(operands, COMBINE_SEND, config, group=group, turn=here)
    if here.plan.rows[group.rank]:
        # One program waits for the last slab's, and holds no SM that a peer needs. What is then left of earlier slabs
        # is with programs that run: they have fetched it before.
        steps.launch_await_everyone(here, world_size, chunk=len(here.plan.slabs(out.shape[1])) - 1)
        steps.launch_sum_slabs(here, out, 2 * sms_for(group), world_size)
    else:
        steps.launch_release(here, world_size)  # nobody sends


def _copy_finished(group: Group, here: Turn, operands: Operands, config: GemmConfig) -> None:
    """Add up into memory of one's own, from which the copy engine sends each owner's slab as soon as it is complete."""
    out, rank, world_size, rows = operands.out, group.rank, group.world_size, here.plan.rows
    _load_steps(group, here, out)
    here.count_call()
    steps.launch_open(here, world_size)
    opened = torch.cuda.current_stream(group.device).record_event()
    # In front of what waits for it: a kernel that has to be loaded is not loaded while another waits.
    launch_gemm(operands, COMBINE_STAGE, config, group=group, turn=here)
    owners = [owner for hop in range(1, world_size) if rows[owner := (rank + hop) % world_size]]
    # In the order in which ``slab_order`` comes to them.
    for slab, columns in enumerate(here.plan.slabs(out.shape[1])):
        for owner in owners:
            num_tiles = -(-rows[owner] // config.block_m) * -(-len(columns) // config.block_n)
            with behind_count(group, here, opened, owner, num_tiles, slab):
                sums = here.slab_to_send(owner, slab, out.dtype, out.shape[1])
                here.slab_at(owner, rank, slab, out.dtype, out.shape[1]).copy_(sums, non_blocking=True)
                here.announce(owner, slab)
    if owners:
        join(group, closing=True)
    # Before what has been sent is waited for: peers' sums come at the same time, the other way.
    if rows[rank]:
        steps.launch_sum_slabs(here, out, num_summers(group), world_size)
    else:
        steps.launch_release(here, world_size)  # nobody sends
    join(group)
