"""What may use what: import direction, and the three things that have exactly one home.

A checker reads a module's source and answers with ``(line, rule)`` pairs. Each is first shown small sources that break
its rule, since a checker that finds nothing looks just like a clean tree.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tileflux"

LEAVES = ("errors", "env", "device", "config", "link")
LAYERS: tuple[tuple[str, ...], ...] = (
    LEAVES,
    ("symm", "lang", "perf"),
    ("kernels", "tune"),
    ("ops",),
    ("nn",),
    ("integrations", "cli"),
)
LEVELS = {part: level for level, layer in enumerate(LAYERS) for part in layer}
SIDEWAYS = {("perf", "lang")}
"""The one import within a layer: perf replays the tile orders of lang, so that the two cannot drift apart."""
NOT_EXPORTED = ("testing", "cli", "integrations")
FLAGS_HOMES = ("tileflux.lang.signal", "tileflux.symm.host_signal")  # on the device, on the host
SYMM_MEM_HOME = "tileflux.symm.cuda"
ENV_HOME = "tileflux.env"

Problem = tuple[int, str]
Checker = Callable[[str, str], list[Problem]]


def imports(module: str, source: str) -> Iterator[tuple[int, str]]:
    """Every module a source imports, at the top or inside functions, with absolute names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")
            base = base[: len(base) - node.level] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for name in node.names:
                # "from tileflux import env" imports a module, "from tileflux.env import check" a name of one.
                yield node.lineno, f"{origin}.{name.name}" if origin == "tileflux" else origin


def part_of(module: str) -> str:
    """The layer's member a module belongs to: ``symm`` for ``tileflux.symm.shm``, the empty string for the root."""
    parts = module.split(".")
    known = {*LEVELS, "testing", "__main__"}
    return parts[1] if len(parts) > 1 and parts[1] in known else ""


def check_direction(module: str, source: str) -> list[Problem]:
    """Imports go down the layers."""
    part = part_of(module)
    problems = []
    for line, imported in imports(module, source):
        target = part_of(imported)
        if imported.split(".")[0] != "tileflux" or target == part:
            continue
        if not _may_import(part, target):
            problems.append((line, f"{part or 'the package root'} may not import {target or 'the package root'}"))
    return problems


def _may_import(part: str, target: str) -> bool:
    if part == "":
        return target not in NOT_EXPORTED
    if part == "__main__":
        return target == "cli"
    if target == "testing":
        return part == "cli"
    if part == "testing":
        return target != "cli"
    if target == "":  # the root imports everything, so whoever imports it stands above everything
        return LEVELS[part] == len(LAYERS) - 1
    if target == "integrations" or target not in LEVELS:
        return False
    if part in LEAVES and target in LEAVES:
        return True
    return LEVELS[target] < LEVELS[part] or (part, target) in SIDEWAYS


def check_environment(module: str, source: str) -> list[Problem]:
    """Only env.py touches the environment."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    if module == ENV_HOME:
        return []
    tree = ast.parse(source)
    aliases = {
        name.asname or name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for name in node.names
        if name.name == "os"
    }
    rule = "the environment is read and set in env.py alone"
    problems = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            if isinstance(node.value, ast.Name) and node.value.id in aliases:
                problems.append((node.lineno, rule))
        elif isinstance(node, ast.ImportFrom) and node.module == "os" and names & {name.name for name in node.names}:
            problems.append((node.lineno, rule))
    return problems


def check_symmetric_memory(module: str, source: str) -> list[Problem]:
    """Only symm/cuda.py names torch's symmetric memory, whose interface changes between releases."""
    if module == SYMM_MEM_HOME:
        return []
    rule = "torch.distributed._symmetric_memory is used in symm/cuda.py alone"
    return [(line, rule) for line, name in _mentions(source) if "_symmetric_memory" in name]


def check_flags(module: str, source: str) -> list[Problem]:
    """Only lang/signal.py and its host twin touch flags: atomics or inline assembly elsewhere are a second protocol."""
    if module in FLAGS_HOMES or part_of(module) == "testing":
        return []
    rule = "atomics and inline assembly belong in lang/signal.py (on the host: symm/host_signal.py) alone"
    return [(line, rule) for line, name in _mentions(source) if name.startswith(("atomic_", "inline_asm"))]


