"""The public surface: what can be imported, from where, and that importing does nothing else."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import tileflux

ROOT = Path(__file__).parents[1]

PUBLIC = {
    "CommConfig",
    "FlagWrite",
    "Group",
    "GroupBroken",
    "GroupClosed",
    "MismatchError",
    "PeerTimeout",
    "RegionError",
    "TilefluxError",
    "TransportUnavailable",
    "__version__",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "local_groups",
    "reduce_scatter",
}
"""What users may rely on. A change here is a change of the interface, and belongs in the changelog."""

NEEDS_WHAT_MAY_BE_MISSING = {"tileflux.__main__": "runs the command line when imported"}


def modules() -> list[str]:
    """Every module of the package, by name."""
    files = sorted((ROOT / "tileflux").rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    return [name for name in names if name not in NEEDS_WHAT_MAY_BE_MISSING]


def in_fresh_python(script: str, *arguments: str) -> str:
    """What a script prints in a Python that has imported nothing of ours."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_exports_exactly_the_public_names() -> None:
    assert set(tileflux.__all__) == PUBLIC
    assert len(tileflux.__all__) == len(PUBLIC)
    assert [name for name in PUBLIC if not hasattr(tileflux, name)] == []


IMPORT_EACH_ALONE = """
import importlib, json, os, sys, traceback
import torch, torch.distributed, triton, triton.language  # once, for all the forks
report = {}
for name in sys.argv[1:]:
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        try:
            module = importlib.import_module(name)
            names = getattr(module, "__all__", None)
            answer = {"all": None if names is None else list(names),
                      "missing": [n for n in names or () if not hasattr(module, n)], "error": ""}
        except BaseException:
            answer = {"all": None, "missing": [], "error": traceback.format_exc()}
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        report[name] = json.loads(stream.read())
    os.wait()
print(json.dumps(report))
"""


def test_every_module_imports_alone_and_has_the_names_it_exports() -> None:
    assert "tileflux.symm.group" in modules()
    report = json.loads(in_fresh_python(IMPORT_EACH_ALONE, *modules()))
    assert set(report) == set(modules())
    problems = [f"{name} does not import alone:\n{entry['error']}" for name, entry in report.items() if entry["error"]]
    problems += [f"{name}.__all__ names {entry['missing']}" for name, entry in report.items() if entry["missing"]]
    assert not problems, "\n".join(problems)


def public_names(source: str) -> set[str]:
    """Names without an underscore that a module defines at its top."""
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


def declared_names(source: str) -> set[str] | None:
    """What ``__all__`` lists, or None without one."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return set(ast.literal_eval(node.value))
    return None


@pytest.mark.parametrize("name", modules())
def test_what_a_module_defines_is_exported_or_has_an_underscore(name: str) -> None:
    path = ROOT.joinpath(*name.split("."))
    source = (path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py").read_text()
    exported, defined = declared_names(source), public_names(source)
    if exported is None:
        assert path.is_dir() and not defined, f"{name} has no __all__"
    else:
        assert defined <= exported, f"{name} defines {sorted(defined - exported)}: add to __all__, or an underscore"


def test_the_checks_above_can_fail() -> None:
    source = "__all__ = ['a']\ndef a(): ...\nclass B: ...\nC: int = 1\nD = 2\n_e = 3\nimport os\n"
    assert declared_names(source) == {"a"}
    assert public_names(source) == {"a", "B", "C", "D"}
    assert declared_names("a = 1") is None


def test_importing_touches_no_gpu_and_starts_no_thread() -> None:
    script = """
import os, threading
import torch, torch.distributed, triton, triton.language
num_threads = len(os.listdir("/proc/self/task"))
import tileflux
assert not torch.cuda.is_initialized()
assert not torch.distributed.is_initialized()
print(threading.active_count(), len(os.listdir("/proc/self/task")) - num_threads)
"""
    assert in_fresh_python(script).split() == ["1", "0"]


def test_importing_loads_neither_tests_nor_command_line() -> None:
    script = "import sys, tileflux; print([m for m in sys.modules if m.startswith('tileflux.')])"
    loaded = ast.literal_eval(in_fresh_python(script))
    assert "tileflux.ops" in loaded
    assert [name for name in loaded if name.split(".")[1] in ("testing", "cli", "integrations")] == []
