"""All-gather and multiply in every strategy: who runs when, over which buffers. No checks; those are in ``ops``.

sequential  the collective (``direct.py`` where SMs copy), then the library's GEMM
pipelined   one library GEMM per chunk, each as soon as its rows are there
fused       one kernel, in which tiles wait by themselves

``scatter.py`` has the ops that go the other way, ``combine.py`` that of experts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from functools import partial

import torch

from tileflux.config import GemmConfig
from tileflux.kernels import direct, gemm_host, library, steps
from tileflux.kernels.again import Launched
from tileflux.kernels.beside import ANNOUNCING, beside, join
from tileflux.kernels.copy import move
from tileflux.kernels.gemm_launch import PreparedGemm, launch_gemm
from tileflux.kernels.gemm_shared import shares_gpu, sms_for
from tileflux.kernels.groups import Groups
from tileflux.kernels.launch import on_host
from tileflux.kernels.loading import load_once
from tileflux.kernels.operands import Operands, Role
from tileflux.kernels.plan import gather_plan
from tileflux.kernels.roles import GATHERING, GATHERING_GROUPED, PLAIN, Gathering
from tileflux.kernels.shards import gather_shards
from tileflux.kernels.turns import Turn, turn
from tileflux.symm.group import Group

__all__ = [
    "announce_behind",
    "copies_by_sms",
    "gather_rows",
    "is_plain_product",
    "load_slab_steps",
    "load_steps",
    "multiply",
    "num_feeders",
    "pipelined_tiles",
    "run",
    "run_gather",
    "sends_by_copies",
]


_MOST_RESULTS = 4096 * 12288


def run_gather(
    group: Group,
    parts: Sequence[Operands],
    rows: tuple[int, ...],
    strategy: str,
    config: GemmConfig,
    gathered: torch.Tensor | None = None,
) -> Launched | None:
    """All-gather and multiply: ``parts`` share x and its scales; ``gathered``, if given, gets all ranks' rows.

    Where the parts' rows are grouped by expert, their tiles pick rows from all that are gathered. Returns the launch
    where it was a single one, and can be repeated.
    """
    x, scale_x, is_grouped = parts[0].x, parts[0].scale_x, parts[0].groups is not None
    roles = GATHERING_GROUPED if is_grouped else GATHERING
    op = roles.feeding.name
    if strategy == "sequential" or group.world_size == 1:
        return _gather_then_multiply(group, op, parts, rows, config, gathered)
    shards = gather_shards(op, rows, x.shape[1] * x.element_size(), scale_x is not None, config.num_chunks)
    here = turn(group, shards)
    if strategy == "fused" or on_host(group):
        tiles = pipelined_tiles(config) if strategy == "pipelined" and not is_grouped else config
        _load_later_parts(group, here, parts, tiles, gathered, roles)
        by_copies = sends_by_copies(group)
        if by_copies:
            load_steps(group, here, parts[0])
            _feed_apart(group, here, x, scale_x)
        first = roles.arriving if by_copies else roles.feeding
        for index, part in enumerate(parts):
            ends = gathered is None and index == len(parts) - 1
            launch = run(part, first if index == 0 else roles.gathered, tiles, group, here, releases=ends)
        if by_copies:
            _join_apart(group, here, x)
        if gathered is not None:
            _copy_gathered(group, here, x, gathered)
            _release(group, here)
        if launch is None or len(parts) > 1 or gathered is not None:
            return None
        return Launched(launch, here, *(((_feed_apart,), (_join_apart,)) if by_copies else ()))
    elif is_grouped:
        _multiply_by_stage(group, parts, config, here, gathered)
    else:
        _multiply_arriving(group, parts, config, here, gathered)
    return None


def multiply(group: Group, operands: Operands, config: GemmConfig, *, load_only: bool = False) -> None:
    """The plain product, within a collective call: the library's, or on virtual ranks that share a GPU our own.

    The library loads its kernels when it first needs them, which may be while a peer waits for this rank, and then
    never ends. Our own are loaded by ``load_only=True`` before anything waits.
    """
    if group.device.type == "cuda" and group.stream is not None:
        if 0 not in operands.out.shape or load_only:
            launch_gemm(operands, PLAIN, config, group=group, load_only=load_only)
    elif not load_only:
        for part in _parts(group, operands):
            library.multiply(part, config)


def _parts(group: Group, operands: Operands) -> list[Operands]:
    """The product in as many parts as are multiplied one after the other, by rows.

    In a share of a GPU that others use the library takes a quarter longer than in parts for more results than these:
    4096 x 14336 on an H200, where 4096 x 12288 is as it should be (docs/measured.md).
    """
    out = operands.out
    if not shares_gpu(group) or out.numel() <= _MOST_RESULTS or not library.uses_torch(operands):
        return [operands]
    count = -(-out.numel() // _MOST_RESULTS)
    of_x, of_out = operands.x.tensor_split(count), out.tensor_split(count)
    return [dataclasses.replace(operands, x=x, out=y) for x, y in zip(of_x, of_out, strict=True)]


def gather_rows(group: Group, op: str, x: torch.Tensor, out: torch.Tensor, rows: tuple[int, ...]) -> None:
    """All-gather through the mailboxes."""
    row_bytes = out.shape[1:].numel() * x.element_size()
    move(group, op, x, out, gather_plan(group.rank, tuple(count * row_bytes for count in rows)))


def run(
    operands: Operands, role: Role, config: GemmConfig, group: Group, here: Turn, *, releases: bool
) -> PreparedGemm | None:
    """The main loop, on the host or queued on the GPU. ``releases``: it ends the call."""
    if not on_host(group):
        return launch_gemm(operands, role, config, group=group, turn=here, releases=releases)
    gemm_host.run_gemm(operands, role, config, group=group, turn=here, releases=releases)
    return None


def _release(group: Group, here: Turn) -> None:
    if on_host(group):
        here.release()
    else:
        steps.launch_release(here, group.world_size)


def _gather_then_multiply(
    group: Group,
    op: str,
    parts: Sequence[Operands],
    rows: tuple[int, ...],
    config: GemmConfig,
    gathered: torch.Tensor | None,
) -> Launched | None:
    x, scale_x = parts[0].x, parts[0].scale_x
    for part in parts:
        multiply(group, part, config, load_only=True)
    everything = x
    if copies_by_sms(group):
        here, before = direct.gather(group, op, x, scale_x, rows)
        everything = here.gathered(x.dtype, x.shape[1])
        scales = None if scale_x is None else here.gathered_scales()
        for part in _by_row(parts, group.world_size):
            multiply(group, dataclasses.replace(part, x=everything, scale_x=scales), config)
        if gathered is not None:
            gathered.copy_(everything)
        after = (steps.launch_release(here, group.world_size),)
        if len(parts) > 1 or gathered is not None or not is_plain_product(group, parts[0]):
            return None
        return Launched(None, here, before, after, _multiply_gathered)
    if group.world_size > 1:
        everything = x.new_empty((sum(rows), x.shape[1])) if gathered is None else gathered
        gather_rows(group, op, x, everything, rows)
        if scale_x is not None:
            scales = scale_x.new_empty(sum(rows))
            gather_rows(group, op, scale_x, scales, rows)
            scale_x = scales
    elif gathered is not None:
        gathered.copy_(x)
    for part in _by_row(parts, group.world_size):
        multiply(group, dataclasses.replace(part, x=everything, scale_x=scale_x), config)
    return None


def is_plain_product(group: Group, operands: Operands) -> bool:
    """Whether ``multiply`` is one call of the library, with nothing around it."""
    is_bare = operands.bias is None and not operands.activation
    return is_bare and group.stream is None and library.uses_torch(operands) and len(_parts(group, operands)) == 1


def _multiply_gathered(here: Turn, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(here.gathered(x.dtype, x.shape[1]), weight.t(), out=out)


def _by_row(parts: Sequence[Operands], num_stages: int) -> list[Operands]:
    """With tiles in the order of experts where rows are grouped: nothing is waited for."""
    return [
        part if part.groups is None else dataclasses.replace(part, groups=part.groups.of_stages(0, num_stages))
        for part in parts
    ]


def _copy_gathered(group: Group, here: Turn, x: torch.Tensor, gathered: torch.Tensor) -> None:
    first = here.plan.first_rows[group.rank]
    buffer = here.gathered(x.dtype, x.shape[1])
    gathered[:first].copy_(buffer[:first])
    gathered[first : first + len(x)].copy_(x)
    gathered[first + len(x) :].copy_(buffer[first + len(x) :])


def _multiply_arriving(
    group: Group, parts: Sequence[Operands], config: GemmConfig, here: Turn, gathered: torch.Tensor | None
) -> None:
    plan, rank, world_size = here.plan, group.rank, group.world_size
    x, scale_x = parts[0].x, parts[0].scale_x
    load_steps(group, here, parts[0])
    for part in parts:
        multiply(group, part, config, load_only=True)
    _feed(group, here, x, scale_x, config)
    buffer = here.gathered(x.dtype, x.shape[1])
    for source in ((rank + hop) % world_size for hop in range(world_size)):
        for chunk in range(plan.num_chunks):
            rows = plan.chunk(source, chunk)
            if not rows:
                continue
            if source != rank:
                steps.launch_await(here, source, chunk, world_size)
            first = plan.first_rows[source]
            whole = slice(first + rows.start, first + rows.stop)
            cut = slice(rows.start, rows.stop) if source == rank else whole
            scales = scale_x
            if scale_x is not None:
                scales = (scale_x if source == rank else here.gathered_scales())[cut]
            arrived = (x if source == rank else buffer)[cut]
            for part in parts:
                multiply(group, dataclasses.replace(part, x=arrived, scale_x=scales, out=part.out[whole]), config)
    if gathered is not None:
        _copy_gathered(group, here, x, gathered)
    join(group)
    steps.launch_release(here, world_size)


def _multiply_by_stage(
    group: Group, parts: Sequence[Operands], config: GemmConfig, here: Turn, gathered: torch.Tensor | None
) -> None:
    """One launch for the tiles that some ranks' rows complete, as soon as these have arrived.

    ``config.span`` of them together: each launch reads the weights of all experts.
    """
    plan, rank, world_size = here.plan, group.rank, group.world_size
    x, scale_x = parts[0].x, parts[0].scale_x
    bands = _bands(world_size, config.span)
    load_steps(group, here, parts[0])
    for part in parts:
        launch_gemm(part, GATHERING_GROUPED.gathered, config, group=group, turn=here, load_only=True)
    # In front of the lists, which take a while, and which nobody waits for but the product. What makes them was loaded
    # for the routing (``load_route``).
    _feed(group, here, x, scale_x, config)
    distinct = {id(part.groups): _groups(part) for part in parts}  # often the same for all parts
    lists = {key: groups.by_stages(bands) for key, groups in distinct.items()}
    for number, band in enumerate(bands):
        those = [dataclasses.replace(part, groups=lists[id(part.groups)][number]) for part in parts]
        for source in ((rank + stage) % world_size for stage in band if stage):
            for chunk in range(plan.num_chunks):
                if plan.chunk(source, chunk):
                    steps.launch_await(here, source, chunk, world_size)
        for part in those:
            launch_gemm(part, GATHERING_GROUPED.gathered, config, group=group, turn=here)
    if gathered is not None:
        _copy_gathered(group, here, x, gathered)
    join(group)
    steps.launch_release(here, world_size)


def _bands(num_stages: int, span: int) -> list[range]:
    """``span`` stages at a time, as counted from the last: what is left over goes with one's own, stage 0, in front.

    Behind the last rows' arrival no more is left to multiply than a band's; and one's own read weights for more rows.
    """
    span = min(span, max(1, num_stages - 1))  # not all: something can begin before the last rows are there
    firsts = sorted({0, *range(num_stages - span, 0, -span)})
    return [range(begin, end) for begin, end in itertools.pairwise([*firsts, num_stages])]


def _groups(operands: Operands) -> Groups:
    assert operands.groups is not None
    return operands.groups


def copies_by_sms(group: Group) -> bool:
    """Whether kernels copy: those of one launch can then go straight to, or read at, all peers."""
    return group.world_size > 1 and not on_host(group) and not sends_by_copies(group)


def sends_by_copies(group: Group) -> bool:
    """Whether rows go to peers by the copy engine: it takes no SM, and is not in the way of those that multiply."""
    return group.device.type == "cuda" and not group.traits.copies_need_sms


def _feed(group: Group, here: Turn, x: torch.Tensor, scale_x: torch.Tensor | None, config: GemmConfig) -> None:
    """Send this rank's rows to every peer, beside what the caller's stream does next."""
    if sends_by_copies(group):
        _feed_by_copies(group, here, x, scale_x, apart=False)
        return
    with beside(group, x, *(() if scale_x is None else (scale_x,))):
        steps.launch_feed(here, x, scale_x, num_feeders(group, config), group.world_size)


def _feed_by_copies(group: Group, here: Turn, x: torch.Tensor, scale_x: torch.Tensor | None, *, apart: bool) -> None:
    # Not beside: a product that fills the GPU and waits for rows might keep it from ever starting.
    steps.launch_open(here, group.world_size)
    with beside(group, x, *(() if scale_x is None else (scale_x,))):
        _copy_chunks(group, here, x, scale_x, apart=apart)


def _feed_apart(
    group: Group, here: Turn, x: torch.Tensor, scale_x: torch.Tensor | None, out: torch.Tensor | None = None
) -> None:
    """Copies one behind the other, and what announces them on another stream: for one launch that waits for all."""
    _feed_by_copies(group, here, x, scale_x, apart=True)


def _join_apart(group: Group, here: Turn, x: torch.Tensor, *_: object) -> None:
    join(group)
    if len(x):  # a stream that nothing was queued on is not part of a CUDA graph that may be captured
        join(group, on=ANNOUNCING)


def _copy_chunks(group: Group, here: Turn, x: torch.Tensor, scale_x: torch.Tensor | None, *, apart: bool) -> None:
    """As ``feed`` in ``lang/turn.py``."""
    here.count_call()
    plan, rank, world_size = here.plan, group.rank, group.world_size
    first = plan.first_rows[rank]
    chunks = [(index, rows) for index in range(plan.num_chunks) if (rows := plan.chunk(rank, index))]
    cuts = [x if len(rows) == len(x) else x[rows.start : rows.stop] for _, rows in chunks]
    for peer in ((rank - hop) % world_size for hop in range(1, world_size)):
        for (index, rows), cut in zip(chunks, cuts, strict=True):
            if scale_x is not None:
                place = slice(first + rows.start, first + rows.stop)
                here.scales_at(peer)[place].copy_(scale_x[rows.start : rows.stop], non_blocking=True)
            here.chunk_at(peer, index, x.dtype, x.shape[1]).copy_(cut, non_blocking=True)
            if apart:
                announce_behind(group, here, peer, index)
            else:
                here.announce(peer, index)


def announce_behind(group: Group, here: Turn, owner: int, index: int) -> None:
    """Announce what the current stream has copied so far, out of the way of what it will copy next."""
    sent = torch.cuda.current_stream(group.device).record_event()
    with beside(group, after=sent, on=ANNOUNCING):
        here.announce(owner, index)


@functools.lru_cache(maxsize=1024)
def pipelined_tiles(config: GemmConfig) -> GemmConfig:
    """Tiles as large as they go: one announcement per shard, and on the CPU one product."""
    return dataclasses.replace(config, block_m=1024, block_n=1024, num_chunks=1)


def num_feeders(group: Group, config: GemmConfig) -> int:
    """Programs that send while others multiply: where SMs are few, no more than half of them."""
    return max(1, min(config.num_feeders, sms_for(group) // 2))


def load_steps(group: Group, here: Turn, part: Operands) -> None:
    """Load the steps of the pipeline. The library's kernels may follow once all rows are on their way."""
    key = ("steps", group.world_size, part.scale_x is not None, part.out.dtype)
    load = partial(steps.load, here, part.x, part.scale_x, part.out, group.world_size)
    load_once(group.device, key, load, group)


def load_slab_steps(group: Group, here: Turn, out: torch.Tensor, *, mostly_whole: bool = False) -> None:
    """Load those that send and sum slab by slab."""
    load = partial(steps.load_for_slabs, here, out, group.world_size, mostly_whole)
    load_once(group.device, ("steps by slab", group.world_size, out.dtype, mostly_whole), load, group)


def _load_later_parts(
    group: Group,
    here: Turn,
    parts: Sequence[Operands],
    config: GemmConfig,
    gathered: torch.Tensor | None,
    roles: Gathering,
) -> None:
    """What is launched after the first part has begun to wait must be loaded before."""
    if group.device.type != "cuda":
        return
    for index, part in enumerate(parts[1:], 1):
        ends = gathered is None and index == len(parts) - 1
        launch_gemm(part, roles.gathered, config, group=group, turn=here, releases=ends, load_only=True)
    if gathered is not None:
        load_steps(group, here, parts[0])
