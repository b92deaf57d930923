"""The oracle of the dense ops against plain torch on whole matrices; right programs pass it and wrong ones do not."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import cycle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import find, given, settings
from hypothesis import strategies as st

from tileflux.testing.dense import (
    ACTIVATIONS,
    DENSE_DTYPES,
    SCALED_DTYPES,
    DenseCase,
    ag_case,
    dense_shapes,
    expected,
    expected_ag,
    expected_ar,
    expected_rs,
    gathered,
    gemm_case,
    ragged_sizes,
    reduction,
    rs_case,
)
from tileflux.testing.numerics import assert_close, tolerance
from tileflux.testing.shapes import GEMM_SHAPES

FLOATS = tuple(dtype for dtype in DENSE_DTYPES if dtype not in SCALED_DTYPES)
EXACT = {"rtol": 1e-11, "atol": 1e-11}  # between two ways to compute the same in fp64


def all_scales(dtype: torch.dtype) -> tuple[str, ...]:
    return ("none", "tensor", "channel") if dtype in SCALED_DTYPES else ("none",)


def rows_of(scale: float | torch.Tensor | None, num_rows: int) -> torch.Tensor:
    return torch.ones(num_rows, dtype=torch.float64) * (1.0 if scale is None else scale)


def scaled(matrices, scales) -> list[torch.Tensor]:
    """Each rank's matrix in fp64, its rows multiplied by their scales."""
    return [each.double() * rows_of(scale, len(each))[:, None] for each, scale in zip(matrices, scales, strict=True)]


def program(x, weight, bias=None, *, activation=None, scale_x=None, scale_weight=None) -> torch.Tensor:
    """What a right kernel computes, up to the last rounding: accumulated in fp32 or int32, the rest in fp32."""
    is_int = x.dtype == torch.int8
    y = (x.int() @ weight.int().T).float() if is_int else x.float() @ weight.float().T
    if scale_x is not None:
        y = y * torch.as_tensor(scale_x).reshape(-1, 1)
    if scale_weight is not None:
        y = y * torch.as_tensor(scale_weight, dtype=torch.float32).reshape(1, -1)
    if bias is not None:
        y = y + bias.float()
    if activation == "swiglu":
        gate, up = y.chunk(2, dim=1)
        return F.silu(gate) * up
    return y if activation is None else getattr(F, activation)(y)


def run(case: DenseCase, op: str, rank: int) -> torch.Tensor:
    """``op`` of all ranks in one place, as a right implementation does it, rounding where it may."""
    if op in ("gemm", "ag_gemm"):
        scales = [rows_of(scale, rows).float() for scale, rows in zip(case.scales_x, case.sizes, strict=True)]
        return program(
            torch.cat(case.xs), case.weights[rank], case.biases[rank], activation=case.activation,
            scale_x=torch.cat(scales), scale_weight=case.scales_weight[rank],
        ).to(case.out_dtype)  # fmt: skip
    total = torch.zeros(case.shape[:2])
    for source in range(case.world_size):
        part = program(
            case.xs[source], case.weights[source], case.biases[0] if source == 0 else None,
            scale_x=case.scales_x[source], scale_weight=case.scales_weight[source],
        )  # fmt: skip
        total += part.to(case.out_dtype).float()
    result = total.to(case.out_dtype)
    return result.split(case.sizes)[rank] if op == "gemm_rs" else result


def check(case: DenseCase, op: str, rank: int, actual: torch.Tensor) -> None:
    wanted = expected(case, op, rank)
    assert_close(actual, wanted, dtype=case.out_dtype, reduction=reduction(case, op), what=f"{op}, rank {rank}")


@pytest.mark.parametrize("scales", ["none", "tensor", "channel"])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_one_element_by_hand(activation: str | None, scales: str) -> None:
    case = gemm_case((5, 9, 11), torch.int8, 3, bias=True, activation=activation, scales=scales)
    (x,), (weight,), (bias,) = case.xs, case.weights, case.biases
    scale_x, scale_weight = rows_of(case.scales_x[0], 5), rows_of(case.scales_weight[0], len(weight))

    def linear(i: int, j: int) -> float:
        total = sum(a * b for a, b in zip(x[i].tolist(), weight[j].tolist(), strict=True))
        return total * scale_x[i].item() * scale_weight[j].item() + bias[j].item()

    def silu(value: float) -> float:
        return value / (1 + math.exp(-value)) if value > -700 else 0.0

    by_hand = {
        None: lambda i, j: linear(i, j),
        "relu": lambda i, j: max(linear(i, j), 0.0),
        "gelu": lambda i, j: linear(i, j) * (1 + math.erf(linear(i, j) / math.sqrt(2))) / 2,
        "silu": lambda i, j: silu(linear(i, j)),
        "swiglu": lambda i, j: silu(linear(i, j)) * linear(i, 9 + j),
    }[activation]
    wanted = torch.tensor([[by_hand(i, j) for j in range(9)] for i in range(5)], dtype=torch.float64)
    torch.testing.assert_close(expected(case, "gemm"), wanted, **EXACT)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_those_of_torch(activation: str) -> None:
    y = 4 * torch.randn(50, 40, dtype=torch.float64)
    wanted = F.silu(y[:, :20]) * y[:, 20:] if activation == "swiglu" else getattr(F, activation)(y)
    torch.testing.assert_close(ACTIVATIONS[activation](y), wanted, **EXACT)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", DENSE_DTYPES, ids=str)
