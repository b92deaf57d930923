"""The ops as the main loops know them: for each, its three policies."""

from __future__ import annotations

import functools
from typing import NamedTuple

from tileflux.kernels.operands import Role
from tileflux.lang.combine import combine_tile, send_sums, stage_sums
from tileflux.lang.policy import (
    scatter_tile,
    send_tile,
    spread_tile,
    stage_tile,
    store_tile,
    wait_for_nothing,
    wait_for_rows,
    wait_for_slot,
    wait_for_slots,
    wait_for_stages,
)
from tileflux.lang.schedule import arrival_order, departure_order, slab_order, twice_order

__all__ = [
    "ARRIVING",
    "ARRIVING_GROUPED",
    "COMBINE",
    "COMBINE_SEND",
    "COMBINE_STAGE",
    "GATHER",
    "GATHERED",
    "GATHERED_GROUPED",
    "GATHERING",
    "GATHERING_GROUPED",
    "GATHER_GROUPED",
    "PLAIN",
    "SCATTER",
    "SEND",
    "SPREAD",
    "STAGE",
    "Gathering",
]

_STORES = functools.partial(Role, finish=store_tile, stores=True)
PLAIN = _STORES("gemm", arrival_order, wait_for_nothing, is_sharded=False)
GATHER = _STORES("ag_gemm", arrival_order, wait_for_rows, gathers=True, feeds=True, awaits_rows=True)
ARRIVING = _STORES("ag_gemm, rows sent by copies", arrival_order, wait_for_rows, gathers=True, awaits_rows=True)
GATHERED = _STORES("ag_gemm, rows already here", arrival_order, wait_for_nothing, gathers=True)
GATHER_GROUPED = _STORES(
    "moe_ag_gemm", arrival_order, wait_for_stages, gathers=True, feeds=True, awaits_rows=True, is_sharded=False
)
ARRIVING_GROUPED = _STORES(
    "moe_ag_gemm, rows sent by copies", arrival_order, wait_for_stages, gathers=True, awaits_rows=True, is_sharded=False
)
GATHERED_GROUPED = _STORES(
    "moe_ag_gemm, rows already here", arrival_order, wait_for_nothing, gathers=True, is_sharded=False
)


class Gathering(NamedTuple):
    """How an op multiplies what it gathers."""

    feeding: Role
    """Programs of the launch send this rank's rows."""
    arriving: Role
    """Copies do."""
    gathered: Role
    """They are there."""


GATHERING = Gathering(GATHER, ARRIVING, GATHERED)
GATHERING_GROUPED = Gathering(GATHER_GROUPED, ARRIVING_GROUPED, GATHERED_GROUPED)

SCATTER = Role("gemm_rs", departure_order, wait_for_slot, scatter_tile)
COMBINE = Role("moe_gemm_rs", slab_order, wait_for_nothing, combine_tile, combines=True)
COMBINE_STAGE = Role(
    "moe_gemm_rs, sent by copies", slab_order, wait_for_nothing, stage_sums, combines=True, num_spare_sms=1
)
COMBINE_SEND = Role("moe_gemm_rs, summed apart", slab_order, wait_for_nothing, send_sums, combines=True)
SEND = Role("gemm_rs, summed apart", departure_order, wait_for_nothing, send_tile, waits=False)
STAGE = Role("gemm_rs, sent by copies", departure_order, wait_for_nothing, stage_tile, num_spare_sms=1, stages=True)
SPREAD = Role("gemm_ar", twice_order, wait_for_slots, spread_tile, is_sharded=False, num_turns=2)
