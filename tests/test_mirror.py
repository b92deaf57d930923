"""The shape of the tree: a test beside every module, a page for every op, and files that stay small."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

TESTED_ELSEWHERE: dict[str, str] = {
    "kernels/host_policies.py": "what gemm_host.py does with each tile: test_gemm_host.py, and every test of tests/ops",
    "kernels/rows_host.py": "test_ep_dispatch.py, test_ep_combine.py of tests/ops; test_spread.py against the kernel",
    "kernels/reduce_host.py": "every test of tests/ops over CPU ranks, and test_copy.py against the kernel",
    "lang/exchange.py": "both kernels are made of it: test_copy.py and test_reduce.py of tests/kernels",
    "lang/tiles.py": "both main loops are made of it: test_gemm.py of tests/kernels, and the compile cases of Hopper's",
    "symm/base.py": "abstract; its data classes are in test_host_copy.py and test_workspace.py",
    "testing/gemm_cases.py": "part of the cases that test_compile_cases.py of tests/testing compiles and judges",
    "testing/hopper_cases.py": "as gemm_cases.py",
    "testing/index_cases.py": "as gemm_cases.py",
}
"""Modules without a test file of their own: path below ``tileflux/`` to the reason."""

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 130
MAX_KERNEL_PARAMETERS = 20


def modules() -> list[Path]:
    """Modules of the package that should have a test file, relative to it."""
    files = (file.relative_to(ROOT / "tileflux") for file in sorted((ROOT / "tileflux").rglob("*.py")))
    return [file for file in files if not file.name.startswith("_")]


def sources() -> list[Path]:
    """Every Python file of package and tests, relative to the root."""
    return sorted(file.relative_to(ROOT) for top in ("tileflux", "tests") for file in (ROOT / top).rglob("*.py"))


def test_every_module_has_its_test_file() -> None:
    assert Path("errors.py") in modules()
    wanted = {module: Path("tests") / module.with_name(f"test_{module.name}") for module in modules()}
    missing = [str(test) for module, test in wanted.items() if not (ROOT / test).exists()]
    excused = {str(wanted[Path(module)]) for module in TESTED_ELSEWHERE if Path(module) in wanted}
    unexcused, needless = sorted(set(missing) - excused), sorted(excused - set(missing))
    assert not unexcused, f"write these, or give a reason in TESTED_ELSEWHERE: {', '.join(unexcused)}"
    assert not needless, f"these exist, take them out of TESTED_ELSEWHERE: {', '.join(needless)}"
    unknown = sorted(set(TESTED_ELSEWHERE) - {str(module) for module in wanted})
    assert not unknown, f"TESTED_ELSEWHERE names modules that do not exist: {', '.join(unknown)}"


def test_every_op_has_its_page() -> None:
    ops = [module.stem for module in modules() if module.parent == Path("ops")]
    assert "all_gather" in ops
    missing = [f"docs/ops/{stem}.md" for stem in ops if not (ROOT / "docs" / "ops" / f"{stem}.md").exists()]
    assert not missing, f"write {', '.join(missing)}"


def functions(source: str) -> Iterator[tuple[str, int, int, bool, int]]:
    """Name, line, number of lines (without decorators), whether a kernel, number of parameters; of every function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = [ast.unparse(decorator).split("(")[0] for decorator in node.decorator_list]
            is_kernel = any(name.split(".")[-1] == "jit" for name in decorators)
            arguments = node.args
            num_parameters = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
            yield node.name, node.lineno, (node.end_lineno or 0) - node.lineno + 1, is_kernel, num_parameters


def over_budget(path: str, source: str) -> list[str]:
    """What in a file is larger than it may be."""
    num_lines = len(source.splitlines())
    found = [f"{path}: {num_lines} lines, at most {MAX_FILE_LINES}"] if num_lines > MAX_FILE_LINES else []
    for name, line, length, is_kernel, num_parameters in functions(source):
        limit = MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES
        if length > limit:
            found.append(f"{path}:{line}: {name} has {length} lines, at most {limit}")
        if is_kernel and num_parameters > MAX_KERNEL_PARAMETERS:
            found.append(f"{path}:{line}: {name} has {num_parameters} parameters, at most {MAX_KERNEL_PARAMETERS}")
    return found


def test_files_functions_and_kernels_stay_small() -> None:
    found = [problem for file in sources() for problem in over_budget(str(file), (ROOT / file).read_text())]
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize(
    ("source", "num_problems"),
    [
        ("x = 1\n" * 400, 0),
        ("x = 1\n" * 401, 1),
        ("def f():\n" + "    pass\n" * 59, 0),
        ("def f():\n" + "    pass\n" * 60, 1),
        ("class A:\n    async def f(self):\n" + "        pass\n" * 60, 1),
        ("@triton.jit\ndef f():\n" + "    pass\n" * 129, 0),
        ("@gluon.jit(debug=True)\ndef f():\n" + "    pass\n" * 130, 1),
        (f"@triton.jit\ndef f({', '.join(f'x{i}' for i in range(20))}): pass\n", 0),
        (f"@triton.jit\ndef f(y, *, {', '.join(f'x{i}' for i in range(20))}): pass\n", 1),
        (f"def f({', '.join(f'x{i}' for i in range(21))}): pass\n", 0),
    ],
)
def test_the_budgets_can_be_broken(source: str, num_problems: int) -> None:
    assert len(over_budget("made_up.py", source)) == num_problems


def test_only_files_with_kernels_are_exempt_from_type_checking() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    exempt = {
        module
        for override in settings["tool"]["mypy"]["overrides"]
        if override.get("ignore_errors")
        for module in override["module"]
    }
    with_kernels = {
        ".".join(file.with_suffix("").parts)
        for file in sources()
        if file.parts[0] == "tileflux" and any(is_kernel for *_, is_kernel, _ in functions((ROOT / file).read_text()))
    }
    assert exempt == with_kernels
