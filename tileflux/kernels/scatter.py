"""Multiply and reduce-scatter, or all-reduce, in every strategy: who runs when, over which buffers.

sequential  the library's GEMM, then the collective (``direct.py`` where SMs copy)
pipelined   one library GEMM per shard, each sent as soon as it is done
fused       one kernel, whose tiles leave as they are finished. Who sends, and where sums are made:

    SMs store tiles at their owners, which sum in the same launch
    SMs store them there, and a launch of its own sums (``GemmConfig.sums_apart``)
    the copy engine brings shards there, or slabs of them, where it needs no SM, and a launch of its own sums
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from tileflux.config import GemmConfig
from tileflux.kernels import direct, steps
from tileflux.kernels.again import Launched
from tileflux.kernels.beside import ANNOUNCING, CLOSING, SENDING, beside, join
from tileflux.kernels.dense import (
    announce_behind,
    copies_by_sms,
    is_plain_product,
    load_slab_steps,
    load_steps,
    multiply,
    num_feeders,
    pipelined_tiles,
    run,
    sends_by_copies,
)
from tileflux.kernels.gemm_launch import launch_gemm
from tileflux.kernels.gemm_shared import sms_for
from tileflux.kernels.launch import on_host
from tileflux.kernels.operands import Operands
from tileflux.kernels.plan import reduce_plan
from tileflux.kernels.reduce import reduce
from tileflux.kernels.roles import SCATTER, SEND, SPREAD, STAGE
from tileflux.kernels.shards import ShardPlan, scatter_shards, spread_shards
from tileflux.kernels.turns import Turn, turn
from tileflux.lang.schedule import departing_bands
from tileflux.symm.group import Group

__all__ = [
    "Departure",
    "copy_slabs",
    "departures",
    "num_summers",
    "own_part",
    "pull_sums",
    "run_scatter",
    "run_spread",
    "send_counted",
    "send_slabs",
    "sum_all",
    "sum_copied",
    "swap_sums",
]

_CLOSED_AT_ONCE = 4  # few, so that the first of them is not held up by the host


def run_scatter(
    group: Group, operands: Operands, rows: tuple[int, ...], strategy: str, config: GemmConfig, op: str = "gemm_rs"
) -> Launched | None:
    """Multiply and reduce-scatter; ``operands.out`` has this rank's rows. Returns what can be launched again."""
    if strategy == "sequential" and copies_by_sms(group):
        return pull_sums(group, operands, rows, config, op, sum(rows[: group.rank]))
    if strategy == "sequential" or group.world_size == 1:
        mine = own_part(operands, sum(rows))
        multiply(group, mine, config)
        sizes = tuple(count * operands.num_columns * mine.out.element_size() for count in rows)
        reduce(group, op, mine.out, operands.out, reduce_plan(group.rank, sizes, scatter=True))
        return None
    if sends_by_copies(group):
        return _copy_finished(group, operands, rows, strategy, config)
    by_tile = on_host(group) or (strategy == "fused" and not config.sums_apart)
    tiles = config if strategy == "fused" and by_tile else pipelined_tiles(config)
    here = turn(group, scatter_shards("gemm_rs", rows, operands.num_columns, operands.out.element_size(), tiles))
    if by_tile:
        launch = run(operands, SCATTER, tiles, group, here, releases=True)
        return None if launch is None else Launched(launch, here)
    if strategy == "fused":
        return _send_finished(group, operands, config, here)
    _push_finished(group, operands, config, here)
    return None


def run_spread(group: Group, operands: Operands, config: GemmConfig) -> Launched | None:
    """Multiply and all-reduce in one step, each rank sending everything to everyone."""
    out = operands.out
    here = turn(group, spread_shards("gemm_ar", group.world_size, len(out), out.shape[1], out.element_size(), config))
    launch = run(operands, SPREAD, config, group, here, releases=True)
    return None if launch is None else Launched(launch, here)


def swap_sums(group: Group, operands: Operands, config: GemmConfig, op: str) -> Launched | None:
    """Multiply, and add up all ranks' results, which are few, on every rank."""
    out = operands.out
    here = direct.swap_turn(group, op, out)
    partial = dataclasses.replace(operands, out=here.own_rows(out.dtype, out.shape[1]))
    multiply(group, partial, config, load_only=True)
    multiply(group, partial, config)
    after = direct.swap(group, here, out)
    return Launched(None, here, (), after, _multiply_alone) if is_plain_product(group, partial) else None


def pull_sums(
    group: Group, operands: Operands, rows: tuple[int, ...], config: GemmConfig, op: str, first_row: int
) -> Launched | None:
    """Multiply all rows, and add up all ranks' from ``first_row`` on into ``operands.out``."""
    out = operands.out
    here = direct.pull_turn(group, op, rows, out.shape[1], out.dtype)
    whole = dataclasses.replace(operands, out=here.gathered(out.dtype, out.shape[1]))
    multiply(group, whole, config, load_only=True)
    before = direct.open_pull(group, here, out.dtype)
    multiply(group, whole, config)
    after = direct.pull(group, here, out, first_row)
    return Launched(None, here, before, after, _multiply_into) if is_plain_product(group, whole) else None


