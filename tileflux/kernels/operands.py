"""What a GEMM multiplies, as tensors, and as the one object that decides which variant of the kernel runs."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any

import torch
import triton.language as tl

from tileflux.config import GemmConfig
from tileflux.kernels.groups import Groups

__all__ = ["ELEMENTS", "GemmSpec", "Operands", "Role", "make_spec", "scale_kind"]

ELEMENTS: dict[torch.dtype, tl.dtype] = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
    torch.int8: tl.int8,
}
"""What can be multiplied, and what Triton calls it."""

_WIDTH = 16  # bytes of the widest access of a thread, and the unit TMA wants rows and addresses in


@dataclass(frozen=True, eq=False)
class Operands:
    """``out = activation(x @ weight.T * scales + bias)``, all on one device.

    ``x`` is ``[M, K]`` with contiguous rows, ``weight`` ``[N, K]`` with one contiguous dimension, ``out`` contiguous.
    With "swiglu" the weight is ``[2 N, K]``: gate, then up. Scales are fp32 of one element, or one per row
    of ``x`` or of ``weight``.

    With ``groups``, rows of the result belong to experts, and the weights of all E experts are one matrix: ``[E N, K]``
    below each other, or where N is contiguous ``[N, E K]`` beside each other. Bias and scales of the weight are
    those of all experts, one after the other.
    """

    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    bias: torch.Tensor | None = None
    scale_x: torch.Tensor | None = None
    scale_weight: torch.Tensor | None = None
    activation: str | None = None
    adds_bias: bool = True
    """Whether the bias is added here; where ranks sum their products, one of them adds it."""
    groups: Groups | None = None

    @property
    def is_gated(self) -> bool:
        """Whether the weight holds two of everything."""
        return self.activation == "swiglu"

    @property
    def num_columns(self) -> int:
        """Columns of the output."""
        num_rows = self.weight.shape[0]
        if self.groups is not None and self.k_major:
            num_rows //= self.groups.num_experts
        return num_rows // 2 if self.is_gated else num_rows

    @property
    def depth(self) -> int:
        """K."""
        return self.x.shape[1]

    @property
    def k_major(self) -> bool:
        """Whether K is the weight's contiguous dimension."""
        return self.weight.stride(1) == 1 or self.weight.shape[1] == 1

    @property
    def weight_stride(self) -> int:
        """Elements from one row of the weight's contiguous dimension to the next."""
        return self.weight.stride(0) if self.k_major else self.weight.stride(1)


@dataclass(frozen=True, eq=False)
class Role:
    """The policies that make an op of the main loop, and what the loop must know of them."""

    name: str
    order: Any
    wait: Any
    finish: Any
    gathers: bool = False
    """Rows of other ranks are read from where they arrive."""
    feeds: bool = False
    awaits_rows: bool = False
    """A launch ends only when all rows have come, also where there is nothing to multiply them with."""
    is_sharded: bool = True
    num_turns: int = 1
    num_spare_sms: int = 0
    """SMs left to small kernels of the same call that must run beside this one."""
    stores: bool = False
    """A finished tile goes into the output, and nothing else happens."""
    stages: bool = False
    """A finished tile goes into this rank's own memory, and is counted."""
    waits: bool = True
    """Programs wait for each other's, or for peers', so that all of a launch must be resident."""
    combines: bool = False
    """Grouped rows are added up by token: columns are cut into as many slabs as the configuration has chunks."""


@dataclass(frozen=True, repr=False)
class GemmSpec:
    """Everything that makes a variant of the kernel. Read by device code as a constexpr."""

    a_type: tl.dtype
    b_type: tl.dtype
    out_type: tl.dtype
    accumulator: tl.dtype
    precision: str
    num_coarse: int
    """fp8 products that Hopper may add up with 14 bits before the sum goes to fp32."""
    scale_a: str
    scale_b: str
    has_bias: bool
    bias_type: tl.dtype
    activation: str
    is_gated: bool
    is_grouped: bool
    """Rows belong to experts, and tiles are those of a list."""
    picks_rows: bool
    """Rows of x are picked by number: they are loaded through pointers, also where the weight is loaded by TMA."""
    combines: bool
    num_slabs: int
    block_m: int
    block_n: int
    block_k: int
    group_m: int
    span: int
    alone: int
    num_feeders: int
    world_size: int
    num_shards: int
    num_turns: int
    gathers: bool
    awaits_rows: bool
    has_table: bool
    releases: bool
    fetches: bool
    """Programs fetch tiles as they come, instead of dealing them out beforehand: some may begin late."""
    use_tma: bool
    k_major: bool
    even_k: bool
    k_aligned: bool
    a_aligned: bool
    b_aligned: bool
    out_aligned: bool
    records: bool

    @property
    def is_hopper(self) -> bool:
        """Whether Hopper's loop runs it."""
        return False

    @property
    def settles(self) -> bool:
        """Whether tiles are counted later than they are stored, since it takes a while until they are written."""
        return False

    @functools.cached_property
    def _text(self) -> str:
        return f"GemmSpec({', '.join(str(getattr(self, field.name)) for field in fields(self))})"

    def __repr__(self) -> str:
        return self._text  # made once: a launch looks its kernel up by this text


