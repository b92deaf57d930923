"""Launching Hopper's GEMM loop: what it takes, how many stages fit, and how tiles leave."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tileflux.config import GemmConfig
from tileflux.kernels.gemm_hopper import _gemm_hopper_kernel
from tileflux.kernels.gemm_shared import (
    Addresses,
    Launch,
    address,
    constants,
    rows_argument,
    side_addresses,
    table_of,
)
from tileflux.kernels.loading import launching, load_once
from tileflux.kernels.operands import ELEMENTS, GemmSpec, Operands, Role, make_spec
from tileflux.kernels.prepared import Launcher, Tile, Tiles, relaunchable
from tileflux.kernels.turns import Turn
from tileflux.lang.policy import wait_for_nothing
from tileflux.symm.group import Group

__all__ = [
    "HopperSpec",
    "Prepared",
    "hopper_family",
    "is_hopper",
    "launch_hopper",
    "load_hopper",
    "make_hopper_spec",
    "why_not_hopper",
]

_PIECE = 64  # columns that are stored at a time, as in lang/hopper.py
_ROW_BYTES = 128  # of a block of K: a row of TMA's swizzle
_SHARED_BYTES = 232448 - 2048  # a program's, less barriers and what single numbers go through
_MAX_STAGES = 8
_MAX_ACCUMULATORS = 128  # registers a thread, of some 230
_WAITING_REGISTERS, _LOADING_REGISTERS = 56, 40  # of the producer; the consumer gets the rest
_NUM_FIRST = 8  # arguments of the kernel before its descriptors
_HALVES = (torch.float16, torch.bfloat16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, repr=False)
class HopperSpec(GemmSpec):
    """Everything that makes a variant of Hopper's loop."""

    num_warps: int
    """Of the consumer. The producer is one more."""
    num_stages: int
    out_by_tma: bool
    stages: bool
    """Tiles go into this rank's own memory, and are counted."""
    producer_registers: int

    @property
    def is_hopper(self) -> bool:
        """Whether Hopper's loop runs it."""
        return True

    @property
    def settles(self) -> bool:
        """Whether tiles are counted later than they are stored, since it takes a while until they are written."""
        return self.stages and self.out_by_tma

    @functools.cached_property
    def accumulator_layout(self) -> Any:
        """Of a tile's sums: each warp has 16 rows of every 16 times as many."""
        shape = [16, self.block_n, 256 // self.a_type.primitive_bitwidth]
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[self.num_warps, 1], instr_shape=shape)


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether WGMMA is there: later GPUs have something else in its place."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def why_not_hopper(operands: Operands, role: Role, config: GemmConfig) -> str | None:
    """What keeps this loop from doing it, or nothing; alignment for TMA is another question."""
    x, weight = operands.x, operands.weight
    num_warps = _num_warps(config)
    accumulators = config.block_m * config.block_n // (32 * num_warps)
    tile = f"tiles of {config.block_m} x {config.block_n} x {config.block_k} with {config.num_warps} warps"
    if operands.is_gated:
        return "it has no gated activations"
    if operands.groups is not None and operands.groups.picks_rows:
        return "TMA does not pick rows"
    if role.combines:
        return "it does not add up rows by token"
    if config.block_m not in (64, 128, 256) or config.block_n < _PIECE or accumulators > _MAX_ACCUMULATORS:
        return f"{tile}: it has 64, 128 or 256 rows, from {_PIECE} columns on, as far as registers go"
    if config.block_k * x.element_size() != _ROW_BYTES or config.num_warps != num_warps:
        return f"{tile}: it wants {_ROW_BYTES // x.element_size()} of K, and {num_warps} warps"
    # Grouped rows are stored by threads, which takes registers, too.
    is_tight = role.awaits_rows or operands.groups is not None
    if accumulators == _MAX_ACCUMULATORS and operands.activation == "gelu" and is_tight:
        return f"{tile} and gelu leave it too few registers"
    if x.dtype in _FP8 and weight.dtype in _FP8:
        # One stage's products are added up apart: twice the registers. WGMMA reads fp8 along K alone.
        # And bf16 keeps 8 bits of the result, and does not notice the 14 that products are added with; others would.
        fits = operands.k_major and 2 * accumulators <= _MAX_ACCUMULATORS and operands.out.dtype is torch.bfloat16
        return None if fits else f"{tile}: fp8 wants half the tile, a weight contiguous along K, and a bf16 result"
    if x.dtype not in _HALVES or weight.dtype != x.dtype:
        return f"it does not multiply {x.dtype} by {weight.dtype}"
    return None


