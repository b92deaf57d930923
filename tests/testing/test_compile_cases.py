"""Every kernel of the library passes the compile gate, and none is left out."""

from __future__ import annotations

import ast
from pathlib import Path

from tileflux.testing.compile_cases import CASES
from tileflux.testing.compile_gate import ARCHITECTURES, gate_library

KERNELS = Path(__file__).parents[2] / "tileflux" / "kernels"


def test_every_kernel_has_a_case() -> None:
    found = set()
    for file in KERNELS.glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found.add(f"tileflux.kernels.{file.stem}:{node.name}")
    assert found and found == {case.kernel for case in CASES}


def test_every_kernel_compiles_for_every_architecture() -> None:
    reports = gate_library()
    assert len(reports) == sum(len(case.architectures) for case in CASES)
    assert {report.arch for report in reports} == set(ARCHITECTURES)
    assert all(report.registers and report.stack_bytes == 0 for report in reports)
