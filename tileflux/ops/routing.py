"""Routing: which rank multiplies which token with which expert, worked out on the device.

    expert_ids  [T_r, k] on rank r      the experts that each of its tokens chose; -1 is a choice that was dropped
    weights     [T_r, k] on rank r      what the result of each choice is multiplied with

W ranks are TP x EP: ``ep_size`` sets of experts, in the order of ranks, and W / ``ep_size`` ranks that share a set,
each with its part of every expert. With ``ep_size=1`` all ranks have a part of all experts, with ``ep_size=W`` each
has whole experts of its own.

Choices of all ranks are gathered, a few bytes per token, and each rank sorts those of its experts: by expert, and
within an expert by the rank the token is on, in the order in which its row will arrive. Nothing of it is known to the
host, so that a CUDA graph can be replayed with other choices. Who writes and who waits: as ``all_gather``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tileflux.errors import CapacityExceeded
from tileflux.kernels.groups import Groups, SortedRows, route_rows
from tileflux.kernels.index import launch_pack, load_route
from tileflux.kernels.launch import on_host
from tileflux.ops._call import begin, check_sizes, check_tensor
from tileflux.ops._library import eager_only
from tileflux.ops.all_gather import all_gather
from tileflux.symm.group import Group
from tileflux.tune.lookup import rows_of_tiles

__all__ = ["MAX_EXPERTS", "Routing", "check_choices", "raise_if_missing", "readable", "route", "route_gathered"]

MAX_EXPERTS = 1024
_ROWS = "rows of a rank's experts"


@dataclass(frozen=True, eq=False)
class Routing:
    """Made by ``route``; the same for both products of a layer. Tensors are on the group's device."""

    group: Group
    num_experts: int
    top_k: int
    ep_size: int
    sizes: tuple[int, ...]
    """Tokens of each rank."""
    capacity: int
    """Sorted rows that there is room for on this rank."""
    own_weights: torch.Tensor
    """``[T_r, top_k]``, as they were given: the gradient of a layer's result goes to them."""
    weights: torch.Tensor
    """``[T, top_k]``, fp32, of all ranks' tokens."""
    rows: SortedRows
    groups: Groups
    """Tiles of the sorted rows; they pick tokens."""
    num_missing: torch.Tensor | None
    """How many rows did not fit, on the ranks with the most: one number that the host can read; on a GPU it may come
    late. None where all rows fit whatever is chosen."""

    @property
    def experts(self) -> range:
        """This rank's."""
        return _experts(self.group, self.num_experts, self.ep_size)

    @property
    def num_tokens(self) -> int:
        """Of all ranks."""
        return sum(self.sizes)

    @property
    def counts(self) -> torch.Tensor:
        """``[experts of this rank]``: rows of each, on the device."""
        return self.rows.offsets.diff()

    def ensure_fits(self) -> None:
        """Raise ``CapacityExceeded`` if it is known by now that rows were left out. Every op asks before it runs."""
        if self.num_missing is not None:
            raise_if_missing(self.group, self.num_missing, self.capacity, _ROWS)

    def synchronize(self) -> None:
        """Wait until it is known whether all rows fit, and raise ``CapacityExceeded`` if not."""
        self.group.wait()
        self.ensure_fits()
        self.group.ensure_usable()


@eager_only
def route(
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    num_experts: int,
    group: Group,
    ep_size: int = 1,
    sizes: Sequence[int] | None = None,
    capacity: int | None = None,
    block_m: int | None = None,
) -> Routing:
    """Who goes where, of this rank's ``expert_ids`` and ``weights [T_r, k]`` and all other ranks'. Collective.

    ``sizes``: tokens per rank where they differ; every rank passes the same list. ``capacity``: sorted rows that
    buffers have room for; by default that of the worst case: every choice of every token is for this rank's experts.
    ``block_m``: rows of a tile; by default what an expert fills if all get the same.
    """
    rows = check_choices("route", expert_ids, weights, num_experts, group, ep_size, sizes)
    sort = _sorting(group, rows, expert_ids.shape[1], num_experts, ep_size, capacity, block_m)
    begin("route", group, (rows, sort.top_k, num_experts, ep_size, sort.capacity))
    with torch.cuda.device(group.device if group.device.type == "cuda" else -1):
        sort.load(expert_ids, weights)
        packed = all_gather(sort.pack(expert_ids, weights), group=group, sizes=rows)
        return sort.unpack(packed, weights)


@eager_only
def route_gathered(
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    num_experts: int,
    group: Group,
    sizes: Sequence[int],
    ep_size: int = 1,
    capacity: int | None = None,
    block_m: int | None = None,
) -> Routing:
    """As ``route``, of all ranks' ``expert_ids`` and ``weights [T, k]``, which are here already. Asks nobody."""
    rows = check_sizes("route", "sizes", sizes, group, total=len(expert_ids))
    own = slice(sum(rows[: group.rank]), sum(rows[: group.rank + 1]))
    check_choices("route", expert_ids[own], weights[own], num_experts, group, ep_size, rows)
    group.ensure_usable()
    sort = _sorting(group, rows, expert_ids.shape[1], num_experts, ep_size, capacity, block_m)
    with torch.cuda.device(group.device if group.device.type == "cuda" else -1):
        sort.load(expert_ids[own], weights[own])
        return sort.unpack(sort.pack(expert_ids, weights), weights[own])


