"""Every kernel of the library passes the compile gate, none is left out, and none takes more of a chip than it did.

What each compilation takes is in ``compiled.json``: registers, spilled bytes a thread, bytes of shared memory. Spills
and shared memory must be as recorded; registers may become fewer. A change that is meant, a new case, or another Triton
is recorded with

    python -m tileflux.testing.compile_cases --record tests/testing/compiled.json

Among the cases are all that the shipped entries (``tune/configs``) launch of our GEMM, fused and alone, each once that
is compiled alike. Of what the rule of ``tune/lookup.py`` takes for the layers in ``testing/shapes.py`` there is every
role on every architecture, and every tile, with its warps and stages, in one role; with Hopper's loop in all.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from tileflux.config import GemmConfig, GemmProblem
from tileflux.errors import CompileGateError
from tileflux.kernels import roles
from tileflux.kernels.operands import ELEMENTS, Role
from tileflux.testing import compile_cases, gemm_cases, hopper_cases
from tileflux.testing._compile_child import resolve
from tileflux.testing.compile_cases import CASES, changes, main, record
from tileflux.testing.compile_gate import (
    ARCHITECTURES,
    SHARED_MEMORY_BYTES,
    CompileCase,
    CompileReport,
    Imported,
    gate_library,
)
from tileflux.testing.compiling import Variant, variants
from tileflux.testing.shapes import MODEL_SHAPES
from tileflux.tune.lookup import rule
from tileflux.tune.search import Candidate
from tileflux.tune.store import Entry, load_shipped

KERNELS = Path(__file__).parents[2] / "tileflux" / "kernels"
RECORDED = json.loads(Path(__file__).with_name("compiled.json").read_text())
SHARED_MEMORY_KIB = {80: 163, 89: 99, 90: 227, 100: 227}
SMS = {80: 108, 89: 142, 90: 132, 100: 148}


def test_every_kernel_has_a_case() -> None:
    found = set()
    for file in KERNELS.glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found.add(f"tileflux.kernels.{file.stem}:{node.name}")
    assert found and found == {case.kernel for case in CASES}


def test_every_kernel_compiles_for_every_architecture_into_what_is_recorded() -> None:
    """One test, since all of them are compiled once."""
    reports = gate_library()
    assert len(reports) == sum(len(case.architectures) for case in CASES)
    assert {report.arch for report in reports} == set(ARCHITECTURES)
    assert all(report.registers and report.stack_bytes == 0 for report in reports)
    found = changes(reports, RECORDED)
    assert not found, "\n".join(["", *found])


def test_what_is_recorded_fits_the_chips() -> None:
    assert {arch: SHARED_MEMORY_BYTES[arch] for arch in ARCHITECTURES} == {
        arch: 1024 * size for arch, size in SHARED_MEMORY_KIB.items()
    }
    assert set(RECORDED["compilations"]) == {f"{case.name} sm_{arch}" for case in CASES for arch in case.architectures}
    for name, figures in RECORDED["compilations"].items():
        arch = int(name.rpartition("sm_")[2])
        assert figures["shared_bytes"] <= 1024 * SHARED_MEMORY_KIB[arch], name
        assert 0 < figures["registers"] <= 255 and figures["spilled_bytes"] == 0, name


def make_report(**figures: Any) -> CompileReport:
    made = CompileReport("some kernel", 90, (), registers=128, stack_bytes=8, shared_bytes=4096)
    return dataclasses.replace(made, **figures)


def recorded(*reports: CompileReport, folder: Path) -> dict[str, Any]:
    record(reports, folder / "compiled.json")
    found: dict[str, Any] = json.loads((folder / "compiled.json").read_text())
    return found


@pytest.mark.parametrize(
    ("figures", "wanted"),
    [
        ({}, None),
        ({"registers": 127}, None),
        ({"registers": 129}, "some kernel sm_90: registers 129, recorded 128"),
        ({"stack_bytes": 16}, "some kernel sm_90: spilled_bytes 16, recorded 8"),
        ({"stack_bytes": 0}, "some kernel sm_90: spilled_bytes 0, recorded 8"),
        ({"shared_bytes": 4097}, "some kernel sm_90: shared_bytes 4097, recorded 4096"),
        ({"shared_bytes": 0}, "some kernel sm_90: shared_bytes 0, recorded 4096"),
    ],
)
def test_a_change_is_told_with_the_way_to_record_it(figures: Any, wanted: str | None, tmp_path: Path) -> None:
    before, now = recorded(make_report(), folder=tmp_path), make_report(**figures)
    found = changes([now], before)
    assert found[:-1] == ([] if wanted is None else [wanted])
    assert not found or "python -m tileflux.testing.compile_cases --record tests/testing/compiled.json" in found[-1]
    assert changes([now], recorded(now, folder=tmp_path)) == []


def test_what_is_new_or_gone_is_a_change(tmp_path: Path) -> None:
    one, other = make_report(), make_report(arch=80)
    before = recorded(one, folder=tmp_path)
    assert changes([one, other], before)[:-1] == ["some kernel sm_80 is not recorded"]
    assert changes([other], before)[:-1] == [
        "some kernel sm_80 is not recorded",
        "some kernel sm_90 is recorded, and there is no such case",
    ]


def test_another_triton_has_figures_of_its_own(tmp_path: Path) -> None:
    before = recorded(make_report(), folder=tmp_path)
    found = changes([make_report()], {**before, "triton": "2.0"})
    assert found[:-1] == [f"recorded with Triton 2.0, and this is Triton {triton.__version__}"]


def test_only_what_passes_the_gate_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, reports = tmp_path / "new.json", [make_report(problems=("spills",))]
    monkeypatch.setattr(compile_cases, "run_gate", lambda cases: reports if cases is CASES else [])
    with pytest.raises(CompileGateError, match="some kernel sm_90: spills"):
        main(["--record", str(file)])
    assert not file.exists()
    reports[:] = [make_report(), make_report(case="another")]
    main(["--record", str(file)])
    assert changes(reports, json.loads(file.read_text())) == [] and "2 compilations" in capsys.readouterr().out


def policies(role: Role) -> tuple[str, str, str]:
    order, wait, finish = (policy.fn.__name__ for policy in (role.order, role.wait, role.finish))
    return order, wait, finish


@functools.cache
def compiled() -> tuple[tuple[CompileCase, Any, tuple[str, str, str]], ...]:
    """Of every case of the two GEMM loops: the case, its spec, and the names of its policies."""
    found = []
    for case in CASES:
        spec = case.constexprs.get("SPEC")
        if isinstance(spec, Imported):
            given = [case.constexprs[name] for name in ("ORDER", "WAIT", "FINISH")]
            order, wait, finish = (str(getattr(each, "path", "")).rpartition(":")[2] for each in given)
            found.append((case, resolve(spec.path), (order, wait, finish)))
    return tuple(found)


def fused_role(entry: Entry) -> Role:
    """What ``kernels/dense.py`` and ``scatter.py`` launch: copies take no SM where each rank has a GPU of its own."""
    shares, op = entry.problem.link == "same GPU", entry.problem.op
    if op == "gemm":
        return roles.PLAIN
    if entry.algorithm == "one_shot":
        return roles.SPREAD
    if op == "ag_gemm":
        return roles.GATHER if shares else roles.ARRIVING
    by_sms = roles.SEND if entry.config.sums_apart else roles.SCATTER
    return by_sms if shares else roles.STAGE


def is_launched(case: CompileCase, spec: Any, entry: Entry, role: Role) -> bool:
    """Whether the case is what ``role`` launches with the entry's configuration."""
    config, problem, is_alone = entry.config, entry.problem, role is roles.PLAIN
    is_banded, shares = role.is_sharded and not is_alone, problem.link == "same GPU" and not is_alone
    wanted = (
        (problem.arch, ELEMENTS[getattr(torch, problem.dtype)], config.num_warps),
        (*tiles(config), config.group_m),
        (config.span, config.alone) if is_banded else (1, 0),
        1 if is_alone else problem.world_size,
        min(config.num_feeders, problem.num_sms // 2) if role.feeds else 0,
        shares and (config.fetches or role.num_turns > 1),
    )
    found = (
        (case.architectures[0], spec.a_type, case.options["num_warps"]),
        (spec.block_m, spec.block_n, spec.block_k, spec.group_m),
        (spec.span, spec.alone),
        spec.world_size,
        spec.num_feeders,
        spec.fetches,
    )
    return wanted == found and (spec.is_hopper or case.options["num_stages"] == config.num_stages)


def test_every_shipped_entry_is_compiled_fused_and_alone() -> None:
    shipped = [each for each in compiled() if "shipped" in each[0].name]
    launched = [(entry, role) for entry in load_shipped() for role in (fused_role(entry), roles.PLAIN)]
    assert {role for _, role in launched} >= {roles.PLAIN, roles.GATHER, roles.SEND, roles.SPREAD}
    used = set()
    for entry, role in launched:
        found = [
            case.name
            for case, spec, names in shipped
            if names == policies(role) and is_launched(case, spec, entry, role)
        ]
        assert len(found) == 1, (entry, found)
        used.update(found)
    assert used == {case.name for case, *_ in shipped}, "compiled, and not shipped"


def rule_problems() -> Iterator[GemmProblem]:
    """The layers of known models, as ranks have them."""
    shapes = dict.fromkeys(itertools.chain.from_iterable(MODEL_SHAPES.values()))
    kinds = itertools.product(ARCHITECTURES, ("bfloat16", "float8_e4m3fn", "float32"), (False, True))
    for (arch, dtype, is_heavy), shape in itertools.product(kinds, shapes):
        if arch == 80 and dtype == "float8_e4m3fn":
            continue
        for op in shape.ops:
            for world_size, link in itertools.product((2, 4, 8), ("NVLink", "PCIe", "same GPU")):
                n, k = (shape.n // world_size, shape.k) if op == "ag_gemm" else (shape.n, shape.k // world_size)
                num_sms = SMS[arch] // (world_size if link == "same GPU" else 1)
                alone = (1, "", SMS[arch]) if op == "gemm" else (world_size, link, num_sms)
                yield GemmProblem(op, shape.m, n, k, alone[0], dtype, is_heavy, arch, alone[2], alone[1])


@functools.cache
def rule_variants() -> tuple[Variant, ...]:
    """What the rule has launched, the product alone included, each tile and role once."""
    found: dict[object, Variant] = {}
    for problem in dict.fromkeys(rule_problems()):
        choice = rule(problem)
        shares = SimpleNamespace(copies_need_sms=problem.link == "same GPU")
        group: Any = SimpleNamespace(stream=None, traits=shares)
        for variant in variants(problem, [Candidate("fused", choice.algorithm, choice.config)], group):
            found.setdefault((variant.role, variant.arch, tile(variant), variant.config.hopper), variant)
    return tuple(found.values())


def tile(variant: Variant) -> tuple[object, ...]:
    config, element = variant.config, ELEMENTS[variant.operands().x.dtype]
    return variant.arch, str(element), *tiles(config), config.num_warps, config.num_stages


def tiles(config: GemmConfig) -> tuple[int, int, int]:
    return config.block_m, config.block_n, config.block_k


def test_every_tile_that_the_rule_takes_is_compiled() -> None:
    have = {
        (case.architectures[0], str(spec.a_type), spec.block_m, spec.block_n, spec.block_k, *case.options.values())[:7]
        for case, spec, _ in compiled()
        if not spec.is_hopper
    }
    wanted = {tile(variant) for variant in rule_variants()}
    assert len(wanted) > 30
    missing = sorted(wanted - have, key=str)
    assert not missing, f"gemm_cases.py should have a case with (arch, type, M, N, K, warps, stages) of {missing}"


def test_every_role_that_the_rule_takes_is_compiled_on_every_architecture() -> None:
    have = {(case.architectures[0], names, spec.num_feeders > 0) for case, spec, names in compiled()}
    wanted = {
        (variant.role, variant.arch, (variant.arch, policies(role), role.feeds))
        for variant in rule_variants()
        for role in [getattr(roles, variant.role)]
    }
    assert {name for name, *_ in wanted} == {"PLAIN", "GATHER", "ARRIVING", "SEND", "STAGE", "SPREAD"}
    missing = sorted((name, arch) for name, arch, key in wanted if key not in have)
    assert not missing, f"gemm_cases.py should have cases of {missing}"


def test_whatever_the_rule_gives_hoppers_loop_is_compiled() -> None:
    have = {
        (names, spec.num_feeders > 0, spec.block_m, spec.block_n) for _, spec, names in compiled() if spec.is_hopper
    }
    chosen = [variant for variant in rule_variants() if variant.config.hopper and variant.is_for_hopper()]
    assert {variant.role for variant in chosen} == {"PLAIN", "ARRIVING", "STAGE", "SPREAD"}
    missing = [
        (variant.role, tiles(variant.config))
        for variant in chosen
        for role in [getattr(roles, variant.role)]
        if (policies(role), role.feeds, *tiles(variant.config)[:2]) not in have
    ]
    assert not missing, f"hopper_cases.py should have cases of {missing}"


ON_HOPPER = Variant("STAGE", "bfloat16", GemmConfig(128, 256, 64, hopper=True), 2048, 1024, 4, 0, 90, False)


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        (dataclasses.replace(ON_HOPPER, rows=(128,) * 4), "hopper shipped_gemm_rs_sent_by_copies_.*_by_tma"),
        (dataclasses.replace(ON_HOPPER, rows=(129,) * 4), "hopper shipped_gemm_rs_sent_by_copies_.*_4_ranks"),
        (dataclasses.replace(ON_HOPPER, depth=1025), "gemm shipped_.*_without_tma_sm90"),
        (dataclasses.replace(ON_HOPPER, arch=100), "gemm shipped_.*_4_ranks_sm100"),
    ],
)
def test_an_entry_is_a_case_of_the_loop_that_runs_it(variant: Variant, name: str) -> None:
    (case,) = [*gemm_cases.of_variants([variant, variant]), *hopper_cases.of_variants([variant, variant])]
    assert re.fullmatch(name, case.name), case.name


def test_a_name_stands_for_one_spec() -> None:
    specs, spec = SimpleNamespace(), compiled()[0][1]
    gemm_cases.keep(specs, "name", spec)
    gemm_cases.keep(specs, "name", spec)
    with pytest.raises(ValueError, match="name should name one spec, not both GemmSpec"):
        gemm_cases.keep(specs, "name", dataclasses.replace(spec, block_m=2 * spec.block_m))