def test_rs_over_ranks_is_the_whole_product(dtype: torch.dtype, world_size: int) -> None:
    for shape, scales, ragged in zip(GEMM_SHAPES, cycle(all_scales(dtype)), cycle([False, True]), strict=False):
        case = rs_case(world_size, shape, dtype, 5, ragged=ragged, bias=True, scales=scales)
        weight = torch.cat(scaled(case.weights, case.scales_weight), dim=1)
        assert weight.shape == (shape.n, shape.k)
        wanted = F.linear(torch.cat(scaled(case.xs, case.scales_x), dim=1), weight, case.biases[0].double())
        results = [expected_rs(case, rank) for rank in range(world_size)]
        assert tuple(map(len, results)) == case.sizes
        torch.testing.assert_close(torch.cat(results), wanted, **EXACT)
        assert torch.equal(torch.cat(results), expected_ar(case))


@pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", DENSE_DTYPES, ids=str)
def test_ag_over_ranks_is_the_whole_product(dtype: torch.dtype, world_size: int, activation: str | None) -> None:
    for shape, scales, ragged in zip(GEMM_SHAPES, cycle(all_scales(dtype)), cycle([False, True]), strict=False):
        case = ag_case(world_size, shape, dtype, 6, ragged=ragged, bias=True, activation=activation, scales=scales)
        weights, biases = scaled(case.weights, case.scales_weight), [bias.double() for bias in case.biases]
        if activation == "swiglu":  # gates of all ranks first, then what they gate
            weights, biases = ([each.chunk(2)[i] for i in (0, 1) for each in part] for part in (weights, biases))
        y = F.linear(torch.cat(scaled(case.xs, case.scales_x)), torch.cat(weights), torch.cat(biases))
        if activation is not None:
            y = F.gelu(y) if activation == "gelu" else F.silu(y[:, : shape.n]) * y[:, shape.n :]
        assert y.shape == (shape.m, shape.n) and gathered(case).dtype == dtype
        results = [expected_ag(case, rank) for rank in range(world_size)]
        torch.testing.assert_close(torch.cat(results, dim=1), y, **EXACT)


def test_a_sum_of_nothing_is_zero_or_the_bias() -> None:
    case = rs_case(3, (5, 7, 0), torch.float16, 1, bias=True)
    assert torch.equal(expected_ar(case), case.biases[0].double().expand(5, 7))
    assert torch.equal(expected_ar(rs_case(3, (5, 7, 0), torch.float16, 1)), torch.zeros(5, 7, dtype=torch.float64))


def tensors_of(case: DenseCase) -> list[torch.Tensor]:
    drawn = (*case.xs, *case.weights, *case.biases, *case.scales_x, *case.scales_weight)
    return [torch.as_tensor(each).double() for each in drawn if each is not None]


