"""The child process of the compile gate: requests in on stdin, answers out on stdout, one JSON object a line.

Run as a script, by its path, so that it imports no more of the package than the kernel asked for does.
A request is what ``CompileCase.request`` makes. An answer has either ``error`` or what the compiler made of the
kernel. A kernel that aborts the compiler ends this process, and the parent reads that from its exit.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

__all__ = ["READY", "main"]

READY = "ready"
"""The first line, once everything is imported: a deadline counts from here."""


def main() -> None:
    """Answer requests until stdin ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an abort is expected, and its core would be gigabytes
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what compilers and imported modules print must not mix with the answers
        importlib.import_module("triton")
        print(READY, file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return _compile(request)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _compile(request: dict[str, Any]) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    kernel = _jit_function(request["kernel"])
    constexprs = {name: _decode(value) for name, value in request["constexprs"].items()}
    signature, constexprs = _complete(kernel, request["signature"], constexprs)
    divisible = request["divisible_by_16"]
    if divisible is None:
        divisible = [name for name, type_name in signature.items() if type_name.startswith("*")]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    source_type = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = source_type(kernel, signature, constexprs, attributes)
    target = GPUTarget("cuda", request["arch"], 32)
    start = time.perf_counter()
    compiled = triton.compile(source, target=target, options=request["options"])
    seconds = time.perf_counter() - start
    registers, stack_bytes = _usage(compiled.asm["cubin"])
    return {
        "seconds": seconds,
        "registers": registers,
        "stack_bytes": stack_bytes,
        "shared_bytes": compiled.metadata.shared,
        "tensor_memory_columns": getattr(compiled.metadata, "tmem_size", None) or 0,
        "ptx": compiled.asm["ptx"],
        "complaints": _complaints(compiled.asm["ptx"], request["arch"]) if source_type is GluonASTSource else [],
    }


def _complaints(ptx: str, arch: int) -> list[str]:
    """What the assembler has to say about WGMMA: that it waits after every instruction, and why."""
    from triton import knobs

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [knobs.nvidia.ptxas.path, "-v", f"--gpu-name=sm_{arch}a", "-o", os.devnull, file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    return [line.strip() for line in said.splitlines() if "wgmma" in line and "serialized" in line]


def _jit_function(path: str) -> Any:
    """The jit function at ``path``, without the autotuner or the heuristics around it."""
    from triton.runtime.jit import JITFunction

    kernel = resolve(path)
    while not isinstance(kernel, JITFunction) and hasattr(kernel, "fn"):
        kernel = kernel.fn
    if not isinstance(kernel, JITFunction):
        raise ValueError(f"{path} is {kernel!r}, not a @triton.jit or @gluon.jit kernel")
    return kernel


def _complete(kernel: Any, types: dict[str, str], constexprs: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Signature and constexprs with every argument in the kernel's order, defaults of constexprs filled in."""
    unknown = [name for name in (*types, *constexprs) if name not in kernel.arg_names]
    if unknown:
        raise ValueError(
            f"{kernel.__name__} has no argument {', '.join(unknown)}; it has {', '.join(kernel.arg_names)}"
        )
    defaults = {p.name: p.default for p in kernel.params if p.is_constexpr and p.has_default}
    constexprs = {**{name: value for name, value in defaults.items() if name not in types}, **constexprs}
    missing = [name for name in kernel.arg_names if name not in types and name not in constexprs]
    if missing:
        raise ValueError(f"the case gives {kernel.__name__} no type or value for {', '.join(missing)}")
    return {name: "constexpr" if name in constexprs else types[name] for name in kernel.arg_names}, constexprs


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        return resolve(value["import"]) if "import" in value else tuple(_decode(item) for item in value["tuple"])
    return value


def resolve(path: str) -> Any:
    """The object that ``module:name``, ``file.py:name`` or, for what a function makes, ``module:name()`` stands for."""
    place, _, name = path.rpartition(":")
    made = _module(place)
    for part in name.removesuffix("()").split("."):
        if not hasattr(made, part):
            raise ValueError(f"{path} is not there: {place} has no {part}")
        made = getattr(made, part)
    return made() if name.endswith("()") else made


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    file = Path(place).resolve()
    name = f"_compile_gate_{file.stem}_{abs(hash(file))}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ValueError(f"{file} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]  # else the next case would find half a module
            raise
    return sys.modules[name]


def _usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) of a cubin. The stack is where ptxas spills; its figure LOCAL stays 0."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=False
        )
    found = re.findall(r"REG:(\d+) STACK:(\d+)", run.stdout + run.stderr)
    if not found:
        raise RuntimeError(f"cuobjdump says nothing of registers: {(run.stdout + run.stderr).strip()[:300]!r}")
    return max(int(registers) for registers, _ in found), max(int(stack) for _, stack in found)


if __name__ == "__main__":
    main()
