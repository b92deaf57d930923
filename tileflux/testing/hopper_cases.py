"""Compile cases of Hopper's loop: every role that it takes, and every tile that is worth having there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from triton.experimental.gluon import language as gl

from tileflux.config import GemmConfig
from tileflux.kernels.gemm_hopper_launch import make_hopper_spec, why_not_hopper
from tileflux.kernels.gemm_shared import Launch
from tileflux.kernels.groups import Groups
from tileflux.kernels.operands import ELEMENTS, Operands, Role
from tileflux.kernels.roles import ARRIVING, GATHER, GATHERED, PLAIN, SCATTER, SEND, SPREAD, STAGE
from tileflux.kernels.turns import Turn
from tileflux.testing.compile_gate import CompileCase, Imported
from tileflux.testing.compiling import Variant, shipped_variants
from tileflux.testing.gemm_cases import identifier, keep, name_of

__all__ = ["HOPPER_CASES", "SPECS", "TILES", "hopper_config", "of_variants"]

SPECS = SimpleNamespace()
"""The specs of all cases, by name."""

TILES = ((128, 256), (256, 128), (128, 128), (64, 256), (64, 128), (128, 64))
"""Rows and columns; the first two keep WGMMA busiest, the others are for what would leave SMs idle."""

_WORLD = 8
_POLICIES = "tileflux.lang.policy"


def hopper_config(block_m: int, block_n: int, dtype: torch.dtype = torch.bfloat16) -> GemmConfig:
    """Tiles of that size, as Hopper's loop takes them."""
    return GemmConfig(
        block_m,
        block_n,
        128 // dtype.itemsize,
        group_m=16,
        num_warps=4 if block_m == 64 else 8,
        hopper=True,
    )


def _operands(
    dtype: torch.dtype, config: GemmConfig, out_dtype: torch.dtype, activation: str | None, options: str
) -> Operands:
    x, weight = torch.zeros(512, 256, dtype=dtype), torch.zeros(512, 256, dtype=dtype)
    if "kn" in options:
        weight = torch.zeros(256, 512, dtype=dtype).t()
    groups = None
    if "grouped" in options:
        groups = Groups(torch.zeros(4, dtype=torch.int32), 2, config.block_m, 8, picks_rows=False)
        if "kn" in options:
            weight = torch.zeros(2 * 256, 512, dtype=dtype).t()
    out = torch.zeros(512, 256 if groups is not None and "kn" not in options else 512, dtype=out_dtype)
    scale_x = torch.ones(512) if "scaled by row" in options else torch.ones(())
    scales = (scale_x, torch.ones(512)) if dtype.itemsize == 1 else (None, None)
    bias = torch.zeros(512, dtype=torch.bfloat16) if activation or "bias" in options else None
    return Operands(x, weight, out, bias, scales[0], scales[1], activation, groups=groups)


def _make(name: str, operands: Operands, how: Launch, turn: Turn | None = None) -> CompileCase:
    """The case of a launch, whose spec is put where the compiling process finds it."""
    role, config, dtype, out = how.role, how.config, operands.x.dtype, operands.out.dtype
    if (reason := why_not_hopper(operands, role, config)) is not None:
        raise ValueError(f"Hopper's loop does not take {role.name}: {reason}")
    spec = make_hopper_spec(operands, how, turn)
    keep(SPECS, name, spec)
    wide = ("a", "out", "bias", "scale_a", "scale_b", "trace", "rows")
    signature = dict.fromkeys(wide, "i64") | dict.fromkeys(("N", "K"), "i32")
    signature |= {"table_ptr": "*i64"}
    constexprs: dict[str, object] = {
        "ORDER": Imported(f"tileflux.lang.schedule:{role.order.fn.__name__}"),
        "WAIT": Imported(f"{_POLICIES}:{role.wait.fn.__name__}"),
        "FINISH": Imported(f"{role.finish.fn.__module__}:{role.finish.fn.__name__}"),
        "SPEC": Imported(f"tileflux.testing.hopper_cases:SPECS.{name}"),
    }
    a_block = [config.block_m, config.block_k]
    b_block = [config.block_n, config.block_k] if spec.k_major else [config.block_k, config.block_n]
    descriptors = {
        "a_desc": (a_block, dtype, True),
        "rows_desc": (a_block, dtype, role.gathers),
        "b_desc": (b_block, dtype, True),
        "out_desc": ([config.block_m, 64], out, spec.out_by_tma),
        "own_desc": ([config.block_m, 64], out, spec.settles),
    }
    for argument, (block, kind, used) in descriptors.items():
        if used:
            layout = gl.NVMMASharedLayout.get_default_for(block, ELEMENTS[kind])
            signature[argument] = f"tensordesc<{ELEMENTS[kind]}{block},{layout!r}>"
        else:
            constexprs[argument] = None
    return CompileCase(
        name=f"hopper {name}",
        kernel="tileflux.kernels.gemm_hopper:_gemm_hopper_kernel",
        signature=signature,
        constexprs=constexprs,
        divisible_by_16=(),
        options={"num_warps": spec.num_warps},
        architectures=(90,),
        waits=role not in (PLAIN, GATHERED, SEND, STAGE),
        signals=role not in (PLAIN, GATHERED, STAGE),
        counts=role is STAGE,
        announces_tma=spec.settles,
    )


