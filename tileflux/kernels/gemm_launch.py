"""Launching the Triton GEMM: a role's policies, the operands' addresses, and how many programs may run."""

from __future__ import annotations

import dataclasses
import functools

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tileflux import device as device_info
from tileflux.config import GemmConfig
from tileflux.kernels.gemm import _gemm_kernel
from tileflux.kernels.gemm_hopper_launch import (
    Launch,
    Prepared,
    hopper_family,
    is_hopper,
    launch_hopper,
    load_hopper,
    takes,
)
from tileflux.kernels.loading import launching, load_once
from tileflux.kernels.operands import GemmSpec, Operands, Role, make_spec, scale_kind
from tileflux.kernels.prepared import Kept, Launcher, Tile, relaunchable
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
    "fetches_tiles",
    "launch_gemm",
    "num_programs",
    "shares_gpu",
    "sms_for",
]

Descriptors = tuple[TensorDescriptor | None, TensorDescriptor | None, TensorDescriptor | None]
_NONE: Descriptors = (None, None, None)

MAX_REGISTERS = 255
"""Said to the assembler, which else spills to fit more programs on an SM than shared memory allows."""

_STORES = functools.partial(Role, finish=store_tile, stores=True)
PLAIN = _STORES("gemm", arrival_order, wait_for_nothing, is_sharded=False)
GATHER = _STORES("ag_gemm", arrival_order, wait_for_rows, gathers=True, feeds=True, awaits_rows=True)
ARRIVING = _STORES("ag_gemm, rows sent by copies", arrival_order, wait_for_rows, gathers=True, awaits_rows=True)
GATHERED = _STORES("ag_gemm, rows already here", arrival_order, wait_for_nothing, gathers=True)
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
    kept = _plain if turn is None else turn.launches
    key = _key(operands, role, config, group if turn is None else None, releases, use_tma)
    known = kept.get(key)
    if known is not None and current_recorder() is None and relaunchable(_gemm_kernel):
        if not load_only:
            with launching(group):
                known.launch(operands, turn)
        return
    x = operands.x
    num_rows = operands.out.shape[0] if turn is None or role is SPREAD else sum(turn.plan.rows)
    num_feeders, num_multipliers = num_programs(config, group, role, num_rows, operands.num_columns, turn)
    if use_tma is None:
        use_tma = _has_tma(x.device) and _fits_tma(operands)
    launch = Launch(
        role, config, num_rows, num_feeders, num_feeders + num_multipliers,
        world_size=1 if turn is None or group is None else group.world_size, releases=releases, use_tma=use_tma,
        records=current_recorder() is not None,
        trace=None if load_only else reserve(role, operands, config, turn, x.device),
        may_stream=_may_stream(group, turn),
    )  # fmt: skip
    is_virtual = group is not None and group.stream is not None
    prepared: Prepared | _Prepared | None
    is_fetched = turn is not None and fetches_tiles(group, config)
    on_hopper = is_hopper(x.device) and takes(operands, role, config) and not is_fetched
    if on_hopper and is_virtual:
        # Which loop a virtual rank needs depends on what is aligned: both are there before the first of them waits.
        load_hopper(operands, launch, group, hopper_family(operands, launch))
        _launch_triton(operands, launch, group, turn, load_only=True)
    if on_hopper and use_tma:
        prepared = launch_hopper(operands, launch, group, turn, load_only=load_only)
    else:
        prepared = _launch_triton(operands, launch, group, turn, load_only=load_only)
    if prepared is not None:
        kept.keep(key, prepared)


def _launch_triton(
    operands: Operands, how: Launch, group: Group | None, turn: Turn | None, *, load_only: bool
) -> _Prepared | None:
    """Queue ``_gemm_kernel``. Returns what repeats it, where that is possible."""
    role, config, x, use_tma = how.role, how.config, operands.x, how.use_tma
    is_virtual = group is not None and group.stream is not None
    spec = make_spec(
        operands, role, config,
        world_size=how.world_size, num_feeders=how.num_feeders, releases=how.releases, use_tma=use_tma,
        plain=is_virtual, fetches=turn is not None and fetches_tiles(group, config), records=how.records,
    )  # fmt: skip
    numbers = (how.num_rows, operands.num_columns, operands.depth, x.stride(0), operands.weight_stride)

    def launch(grid: int, spec: GemmSpec, descriptors: Descriptors) -> object:
        return _gemm_kernel[(grid,)](
            x.data_ptr(), operands.weight.data_ptr(), operands.out.data_ptr(), *_addresses(operands), *numbers,
            *descriptors, _address(how.trace), _no_table(x.device) if turn is None else turn.table,
            *_constants(role, spec),
            num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=MAX_REGISTERS,
        )  # fmt: skip

    # Virtual ranks may differ in what is aligned, and all that they need must be there before the first of them waits.
    for variant in _family(operands, role, config, spec) if is_virtual else [spec]:

        def load(variant: GemmSpec = variant) -> None:
            launch(0, variant, _blank_descriptors(operands, config, role) if variant.use_tma else _NONE)

        load_once(x.device, (role.name, variant, config), load, group)
    if load_only:
        return None
    descriptors = _descriptors(operands, config, turn if role.gathers else None) if use_tma else _NONE
    with launching(group):
        compiled = launch(how.num_programs, spec, descriptors)
    if how.trace is not None or not relaunchable(_gemm_kernel):
        return None
    launcher = Launcher(compiled, x.device.index or 0, _constants(role, spec))
    return _Prepared(launcher, how.num_programs, numbers, descriptors)