def _mentions(source: str) -> Iterator[tuple[int, str]]:
    """Names that a source imports or looks up on something, and modules it imports by string."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for name in node.names:
                yield node.lineno, name.name
            if isinstance(node, ast.ImportFrom) and node.module:
                yield node.lineno, node.module
        elif isinstance(node, ast.Call) and any(word in ast.unparse(node.func) for word in ("import", "getattr")):
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


CHECKERS: list[Checker] = [check_direction, check_environment, check_symmetric_memory, check_flags]


@pytest.mark.parametrize("checker", CHECKERS, ids=lambda checker: checker.__name__)
def test_the_package_keeps_the_rule(checker: Checker) -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(ROOT)
        module = ".".join(relative.with_suffix("").parts)
        found += [f"{relative}:{line}: {rule}" for line, rule in checker(module, path.read_text())]
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tileflux.config", "from tileflux.symm.base import Transport"),
        ("tileflux.symm.group", "from tileflux.lang import signal"),
        ("tileflux.lang.remote", "import tileflux.perf.roofline"),
        ("tileflux.lang.schedule", "from tileflux.perf import overlap"),
        ("tileflux.symm.shm", "def f():\n    from tileflux.kernels.copy import move"),
        ("tileflux.kernels.copy", "from tileflux.ops.barrier import barrier"),
        ("tileflux.kernels.copy", "from tileflux.tune import lookup"),
        ("tileflux.ops.barrier", "from tileflux import nn"),
        ("tileflux.ops.barrier", "from ..nn import linear"),
        ("tileflux.ops.barrier", "from tileflux import Group"),
        ("tileflux.ops.barrier", "import tileflux"),
        ("tileflux.ops.barrier", "from tileflux.testing.ranks import run_ranks"),
        ("tileflux.nn.linear", "from tileflux.integrations import vllm"),
        ("tileflux.cli.demo", "from tileflux.integrations import vllm"),
        ("tileflux.integrations.vllm", "from tileflux.testing.numerics import assert_close"),
        ("tileflux.testing.ranks", "from tileflux.cli import main"),
        ("tileflux.__init__", "from tileflux.testing.ranks import run_ranks"),
        ("tileflux.__init__", "from .cli import main"),
        ("tileflux.ops.__init__", "from ..nn import linear"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert [line for line, _ in check_direction(module, source)] == [len(source.splitlines())]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tileflux.device", "from tileflux import env\nfrom tileflux.errors import TilefluxError"),
        ("tileflux.symm.group", "import torch\nfrom tileflux import env\nfrom tileflux.symm.base import Transport"),
        ("tileflux.perf.overlap", "from tileflux.lang import schedule"),
        ("tileflux.kernels.copy", "from tileflux.lang.signal import wait\nfrom tileflux.symm.group import Group"),
        ("tileflux.ops.barrier", "from ._call import begin\nfrom ..kernels import copy"),
        ("tileflux.cli.demo", "from tileflux import Group\nfrom tileflux.testing.ranks import run_ranks"),
        ("tileflux.testing.simulator", "import tileflux\nfrom tileflux.ops import barrier"),
        ("tileflux.__init__", "from tileflux.ops import barrier"),
        ("tileflux.ops.__init__", "from .barrier import barrier"),
        ("tileflux.__main__", "from tileflux.cli import main"),
    ],
)
def test_a_right_import_passes(module: str, source: str) -> None:
    assert check_direction(module, source) == []


@pytest.mark.parametrize(
    ("checker", "home", "sources"),
    [
        (
            check_environment,
            ENV_HOME,
            ["import os\nos.environ['A']", "import os as o\no.getenv('A')", "import re\nfrom os import path, environ"],
        ),
        (
            check_symmetric_memory,
            SYMM_MEM_HOME,
            [
                "import re\nimport torch.distributed._symmetric_memory as symm_mem",
                "import re\nfrom torch.distributed import _symmetric_memory",
                "import re\nfrom torch.distributed._symmetric_memory import empty",
                "import torch\ntorch.distributed._symmetric_memory.empty(1)",
                "import importlib\nimportlib.import_module('torch.distributed._symmetric_memory')",
            ],
        ),
        (
            check_flags,
            FLAGS_HOMES[0],
            [
                "import triton.language as tl\ntl.atomic_add(p, 1)",
                "import triton.language as tl\ntl.inline_asm_elementwise('nop;', '', [], tl.int32, True, 1)",
                "import re\nfrom triton.language import atomic_cas",
                "import triton.language as tl\ngetattr(tl, 'atomic_xchg')",
            ],
        ),
    ],
)
def test_a_thing_outside_its_home_is_found(checker: Checker, home: str, sources: list[str]) -> None:
    for source in sources:
        assert [line for line, _ in checker("tileflux.kernels.copy", source)] == [2], source
        assert checker(home, source) == []


def test_what_only_looks_alike_passes() -> None:
    source = '"""No tl.atomic_add, os.environ or _symmetric_memory here."""\nimport os\nos.getpid()\nself.environ = 1\n'
    for checker in CHECKERS:
        assert checker("tileflux.kernels.copy", source) == []