def _case(
    role: Role,
    tile: tuple[int, int] = (128, 256),
    dtype: torch.dtype = torch.bfloat16,
    *,
    out: torch.dtype = torch.bfloat16,
    activation: str | None = None,
    options: str = "",
) -> CompileCase:
    config = hopper_config(*tile, dtype)
    if "together" in options:
        config = dataclasses.replace(config, span=2, alone=-1)
    how = Launch(
        role, config, num_rows=512, num_feeders=2 if role.feeds else 0, num_programs=132, fetches=False,
        world_size=1 if role is PLAIN else _WORLD, releases=role not in (PLAIN, GATHERED, SEND, STAGE), use_tma=True,
        records="recorded" in options, trace=None,
    )  # fmt: skip
    kinds = f"{tile[0]}x{tile[1]}_{ELEMENTS[dtype]}_{ELEMENTS[out]}_{activation}_{options.replace(' ', '_')}"
    operands = _operands(dtype, config, out, activation, options)
    return _make(f"{identifier(role)}_{kinds}", operands, how)


def of_variants(found: Sequence[Variant]) -> list[CompileCase]:
    """Those that Hopper's loop runs, each once that is compiled alike; the others are cases of ``gemm_cases.py``."""
    cases: dict[str, CompileCase] = {}
    for variant in found:
        if variant.is_for_hopper():
            how, operands, turn = variant.plan(), variant.operands(), variant.turn()
            by_tma = make_hopper_spec(operands, how, turn).out_by_tma
            name = f"shipped_{name_of(how, operands)}{'_by_tma' * by_tma}"
            cases[name] = _make(name, operands, how, turn)
    return list(cases.values())


def _all_cases() -> tuple[CompileCase, ...]:
    fp8, fp32 = torch.float8_e4m3fn, torch.float32
    cases = [_case(PLAIN, tile) for tile in TILES]
    cases += [_case(role, tile) for role in (ARRIVING, SEND, STAGE) for tile in ((128, 256), (64, 128))]
    cases += [_case(PLAIN, options=each) for each in ("kn", "recorded", "bias")]
    cases += [_case(role, options="recorded") for role in (ARRIVING, STAGE)]
    cases += [_case(ARRIVING, options="together")]
    cases += [_case(role, tile) for role in (GATHER, SCATTER) for tile in ((128, 256), (64, 128))]
    cases += [_case(SPREAD, tile) for tile in ((64, 128), (64, 64))]
    cases += [_case(SPREAD, (64, 128), options="recorded")]
    cases += [_case(GATHERED), _case(PLAIN, out=fp32), _case(PLAIN, dtype=torch.float16, out=torch.float16)]
    cases += [_case(PLAIN, activation=each) for each in ("relu", "gelu", "silu")]
    cases += [_case(role, (128, 128), fp8) for role in (PLAIN, STAGE)]
    cases += [_case(role, (128, 128), fp8, options="scaled by row") for role in (PLAIN, GATHER, ARRIVING, GATHERED)]
    cases += [_case(ARRIVING, (128, 128), activation="gelu")]
    cases += [_case(PLAIN, options=each) for each in ("grouped", "grouped kn")]
    cases += [_case(PLAIN, (128, 128), activation="gelu", options="grouped")]
    # Smaller tiles, which the rule takes where they come out more evenly, and one-shot sums of many rows.
    cases += [_case(role, (128, 128)) for role in (ARRIVING, STAGE, SPREAD)] + [_case(SPREAD)]
    return (*cases, *of_variants(shipped_variants()))


HOPPER_CASES: tuple[CompileCase, ...] = _all_cases()