@pytest.mark.parametrize("draw", [ag_case, rs_case])
@pytest.mark.parametrize("dtype", DENSE_DTYPES, ids=str)
def test_the_seed_decides(draw, dtype: torch.dtype) -> None:
    scales = all_scales(dtype)[-1]
    one, same, other = (draw(3, (12, 24, 16), dtype, s, ragged=True, bias=True, scales=scales) for s in (7, 7, 8))
    torch.randn(5)  # nobody else's random numbers matter
    for a, b, c in zip(*map(tensors_of, (one, same, other)), strict=True):
        assert torch.equal(a, b)
        assert a.numel() == 0 or a.shape != c.shape or not torch.equal(a, c)
    assert one.sizes == same.sizes
    parts = [each for group in (one.xs, one.weights, one.biases) for each in group if each.numel() == group[0].numel()]
    assert len({tuple(each.double().flatten().tolist()) for each in parts}) == len(parts)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_shards_have_the_shapes_of_tensor_split(world_size: int) -> None:
    for shape in GEMM_SHAPES:
        m, n, k = (
            [len(part) for part in torch.empty(dim).tensor_split(world_size)] for dim in (shape.m, shape.n, shape.k)
        )
        for factor, activation in ((1, None), (2, "swiglu")):
            case = ag_case(world_size, shape, torch.float32, 0, bias=True, activation=activation)
            assert [tuple(x.shape) for x in case.xs] == [(rows, shape.k) for rows in m]
            assert [tuple(w.shape) for w in case.weights] == [(factor * columns, shape.k) for columns in n]
            assert [len(bias) for bias in case.biases] == [factor * columns for columns in n]
        case = rs_case(world_size, shape, torch.int8, 0, bias=True, scales="channel")
        assert [tuple(x.shape) for x in case.xs] == [(shape.m, terms) for terms in k]
        assert [tuple(w.shape) for w in case.weights] == [(shape.n, terms) for terms in k]
        assert [tuple(scale.shape) for scale in case.scales_x] == [(shape.m,)] * world_size
        assert [tuple(scale.shape) for scale in case.scales_weight] == [(shape.n,)] * world_size
        assert case.sizes == tuple(m)


@given(st.integers(0, 5000), st.integers(1, 16), st.integers(0, 1000))
def test_ragged_sizes_are_skewed_and_complete(num_rows: int, world_size: int, seed: int) -> None:
    sizes = ragged_sizes(num_rows, world_size, seed)
    assert len(sizes) == world_size and sum(sizes) == num_rows
    assert max(sizes) * 2 >= num_rows
    assert world_size == 1 or 0 in sizes
    if world_size > 2 and num_rows >= 4 * world_size:
        assert len(set(sizes)) == 3


def test_the_seed_decides_who_has_no_rows() -> None:
    assert {ragged_sizes(100, 4, seed).index(0) for seed in range(50)} == {0, 1, 2, 3}


@pytest.mark.parametrize("draw", [gemm_case, lambda *args, **kwargs: rs_case(2, *args, **kwargs)])
def test_weights_may_lie_transposed(draw) -> None:
    plain, transposed = (draw((6, 8, 10), torch.bfloat16, 3, transposed_weight=flag) for flag in (False, True))
    for weight, other in zip(plain.weights, transposed.weights, strict=True):
        assert torch.equal(weight, other) and weight.is_contiguous()
        assert other.stride() == (1, 8)
    assert transposed.arguments(transposed.ops[0], 0)["weight"].stride() == (1, 8)


def test_shards_have_memory_of_their_own() -> None:
    for case in (ag_case(3, (7, 9, 5), torch.float8_e4m3fn, 1), rs_case(3, (7, 9, 5), torch.float8_e4m3fn, 1)):
        for tensor in (*case.xs, *case.weights):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_only_what_is_not_the_default_is_passed() -> None:
    def names(case: DenseCase, op: str) -> set[str]:
        return set(case.arguments(op, 0))

    plain = {"x", "weight"}
    assert names(gemm_case((4, 4, 4), torch.int8, 0), "gemm") == plain
    assert names(ag_case(2, (4, 4, 4), torch.float16, 0), "ag_gemm") == plain
    assert names(ag_case(2, (5, 4, 4), torch.float16, 0), "ag_gemm") == {*plain, "sizes"}
    assert names(rs_case(2, (5, 4, 4), torch.float16, 0), "gemm_rs") == plain
    skewed = rs_case(2, (5, 4, 4), torch.float16, 0, ragged=True)
    assert skewed.arguments("gemm_rs", 1)["sizes"] == list(skewed.sizes)
    assert names(skewed, "gemm_ar") == plain
    full = ag_case(
        1, (4, 4, 4), torch.int8, 0, bias=True, activation="relu", scales="tensor", out_dtype=torch.float32
    ).arguments("ag_gemm", 0)  # fmt: skip
    assert set(full) == {*plain, "bias", "scale_x", "scale_weight", "activation", "out_dtype"}
    assert full["scale_x"].shape == () and isinstance(full["scale_weight"], float)
    assert full["bias"].dtype == full["out_dtype"] == torch.float32


def test_dtypes() -> None:
    mixed = ag_case(2, (4, 4, 4), torch.float8_e4m3fn, 0, bias=True, weight_dtype=torch.float8_e5m2)
    assert {x.dtype for x in mixed.xs} == {torch.float8_e4m3fn}
    assert {w.dtype for w in mixed.weights} == {torch.float8_e5m2}
    assert mixed.out_dtype == mixed.biases[0].dtype == torch.bfloat16
    plain = gemm_case((4, 4, 4), torch.float16, 0, bias=True, out_dtype=torch.float32)
    assert plain.out_dtype == torch.float32 and plain.biases[0].dtype == torch.float16


