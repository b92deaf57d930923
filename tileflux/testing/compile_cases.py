"""The library's own kernels, as the launchers compile them, for the compile gate.

World sizes 2 and 8: the smallest that communicates, and the largest whose ranks one node's switch joins. The reducer
unrolls its ranks, so 8 is also where it would spill first.
"""

from __future__ import annotations

from tileflux.config import CommConfig
from tileflux.kernels.gather import BLOCK as GATHERED
from tileflux.kernels.launch import BLOCK, MAX_REGISTERS, NUM_WARPS
from tileflux.kernels.steps import SUM_REGISTERS
from tileflux.testing.compile_gate import CompileCase, Imported
from tileflux.testing.gemm_cases import GEMM_CASES
from tileflux.testing.hopper_cases import HOPPER_CASES
from tileflux.testing.index_cases import INDEX_CASES

__all__ = ["CASES"]

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
        {"TYPE": Imported("triton.language:bfloat16"), "ALIGNED": True, "BLOCK": 1024},
        module="direct",
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
