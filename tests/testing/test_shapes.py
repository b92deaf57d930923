"""The table says what it claims."""

from __future__ import annotations

import math

from tileflux import ops
from tileflux.config import CommConfig
from tileflux.testing.shapes import GEMM_SHAPES, MESSAGE_SHAPES, MODEL_SHAPES, MOE_SHAPES, Mixture

SHAPES = {entry.name: entry for entry in MESSAGE_SHAPES}
GEMMS = {entry.name: entry for entry in GEMM_SHAPES}
TILE, BLOCK_K = 128, 64


def test_names_are_unique_and_every_shape_has_a_reason() -> None:
    assert len(SHAPES) == len(MESSAGE_SHAPES)
    assert len(GEMMS) == len(GEMM_SHAPES)
    assert all(entry.why for entry in (*MESSAGE_SHAPES, *GEMM_SHAPES))


def test_the_reasons_are_true() -> None:
    slot_bytes = CommConfig().slot_bytes
    assert SHAPES["empty"].numel == SHAPES["empty_rows"].numel == 0
    assert SHAPES["one"].numel == 1
    assert SHAPES["odd"].numel % 2 == 1
    assert all(SHAPES["prime_rows"].shape[0] % world_size for world_size in range(2, 13))
    assert all(SHAPES["aligned"].shape[0] % world_size == 0 for world_size in (2, 3, 4, 6, 8))
    assert all(SHAPES["odd_columns"].shape[1] * size % 16 for size in (1, 2, 4))
    assert slot_bytes < 2 * SHAPES["past_slot"].numel < 1.1 * slot_bytes
    assert 6 * slot_bytes < 2 * SHAPES["many_slots"].numel < 6.1 * slot_bytes


def test_products_are_cheap_and_differ() -> None:
    assert all(shape.m * shape.n * shape.k < 10**7 for shape in GEMM_SHAPES)
    assert len({(shape.m, shape.n, shape.k) for shape in GEMM_SHAPES}) == len(GEMM_SHAPES)


def test_the_reasons_of_products_are_true() -> None:
    empty = [[name for name, size in zip("mnk", shape[1:4], strict=True) if size == 0] for shape in GEMM_SHAPES]
    assert [dims for dims in empty if dims] == [["m"], ["n"], ["k"]]
    assert GEMMS["no_rows"].m == GEMMS["no_columns"].n == GEMMS["no_terms"].k == 0
    assert GEMMS["one"][1:4] == (1, 1, 1)
    assert 0 < GEMMS["few_rows"].m < 4 <= min(GEMMS["few_rows"].n, GEMMS["few_rows"].k)
    assert all(dim % world_size for dim in GEMMS["primes"][1:4] for world_size in range(2, 7))
    assert GEMMS["primes"].k < 8
    uneven = GEMMS["uneven_rows"]
    assert all(uneven.m % world_size for world_size in (3, 4, 8))
    assert all(dim % world_size == 0 for dim in (uneven.n, uneven.k) for world_size in (2, 4, 8))
    assert all(GEMMS["odd_k"].k * itemsize % 16 for itemsize in (1, 2, 4))
    short = GEMMS["short_block"]
    assert short.k % 16 == 0 and short.k > BLOCK_K and short.k % BLOCK_K


def test_the_reasons_of_tiles_are_true() -> None:
    assert GEMMS["one_tile"][1:4] == (TILE, TILE, BLOCK_K)
    assert GEMMS["past_tile"][1:4] == (TILE + 1, TILE + 1, BLOCK_K + 1)
    aligned = GEMMS["past_tile_aligned"]
    assert aligned.m == TILE + 1 and aligned.n > TILE and aligned.k > BLOCK_K
    assert aligned.n % 16 == aligned.k % 16 == 0
    several = GEMMS["several_tiles"]
    assert [math.ceil(dim / size) for dim, size in zip(several[1:4], (TILE, TILE, BLOCK_K), strict=True)] == [3, 2, 3]
    assert all(dim % size for dim, size in zip(several[1:4], (TILE, TILE, BLOCK_K), strict=True))
    assert several.k % 16 and 2 * several.k % 16 == 0
    assert GEMMS["tall"].m >= 8 * TILE and GEMMS["tall"].n < 16
    assert GEMMS["wide"].n >= 8 * TILE and GEMMS["wide"].m < 16
    assert GEMMS["deep"].k >= 32 * BLOCK_K and max(GEMMS["deep"].m, GEMMS["deep"].n) < TILE


def test_layers_of_models_are_named_once_and_have_reasons() -> None:
    assert set(MODEL_SHAPES) == {"flux", "gpt3", "llama", "decode"}
    for shapes in MODEL_SHAPES.values():
        assert len({(shape.name, shape.m) for shape in shapes}) == len(shapes)
        assert len({(shape.m, shape.n, shape.k, shape.ops) for shape in shapes}) == len(shapes)
        assert all(shape.why and min(shape.m, shape.n, shape.k) >= 1 for shape in shapes)