@pytest.mark.parametrize("dtype", DENSE_DTYPES, ids=str)
def test_only_values_of_small_results_are_positive(dtype: torch.dtype) -> None:
    def signed(case: DenseCase) -> set[bool]:
        assert dtype == torch.int8 or all(float(x.double().abs().max()) <= 3.0 for x in case.xs)
        return {bool((each.double() < 0).any()) for each in (*case.xs, *case.weights, *case.biases)}

    assert signed(ag_case(2, (8, 8, 50), dtype, 0, bias=True)) == {True}
    assert signed(ag_case(2, (7, 8, 50), dtype, 0, bias=True)) == {False}
    assert signed(rs_case(2, (8, 8, 50), dtype, 0, bias=True)) == {True}
    assert signed(rs_case(2, (7, 8, 50), dtype, 0, bias=True)) == {False}
    assert signed(gemm_case((40, 8, 50), dtype, 0, bias=True, activation="silu")) == {True}
    assert signed(gemm_case((40, 7, 50), dtype, 0, bias=True, activation="silu")) == {False}


@pytest.mark.parametrize("dtype", DENSE_DTYPES, ids=str)
def test_bias_and_product_weigh_alike(dtype: torch.dtype) -> None:
    for scales in all_scales(dtype):
        case = gemm_case((60, 50, 400), dtype, 1, bias=True, scales=scales)
        product = expected(replace(case, biases=(None,)), "gemm")
        assert 0.5 < float(product.norm() / case.biases[0].double().expand_as(product).norm()) < 2


def test_reduction_counts_terms() -> None:
    assert [reduction(gemm_case((4, 4, k), torch.float32, 0), "gemm") for k in (0, 1, 300)] == [1, 1, 300]
    assert reduction(rs_case(3, (4, 4, 300), torch.float32, 0), "gemm_rs") == 300
    swiglu, relu = (gemm_case((4, 4, 300), torch.float32, 0, activation=name) for name in ("swiglu", "relu"))
    assert 600 < reduction(swiglu, "gemm") < 620 and reduction(relu, "gemm") == 300


def test_arguments_go_to_the_device_that_is_named() -> None:
    case = ag_case(2, (4, 6, 5), torch.int8, 0, bias=True, scales="tensor", transposed_weight=True)
    moved = case.arguments("ag_gemm", 1, "meta")
    assert {each.device.type for each in moved.values() if isinstance(each, torch.Tensor)} == {"meta"}
    assert moved["weight"].stride() == case.weights[1].stride() == (1, 3)


def test_refusals() -> None:
    for dtype in FLOATS:
        with pytest.raises(ValueError, match=f"scales='tensor' are for fp8 and int8, not for {dtype}"):
            ag_case(2, (4, 4, 4), dtype, 0, scales="tensor")
    with pytest.raises(ValueError, match="swiglu of torch.int8 would overflow fp16"):
        gemm_case((4, 4, 4), torch.int8, 0, activation="swiglu", out_dtype=torch.float16)
    case = rs_case(2, (4, 4, 4), torch.float32, 0)
    for wrong in (lambda: expected_ag(case, 0), lambda: reduction(case, "ag_gemm"), lambda: gathered(case)):
        with pytest.raises(ValueError, match="op='ag_gemm', and the case is for gemm_rs and gemm_ar"):
            wrong()
    with pytest.raises(ValueError, match="the case is for ag_gemm"):
        expected_rs(ag_case(2, (4, 4, 4), torch.float32, 0), 0)


def test_shapes_to_be_tried() -> None:
    fixed = settings(derandomize=True, database=None, max_examples=2000)
    for wanted in (
        lambda shape: shape[0] == 0 < shape[1] * shape[2],
        lambda shape: shape[2] == 0 < shape[0] * shape[1],
        lambda shape: all(dim % 2 and dim > 2 for dim in shape),
        lambda shape: all(dim > 60 for dim in shape),
    ):
        assert wanted(find(dense_shapes(), wanted, settings=fixed))
    assert max(find(dense_shapes(5), lambda shape: 5 in shape, settings=fixed)) == 5


