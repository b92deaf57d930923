"""The kernels of routing, as their launchers compile them, for the compile gate: few experts, and as many as can be."""

from __future__ import annotations

from tileflux.testing.compile_gate import CompileCase, Imported

__all__ = ["INDEX_CASES"]

_ROWS = {"num_experts": "i32", "num_sets": "i32"}
_FROM = {"packed": "i64", "counts": "i64"}
_RESULTS = {name: "i64" for name in ("index", "slots", "starts", "offsets", "missing")}
_SIZES = {name: "i32" for name in ("num_blocks", "num_slots", "capacity", "block_m")}
_SOURCES = {name: "i64" for name in ("ids", "weights", "ids_row", "ids_column", "weights_row", "weights_column")}


def _case(
    name: str, module: str, kernel: str, signature: dict[str, str], constexprs: dict[str, object], num_warps: int = 8
) -> CompileCase:
    return CompileCase(
        architectures=(80, 90, 100),  # for 8.9 as for 8.0: nothing here is arithmetic
        name=name,
        kernel=f"tileflux.kernels.{module}:_{kernel}_kernel",
        signature=signature,
        constexprs=constexprs,
        divisible_by_16=(),
        options={"num_warps": num_warps},
    )


def _type(name: str) -> Imported:
    return Imported(f"triton.language:{name}")


def _pack(ids: str, weights: str) -> CompileCase:
    signature = {**_SOURCES, "num_slots": "i32", "top_k": "i32", "num_experts": "i32", "packed_ptr": "*i32"}
    constexprs = {"ID": _type(ids), "WEIGHT": _type(weights), "BLOCK": 1024}
    return _case(f"pack choices {ids} {weights}", "index", "pack", signature, constexprs)


def _count(world_size: int, num_experts: int) -> CompileCase:
    signature = {**_FROM, "top_k": "i32", "first_expert": "i32", **_ROWS, "stages_ptr": "*i64"}
    constexprs: dict[str, object] = {"WORLD": world_size, "EXPERTS": num_experts, "BLOCK": 256}
    return _case(f"count choices, {num_experts} experts", "index", "count", signature, constexprs)


def _place(world_size: int, num_experts: int) -> CompileCase:
    signature = {
        **_FROM, **_RESULTS, "top_k": "i32", "first_expert": "i32", **_ROWS, **_SIZES, "stages_ptr": "*i64",
    }  # fmt: skip
    constexprs: dict[str, object] = {"WORLD": world_size, "EXPERTS": num_experts, "BLOCK": 256, "TILES": 16}
    return _case(f"place rows, {num_experts} experts", "index", "place", signature, constexprs)


def _cut(counts: str, num_experts: int) -> CompileCase:
    numbers = {name: "i32" for name in ("num_experts", "num_rows", "block_m")}
    signature = {"counts": "i64", "stride": "i64", **numbers, "index_ptr": "*i32"}
    constexprs = {"COUNT": _type(counts), "EXPERTS": num_experts, "TILES": 16}
    return _case(f"cut tiles, {num_experts} experts", "lists", "cut", signature, constexprs)


_NUMBERS = {name: "i32" for name in ("rank", "words", "top_k", "num_experts", "capacity")}


def _addresses(world_size: int, ids: str, weights: str) -> CompileCase:
    strides = ("ids_row", "ids_column", "weights_row", "weights_column", "scales_row")
    signature = dict.fromkeys(("ids", "weights", "scales", "notes", *strides), "i64")
    signature |= dict.fromkeys(("num_tokens", "top_k", "words", "num_experts"), "i32") | {"sent_ptr": "*i32"}
    tile = {"WORLD": world_size, "TOKENS": 512, "CHOICES": 8, "PACK": 1024}
    constexprs = {"ID": _type(ids), "WEIGHT": _type(weights), **tile}
    return _case(f"addresses {ids} {weights}, {world_size} ranks", "arrivals", "addresses", signature, constexprs)


def _count_arrivals(world_size: int, num_experts: int) -> CompileCase:
    signature = {"notes": "i64", "table": "i64", **_NUMBERS, "received_ptr": "*i32"}
    constexprs: dict[str, object] = {"WORLD": world_size, "EXPERTS": num_experts, "BLOCK": 256}
    return _case(f"count arrivals, {num_experts} experts", "arrivals", "count", signature, constexprs)


