"""Launching a GEMM: which of the two loops runs it; and Triton's, with the operands' addresses."""

from __future__ import annotations

import dataclasses
import functools
import logging

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tileflux.config import GemmConfig
from tileflux.kernels.gemm import _gemm_kernel
from tileflux.kernels.gemm_hopper_launch import (
    Prepared,
    hopper_family,
    is_hopper,
    launch_hopper,
    load_hopper,
    why_not_hopper,
)
from tileflux.kernels.gemm_shared import (
    Addresses,
    Launch,
    address,
    addresses,
    constants,
    fetches_tiles,
    is_virtual,
    num_programs,
    num_tiles,
    rows_argument,
    side_addresses,
    table_of,
)
from tileflux.kernels.loading import launching, load_once
from tileflux.kernels.operands import GemmSpec, Operands, Role, make_spec, scale_kind
from tileflux.kernels.prepared import Kept, Launcher, Tile, Tiles, relaunchable
from tileflux.kernels.recording import current_recorder, reserve
from tileflux.kernels.turns import Turn
from tileflux.symm.group import Group

__all__ = ["MAX_REGISTERS", "PreparedGemm", "launch_gemm", "relaunches_gemm"]

_log = logging.getLogger("tileflux")

Descriptors = tuple[TensorDescriptor | None, TensorDescriptor | None, TensorDescriptor | None]
_NONE: Descriptors = (None, None, None)

MAX_REGISTERS = 255
"""Said to the assembler, which else spills to fit more programs on an SM than shared memory allows."""


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
) -> PreparedGemm | None:
    """Queue the kernel on the current stream. ``releases``: this launch ends the call. ``load_only``: load it alone.

    Returns what repeats the launch, where that is possible.
    """
    kept = _plain if turn is None else turn.launches
    key = _key(operands, role, config, group if turn is None else None, releases, use_tma)
    known = kept.get(key)
    if known is not None and relaunches_gemm():
        if not load_only:
            with launching(group):
                known.launch(addresses(operands), table_of(turn, operands.x.device).data_ptr())
        return known
    launch = _plan(operands, role, config, group, turn, releases, use_tma, load_only)
    prepared: PreparedGemm | None
    on_hopper = _runs_on_hopper(operands, launch)
    if on_hopper and is_virtual(group):
        # Which loop a virtual rank needs depends on what is aligned: both are there before the first of them waits.
        load_hopper(operands, launch, group, hopper_family(operands, launch))
        _launch_triton(operands, launch, group, turn, load_only=True)
    if on_hopper and launch.use_tma:
        prepared = launch_hopper(operands, launch, group, turn, load_only=load_only)
    else:
        prepared = _launch_triton(operands, launch, group, turn, load_only=load_only)
    if prepared is not None:
        kept.keep(key, prepared)
    return prepared


def relaunches_gemm() -> bool:
    """Whether launches that are kept may be used now: nobody records them, and nobody listens."""
    return current_recorder() is None and relaunchable(_gemm_kernel)


