"""What the launchers of both GEMM loops share: what is decided before a loop is chosen, and how many programs run."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from tileflux import device as device_info
from tileflux.config import GemmConfig
from tileflux.kernels.operands import GemmSpec, Operands, Role
from tileflux.kernels.turns import Turn
from tileflux.symm.group import Group

__all__ = [
    "Addresses",
    "Launch",
    "address",
    "addresses",
    "constants",
    "fetches_tiles",
    "is_virtual",
    "num_programs",
    "num_tiles",
    "rows_argument",
    "shares_gpu",
    "side_addresses",
    "sms_for",
    "table_of",
]


@dataclass(frozen=True)
class Launch:
    """What is decided about a launch before it is known which loop runs it."""

    role: Role
    config: GemmConfig
    num_rows: int
    """Of grouped rows, as many as there is room for."""
    num_feeders: int
    num_programs: int
    """Feeders and all."""
    world_size: int
    releases: bool
    use_tma: bool
    fetches: bool
    """Programs take tiles as they come."""
    records: bool
    trace: torch.Tensor | None


def num_tiles(config: GemmConfig, role: Role, num_rows: int, num_columns: int, turn: Turn | None) -> int:
    """Steps of one turn of the tile order; of ranks with fewer rows than others, some are no tile."""
    across = -(-num_columns // config.block_n)
    if turn is None or not role.is_sharded:
        return -(-num_rows // config.block_m) * across
    plan = turn.plan
    return len(plan.rows) * plan.num_chunks * -(-plan.chunk_rows // config.block_m) * across


def num_programs(
    config: GemmConfig, group: Group | None, role: Role, num_tiles: int, turn: Turn | None
) -> tuple[int, int]:
    """(feeders, multipliers): no more than are resident at once where they wait for each other's ranks."""
    if not role.waits and config.num_sms is None and not _is_interpreted(group):
        # Programs that fetch their tiles are no more than may find a place; the others have a tile each.
        return 0, max(1, min(num_tiles, 2 * sms_for(group)) if fetches_tiles(group, config, role) else num_tiles)
    num_sms = max(1, sms_for(group) - role.num_spare_sms)
    if config.num_sms is not None:
        # More than are resident would wait for each other; interpreted programs are as many as the simulator likes.
        num_sms = config.num_sms if _is_interpreted(group) else min(config.num_sms, num_sms)
    num_feeders = max(1, min(config.num_feeders, num_sms // 2)) if role.feeds and turn is not None else 0
    if num_sms == 1:
        return num_feeders, 1  # interpreted programs run one after the other: feeders, then one that multiplies
    return num_feeders, max(1, min(num_sms - num_feeders, num_tiles))


def sms_for(group: Group | None) -> int:
    """SMs that programs of one rank may fill; 1 where programs are interpreted."""
    if group is not None and group.traits.num_sms:
        return group.traits.num_sms
    if not _is_interpreted(group):
        return device_info.num_sms(torch.device("cuda", torch.cuda.current_device()))
    return 1


def shares_gpu(group: Group | None) -> bool:
    """Whether a peer's programs may hold the SMs that this rank's are to run on, so that some of them begin late."""
    return group is not None and "same GPU" in group.traits.links


def fetches_tiles(group: Group | None, config: GemmConfig, role: Role) -> bool:
    """Whether programs of a fused op fetch their tiles.

    They must where some wait for others of their rank: those may not have begun, and what one has fetched has begun.
    """
    return shares_gpu(group) and (config.fetches or role.combines or role.num_turns > 1)


def is_virtual(group: Group | None) -> bool:
    """Whether ranks are streams of one process: all that they launch is loaded before the first of them waits."""
    return group is not None and group.stream is not None


def rows_argument(operands: Operands, num_rows: int) -> int:
    """How a loop takes its rows: their number, or where they are grouped the address of their list."""
    return num_rows if operands.groups is None else operands.groups.index.data_ptr()


def constants(role: Role, spec: GemmSpec) -> tuple[object, ...]:
    """What a loop is compiled for, as its kernel takes it."""
    return role.order, role.wait, role.finish, spec


def side_addresses(operands: Operands) -> tuple[int, int, int]:
    """Of bias and scales; 0 for what there is none of."""
    bias = operands.bias if operands.adds_bias else None
    return address(bias), address(operands.scale_x), address(operands.scale_weight)


Addresses = tuple[int, int, int, int, int, int, int]
"""Of x, weight, out, bias, both scales, and the list of grouped rows: all that differs between launches of a kind."""


def addresses(operands: Operands) -> Addresses:
    """What a prepared launch is queued with; 0 for what there is none of."""
    index = 0 if operands.groups is None else operands.groups.index.data_ptr()
    x, weight, out = operands.x.data_ptr(), operands.weight.data_ptr(), operands.out.data_ptr()
    return x, weight, out, *side_addresses(operands), index


def address(tensor: torch.Tensor | None) -> int:
    """Where it begins; 0 if there is none."""
    return 0 if tensor is None else tensor.data_ptr()


def table_of(turn: Turn | None, device: torch.device) -> torch.Tensor:
    """The turn's table; without one, one that nobody reads."""
    return _no_table(device) if turn is None else turn.table


@functools.cache
def _no_table(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64, device=device)


def _is_interpreted(group: Group | None) -> bool:
    return group.device.type == "cpu" if group is not None else not torch.cuda.is_available()