def _may_stream(group: Group | None, turn: Turn | None) -> bool:
    """Whether every step is a tile, and the SMs are this rank's alone."""
    if shares_gpu(group):
        return False
    return turn is None or all(count == turn.plan.num_chunks * turn.plan.chunk_rows for count in turn.plan.rows)


class _Prepared:
    """A launch of which all but the addresses is known: what is left of ``launch_gemm`` for the next such call."""

    __slots__ = ("_grid", "_launcher", "_numbers", "_rows", "_shapes")

    def __init__(self, launcher: Launcher, grid: int, numbers: tuple[int, ...], descriptors: Descriptors) -> None:
        self._launcher, self._grid, self._numbers = launcher, grid, numbers
        a, rows, b = descriptors
        self._shapes = None if a is None or b is None else (a.shape, a.strides, b.shape, b.strides)
        # Where rows arrive is the turn's own, and stays where it is.
        self._rows = None if rows is None else Tile(rows.base.data_ptr(), rows.shape, rows.strides)

    def launch(self, operands: Operands, turn: Turn | None) -> None:
        """Queue it with these addresses."""
        x, weight = operands.x.data_ptr(), operands.weight.data_ptr()
        a = b = None
        if self._shapes is not None:
            a_shape, a_strides, b_shape, b_strides = self._shapes
            a, b = Tile(x, a_shape, a_strides), Tile(weight, b_shape, b_strides)
        table = _no_table(operands.x.device) if turn is None else turn.table
        self._launcher.launch(
            self._grid, x, weight, operands.out.data_ptr(), *_addresses(operands), *self._numbers,
            a, self._rows, b, 0, table,
        )  # fmt: skip


_plain: Kept[_Prepared | Prepared] = Kept()
"""Launches without a turn; those with one are kept by it, and go with it."""


def _key(
    operands: Operands, role: Role, config: GemmConfig, group: Group | None, releases: bool, use_tma: bool | None
) -> tuple[object, ...]:
    """Everything a launch depends on but addresses: of those only how they are aligned. The turn is not in it."""
    x, weight, out, bias = operands.x, operands.weight, operands.out, operands.bias
    return (
        role, config, None if group is None else group.name, releases, use_tma,
        x.device, x.dtype, x.shape, x.stride(), x.data_ptr() % 16,
        weight.dtype, weight.shape, weight.stride(), weight.data_ptr() % 16,
        out.dtype, out.shape, out.data_ptr() % 16,
        None if bias is None else bias.dtype, operands.adds_bias, operands.activation,
        scale_kind(operands.scale_x), scale_kind(operands.scale_weight),
        torch.backends.cuda.matmul.fp32_precision if x.dtype is torch.float32 else "",
    )  # fmt: skip


def _addresses(operands: Operands) -> tuple[int, int, int]:
    """Of bias and scales."""
    bias = operands.bias if operands.adds_bias else None
    return _address(bias), _address(operands.scale_x), _address(operands.scale_weight)


def _constants(role: Role, spec: GemmSpec) -> tuple[object, ...]:
    return role.order, role.wait, role.finish, spec


def _family(operands: Operands, role: Role, config: GemmConfig, spec: GemmSpec) -> list[GemmSpec]:
    """The variants that virtual ranks choose from: without TMA, and with, for rows of the result aligned or not."""
    make = functools.partial(
        make_spec, operands, role, config,
        world_size=spec.world_size, num_feeders=spec.num_feeders, releases=spec.releases, plain=True,
        fetches=spec.fetches, records=spec.records,
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


def fetches_tiles(group: Group | None, config: GemmConfig) -> bool:
    """Whether programs of a fused op fetch their tiles."""
    return config.fetches and shares_gpu(group)


def shares_gpu(group: Group | None) -> bool:
    """Whether a peer's programs may hold the SMs that this rank's are to run on, so that some of them begin late."""
    return group is not None and "same GPU" in group.traits.links


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
