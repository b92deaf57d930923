"""Compile cases of the GEMM: every role as ``tune.lookup`` would have it run on each architecture.

A case names its ``GemmSpec`` as ``tileflux.testing.gemm_cases:SPECS.<name>``: the compiling process makes its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace

import torch

from tileflux.config import GemmConfig, GemmProblem
from tileflux.kernels.gemm_launch import MAX_REGISTERS
from tileflux.kernels.gemm_shared import Launch
from tileflux.kernels.groups import Groups
from tileflux.kernels.operands import ELEMENTS, GemmSpec, Operands, Role, make_spec
from tileflux.kernels.roles import (
    ARRIVING,
    ARRIVING_GROUPED,
    COMBINE,
    COMBINE_SEND,
    COMBINE_STAGE,
    GATHER,
    GATHER_GROUPED,
    GATHERED,
    GATHERED_GROUPED,
    PLAIN,
    SCATTER,
    SEND,
    SPREAD,
    STAGE,
)
from tileflux.ops._moe import tiles_for
from tileflux.testing.compile_gate import ARCHITECTURES, CompileCase, Imported
from tileflux.testing.compiling import Variant, shipped_variants
from tileflux.tune.lookup import HEAVY, lookup

__all__ = ["GEMM_CASES", "SPECS", "identifier", "keep", "name_of", "of_variants"]

SPECS = SimpleNamespace()
"""The specs of all cases, by name."""

_WORLD = 8
_COLUMNS = 4096
_SMS = {80: 108, 89: 142, 90: 132, 100: 148}
_POLICIES = "tileflux.lang.policy"
_ORDERS = "tileflux.lang.schedule"
_PLAIN_ENDS = (PLAIN, GATHERED, GATHERED_GROUPED)
"""Roles that wait for nobody and, as compiled here, tell nobody."""
_STAGING = (STAGE, SEND, COMBINE_STAGE, COMBINE_SEND)
"""Roles whose call ends with another launch."""


def _config(
    role: Role, dtype: torch.dtype, arch: int, shape: tuple[int, int], activation: str | None, block_m: int, link: str
) -> GemmConfig:
    op = role.name.split(",")[0]
    world_size = 1 if role is PLAIN else _WORLD
    kind, heavy = str(dtype).removeprefix("torch."), activation in HEAVY
    problem = GemmProblem(op, *shape, 4096, world_size, kind, heavy, arch, _SMS[arch], link)
    config = lookup(problem).config
    return tiles_for(config, "", block_m, problem) if block_m else config


def _operands(dtype: torch.dtype, depth: int, activation: str | None, grouped: str, block_m: int) -> Operands:
    """``grouped``: of two experts, whose rows are ``sorted`` or ``picked``."""
    quantised = dtype.itemsize == 1
    out_dtype = torch.bfloat16 if quantised else dtype
    x, weight, groups = torch.zeros(256, depth, dtype=dtype), torch.zeros(512, depth, dtype=dtype), None
    if grouped:
        groups = Groups(torch.zeros(4, dtype=torch.int32), 2, block_m, 8, picks_rows=grouped == "picked")
    num_columns = (512 if groups is None else 256) // (2 if activation == "swiglu" else 1)
    scale_x, scale_weight = (torch.ones(256), torch.ones(512)) if quantised else (None, None)
    return Operands(
        x, weight, torch.zeros(256, num_columns, dtype=out_dtype), torch.zeros(512, dtype=out_dtype),
        scale_x, scale_weight, activation, groups=groups,
    )  # fmt: skip


def _make(name: str, operands: Operands, how: Launch, arch: int) -> CompileCase:
    """The case of a launch, whose spec is put where the compiling process finds it."""
    role, config = how.role, how.config
    spec = make_spec(
        operands, role, config,
        world_size=how.world_size, num_feeders=how.num_feeders, releases=how.releases, use_tma=how.use_tma,
        fetches=how.fetches, records=how.records,
    )  # fmt: skip
    keep(SPECS, name, spec)
    waits = role is not PLAIN
    wide = ("a", "b", "out", "bias", "scale_a", "scale_b", "stride_a", "stride_b", "trace", "rows")
    signature = dict.fromkeys(wide, "i64") | dict.fromkeys("NK", "i32") | {"table_ptr": "*i64"}
    constexprs: dict[str, object] = {
        "ORDER": Imported(f"{_ORDERS}:{role.order.fn.__name__}"),
        "WAIT": Imported(f"{_POLICIES}:{role.wait.fn.__name__}"),
        "FINISH": Imported(f"{role.finish.fn.__module__}:{role.finish.fn.__name__}"),
        "SPEC": Imported(f"tileflux.testing.gemm_cases:SPECS.{name}"),
    }
    kind = str(ELEMENTS[operands.x.dtype])
    kind = {"int8": "i8"}.get(kind, kind)
    descriptors = {
        "a_desc": (config.block_m, True), "rows_desc": (config.block_m, role.gathers), "b_desc": (config.block_n, True)
    }  # fmt: skip
    for argument, (rows, used) in descriptors.items():
        if how.use_tma and used:
            signature[argument] = f"tensordesc<{kind}[{rows},{config.block_k}]>"
        else:
            constexprs[argument] = None
    return CompileCase(
        name=f"gemm {name}",
        kernel="tileflux.kernels.gemm:_gemm_kernel",
        signature=signature,
        constexprs=constexprs,
        divisible_by_16=(),
        options={"num_warps": config.num_warps, "num_stages": config.num_stages, "maxnreg": MAX_REGISTERS},
        architectures=(arch,),
        waits=waits and role not in (*_PLAIN_ENDS, SEND, STAGE),
        signals=waits and role not in (*_PLAIN_ENDS, STAGE),
        counts=role is STAGE or role.combines,
    )


def _case(
    role: Role,
    dtype: torch.dtype,
    arch: int,
    *,
    m: int = 8192,
    n: int = _COLUMNS,
    tma: bool = True,
    activation: str | None = None,
    fetches: bool = False,
    records: bool = False,
    grouped: str = "",
    block_m: int = 0,
    link: str = "",
) -> CompileCase:
    """``block_m``: of grouped rows, the height of tiles that they are cut into."""
    use_tma = tma and arch >= 90
    config = _config(role, dtype, arch, (m, n), activation, block_m, link)
    kinds = f"{ELEMENTS[dtype]}_{m}_{activation}_{use_tma}_sm{arch}{'_fetched' * fetches}{'_recorded' * records}"
    if n != _COLUMNS:
        kinds += f"_{n}_columns{'_' * bool(link)}{link}"
    if grouped:
        kinds += f"_{grouped}_{config.block_m}"
    depth = 2 * config.block_k if use_tma else 2 * config.block_k + 16
    operands = _operands(dtype, depth, activation, grouped, config.block_m)
    how = Launch(
        role, config, num_rows=256, num_feeders=config.num_feeders if role.feeds else 0, num_programs=_SMS[arch],
        world_size=1 if role is PLAIN else _WORLD, releases=role not in (*_PLAIN_ENDS, *_STAGING),
        use_tma=use_tma, fetches=fetches, records=records, trace=None,
    )  # fmt: skip
    return _make(f"{identifier(role)}_{kinds}", operands, how, arch)


def keep(specs: SimpleNamespace, name: str, spec: GemmSpec) -> None:
    """Put it there by its name, which cases that are compiled otherwise must not share."""
    if getattr(specs, name, spec) != spec:
        raise ValueError(f"{name} should name one spec, not both {getattr(specs, name)} and {spec}")
    setattr(specs, name, spec)


def identifier(role: Role) -> str:
    """Its name, as part of a Python name."""
    return role.name.replace(", ", "_").replace(" ", "_")


def of_variants(found: Sequence[Variant]) -> list[CompileCase]:
    """Those that Triton's loop runs, each once that is compiled alike; the others are cases of ``hopper_cases.py``."""
    cases: dict[str, CompileCase] = {}
    for variant in found:
        if not variant.is_for_hopper():
            how, operands = variant.plan(), variant.operands()
            name = f"shipped_{name_of(how, operands)}_sm{variant.arch}"
            cases[name] = _make(name, operands, how, variant.arch)
    return list(cases.values())