def _arrive(counted: bool, world_size: int, num_experts: int) -> CompileCase:
    results = ("shares", "scales", "counts", "row_tokens", "positions", "missing")
    signature = dict.fromkeys(("notes", "table", *results), "i64") | _NUMBERS | {"received_ptr": "*i32"}
    constexprs: dict[str, object] = {
        "COUNTED": counted, "WORLD": world_size, "EXPERTS": num_experts, "BLOCK": 256, "CHUNK": 2048,
    }  # fmt: skip
    name = f"sort {'many' if counted else 'few'} arrivals, {num_experts} experts"
    return _case(name, "arrivals", "arrive", signature, constexprs)


def _choices(row: str, out: str, pointer: str, weighted: bool, aligned: bool) -> CompileCase:
    signature = {
        "rows": "i64", "positions": "i64", "weights": "i64", "pitch": "i64", "width": "i32", "num_tokens": "i32",
        "top_k": "i32", "out_ptr": pointer,
    }  # fmt: skip
    tile = {"TOKENS": 4, "COLUMNS": 512, "WIDTH": 8}
    constexprs = {"ROW": _type(row), "OUT": _type(out), "WEIGHTED": weighted, "ALIGNED": aligned, **tile}
    name = f"sum choices {row} to {out}{', aligned' if aligned else ''}"
    return _case(name, "choices", "choices", signature, constexprs, num_warps=4)


def _slab_sums(element: str, aligned: bool, columns: int) -> CompileCase:
    signature = {
        "index": "i64",
        "products": "i64",
        **dict.fromkeys(("width", "slab", "first_hop", "num_blocks"), "i32"),
    }
    tile = {"TOKENS": 2048 // columns, "COLUMNS": columns, "WIDTH": 8}
    constexprs = {"TYPE": _type(element), "ALIGNED": aligned, "WORLD": 8, **tile}
    name = f"sum choices of a slab, {element}{', aligned' if aligned else ''}"
    return _case(name, "slabs", "slab_sums", {**signature, "table_ptr": "*i64"}, constexprs, num_warps=4)


INDEX_CASES: tuple[CompileCase, ...] = (
    _pack("int64", "float32"),
    _pack("int32", "bfloat16"),
    *(_count(world_size, num_experts) for world_size, num_experts in ((2, 32), (8, 1024))),
    _case(
        "add counts up", "index", "scan", {"num_blocks": "i32", "num_columns": "i32", "counts_ptr": "*i32"},
        {"ROWS": 128, "COLUMNS": 16},
    ),
    *(_place(world_size, num_experts) for world_size, num_experts in ((2, 32), (8, 1024))),
    _cut("int32", 32),
    _cut("int64", 1024),
    _case(
        "tiles of some stages", "lists", "stages",
        {
            "index": "i64", "num_words": "i32", "max_tiles": "i32", "begins": "i64", "ends": "i64", "bits": "i32",
            "num_programs": "i32", "pitch": "i32", "results_ptr": "*i32",
        },
        {"BLOCK": 1024, "TILES": 64},
    ),
    _addresses(2, "int32", "bfloat16"),
    _addresses(8, "int64", "float32"),
    *(_count_arrivals(world_size, num_experts) for world_size, num_experts in ((8, 32), (1, 1024))),
    *(_arrive(counted, 8, 32) for counted in (False, True)),
    *(_arrive(counted, 1, 1024) for counted in (False, True)),
    _case(
        "rows picked", "arrivals", "pick", {"x": "i64", "out": "i64", "row_bytes": "i64", "index_ptr": "*i32"},
        {"BLOCK": 1024},
    ),
    _choices("bfloat16", "bfloat16", "*bf16", weighted=True, aligned=True),
    _choices("float32", "bfloat16", "*bf16", weighted=False, aligned=False),
    _slab_sums("bfloat16", aligned=True, columns=512),
    _slab_sums("float32", aligned=False, columns=32),
    _case(
        "tiles of spaced experts", "slabs", "spaced",
        {"index": "i64", "num_words": "i32", "times": "i32", "spaced_ptr": "*i32"}, {"BLOCK": 1024}, num_warps=4,
    ),
)  # fmt: skip
