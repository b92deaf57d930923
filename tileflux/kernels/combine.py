"""Multiply rows that are grouped by expert, add up every token's, and reduce-scatter tokens: ``moe_gemm_rs``.

sequential  the product, the sums of tokens' choices, then the collective (``direct.py`` where SMs copy)
pipelined   columns in slabs: of each a product, a kernel that adds up by token, and then what is sent, beside the next
            slab's product. One slab that copies send goes by owners: their tokens' rows, sums, and what is sent
fused       one kernel; SMs store sums at their owners, or where copies need no SM the copy engine brings them there.
            Owners add them up in the same launch, or in one of its own (as in ``scatter.py``)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import torch

from tileflux.config import GROUPS, GemmConfig
from tileflux.kernels import direct, gemm_host, slabs, steps
from tileflux.kernels.beside import ANNOUNCING, beside, join
from tileflux.kernels.dense import copies_by_sms, load_slab_steps, multiply, num_feeders, sends_by_copies
from tileflux.kernels.gemm_launch import launch_gemm
from tileflux.kernels.gemm_shared import sms_for
from tileflux.kernels.groups import Groups, sum_choices
from tileflux.kernels.launch import on_host
from tileflux.kernels.loading import load_once
from tileflux.kernels.operands import Operands
from tileflux.kernels.plan import reduce_plan
from tileflux.kernels.reduce import reduce
from tileflux.kernels.roles import COMBINE, COMBINE_SEND, COMBINE_STAGE, PLAIN
from tileflux.kernels.scatter import Departure, copy_slabs, own_part, send_counted, send_slabs, sum_copied
from tileflux.kernels.shards import combine_shards, slab_shards
from tileflux.kernels.turns import Turn, turn
from tileflux.symm.group import Group

__all__ = ["departing_hops", "run_combine"]


def run_combine(group: Group, operands: Operands, rows: tuple[int, ...], strategy: str, config: GemmConfig) -> None:
    """``operands.out`` has this rank's tokens, of which all ranks have ``rows``."""
    assert operands.groups is not None
    by_stage, out = operands.groups, operands.out
    by_copies, world_size = sends_by_copies(group), group.world_size
    shape = (by_stage.capacity, operands.num_columns, out.element_size())
    is_pipelined = strategy == "pipelined" and world_size > 1 and not on_host(group)
    if is_pipelined:
        here = turn(group, slab_shards(COMBINE.name, rows, *shape, config, by_copies=by_copies))
        if by_copies and len(here.plan.slabs(operands.num_columns)) == 1:
            _multiply_by_owner(group, here, operands, by_stage, config)
            return
    # All rows are here: tiles of one expert go beside each other, whatever stage their tokens came at.
    groups = by_stage.of_stages(0, world_size)
    operands = dataclasses.replace(operands, groups=groups)
    if is_pipelined:
        _multiply_by_slab(group, here, operands, groups, config)
        return
    if strategy == "sequential" or world_size == 1:
        _sum_then_reduce(group, operands, groups, rows, config)
        return
    by_slab = config.sums_apart and not on_host(group)
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
    if copies_by_sms(group):
        here = direct.pull_turn(group, COMBINE.name, rows, operands.num_columns, out.dtype)
        direct.open_pull(group, here, out.dtype)
        multiply(group, products, config)
        add_up(out=here.gathered(out.dtype, operands.num_columns))
        direct.pull(group, here, out, here.plan.first_rows[group.rank])
        return
    multiply(group, products, config)
    sums = add_up()
    sizes = tuple(count * operands.num_columns * out.element_size() for count in rows)
    reduce(group, COMBINE.name, sums, out, reduce_plan(group.rank, sizes, scatter=True))


def _multiply_by_slab(group: Group, here: Turn, operands: Operands, groups: Groups, config: GemmConfig) -> None:
    """One slab after the other on the caller's stream, and what is sent beside it. Streams keep the order."""
    out, world_size = operands.out, group.world_size
    by_copies, num_slabs = here.plan.by_copies, len(here.plan.slabs(out.shape[1]))
    products = here.slab_rows(groups.capacity, out.dtype, out.shape[1])
    tiles = config if by_copies else _beside_feeders(group, config)
    _load(group, here, groups, products, out)
    part = _cut_slabs(group, operands, groups, products)
    launch_gemm(part(0), PLAIN, tiles, group=group, load_only=True)
    if by_copies:
        here.count_call()
        steps.launch_open(here, world_size)
    for slab in range(num_slabs):
        if groups.capacity:
            launch_gemm(part(slab), PLAIN, tiles, group=group)
        slabs.launch_sums(here, groups.index, products, slab, range(1, world_size + 1), world_size)
        if not by_copies:
            with beside(group):
                slabs.launch_push_slab(here, products, slab, num_feeders(group, config), world_size)
        else:
            _send(group, here, out, range(1, world_size), slab)
    if by_copies:
        sum_copied(group, here, out)
    else:
        join(group)
        _sum_sent(group, here, out)