def launch_hopper(
    operands: Operands, launch: Launch, group: Group | None, turn: Turn | None, *, load_only: bool = False
) -> Prepared | None:
    """Queue the kernel on the current stream. Returns what repeats it, where that is possible."""
    spec = make_hopper_spec(operands, launch, turn)
    load_hopper(operands, launch, group, [spec])
    if load_only:
        return None
    device, sizes = operands.x.device, (operands.num_columns, operands.depth)
    descriptors = _descriptors(operands, spec, turn)
    rows = rows_argument(operands, launch.num_rows)
    first = (operands.x.data_ptr(), operands.out.data_ptr(), *side_addresses(operands), rows, *sizes)
    last = (address(launch.trace), table_of(turn, device))
    with launching(group):
        compiled = _start(launch.num_programs, first, descriptors, last, launch.role, spec)
    if launch.trace is not None or not relaunchable(_gemm_hopper_kernel):
        return None
    launcher = Launcher(compiled, device.index or 0, constants(launch.role, spec))
    return Prepared(launcher, launch, sizes, descriptors)


def load_hopper(operands: Operands, launch: Launch, group: Group | None, specs: Sequence[HopperSpec]) -> None:
    """Load these variants, with nothing to do."""
    device, role = operands.x.device, launch.role
    for spec in specs:

        def load(spec: HopperSpec = spec) -> None:
            last = (0, table_of(None, device))
            _start(0, (0,) * _NUM_FIRST, _blank_descriptors(operands, spec, role), last, role, spec)

        load_once(device, (role.name, spec, launch.config), load, group)


def hopper_family(operands: Operands, launch: Launch) -> list[HopperSpec]:
    """The variants that virtual ranks choose from, which may differ in what is aligned, and in what is cut short."""
    found = []
    for aligned, by_tma in ((True, True), (True, False), (False, False)):
        plain = dataclasses.replace(_plain_spec(operands, launch), out_aligned=aligned)
        if not by_tma or _may_leave_by_tma(operands, launch.role):
            found.append(_make_spec(plain, launch.role, launch.config, by_tma))
    return found


def _start(
    grid: int, first: tuple[int, ...], descriptors: tuple[Any, ...], last: tuple[Any, ...], role: Role, spec: HopperSpec
) -> Any:
    return _gemm_hopper_kernel[(grid,)](
        *first, *descriptors, *last, *constants(role, spec), num_warps=spec.num_warps
    )  # fmt: skip


class Prepared:
    """A launch of which all but the addresses is known."""

    __slots__ = ("_a", "_b", "_grid", "_launcher", "_num_rows", "_out", "_own", "_rows", "_sizes")

    def __init__(
        self, launcher: Launcher, launch: Launch, sizes: tuple[int, int], descriptors: tuple[Any, ...]
    ) -> None:
        self._launcher, self._grid = launcher, launch.num_programs
        self._num_rows, self._sizes = launch.num_rows, sizes
        a, rows, b, out, own = descriptors
        self._a, self._b = Tiles(a.shape, a.strides), Tiles(b.shape, b.strides)
        # Where rows arrive and products are staged is the turn's own, and stays where it is.
        self._rows, self._own = _tile(rows), _tile(own)
        self._out = _tile(out) if out is None or own is not None else Tiles(out.shape, out.strides)

    def launch(self, at: Addresses, table: int) -> None:
        """Queue it with these addresses, that of the table too: Triton would ask the driver about a tensor's."""
        x, weight, out, bias, scale_x, scale_weight, index = at
        leaving = self._out[out] if isinstance(self._out, Tiles) else self._out
        self._launcher.launch(
            self._grid, x, out, bias, scale_x, scale_weight, index or self._num_rows, *self._sizes,
            self._a[x], self._rows, self._b[weight], leaving, self._own, 0, table,
        )  # fmt: skip


def _tile(descriptor: Any) -> Tile | None:
    return None if descriptor is None else Tile(descriptor.base.data_ptr(), descriptor.shape, descriptor.strides)


