"""Launching the Triton GEMM: a role's policies, the operands' addresses, and how many programs may run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tileflux import device as device_info
from tileflux.config import GemmConfig
from tileflux.kernels.gemm import _gemm_kernel
from tileflux.kernels.loading import load_once
from tileflux.kernels.operands import GemmSpec, Operands, Role, make_spec
from tileflux.kernels.turns import Turn
from tileflux.lang.policy import (
    scatter_tile,
    spread_tile,
    store_tile,
    wait_for_nothing,
    wait_for_rows,
    wait_for_slot,
    wait_for_slots,
)
from tileflux.lang.schedule import arrival_order, departure_order, twice_order
from tileflux.symm.group import Group

__all__ = ["GATHER", "GATHERED", "PLAIN", "SCATTER", "SPREAD", "launch_gemm", "num_programs", "sms_for"]

PLAIN = Role("gemm", arrival_order, wait_for_nothing, store_tile, is_sharded=False)
GATHER = Role("ag_gemm", arrival_order, wait_for_rows, store_tile, gathers=True, feeds=True)
GATHERED = Role("ag_gemm, rows already here", arrival_order, wait_for_nothing, store_tile, gathers=True)
SCATTER = Role("gemm_rs", departure_order, wait_for_slot, scatter_tile)
SPREAD = Role("gemm_ar", twice_order, wait_for_slots, spread_tile, is_sharded=False, num_turns=2)


def launch_gemm(
    operands: Operands,
    role: Role,
    config: GemmConfig,
    *,
    group: Group | None = None,
    turn: Turn | None = None,
    releases: bool = False,
    use_tma: bool | None = None,
) -> None:
    """Queue the kernel on the current stream. ``releases``: this launch ends the call."""
    x, weight, out = operands.x, operands.weight, operands.out
    num_rows = out.shape[0] if turn is None or role is SPREAD else sum(turn.plan.rows)
    num_feeders, num_multipliers = num_programs(config, group, role, num_rows, operands.num_columns, turn)
    if use_tma is None:
        use_tma = _has_tma(x.device) and _fits_tma(operands)
    spec = make_spec(
        operands, role, config,
        world_size=1 if turn is None or group is None else group.world_size,
        num_feeders=num_feeders, releases=releases, use_tma=use_tma,
    )  # fmt: skip
    descriptors = _descriptors(operands, config, turn if role.gathers else None) if use_tma else (None, None, None)
    table = _no_table(x.device) if turn is None else turn.table

    def launch(grid: int, spec: GemmSpec) -> None:
        _gemm_kernel[(grid,)](
            x.data_ptr(), weight.data_ptr(), out.data_ptr(),
            _address(operands.bias), _address(operands.scale_x), _address(operands.scale_weight),
            num_rows, operands.num_columns, operands.depth, x.stride(0), operands.weight_stride,
            *descriptors, table,
            ORDER=role.order, WAIT=role.wait, FINISH=role.finish, SPEC=spec,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip

    # Virtual ranks whose outputs differ in width need different variants of the stores, and all must be loaded
    # before the first of them waits.
    variants = (spec,) if group is None or group.stream is None else _store_variants(spec)
    load_once(x.device, (role.name, spec, config), lambda: _each(launch, variants))
    launch(num_feeders + num_multipliers, spec)


def _each(launch: Callable[[int, GemmSpec], None], variants: Sequence[GemmSpec]) -> None:
    for variant in variants:
        launch(0, variant)


@functools.cache
def _store_variants(spec: GemmSpec) -> tuple[GemmSpec, ...]:
    return tuple(dataclasses.replace(spec, out_aligned=aligned) for aligned in (True, False))


def num_programs(
    config: GemmConfig, group: Group | None, role: Role, num_rows: int, num_columns: int, turn: Turn | None
) -> tuple[int, int]:
    """(feeders, multipliers): no more than are resident at once, since they wait for each other's ranks."""
    if turn is None or role is SPREAD:
        num_tiles = -(-num_rows // config.block_m) * -(-num_columns // config.block_n)
    else:
        plan = turn.plan
        num_tiles = len(plan.rows) * plan.num_chunks * -(-plan.chunk_rows // config.block_m)
        num_tiles *= -(-num_columns // config.block_n)
    num_sms = config.num_sms or sms_for(group)
    num_feeders = max(1, min(config.num_feeders, num_sms // 2)) if role.feeds and turn is not None else 0
    if num_sms == 1:
        return num_feeders, 1  # interpreted programs run one after the other: feeders, then one that multiplies
    return num_feeders, max(1, min(num_sms - num_feeders, num_tiles))


def sms_for(group: Group | None) -> int:
    """SMs that programs of one rank may fill."""
    if group is not None and group.traits.num_sms:
        return group.traits.num_sms
    if torch.cuda.is_available():
        return device_info.num_sms(torch.device("cuda", torch.cuda.current_device()))
    return 1


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@functools.cache
def _no_table(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64, device=device)


@functools.cache
def _has_tma(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _fits_tma(operands: Operands) -> bool:
    """TMA wants rows and addresses in units of 16 bytes, and something to load."""
    x, weight = operands.x, operands.weight
    if 0 in (x.numel(), weight.numel()):
        return False
    return all(
        tensor.data_ptr() % 16 == 0 and stride * tensor.element_size() % 16 == 0
        for tensor, stride in ((x, x.stride(0)), (x, operands.depth), (weight, operands.weight_stride))
    )


def _descriptors(operands: Operands, config: GemmConfig, turn: Turn | None) -> tuple[TensorDescriptor | None, ...]:
    x, weight = operands.x, operands.weight
    a_block = [config.block_m, config.block_k]
    a = TensorDescriptor(x, list(x.shape), [x.stride(0), 1], a_block)
    rows = None
    if turn is not None:
        gathered = turn.gathered(x.dtype, operands.depth)
        rows = TensorDescriptor(gathered, list(gathered.shape), [operands.depth, 1], a_block)
    if operands.k_major:
        b = TensorDescriptor(weight, list(weight.shape), [operands.weight_stride, 1], [config.block_n, config.block_k])
    else:
        shape = [weight.shape[1], weight.shape[0]]
        b = TensorDescriptor(weight.t(), shape, [operands.weight_stride, 1], [config.block_k, config.block_n])
    return a, rows, b