def _multiply_into(here: Turn, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(x, weight.t(), out=here.gathered(out.dtype, out.shape[1]))


def _multiply_alone(here: Turn, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(x, weight.t(), out=here.own_rows(out.dtype, out.shape[1]))


def _push_finished(group: Group, operands: Operands, config: GemmConfig, here: Turn) -> None:
    plan, rank, world_size = here.plan, group.rank, group.world_size
    mine = own_part(operands, sum(plan.rows))
    load_steps(group, here, mine)
    for owner in ((rank + 1 + hop) % world_size for hop in range(world_size)):
        part = _shard_of(mine, here, owner, mine.out)
        multiply(group, part, config)
        with beside(group, mine.out):
            steps.launch_push(here, part.out, owner, num_feeders(group, config), world_size)
    join(group)
    sum_all(group, here, operands.out)


def _send_finished(group: Group, operands: Operands, config: GemmConfig, here: Turn) -> Launched | None:
    """Multiply, storing tiles at their owners, and sum when all ranks' have come.

    No program of the product waits for anybody: those that have begun hold no SM that a rank which is late needs, and
    there may be more of them than fit.
    """
    load_steps(group, here, operands)
    before = steps.launch_open(here, group.world_size)
    launch = launch_gemm(operands, SEND, config, group=group, turn=here)
    after = sum_all(group, here, operands.out)
    return None if launch is None else Launched(launch, here, (before,), after)


def sum_all(group: Group, here: Turn, out: torch.Tensor) -> direct.Steps:
    """Wait for every peer's shard with a single program, that holds no SM of theirs; then add up with many."""
    world_size = group.world_size
    if not here.plan.rows[group.rank]:
        return (steps.launch_release(here, world_size),)  # nobody sends
    return (
        steps.launch_await_everyone(here, world_size),
        steps.launch_sum(here, out, 2 * sms_for(group), world_size),
    )


def _copy_finished(
    group: Group, operands: Operands, rows: tuple[int, ...], strategy: str, config: GemmConfig
) -> Launched | None:
    """Multiply into memory of one's own, from which the copy engine sends each shard as soon as it is complete."""
    out, rank = operands.out, group.rank
    tiles = config if strategy == "fused" else pipelined_tiles(config)
    here = turn(group, scatter_shards("gemm_rs", rows, out.shape[1], out.element_size(), tiles, by_copies=True))
    load_steps(group, here, operands)
    if here.plan.slab_columns:
        load_slab_steps(group, here, out, mostly_whole=True)
    given = (group, here, operands.x, operands.scale_x, out)
    _open_counted(*given)
    if strategy == "fused":
        # In front of what waits for it: a kernel that has to be loaded is not loaded while another waits.
        launch = launch_gemm(operands, STAGE, config, group=group, turn=here)
        send = partial(_send_counted, config)
        send(*given)
        return None if launch is None else Launched(launch, here, (_open_counted,), (send,))
    mine = dataclasses.replace(operands, out=here.staging(out.dtype, out.shape[1]))
    for owner in _others(group):
        multiply(group, _shard_of(mine, here, owner, mine.out), config)
        if rows[owner]:
            with beside(group):
                send_slabs(here, out, here.staged_slabs, owner, range(1))
    own_slot = here.slot(rank, rank, out.dtype, out.shape[1], 0)
    multiply(group, dataclasses.replace(_shard_of(mine, here, rank, mine.out), out=own_slot[: rows[rank]]), config)
    sum_copied(group, here, out)
    return None


def _others(group: Group) -> list[int]:
    """The next rank first."""
    return [(group.rank + 1 + hop) % group.world_size for hop in range(group.world_size - 1)]


def _open_counted(group: Group, here: Turn, x: torch.Tensor, scale_x: torch.Tensor | None, out: torch.Tensor) -> None:
    here.count_call()
    steps.launch_open(here, group.world_size)
    here.opened = torch.cuda.current_stream(group.device).record_event()


def _send_counted(
    config: GemmConfig, group: Group, here: Turn, x: torch.Tensor, scale_x: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Send each shard, or slab of one, when its tiles have been counted; then sum."""
    leaving = departures(group.rank, here.plan, config, out.shape[1])
    send_counted(group, here, here.opened, leaving, partial(copy_slabs, here, out, here.staged_slabs))
    sum_copied(group, here, out, mostly_whole=True, behind=ANNOUNCING)


class Departure(NamedTuple):
    """What leaves in one piece."""

    owner: int
    slabs: range
    """Of its shard, one behind the other."""
    num_tiles: tuple[int, ...]
    """That make up each of them; none where the owner has no rows."""


@functools.lru_cache(maxsize=1024)
def departures(rank: int, plan: ShardPlan, config: GemmConfig, num_columns: int) -> tuple[Departure, ...]:
    """All that leaves, in the order in which ``departure_order`` completes it.

    Whole shards, but for the last: what is left of that when the product ends is on its way behind it, and is little
    where it leaves slab by slab. ``await_pieces`` knows.
    """
    across = [-(-len(columns) // config.block_n) for columns in plan.slabs(num_columns)]
    world_size, last = len(plan.rows), (rank - 1) % len(plan.rows)

    def tiles_of(owner: int) -> tuple[int, ...]:
        return tuple(-(-plan.rows[owner] // config.block_m) * wide for wide in across)

    found = []
    for band in departing_bands(world_size - 1, config.span, config.alone):
        owners = [(rank + 1 + place) % world_size for place in band]
        whole = [Departure(owner, range(len(across)), tiles_of(owner)) for owner in owners if owner != last]
        pieces = [Departure(last, range(i, i + 1), (count,)) for i, count in enumerate(tiles_of(last))]
        # Tiles of a band are side by side, slab by slab: the others are complete when the last one's last slab is.
        found += [*pieces[:-1], *whole, pieces[-1]] if last in owners else whole
    return tuple(found)


def sum_copied(
    group: Group, here: Turn, out: torch.Tensor, *, mostly_whole: bool = False, behind: str = SENDING
) -> None:
    """Sum what copies bring, a shard or slab by slab as they come, and end the call ``behind`` what is sent."""
    # Before what has been sent is waited for: peers' sums come at the same time, the other way.
    if not here.plan.rows[group.rank]:
        steps.launch_release(here, group.world_size)  # nobody sends
    elif here.plan.slab_columns:
        steps.launch_sum_slabs(here, out, num_summers(group), group.world_size, mostly_whole=mostly_whole)
    else:
        steps.launch_sum(here, out, num_summers(group), group.world_size)
    # A stream that nothing was queued on is not part of a CUDA graph that may be captured.
    if any(here.plan.rows[owner] for owner in _others(group)):
        join(group, on=behind)


def send_counted(
    group: Group,
    here: Turn,
    opened: torch.cuda.Event,
    leaving: Sequence[Departure],
    send: Callable[[int, range], None],
) -> None:
    """``send`` each to its owner beside the product, once all its tiles have been counted, and announce it.

    Counts are waited for on a stream of their own, some at a time: to change streams for each would take the host
    longer than the GPU has work for.
    """
    leaving = [each for each in leaving if any(each.num_tiles)]
    for first in range(0, len(leaving), _CLOSED_AT_ONCE):
        some = leaving[first : first + _CLOSED_AT_ONCE]
        with beside(group, after=opened, on=CLOSING):
            closing = torch.cuda.current_stream(group.device)
            closed = []
            for owner, slabs, num_tiles in some:
                steps.launch_close(here, owner, num_tiles, group.world_size, chunk=slabs[0])
                closed.append(closing.record_event())
        with beside(group, after=opened):
            sending = torch.cuda.current_stream(group.device)
            for (owner, slabs, _), event in zip(some, closed, strict=True):
                sending.wait_event(event)
                send(owner, slabs)
                announce_behind(group, here, owner, slabs[0])
    if leaving:
        join(group, on=CLOSING)


def _shard_of(operands: Operands, here: Turn, owner: int, out: torch.Tensor) -> Operands:
    """The product of the rows that ``owner`` will sum."""
    first = here.plan.first_rows[owner]
    rows = slice(first, first + here.plan.rows[owner])
    scale = operands.scale_x if operands.scale_x is None or operands.scale_x.dim() == 0 else operands.scale_x[rows]
    return dataclasses.replace(operands, x=operands.x[rows], scale_x=scale, out=out[rows])


def send_slabs(here: Turn, out: torch.Tensor, staged: Callable[..., torch.Tensor], owner: int, slabs: range) -> None:
    """``copy_slabs``, and announce the piece by the first of them."""
    copy_slabs(here, out, staged, owner, slabs)
    here.announce(owner, slabs[0])


def copy_slabs(here: Turn, out: torch.Tensor, staged: Callable[..., torch.Tensor], owner: int, slabs: range) -> None:
    """Copy the slabs that ``staged`` finds to their owner in one piece."""
    piece = staged(owner, slabs, out.dtype, out.shape[1])
    if here.leaving is not None:
        here.leaving.append(torch.cuda.current_stream(here.group.device).record_event())
    here.slabs_at(owner, here.rank, slabs, out.dtype, out.shape[1]).copy_(piece, non_blocking=True)


def own_part(operands: Operands, num_rows: int) -> Operands:
    """This rank's part of the sum: the same product, of all rows, into memory of its own."""
    out = operands.out
    return dataclasses.replace(operands, out=out.new_empty((num_rows, out.shape[1])))


def num_summers(group: Group) -> int:
    """Programs that sum at the speed of memory. They wait, so there must be room beside them for who sends."""
    return max(1, sms_for(group) // 2 if "same GPU" in group.traits.links else 3 * sms_for(group))