def scale_kind(scale: torch.Tensor | None) -> str:
    """``none``, ``tensor`` (one element for all) or ``channel`` (one per row)."""
    if scale is None:
        return "none"
    return "tensor" if scale.dim() == 0 else "channel"


def make_spec(
    operands: Operands,
    role: Role,
    config: GemmConfig,
    *,
    world_size: int,
    num_feeders: int,
    releases: bool,
    use_tma: bool,
    plain: bool = False,
    fetches: bool = False,
    records: bool = False,
) -> GemmSpec:
    """The variant for these operands. Cached: the hot path looks it up. ``plain``: without TMA, the one for all."""
    x, weight = operands.x, operands.weight
    row_bytes = operands.depth * x.element_size()
    aligned = (
        _aligned(x, x.stride(0)) and (not role.gathers or row_bytes % _WIDTH == 0),
        _aligned(weight, operands.weight_stride),
        _aligned(operands.out, operands.num_columns),
    )
    layout = (use_tma, operands.k_major, operands.depth % config.block_k == 0, row_bytes % _WIDTH == 0)
    groups = operands.groups
    picks_rows = groups is not None and groups.picks_rows
    if use_tma:  # TMA needs the alignment anyway, and fills what is beyond K with zeroes
        aligned, layout = (True, True, aligned[2]), (True, operands.k_major, layout[2] or not picks_rows, True)
    elif plain:
        aligned, layout = (False, False, False), (False, operands.k_major, False, False)
    return _make_spec(
        (x.dtype, weight.dtype, operands.out.dtype, None if operands.bias is None else operands.bias.dtype),
        (scale_kind(operands.scale_x), scale_kind(operands.scale_weight), operands.activation or ""),
        (groups is not None, picks_rows),
        role,
        config,
        (world_size, num_feeders, releases, fetches, records),
        aligned,
        layout,
        "tf32" if x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee",
    )


def _aligned(tensor: torch.Tensor, stride: int) -> bool:
    return tensor.data_ptr() % _WIDTH == 0 and stride * tensor.element_size() % _WIDTH == 0


@functools.lru_cache(maxsize=4096)
def _make_spec(
    types: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype | None],
    kinds: tuple[str, str, str],
    groups: tuple[bool, bool],
    role: Role,
    config: GemmConfig,
    world: tuple[int, int, bool, bool, bool],
    aligned: tuple[bool, bool, bool],
    layout: tuple[bool, bool, bool, bool],
    precision: str,
) -> GemmSpec:
    a_type, b_type, out_type = (ELEMENTS[dtype] for dtype in types[:3])
    scale_a, scale_b, activation = kinds
    bias_type = types[3]
    world_size, num_feeders, releases, fetches, records = world
    is_banded = role.is_sharded and world_size > 1
    return GemmSpec(
        a_type, b_type, out_type,
        accumulator=tl.int32 if types[0] == torch.int8 else tl.float32,
        precision=precision,
        # bf16 keeps 8 bits of the result, and does not notice 14; fp16 and fp32 would.
        num_coarse=min(128, config.block_k) if out_type == tl.bfloat16 else 0,
        scale_a=scale_a, scale_b=scale_b,
        has_bias=bias_type is not None, bias_type=ELEMENTS[bias_type or torch.float32],
        activation=activation,
        is_gated=activation == "swiglu",
        is_grouped=groups[0], picks_rows=groups[1],
        combines=role.combines, num_slabs=config.num_chunks if role.combines else 1,
        block_m=config.block_m, block_n=config.block_n, block_k=config.block_k,
        group_m=config.group_m, span=config.span if is_banded else 1, alone=config.alone if is_banded else 0,
        num_feeders=num_feeders,
        world_size=world_size,
        num_shards=world_size if role.is_sharded else 1,
        num_turns=role.num_turns,
        gathers=role.gathers,
        awaits_rows=role.awaits_rows,
        has_table=world_size > 1,
        releases=releases,
        fetches=fetches,
        use_tma=layout[0], k_major=layout[1], even_k=layout[2], k_aligned=layout[3],
        a_aligned=aligned[0], b_aligned=aligned[1], out_aligned=aligned[2],
        records=records,
    )  # fmt: skip