def _plan(
    operands: Operands,
    role: Role,
    config: GemmConfig,
    group: Group | None,
    turn: Turn | None,
    releases: bool,
    use_tma: bool | None,
    load_only: bool,
) -> Launch:
    device = operands.x.device
    num_rows = sum(turn.plan.rows) if turn is not None and role.is_sharded else operands.out.shape[0]
    tiles = num_tiles(config, role, num_rows, operands.num_columns, turn)
    groups = operands.groups
    if groups is not None:
        listed = groups.max_tiles * -(-operands.num_columns // config.block_n)
        tiles = tiles + listed if role.combines else listed
    num_feeders, num_multipliers = num_programs(config, group, role, tiles, turn)
    return Launch(
        role, config, num_rows, num_feeders, num_feeders + num_multipliers,
        world_size=1 if turn is None or group is None else group.world_size,
        releases=releases,
        use_tma=_has_tma(device) and _fits_tma(operands, config) if use_tma is None else use_tma,
        fetches=turn is not None and fetches_tiles(group, config, role),
        records=current_recorder() is not None,
        trace=None if load_only else reserve(role, operands, config, turn, device),
    )  # fmt: skip


def _runs_on_hopper(operands: Operands, launch: Launch) -> bool:
    """Whether Hopper's loop is asked for and takes this, TMA's wants apart. If it does not, says so once."""
    if not launch.config.hopper:
        return False
    reason = why_not_hopper(operands, launch.role, launch.config)
    if not is_hopper(operands.x.device):
        reason = "the GPU is not of Hopper's kind"
    elif launch.fetches:
        reason = "its programs do not fetch tiles"
    if reason is None and not launch.use_tma:
        _say_once(launch.role.name, "rows or addresses are not multiples of 16 bytes, as TMA wants them")
    elif reason is not None:
        _say_once(launch.role.name, reason)
    return reason is None


@functools.cache
def _say_once(name: str, reason: str) -> None:
    _log.info("%s runs Triton's loop although GemmConfig(hopper=True): %s", name, reason)


def _launch_triton(
    operands: Operands, how: Launch, group: Group | None, turn: Turn | None, *, load_only: bool
) -> _Prepared | None:
    """Queue ``_gemm_kernel``. Returns what repeats it, where that is possible."""
    role, config, x, use_tma = how.role, how.config, operands.x, how.use_tma
    spec = make_spec(
        operands, role, config,
        world_size=how.world_size, num_feeders=how.num_feeders, releases=how.releases, use_tma=use_tma,
        plain=is_virtual(group), fetches=how.fetches, records=how.records,
    )  # fmt: skip
    numbers = (operands.num_columns, operands.depth, x.stride(0), operands.weight_stride)
    rows = rows_argument(operands, how.num_rows)

    def launch(grid: int, spec: GemmSpec, descriptors: Descriptors) -> object:
        return _gemm_kernel[(grid,)](
            x.data_ptr(), operands.weight.data_ptr(), operands.out.data_ptr(), *side_addresses(operands),
            rows, *numbers, *descriptors, address(how.trace), table_of(turn, x.device),
            *constants(role, spec),
            num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=MAX_REGISTERS,
        )  # fmt: skip

    # Virtual ranks may differ in what is aligned, and all that they need must be there before the first of them waits.
    for variant in _family(operands, role, config, spec) if is_virtual(group) else [spec]:

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
    launcher = Launcher(compiled, x.device.index or 0, constants(role, spec))
    return _Prepared(launcher, how, numbers, descriptors)


class _Prepared:
    """A launch of which all but the addresses is known: what is left of ``launch_gemm`` for the next such call."""

    __slots__ = ("_a", "_b", "_grid", "_launcher", "_num_rows", "_numbers", "_rows")

    def __init__(self, launcher: Launcher, how: Launch, numbers: tuple[int, ...], descriptors: Descriptors) -> None:
        self._launcher, self._grid, self._num_rows, self._numbers = launcher, how.num_programs, how.num_rows, numbers
        a, rows, b = descriptors
        self._a = None if a is None else Tiles(a.shape, a.strides)
        self._b = None if b is None else Tiles(b.shape, b.strides)
        # Where rows arrive is the turn's own, and stays where it is.
        self._rows = None if rows is None else Tile(rows.base.data_ptr(), rows.shape, rows.strides)

    def launch(self, at: Addresses, table: int) -> None:
        """Queue it with these addresses, that of the table too: Triton would ask the driver about a tensor's."""
        x, weight, out, bias, scale_x, scale_weight, index = at
        self._launcher.launch(
            self._grid, x, weight, out, bias, scale_x, scale_weight, index or self._num_rows, *self._numbers,
            None if self._a is None else self._a[x], self._rows, None if self._b is None else self._b[weight],
            0, table,
        )  # fmt: skip


PreparedGemm = _Prepared | Prepared
_plain: Kept[PreparedGemm] = Kept()
"""Launches without a turn; those with one are kept by it, and go with it."""


def _key(
    operands: Operands, role: Role, config: GemmConfig, group: Group | None, releases: bool, use_tma: bool | None
) -> tuple[object, ...]:
    """Everything a launch depends on but addresses: of those only how they are aligned. The turn is not in it."""
    x, weight, out, bias, groups = operands.x, operands.weight, operands.out, operands.bias, operands.groups
    return (
        role, config, None if group is None else group.name, releases, use_tma,
        x.device, x.dtype, x.shape, x.stride(), x.data_ptr() % 16,
        weight.dtype, weight.shape, weight.stride(), weight.data_ptr() % 16,
        out.dtype, out.shape, out.data_ptr() % 16,
        None if bias is None else bias.dtype, operands.adds_bias, operands.activation,
        scale_kind(operands.scale_x), scale_kind(operands.scale_weight),
        None if groups is None else (groups.num_experts, groups.max_tiles, groups.picks_rows),
        torch.backends.cuda.matmul.fp32_precision if x.dtype is torch.float32 else "",
    )  # fmt: skip


def _family(operands: Operands, role: Role, config: GemmConfig, spec: GemmSpec) -> list[GemmSpec]:
    """The variants that virtual ranks choose from: without TMA, and with, for rows of the result aligned or not."""
    make = functools.partial(
        make_spec, operands, role, config,
        world_size=spec.world_size, num_feeders=spec.num_feeders, releases=spec.releases, plain=True,
        fetches=spec.fetches, records=spec.records,
    )  # fmt: skip
    with_tma = [dataclasses.replace(make(use_tma=True), out_aligned=aligned) for aligned in (True, False)]
    return [make(use_tma=False), *(with_tma if _has_tma(operands.x.device) else [])]


@functools.cache
def _has_tma(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _fits_tma(operands: Operands, config: GemmConfig) -> bool:
    """TMA wants rows and addresses in units of 16 bytes, and something to load."""
    x, weight = operands.x, operands.weight
    if 0 in (x.numel(), weight.numel()):
        return False
    if operands.groups is not None and not operands.k_major and operands.depth % config.block_k:
        return False  # behind an expert's K is the next one's weight, and whatever is not a number there would show
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
