"""The public surface: what can be imported, from where, and that importing does nothing else."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import tileflux

ROOT = Path(__file__).parents[1]

PUBLIC = {
    "CapacityExceeded",
    "Routing",
    "CommConfig",
    "Dispatched",
    "Explanation",
    "FlagWrite",
    "GemmConfig",
    "Group",
    "GroupBroken",
    "GroupClosed",
    "MismatchError",
    "PeerTimeout",
    "RegionError",
    "TilefluxError",
    "TransportUnavailable",
    "__version__",
    "ag_gemm",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "ep_combine",
    "ep_dispatch",
    "explain",
    "gemm",
    "gemm_ar",
    "gemm_rs",
    "grouped_gemm",
    "moe_ag_gemm",
    "moe_gemm_ar",
    "moe_gemm_rs",
    "route",
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
import tileflux  # once, for all the forks: Python imports it first in any case
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


def lacks_all(source: str) -> bool:
    """Whether a module defines or imports something and does not say what of it is public."""
    body = ast.parse(source).body
    assigned = {ast.unparse(target) for node in body if isinstance(node, ast.Assign) for target in node.targets}
    only_docstring = all(isinstance(node, ast.Expr) for node in body)
    return "__all__" not in assigned and not only_docstring


def test_every_public_module_says_what_is_public() -> None:
    files = [file for file in (ROOT / "tileflux").rglob("*.py") if file.name == "__init__.py" or file.name[0] != "_"]
    silent = sorted(str(file.relative_to(ROOT)) for file in files if lacks_all(file.read_text()))
    assert not silent, f"no __all__ in {', '.join(silent)}"


def test_the_check_above_can_fail() -> None:
    assert lacks_all("'''Words.'''\nx = 1")
    assert lacks_all("def f(): ...")
    assert not lacks_all("__all__ = []\nx = 1")
    assert not lacks_all("'''Words alone.'''")


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