def test_a_layer_is_divided_by_columns_or_by_rows() -> None:
    for shapes in MODEL_SHAPES.values():
        for shape in shapes:
            assert all(hasattr(ops, op) for op in shape.ops)
            by_columns, by_rows = "ag_gemm" in shape.ops, {"gemm_rs", "gemm_ar"} & set(shape.ops)
            assert by_columns != bool(by_rows)
            divided = shape.n if by_columns else shape.k
            assert all(divided % world_size == 0 for world_size in (2, 4, 8)), shape
    assert {op for shape in MODEL_SHAPES["decode"] for op in shape.ops} == {"gemm_ar", "gemm"}
    for name in ("flux", "gpt3", "llama"):
        assert {op for shape in MODEL_SHAPES[name] for op in shape.ops} == {"ag_gemm", "gemm_rs", "gemm_ar", "gemm"}


def test_layers_are_as_wide_as_their_models() -> None:
    """From the models' own numbers: hidden size, heads, heads of keys and values, width of the MLP."""
    models = {"8b": (4096, 32, 8, 14336), "70b": (8192, 64, 8, 28672)}
    llama = {shape.name: (shape.n, shape.k) for shape in MODEL_SHAPES["llama"]}
    for name, (hidden, heads, kv_heads, inner) in models.items():
        head = hidden // heads
        assert head == 128
        assert llama[f"{name}_qkv"] == ((heads + 2 * kv_heads) * head, hidden)
        assert llama[f"{name}_gate_up"] == (2 * inner, hidden)
        assert llama[f"{name}_attention_out"] == (hidden, heads * head)
        assert llama[f"{name}_down"] == (hidden, inner)
    gpt3 = {shape.name: (shape.n, shape.k) for shape in MODEL_SHAPES["gpt3"]}
    hidden = 96 * 128
    assert gpt3["qkv"] == (3 * hidden, hidden) and gpt3["attention_out"] == (hidden, hidden)
    assert gpt3["up"] == (4 * hidden, hidden) and gpt3["down"] == (hidden, 4 * hidden)
    flux = {(shape.name, shape.n, shape.k) for shape in MODEL_SHAPES["flux"]}
    assert flux == {("gpt3_up", *gpt3["up"]), ("gpt3_down", *gpt3["down"])}
    assert {shape.m for shape in MODEL_SHAPES["flux"]} == {512 << power for power in range(5)}
    decode = MODEL_SHAPES["decode"]
    assert all((shape.n, shape.k) == llama[shape.name] for shape in decode)
    assert (min(shape.m for shape in decode), max(shape.m for shape in decode)) == (1, 256)


def test_layers_of_experts_are_as_wide_as_their_models() -> None:
    """Width of a token, width of an expert, experts, experts of a token."""
    models = {
        "comet_e32": (8192, 8192, 32, 4), "comet_e8": (8192, 8192, 8, 2), "mixtral_8x7b": (4096, 14336, 8, 2),
        "qwen2_57b_a14b": (3584, 2560, 64, 8), "phi_3.5_moe": (4096, 6400, 16, 2),
    }  # fmt: skip
    assert {(shape.name, *shape[2:6]) for shape in MOE_SHAPES["moe"]} == {
        (name, *each) for name, each in models.items()
    }
    parts = [MOE_SHAPES[name] for name in ("comet", "mixtral", "qwen-moe", "phi-moe")]
    assert MOE_SHAPES["moe"] == tuple(shape for part in parts for shape in part) and len(MOE_SHAPES) == 5
    assert {shape.m for shape in MOE_SHAPES["comet"]} == {8192}
    for part in parts[1:]:
        assert [shape.m for shape in part] == [2048, 4096, 8192, 16384]
    for shape in MOE_SHAPES["moe"]:
        assert shape.why and all(
            shape.ffn % world_size == 0 == shape.num_experts % world_size for world_size in (2, 4, 8)
        )


def test_products_of_a_layer_of_experts() -> None:
    (layer, *_) = MOE_SHAPES["mixtral"]
    into, out_of = (2048, 14336, 4096), (2048, 4096, 14336)
    assert layer.sizes("moe_ag_gemm") == (into,) and layer.sizes("moe_gemm_rs") == (out_of,)
    assert layer.sizes("grouped_gemm") == (into, out_of) and layer.sizes("ag_gemm") == ()


def test_a_mixture_is_told_by_what_is_not_usual() -> None:
    assert str(Mixture(8, 2)) == "E=8 top=2"
    assert str(Mixture(8, 2, 4, "skewed", is_picked=True)) == "E=8 top=2 EP=4 skewed picked"