def make_hopper_spec(operands: Operands, launch: Launch, turn: Turn | None) -> HopperSpec:
    """The variant for these operands."""
    role, config = launch.role, launch.config
    plain = _plain_spec(operands, launch)
    # A tile may only be stored whole where it ends with its chunk, or with all rows.
    whole = turn is None or all(count % config.block_m == 0 for count in (*turn.plan.rows, turn.plan.chunk_rows))
    if turn is not None and role.stages:
        whole &= turn.plan.has_even_slabs(operands.num_columns)
    by_tma = whole and operands.groups is None and plain.out_aligned and _may_leave_by_tma(operands, role)
    return _make_spec(plain, role, config, by_tma)


def _plain_spec(operands: Operands, launch: Launch) -> GemmSpec:
    return make_spec(
        operands, launch.role, launch.config,
        world_size=launch.world_size, num_feeders=launch.num_feeders, releases=launch.releases, use_tma=True,
        records=launch.records,
    )  # fmt: skip


def _may_leave_by_tma(operands: Operands, role: Role) -> bool:
    return (role.stores or role.stages) and operands.out.dtype in _HALVES


@functools.lru_cache(maxsize=4096)
def _make_spec(plain: GemmSpec, role: Role, config: GemmConfig, by_tma: bool) -> HopperSpec:
    stage = (config.block_m + config.block_n) * _ROW_BYTES
    # Two pieces on their way out, or one that changes hands between threads.
    leaving = config.block_m * _PIECE * (plain.out_type.primitive_bitwidth // 8) * (2 if by_tma else 1)
    return HopperSpec(
        **{field.name: getattr(plain, field.name) for field in dataclasses.fields(GemmSpec)},
        num_warps=_num_warps(config),
        num_stages=min(_MAX_STAGES, (_SHARED_BYTES - leaving) // stage),
        out_by_tma=by_tma,
        stages=role.stages,
        producer_registers=_LOADING_REGISTERS if role.wait is wait_for_nothing else _WAITING_REGISTERS,
    )


def _num_warps(config: GemmConfig) -> int:
    return 4 if config.block_m == 64 else 8


def _descriptors(operands: Operands, spec: HopperSpec, turn: Turn | None) -> tuple[TensorDescriptor | None, ...]:
    """Of the rows, the rows that arrive, the weight, the result, and of staged ones those that stay."""
    x, weight = operands.x, operands.weight
    a_block = [spec.block_m, spec.block_k]
    rows = _describe(turn.gathered(x.dtype, operands.depth), a_block) if turn is not None and spec.gathers else None
    if operands.k_major:
        b = _describe(weight, [spec.block_n, spec.block_k])
    else:
        b = _describe(weight.t(), [spec.block_k, spec.block_n])
    out = own = None
    if spec.settles:
        assert turn is not None, "what is staged has a place in a turn"
        out, own = (_describe(each, [spec.block_m, _PIECE]) for each in _staged(operands, turn))
    elif spec.out_by_tma:
        # Of a single row, a contiguous tensor may have any stride.
        out = _describe(operands.out, [spec.block_m, _PIECE], stride=operands.num_columns)
    return _describe(x, a_block), rows, b, out, own


def _staged(operands: Operands, turn: Turn) -> tuple[torch.Tensor, torch.Tensor]:
    """What leaves, and what stays: rows of one slab each, as ``stage_tile`` has them."""
    kind, num_columns = operands.out.dtype, operands.num_columns
    width = turn.plan.slab_columns or num_columns
    slot = turn.slot(turn.rank, turn.rank, kind, num_columns, 0)
    return turn.staging(kind, num_columns).view(-1, width), slot.view(-1, width)


def _blank_descriptors(operands: Operands, spec: HopperSpec, role: Role) -> tuple[TensorDescriptor | None, ...]:
    """For a launch with nothing to do: of the right types."""
    a_block = [spec.block_m, spec.block_k]
    a = _describe(operands.x.new_empty(a_block), a_block)
    b_block = [spec.block_n, spec.block_k] if operands.k_major else [spec.block_k, spec.block_n]
    out_block = [spec.block_m, _PIECE]
    out = _describe(operands.out.new_empty(out_block), out_block) if spec.out_by_tma else None
    b = _describe(operands.weight.new_empty(b_block), b_block)
    return a, a if role.gathers else None, b, out, out if spec.settles else None


def _describe(tensor: torch.Tensor, block: list[int], stride: int | None = None) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(block, ELEMENTS[tensor.dtype])
    strides = [tensor.stride(0) if stride is None else stride, 1]
    return TensorDescriptor(tensor, list(tensor.shape), strides, block, layout)
