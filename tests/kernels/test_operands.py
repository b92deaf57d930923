"""From operands to the variant of the kernel: what makes one, what does not, and that it is found again."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton.language as tl

from tileflux.config import GemmConfig
from tileflux.kernels.operands import ELEMENTS, GemmSpec, Operands, Role, make_spec, scale_kind
from tileflux.kernels.roles import GATHER, PLAIN, SCATTER, SPREAD

CONFIG = GemmConfig(block_m=16, block_n=16, block_k=32)


def spec_of(operands: Operands, role: Role = PLAIN, config: GemmConfig = CONFIG, **changes: object) -> GemmSpec:
    """Its spec as ``launch_gemm`` asks for it."""
    given = {"world_size": 1, "num_feeders": 0, "releases": False, "use_tma": False} | changes
    return make_spec(operands, role, config, **given)


def make(m: int = 8, n: int = 32, k: int = 64, dtype: torch.dtype = torch.bfloat16, **others: object) -> Operands:
    """Operands of these sizes, all aligned."""
    x, weight = torch.zeros(m, k).to(dtype), torch.zeros(n, k).to(dtype)
    width = n // 2 if others.get("activation") == "swiglu" else n
    out = torch.zeros(m, width, dtype=dtype if dtype.itemsize > 1 else torch.bfloat16)
    return Operands(x, weight, out, **others)


def test_views_of_the_weight() -> None:
    operands = make(n=24, k=40)
    assert (operands.num_columns, operands.depth, operands.k_major, operands.weight_stride) == (24, 40, True, 40)
    turned = dataclasses.replace(operands, weight=torch.zeros(40, 24).t())
    assert (turned.num_columns, turned.depth, turned.k_major, turned.weight_stride) == (24, 40, False, 24)
    part = dataclasses.replace(operands, weight=torch.zeros(24, 100)[:, :40])
    assert part.k_major and part.weight_stride == 100
    gated = make(n=24, activation="swiglu")
    assert gated.is_gated and gated.num_columns == 12
    assert not operands.is_gated


def test_scale_kinds() -> None:
    assert scale_kind(None) == "none"
    assert scale_kind(torch.tensor(2.0)) == "tensor"
    assert scale_kind(torch.ones(1)) == "channel" and scale_kind(torch.ones(7)) == "channel"


def test_the_same_kind_of_call_finds_the_same_spec() -> None:
    first = spec_of(make(8, 32, 64))
    assert spec_of(make(80, 64, 96)) is first, "sizes make no variant"
    assert repr(first) == repr(dataclasses.replace(first)), "a launch looks its kernel up by this text"


@pytest.mark.parametrize(
    "other",
    [
        make(dtype=torch.float16),
        make(bias=torch.zeros(32)),
        make(bias=torch.zeros(32, dtype=torch.bfloat16)),
        make(activation="relu"),
        make(activation="swiglu"),
        make(dtype=torch.int8),
        make(dtype=torch.int8, scale_x=torch.tensor(1.0)),
        make(dtype=torch.int8, scale_x=torch.ones(8)),
        make(dtype=torch.int8, scale_weight=torch.ones(32)),
        make(k=72),
        make(k=71),
        make(n=31),
    ],
)
def test_what_makes_a_variant_also_shows_in_its_text(other: Operands) -> None:
    first, second = spec_of(make()), spec_of(other)
    assert first != second and repr(first) != repr(second)


def test_roles_configs_and_worlds_make_variants() -> None:
    operands = make()
    specs = [
        spec_of(operands),
        spec_of(operands, use_tma=True),
        spec_of(operands, GATHER, world_size=4, num_feeders=2, releases=True),
        spec_of(operands, GATHER, world_size=4, num_feeders=2, releases=False),
        spec_of(operands, GATHER, world_size=8, num_feeders=2, releases=True),
        spec_of(operands, GATHER, world_size=4, num_feeders=3, releases=True),
        spec_of(operands, SCATTER, world_size=4, releases=True),
        spec_of(operands, SPREAD, world_size=4, releases=True),
        spec_of(operands, SPREAD, world_size=4, releases=True, fetches=True),
        spec_of(operands, config=dataclasses.replace(CONFIG, block_n=32)),
        spec_of(operands, config=dataclasses.replace(CONFIG, group_m=1)),
    ]
    assert len(set(specs)) == len({repr(spec) for spec in specs}) == len(specs)
    assert [spec.num_shards for spec in specs[:8]] == [1, 1, 4, 4, 8, 4, 4, 1]
    assert [spec.has_table for spec in specs[:8]] == [False] * 2 + [True] * 6
    assert specs[7].num_turns == 2 and specs[6].num_turns == 1


def test_alignment_is_of_addresses_and_of_rows() -> None:
    aligned = spec_of(make(k=64, n=32))
    assert (aligned.a_aligned, aligned.b_aligned, aligned.out_aligned) == (True,) * 3
    assert aligned.even_k and aligned.k_aligned
    short = spec_of(make(k=65, n=33))
    assert (short.a_aligned, short.b_aligned, short.out_aligned) == (False,) * 3
    assert not short.even_k and not short.k_aligned
    ragged = spec_of(make(k=72))
    assert ragged.k_aligned and not ragged.even_k
    shifted = make()
    x = torch.zeros(8 * 64 + 1, dtype=torch.bfloat16)[1:].view(8, 64)
    assert not spec_of(dataclasses.replace(shifted, x=x)).a_aligned
    wide = torch.zeros(8, 72, dtype=torch.bfloat16)[:, :60]
    by_rows = dataclasses.replace(make(k=60), x=wide)
    assert spec_of(by_rows).a_aligned and not spec_of(by_rows).k_aligned
    assert not spec_of(by_rows, GATHER, world_size=2).a_aligned, "rows arrive without the gaps between them"


def test_variants_that_serve_all_alignments() -> None:
    """Virtual ranks must all run what has been loaded, and may differ in alignment."""
    for operands in (make(k=65, n=33), make()):
        plain = spec_of(operands, plain=True)
        assert not (plain.a_aligned or plain.b_aligned or plain.out_aligned or plain.even_k or plain.k_aligned)
    tma = spec_of(make(k=72, n=33), use_tma=True)
    assert tma.a_aligned and tma.b_aligned and tma.even_k and not tma.out_aligned


def test_accumulators_and_precision() -> None:
    assert spec_of(make(dtype=torch.int8)).accumulator == tl.int32
    for dtype in set(ELEMENTS) - {torch.int8}:
        assert spec_of(make(dtype=dtype)).accumulator == tl.float32
    fp8 = make(dtype=torch.float8_e4m3fn)
    assert spec_of(fp8).num_coarse == 32
    exact = dataclasses.replace(fp8, out=torch.zeros(8, 32))
    assert spec_of(exact).num_coarse == 0
    before = torch.get_float32_matmul_precision()
    try:
        for setting, precision in (("highest", "ieee"), ("high", "tf32")):
            torch.set_float32_matmul_precision(setting)
            assert spec_of(make(dtype=torch.float32)).precision == precision
            assert spec_of(make(dtype=torch.bfloat16)).precision == "ieee"
    finally:
        torch.set_float32_matmul_precision(before)