def _sorting(
    group: Group,
    rows: tuple[int, ...],
    top_k: int,
    num_experts: int,
    ep_size: int,
    capacity: int | None,
    block_m: int | None,
) -> _Sorting:
    """With what the caller leaves open filled in, and what he may not ask for refused."""
    most = sum(rows) * top_k
    capacity = most if capacity is None else capacity
    if capacity < 0:
        raise ValueError(f"route: capacity={capacity} should not be negative")
    if block_m is None:
        block_m = rows_of_tiles(most, num_experts, group.device)
    elif not 16 <= block_m <= 1024 or block_m & (block_m - 1):
        raise ValueError(f"route: block_m={block_m} should be a power of two from 16 to 1024")
    return _Sorting(group, rows, top_k, num_experts, ep_size, capacity, block_m)


@dataclass(frozen=True)
class _Sorting:
    """What ``route`` does on the device before and after choices are gathered."""

    group: Group
    rows: tuple[int, ...]
    top_k: int
    num_experts: int
    ep_size: int
    capacity: int
    block_m: int

    def pack(self, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """``[T_r, 2 k]``, int32: choices, and the bits of their weights."""
        if not on_host(self.group):
            return launch_pack(self.group, expert_ids, weights, self.num_experts)
        # Clamped: in 32 bits a number that is no expert's might become that of one.
        chosen = expert_ids.clamp(-1, self.num_experts).to(torch.int32)
        return torch.cat((chosen, weights.detach().float().view(torch.int32)), dim=1)

    def unpack(self, packed: torch.Tensor, own_weights: torch.Tensor) -> Routing:
        """The routing, from what all ranks have packed."""
        group, capacity, experts = self.group, self.capacity, _experts(self.group, self.num_experts, self.ep_size)
        rows, groups, missing = route_rows(group, packed, self.rows, experts, self.ep_size, capacity, self.block_m)
        return Routing(
            group, self.num_experts, self.top_k, self.ep_size, self.rows, capacity, own_weights, groups.weights, rows,
            groups, None if missing is None else readable(group, missing, capacity, _ROWS),
        )  # fmt: skip

    def load(self, expert_ids: torch.Tensor, weights: torch.Tensor) -> None:
        """What must not happen later, when a peer may wait (``kernels/loading.py``), or in a graph."""
        load_route(self.group, self.rows, self.num_experts // self.ep_size, expert_ids, weights)


@eager_only
def readable(group: Group, missing: torch.Tensor, capacity: int, what: str) -> torch.Tensor:
    """A number of the device where the host can read it without waiting; until it is there it reads 0.

    It may come when the last op that would ask has long been called, so the group looks at it too.
    """
    return group.late.bring(missing, functools.partial(_too_many, capacity, what)) if missing.is_cuda else missing


@eager_only
def raise_if_missing(group: Group, num_missing: torch.Tensor, capacity: int, what: str) -> None:
    """Raise ``CapacityExceeded`` if it is known by now that some of ``what`` did not fit."""
    if int(num_missing) <= 0:
        return
    error = _too_many(capacity, what, int(num_missing))
    if group.device.type == "cuda":
        # Ranks get to know at different times: some may have gone on.
        group.mark_broken(error)
    raise error


def _too_many(capacity: int, what: str, num_missing: int) -> CapacityExceeded:
    needed = capacity + num_missing
    return CapacityExceeded(
        f"{num_missing} of {needed} {what} did not fit: capacity={capacity} should be at least {needed}, or left away"
    )


def check_choices(
    op: str,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    group: Group,
    ep_size: int,
    sizes: Sequence[int] | None,
) -> tuple[int, ...]:
    """Tokens by rank of a call of ``op`` that is in order."""
    check_tensor(op, "expert_ids", expert_ids, group)
    check_tensor(op, "weights", weights, group)
    if expert_ids.dim() != 2 or expert_ids.shape != weights.shape or not expert_ids.shape[1]:
        raise ValueError(
            f"{op}: expert_ids {tuple(expert_ids.shape)} and weights {tuple(weights.shape)} should both be "
            "[tokens, k], with one choice or more"
        )
    if expert_ids.dtype not in (torch.int32, torch.int64) or not weights.is_floating_point():
        raise ValueError(
            f"{op}: expert_ids should be int32 or int64 and weights floating, not {expert_ids.dtype}, {weights.dtype}"
        )
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"{op}: num_experts={num_experts} should be from 1 to {MAX_EXPERTS}")
    if ep_size < 1 or group.world_size % ep_size or num_experts % ep_size:
        raise ValueError(
            f"{op}: ep_size={ep_size} should divide the {group.world_size} ranks and the {num_experts} experts"
        )
    rows = (len(expert_ids),) * group.world_size if sizes is None else check_sizes(op, "sizes", sizes, group)
    if rows[group.rank] != len(expert_ids):
        raise ValueError(f"{op}: expert_ids has {len(expert_ids)} rows but sizes[{group.rank}] is {rows[group.rank]}")
    return rows


def _experts(group: Group, num_experts: int, ep_size: int) -> range:
    count = num_experts // ep_size
    place = group.rank // (group.world_size // ep_size)
    return range(place * count, (place + 1) * count)
