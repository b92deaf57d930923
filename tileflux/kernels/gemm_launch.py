"""Launching the Triton GEMM: a role's policies, the operands' addresses, and how many programs may run."""

from __future__ import annotations

import dataclasses
import functools

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tileflux import device as device_info
from tileflux.config import GemmConfig
from tileflux.kernels.gemm import _gemm_kernel
from tileflux.kernels.loading import launching, load_once
from tileflux.kernels.operands import GemmSpec, Operands, Role, make_spec
from tileflux.kernels.recording import current_recorder, reserve
from tileflux.kernels.turns import Turn
from tileflux.lang.policy import (
    scatter_tile,
    spread_tile,
    stage_tile,
    store_tile,
    wait_for_nothing,
    wait_for_rows,
    wait_for_slot,
    wait_for_slots,
)
from tileflux.lang.schedule import arrival_order, departure_order, twice_order
from tileflux.symm.group import Group

__all__ = [
    "ARRIVING",
    "GATHER",
    "GATHERED",
    "MAX_REGISTERS",
    "PLAIN",
    "SCATTER",
    "SPREAD",
    "STAGE",
    "launch_gemm",
    "num_programs",
    "sms_for",
]

Descriptors = tuple[TensorDescriptor | None, TensorDescriptor | None, TensorDescriptor | None]
_NONE: Descriptors = (None, None, None)

MAX_REGISTERS = 255
"""Said to the assembler, which else spills to fit more programs on an SM than shared memory allows."""

PLAIN = Role("gemm", arrival_order, wait_for_nothing, store_tile, is_sharded=False)
GATHER = Role("ag_gemm", arrival_order, wait_for_rows, store_tile, gathers=True, feeds=True, awaits_rows=True)
ARRIVING = Role(
    "ag_gemm, rows sent by copies", arrival_order, wait_for_rows, store_tile, gathers=True, awaits_rows=True
)
GATHERED = Role("ag_gemm, rows already here", arrival_order, wait_for_nothing, store_tile, gathers=True)
SCATTER = Role("gemm_rs", departure_order, wait_for_slot, scatter_tile)
STAGE = Role("gemm_rs, sent by copies", departure_order, wait_for_nothing, stage_tile, num_spare_sms=1)
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
    load_only: bool = False,
) -> None:
    """Queue the kernel on the current stream. ``releases``: this launch ends the call. ``load_only``: load it alone."""
    x, weight, out = operands.x, operands.weight, operands.out
    num_rows = out.shape[0] if turn is None or role is SPREAD else sum(turn.plan.rows)
    num_feeders, num_multipliers = num_programs(config, group, role, num_rows, operands.num_columns, turn)
    if use_tma is None:
        use_tma = _has_tma(x.device) and _fits_tma(operands)
    is_virtual = group is not None and group.stream is not None
    trace = None
    if not load_only:
        trace = reserve(role, operands, config, turn, x.device)
    spec = make_spec(
        operands, role, config,
        world_size=1 if turn is None or group is None else group.world_size,
        num_feeders=num_feeders, releases=releases, use_tma=use_tma, plain=is_virtual,
        records=current_recorder() is not None,
    )  # fmt: skip
    table = _no_table(x.device) if turn is None else turn.table

    def launch(grid: int, spec: GemmSpec, descriptors: Descriptors) -> None:
        bias = _address(operands.bias) if operands.adds_bias else 0
        _gemm_kernel[(grid,)](
            x.data_ptr(), weight.data_ptr(), out.data_ptr(),
            bias, _address(operands.scale_x), _address(operands.scale_weight),
            num_rows, operands.num_columns, operands.depth, x.stride(0), operands.weight_stride,
            *descriptors, _address(trace), table,
            ORDER=role.order, WAIT=role.wait, FINISH=role.finish, SPEC=spec,
            num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=MAX_REGISTERS,
        )  # fmt: skip

    # Virtual ranks may differ in what is aligned, and all that they need must be there before the first of them waits.
    for variant in _family(operands, role, config, spec) if is_virtual else [spec]:

        def load(variant: GemmSpec = variant) -> None:
            launch(0, variant, _blank_descriptors(operands, config, role) if variant.use_tma else _NONE)

        load_once(x.device, (role.name, variant, config), load, group)
    if not load_only:
        descriptors = _descriptors(operands, config, turn if role.gathers else None) if use_tma else _NONE
        with launching(group):
            launch(num_feeders + num_multipliers, spec, descriptors)


def _family(operands: Operands, role: Role, config: GemmConfig, spec: GemmSpec) -> list[GemmSpec]:
    """The variants that virtual ranks choose from: without TMA, and with, for rows of the result aligned or not."""
    make = functools.partial(
        make_spec, operands, role, config,
        world_size=spec.world_size, num_feeders=spec.num_feeders, releases=spec.releases, plain=True,
        records=spec.records,
    )  # fmt: skip
    with_tma = [dataclasses.replace(make(use_tma=True), out_aligned=aligned) for aligned in (True, False)]
    return [make(use_tma=False), *(with_tma if _has_tma(operands.x.device) else [])]


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


def _is_interpreted(group: Group | None) -> bool:
    return group.device.type == "cpu" if group is not None else not torch.cuda.is_available()


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


def _blank_descriptors(operands: Operands, config: GemmConfig, role: Role) -> Descriptors:
    """For a launch with nothing to do: of the right types."""
    a = operands.x.new_empty((config.block_m, config.block_k))
    shape = (config.block_n, config.block_k) if operands.k_major else (config.block_k, config.block_n)
    a_descriptor = TensorDescriptor.from_tensor(a, list(a.shape))
    b_descriptor = TensorDescriptor.from_tensor(operands.weight.new_empty(shape), list(shape))
    return a_descriptor, a_descriptor if role.gathers else None, b_descriptor


def _descriptors(operands: Operands, config: GemmConfig, turn: Turn | None) -> Descriptors:
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