def name_of(how: Launch, operands: Operands) -> str:
    """Of a launch, what it is compiled for, as part of a Python name."""
    config = how.config
    tile = f"{config.block_m}x{config.block_n}x{config.block_k}_{config.num_warps}_warps_{config.num_stages}_stages"
    order = f"group_{config.group_m}"
    if how.world_size > 1 and how.role.is_sharded:
        order += f"_span_{config.span}_{str(config.alone).replace('-', 'minus')}"
    ranks = f"{how.world_size}_ranks" + f"_{how.num_feeders}_feeders" * bool(how.num_feeders)
    switches = "_fetched" * how.fetches + "_without_tma" * (not how.use_tma)
    return f"{identifier(how.role)}_{ELEMENTS[operands.x.dtype]}_{tile}_{order}_{ranks}{switches}"


def _all_cases() -> tuple[CompileCase, ...]:
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    cases = [_case(role, bf16, arch) for role in (PLAIN, GATHER, SCATTER) for arch in ARCHITECTURES]
    cases += [_case(SPREAD, bf16, arch, m=32) for arch in ARCHITECTURES]
    cases += [_case(role, fp8, arch) for role in (GATHER, SCATTER) for arch in (89, 90, 100)]
    cases += [_case(GATHER, torch.int8, arch) for arch in (80, 90)]
    cases += [_case(role, torch.float32, 90) for role in (PLAIN, GATHER, SCATTER)]
    cases += [_case(role, torch.float32, 80) for role in (PLAIN,)]
    cases += [_case(role, bf16, 90, activation="swiglu") for role in (PLAIN, GATHER)]
    cases += [_case(PLAIN, bf16, 80, activation="swiglu"), _case(PLAIN, bf16, 90, activation="gelu")]
    cases += [_case(role, bf16, 90, tma=False) for role in (PLAIN, GATHER, SCATTER)]
    cases += [_case(GATHERED, bf16, 90), _case(PLAIN, bf16, 90, m=16), _case(PLAIN, bf16, 90, m=64)]
    cases += [_case(role, bf16, arch) for role in (ARRIVING, SEND, STAGE) for arch in ARCHITECTURES]
    cases += [_case(role, bf16, arch, fetches=True) for role in (GATHER, SCATTER) for arch in ARCHITECTURES]
    cases += [_case(SPREAD, bf16, 90, m=32, fetches=True), _case(GATHERED, bf16, 90, fetches=True)]
    cases += [_case(SEND, bf16, 90, fetches=True)]
    cases += [_case(role, bf16, 90, tma=False, fetches=True) for role in (GATHER, SCATTER)]
    cases += [_case(role, bf16, 90, records=True) for role in (PLAIN, GATHER, SCATTER)]
    cases += [_case(SCATTER, bf16, 90, fetches=True, records=True)]
    return (*cases, *_other_tiles(), *_grouped_cases(), *of_variants(shipped_variants()))