@pytest.mark.parametrize("world_size", [1, 2, 8])
@pytest.mark.parametrize("dtype", DENSE_DTYPES, ids=str)
def test_right_programs_pass(dtype: torch.dtype, world_size: int) -> None:
    seed = 0
    for shape in GEMM_SHAPES:
        for activation in (None, *ACTIVATIONS, "rs"):
            seed += 1
            scales = all_scales(dtype)
            options = {"ragged": seed % 2 == 1, "bias": seed % 3 > 0, "scales": scales[seed % len(scales)]}
            out_dtype = (None, torch.float32, torch.bfloat16, torch.float16)[seed % 4]
            if activation == "rs":
                case = rs_case(world_size, shape, dtype, seed, out_dtype=out_dtype, **options)
            else:
                if activation == "swiglu" and options["scales"] == "none" and out_dtype == torch.float16:
                    out_dtype = None
                case = ag_case(world_size, shape, dtype, seed, out_dtype=out_dtype, activation=activation, **options)
            for op in case.ops:
                for rank in range(world_size):
                    check(case, op, rank, run(case, op, rank))


@settings(deadline=None)
@given(dense_shapes(), st.sampled_from(DENSE_DTYPES), st.sampled_from([1, 2, 3, 5]), st.integers(0, 10**6), st.data())
def test_right_programs_pass_anywhere(shape, dtype: torch.dtype, world_size: int, seed: int, data) -> None:
    options = {"bias": data.draw(st.booleans()), "scales": data.draw(st.sampled_from(all_scales(dtype)))}
    activation = data.draw(st.sampled_from([None, *ACTIVATIONS]))
    rank = data.draw(st.integers(0, world_size - 1))
    case = ag_case(world_size, shape, dtype, seed, activation=activation, **options)
    check(case, "ag_gemm", rank, run(case, "ag_gemm", rank))
    case = rs_case(world_size, shape, dtype, seed, ragged=True, **options)
    check(case, "gemm_rs", rank, run(case, "gemm_rs", rank))


@pytest.mark.parametrize("num_terms", [16, 136, 1024])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rounded_partial_results_of_eight_ranks_pass_with_room_to_spare(dtype: torch.dtype, num_terms: int) -> None:
    case = rs_case(8, (128, 96, num_terms), dtype, num_terms, bias=True)
    actual, wanted = run(case, "gemm_ar", 0), expected_ar(case)
    check(case, "gemm_ar", 0, actual)
    bound = tolerance(dtype, reduction(case, "gemm_ar"))
    error = (actual.double() - wanted).abs()
    assert error.norm() < 0.4 * bound.norm * wanted.norm()
    scale = wanted.norm() / math.sqrt(wanted.numel())
    assert bool((error < 0.8 * bound.element * wanted.abs().clamp_min(scale)).all())


@pytest.mark.parametrize("dtype", SCALED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", GEMM_SHAPES, ids=lambda shape: shape.name)
def test_results_without_scales_fit_into_fp16(shape, dtype: torch.dtype) -> None:
    for world_size in (1, 8):
        case = rs_case(world_size, shape, dtype, 9, bias=True, out_dtype=torch.float16)
        results = expected_ar(case).abs()
        assert results.numel() == 0 or 0.1 < float(results.max()) < 60_000


@pytest.mark.parametrize("dtype", DENSE_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(40, 48, 81), (7, 5, 33), (300, 8, 513), (2, 3, 33)], ids=str)
def test_wrong_programs_do_not_pass(shape, dtype: torch.dtype) -> None:
    scales = all_scales(dtype)[-1]
    case = rs_case(3, shape, dtype, 11, bias=True, scales=scales)
    xs, weights = list(case.xs), list(case.weights)
    wrong = {
        "a rank's part left out": replace(case, xs=(*xs[:2], torch.zeros_like(xs[2].float()).to(dtype))),
        "parts paired wrongly": replace(case, weights=(weights[0], weights[2], weights[1])),
        "another rank's bias": replace(case, biases=case.biases[1:]),
        "no bias": replace(case, biases=(None,)),
        "rows one further": replace(case, xs=tuple(x.roll(1, 0) for x in xs)),
        "columns one further": replace(case, weights=tuple(w.roll(1, 0) for w in weights)),
    }
    if scales == "channel":
        wrong["scales of the next row"] = replace(case, scales_x=tuple(s.roll(1) for s in case.scales_x))
        wrong["scales of the next column"] = replace(case, scales_weight=tuple(s.roll(1) for s in case.scales_weight))
        wrong["scales of the next rank"] = replace(case, scales_x=(*case.scales_x[1:], case.scales_x[0]))
    check(case, "gemm_ar", 0, run(case, "gemm_ar", 0))
    for what, other in wrong.items():
        with pytest.raises(AssertionError, match="off by more than rounding explains"):
            check(case, "gemm_ar", 0, run(other, "gemm_ar", 0))
            pytest.fail(f"not noticed: {what}")
