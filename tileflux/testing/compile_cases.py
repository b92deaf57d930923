"""The library's own kernels, as the launchers compile them, for the compile gate.

World sizes 2 and 8: the smallest that communicates, and the largest whose ranks one node's switch joins. The reducer
unrolls its ranks, so 8 is also where it would spill first.

What they take of a chip is kept in ``tests/testing/compiled.json``, which a test compares with. To record it anew::

    python -m tileflux.testing.compile_cases --record tests/testing/compiled.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import triton

from tileflux.config import CommConfig
from tileflux.kernels.gather import BLOCK as GATHERED
from tileflux.kernels.launch import BLOCK, MAX_REGISTERS, NUM_WARPS
from tileflux.kernels.steps import SUM_REGISTERS
from tileflux.testing.compile_gate import CompileCase, CompileReport, Imported, assert_clean, run_gate
from tileflux.testing.gemm_cases import GEMM_CASES
from tileflux.testing.hopper_cases import HOPPER_CASES
from tileflux.testing.index_cases import INDEX_CASES

__all__ = ["CASES", "changes", "main", "record"]

_CONFIG = CommConfig(num_lanes=32, slot_bytes=64 * 1024)
_OPTIONS = {"num_warps": NUM_WARPS, "maxnreg": MAX_REGISTERS}
_TABLES = {"extents_ptr": "*i64", "boxes_ptr": "*i64", "guard_ptr": "*i64"}
_PLAN = {"send_bytes": "i64", "send_stride": "i64", "recv_bytes": "i64", "recv_stride": "i64"}
_SIGNATURE = {"x": "i64", "out": "i64", **_TABLES, "op": "i32", "ragged": "i32", **_PLAN}


def _move(world_size: int) -> CompileCase:
    return CompileCase(
        name=f"move, {world_size} ranks",
        kernel="tileflux.kernels.copy:_move_kernel",
        signature={**_SIGNATURE, "min_pieces": "i64"},
        constexprs=_constexprs(world_size),
        options=_OPTIONS,
        waits=True,
        signals=True,
    )


def _reduce(world_size: int, element: str) -> CompileCase:
    return CompileCase(
        name=f"reduce {element}, {world_size} ranks",
        kernel="tileflux.kernels.reduce:_reduce_kernel",
        signature=_SIGNATURE,
        constexprs={"ELEMENT": Imported(f"triton.language:{element}"), **_constexprs(world_size)},
        options=_OPTIONS,
        waits=True,
        signals=True,
    )


_ROWS = {"boxes_ptr": "*i64", "guard_ptr": "*i64", "table_ptr": "*i64"}


def _spread(world_size: int) -> CompileCase:
    addresses = ("x", "notes", "sent", "out", "out_notes", "arrived", "received")
    return CompileCase(
        name=f"spread, {world_size} ranks",
        kernel="tileflux.kernels.spread:_spread_kernel",
        signature=dict.fromkeys(addresses, "i64") | {"op": "i32", "capacity": "i32"} | _ROWS,
        constexprs=_constexprs(world_size),
        divisible_by_16=(),
        options=_OPTIONS,
        waits=True,
        signals=True,
    )


def _gather(world_size: int, element: str) -> CompileCase:
    addresses = ("rows", "positions", "weights", "sent", "arrived", "out")
    return CompileCase(
        name=f"gather {element}, {world_size} ranks",
        kernel="tileflux.kernels.gather:_gather_kernel",
        signature=dict.fromkeys(addresses, "i64") | {"op": "i32", "top_k": "i32"} | _ROWS,
        constexprs={"ELEMENT": Imported(f"triton.language:{element}"), **_constexprs(world_size), "BLOCK": GATHERED},
        divisible_by_16=(),
        options=_OPTIONS,
        waits=True,
        signals=True,
    )


def _constexprs(world_size: int) -> dict[str, object]:
    return {
        "WORLD": world_size,
        "LANES": _CONFIG.num_lanes,
        "SLOT_BYTES": _CONFIG.slot_bytes,
        "BLOCK": BLOCK,
    }


def _step(
    name: str, signature: dict[str, str], constexprs: dict[str, object], waits: bool = True, signals: bool = True,
    module: str = "steps", **options: int,
) -> CompileCase:  # fmt: skip
    return CompileCase(
        name=f"step {name}",
        kernel=f"tileflux.kernels.{module}:_{name}_kernel",
        signature={**signature, "table_ptr": "*i64"},
        constexprs={"WORLD": 8, **constexprs},
        divisible_by_16=(),
        options={"num_warps": 8 if "BLOCK" in constexprs or "ROWS" in constexprs else 1, **options},
        waits=waits,
        signals=signals,
    )


_STEPS = (
    _step("feed", {"x": "i64", "scale_x": "i64", "row_bytes": "i64"}, {"SCALED": True, "BLOCK": BLOCK}),
    _step("open", {}, {}, signals=False),
    _step("close", dict.fromkeys(("owner", "chunk", "num_chunks", "num_tiles", "last_tiles"), "i32"), {}),
    _step("await", {"source": "i32", "chunk": "i32"}, {}, signals=False),
    _step("await_everyone", {"chunk": "i32"}, {}, signals=False),
    _step("push", {"partial": "i64", "nbytes": "i64", "owner": "i32"}, {"BLOCK": BLOCK}),
    _step(
        "sum",
        {"out": "i64", "num_elements": "i64"},
        {"TYPE": Imported("triton.language:bfloat16"), "ALIGNED": True, "BLOCK": BLOCK},
    ),
    _step(
        "sum_slabs",
        {"out": "i64", "num_rows": "i32", "N": "i32", "slab_columns": "i32"},
        {
            "TYPE": Imported("triton.language:bfloat16"),
            "ALIGNED": True,
            "MOSTLY_WHOLE": True,
            "ROWS": 8,
            "COLUMNS": 256,
        },
        maxnreg=SUM_REGISTERS,
    ),
    _step("release", {}, {}, waits=False),
    _step("push_slab", {"row_bytes": "i64", "slab": "i32"}, {"BLOCK": BLOCK}, module="slabs"),
    _step(
        "feed_all",
        {"x": "i64", "scale_x": "i64", "row_bytes": "i64"},
        {"SCALED": True, "BLOCK": BLOCK},
        module="direct",
    ),
    _step("meet", {}, {}, module="direct"),
    _step(
        "swap",
        {"x": "i64", "out": "i64", "num_elements": "i64"},
        {"TYPE": Imported("triton.language:bfloat16"), "ALIGNED": True, "BLOCK": 4096},
        module="direct",
        num_warps=16,
    ),
    _step(
        "pull",
        {"out": "i64", "first": "i64", "num_elements": "i64"},
        {"TYPE": Imported("triton.language:bfloat16"), "ALIGNED": True, "BLOCK": BLOCK},
        waits=False,
        module="direct",
    ),
)

_SMALL = (
    CompileCase(
        name="clock", kernel="tileflux.kernels.steps:_clock_kernel", signature={"out_ptr": "*i64"}, constexprs={},
        divisible_by_16=(), options={"num_warps": 1}, waits=False, signals=False,
    ),
    CompileCase(
        name="fill", kernel="tileflux.kernels.fill:_fill_kernel",
        signature={"row_ptr": "*i64", "first": "i32", "count": "i32"} | {f"w{i}": "i64" for i in range(8)},
        constexprs={}, divisible_by_16=(), options={"num_warps": 1}, waits=False, signals=False,
    ),
)  # fmt: skip

CASES: tuple[CompileCase, ...] = (
    _move(2),
    _move(8),
    _reduce(2, "float32"),
    *(_reduce(8, element) for element in ("float32", "float16", "bfloat16")),
    _spread(8),
    *(_gather(8, element) for element in ("float32", "float16", "bfloat16")),
    *_STEPS,
    *_SMALL,
    *GEMM_CASES,
    *HOPPER_CASES,
    *INDEX_CASES,
)
"""Every kernel of the library in the specialisations that launchers make."""


_HOW = "if that is meant, record it anew: python -m tileflux.testing.compile_cases --record tests/testing/compiled.json"


def record(reports: Sequence[CompileReport], file: Path) -> None:
    """Write down what each compilation takes of a chip, one a line."""
    lines = [f"  {json.dumps(name)}: {json.dumps(figures)}" for name, figures in sorted(_figures(reports).items())]
    version, compilations = json.dumps(triton.__version__), ",\n".join(lines)
    file.write_text(f'{{\n "triton": {version},\n "compilations": {{\n{compilations}\n }}\n}}\n')


def changes(reports: Sequence[CompileReport], recorded: Mapping[str, Any]) -> list[str]:
    """What is not as it was recorded, and last, if there is anything, how to record it anew.

    Spills and shared memory should be the same; of registers there may be fewer. Another Triton has another assembler,
    so it has figures of its own.
    """
    if recorded["triton"] != triton.__version__:
        return [f"recorded with Triton {recorded['triton']}, and this is Triton {triton.__version__}", _HOW]
    found, known, now = [], recorded["compilations"], _figures(reports)
    for name, figures in now.items():
        if name not in known:
            found.append(f"{name} is not recorded")
            continue
        for what, value in figures.items():
            before = known[name][what]
            if value > before or (value != before and what != "registers"):
                found.append(f"{name}: {what} {value}, recorded {before}")
    found += [f"{name} is recorded, and there is no such case" for name in known if name not in now]
    return [*found, _HOW] if found else []


def _figures(reports: Sequence[CompileReport]) -> dict[str, dict[str, int | None]]:
    return {
        f"{report.case} sm_{report.arch}": {
            "registers": report.registers, "spilled_bytes": report.stack_bytes, "shared_bytes": report.shared_bytes,
        }
        for report in reports
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile every case, and record what it takes if none has a problem."""
    parser = argparse.ArgumentParser(prog="python -m tileflux.testing.compile_cases", description=main.__doc__)
    parser.add_argument("--record", type=Path, required=True, metavar="FILE", help="written anew")
    file: Path = parser.parse_args(arguments).record
    reports = run_gate(CASES)
    assert_clean(reports)
    record(reports, file)
    print(f"{file}: {len(reports)} compilations of {len(CASES)} cases")


if __name__ == "__main__":
    main()