def _other_tiles() -> list[CompileCase]:
    """Tiles that the rule takes beside those of the cases above: of few rows, and smaller for heavy activations."""
    bf16, fp8, fp32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
    cases = [_case(SPREAD, dtype, arch, m=16) for dtype in (bf16, fp32) for arch in ARCHITECTURES]
    cases += [_case(SPREAD, fp8, arch, m=16) for arch in (89, 90, 100)]
    cases += [_case(PLAIN, fp8, arch, m=64) for arch in (89, 90, 100)] + [_case(PLAIN, bf16, 100, m=64)]
    cases += [_case(PLAIN, fp32, arch) for arch in (89, 100)] + [_case(PLAIN, bf16, 89, activation="swiglu")]
    cases += [_case(PLAIN, bf16, arch, m=m, activation="gelu") for m in (16, 64) for arch in (90, 100)]
    cases += [_case(PLAIN, bf16, 100, activation="gelu"), _case(GATHER, bf16, 100, n=1024)]
    cases += [_case(SPREAD, dtype, arch, m=16, n=32768) for dtype in (bf16, fp8) for arch in (90, 100)]
    cases += [_case(ARRIVING, bf16, arch, m=128 * _WORLD, n=7168, link="PCIe") for arch in (90, 100)]
    return cases


def _grouped_cases() -> list[CompileCase]:
    bf16, archs = torch.bfloat16, (80, 90, 100)
    gathering = (GATHER_GROUPED, ARRIVING_GROUPED, GATHERED_GROUPED)
    cases = [_case(role, bf16, arch, grouped="picked", block_m=128) for role in gathering for arch in archs]
    cases += [_case(PLAIN, bf16, arch, grouped=how) for how in ("picked", "sorted") for arch in archs]
    gather = functools.partial(_case, GATHER_GROUPED, arch=90, grouped="picked")
    cases += [gather(bf16, block_m=16), gather(torch.float8_e4m3fn, block_m=128)]
    cases += [gather(bf16, block_m=128, activation="swiglu"), gather(bf16, block_m=128, fetches=True)]
    combine = functools.partial(_case, COMBINE, grouped="sorted")
    cases += [combine(bf16, arch, block_m=128) for arch in archs]
    cases += [combine(torch.float8_e4m3fn, 90, block_m=128), combine(bf16, 90, block_m=16)]
    cases += [combine(bf16, 90, block_m=128, fetches=True)]
    send = functools.partial(_case, COMBINE_SEND, grouped="sorted")
    cases += [send(bf16, 90, block_m=128), send(bf16, 90, block_m=128, fetches=True)]
    stage = functools.partial(_case, COMBINE_STAGE, grouped="sorted")
    cases += [stage(bf16, arch, block_m=128) for arch in archs]
    cases += [stage(torch.float8_e4m3fn, 90, block_m=128), stage(bf16, 90, block_m=16)]
    return cases


GEMM_CASES: tuple[CompileCase, ...] = _all_cases()
"""Roles, element types and ways to load, each where it differs."""