def _multiply_by_owner(group: Group, here: Turn, operands: Operands, groups: Groups, config: GemmConfig) -> None:
    """Rows of some owners' tokens after those of others, the farthest rank's first, one's own last.

    An expert's rows lie in the order of ranks from this one on, so tiles that have rows of a rank, and all that come
    behind them, are those whose last rows are of that rank or a farther one: ``by_stages`` from the end on. Each launch
    reads the weights of all experts, so ``config.span`` ranks go together, but for this one.
    """
    out, world_size = operands.out, group.world_size
    products = here.slab_rows(groups.capacity, out.dtype, out.shape[1])
    operands = dataclasses.replace(operands, out=products)
    bands = departing_hops(world_size, config.span)
    _load(group, here, groups, products, out)
    launch_gemm(operands, PLAIN, config, group=group, load_only=True)
    here.count_call()
    steps.launch_open(here, world_size)
    for band, those in zip(bands, groups.by_stages(bands), strict=True):
        if groups.capacity:
            launch_gemm(dataclasses.replace(operands, groups=those), PLAIN, config, group=group)
        slabs.launch_sums(here, groups.index, products, 0, band, world_size)
        _send(group, here, out, band[::-1] if band.start else range(0), 0)
    sum_copied(group, here, out)


def _load(group: Group, here: Turn, groups: Groups, products: torch.Tensor, out: torch.Tensor) -> None:
    """What is launched between products."""
    load_slab_steps(group, here, out)
    load = partial(slabs.load, here, groups.index, products, group.world_size)
    load_once(group.device, ("slabs", group.world_size, out.dtype, products.shape[1]), load, group)


def _send(group: Group, here: Turn, out: torch.Tensor, hops: range, slab: int) -> None:
    """Copy a slab to the ranks so far behind this one, in that order, beside what comes next."""
    owners = [owner for hop in hops if here.plan.rows[owner := (group.rank + hop) % group.world_size]]
    if owners:  # a stream that nothing was queued on is not part of a CUDA graph that may be captured
        with beside(group):
            for owner in owners:
                send_slabs(here, out, here.slabs_to_send, owner, range(slab, slab + 1))


def departing_hops(world_size: int, span: int) -> list[range]:
    """How far behind this rank those are whose rows go together: from the farthest on, ``span`` of them, 0 alone."""
    peers = [range(max(1, end - span), end) for end in range(world_size, 1, -span)]
    return [*peers, range(1)]


def _cut_slabs(group: Group, operands: Operands, groups: Groups, products: torch.Tensor) -> Callable[[int], Operands]:
    """The product of a slab's columns alone, by the number of the slab; see ``slabs.py``."""
    weight, scale, num_experts, width = operands.weight, operands.scale_weight, groups.num_experts, products.shape[1]
    num_slabs = operands.num_columns // width
    by_channel = scale is not None and scale.dim() > 0
    if not operands.k_major:
        scales = None
        if scale is not None and by_channel:
            regroup = partial(_by_slab, scale, num_experts, width)
            # Of one expert, or one slab, it is a view, and loads nothing.
            load_once(group.device, ("scales by slab", num_experts > 1, num_slabs > 1), regroup, group)
            scales = regroup()

        def beside_each_other(slab: int) -> Operands:
            return dataclasses.replace(
                operands, weight=weight[slab * width : (slab + 1) * width], out=products,
                scale_weight=scale if scales is None else scales[slab],
            )  # fmt: skip

        return beside_each_other
    num_rows = (num_experts - 1) * operands.num_columns + width
    spaced = groups.index.new_empty(GROUPS.tiles + GROUPS.tile_words * groups.max_tiles)
    slabs.launch_spaced(group, groups.index, spaced, num_slabs)
    of_slab = dataclasses.replace(groups, index=spaced, num_experts=(num_experts - 1) * num_slabs + 1)

    def below_each_other(slab: int) -> Operands:
        first = slab * width
        return dataclasses.replace(
            operands, weight=weight[first : first + num_rows], out=products, groups=of_slab,
            scale_weight=scale[first:] if scale is not None and by_channel else scale,
        )  # fmt: skip

    return below_each_other


def _by_slab(scale: torch.Tensor, num_experts: int, width: int) -> torch.Tensor:
    """Of every slab the scales of all experts, one after the other."""
    return scale.view(num_experts, -1, width).transpose(0, 1).reshape(-1, num_experts * width)


def _beside_feeders(group: Group, config: GemmConfig) -> GemmConfig:
    """With SMs left to what sends: a product that fills them all would let nothing leave before it has ended."""
    num_sms = sms_for(group) - num_feeders(group, config)
    return dataclasses.replace(config, num_sms=num_sms) if config.num_sms is None and num_sms >= 2 else config


def _send_finished(group: Group, here: Turn, operands: Operands, config: GemmConfig) -> None:
    """Add up into the owners' memory, and there, when all ranks' have come, in a launch of its own."""
    out = operands.out
    load_slab_steps(group, here, out)
    steps.launch_open(here, group.world_size)
    launch_gemm(operands, COMBINE_SEND, config, group=group, turn=here)
    _sum_sent(group, here, out)


def _sum_sent(group: Group, here: Turn, out: torch.Tensor) -> None:
    world_size = group.world_size
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
    load_slab_steps(group, here, out)
    here.count_call()
    steps.launch_open(here, world_size)
    opened = torch.cuda.current_stream(group.device).record_event()
    # In front of what waits for it: a kernel that has to be loaded is not loaded while another waits.
    launch_gemm(operands, COMBINE_STAGE, config, group=group, turn=here)
    owners = [owner for hop in range(1, world_size) if rows[owner := (rank + hop) % world_size]]
    # In the order in which ``slab_order`` comes to them.
    leaving = [
        Departure(
            owner, range(slab, slab + 1), (-(-rows[owner] // config.block_m) * -(-len(columns) // config.block_n),)
        )
        for slab, columns in enumerate(here.plan.slabs(out.shape[1]))
        for owner in owners
    ]
    send_counted(group, here, opened, leaving, partial(copy_slabs, here, out, here.slabs_to_send))
    sum_copied(group, here, out, behind=ANNOUNCING)
