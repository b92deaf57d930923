"""grouped_gemm against the fp64 oracle expert by expert, on the host and interpreted; its gradient and refusals."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tileflux
from tileflux import GemmConfig
from tileflux.ops import grouped_gemm_reference
from tileflux.ops._dense import config_text
from tileflux.testing import assert_close, run_ranks
from tileflux.testing.dense import ACTIVATIONS, DENSE_DTYPES, DenseCase, expected_gemm, gemm_case, reduction
from tileflux.testing.numerics import poisoned

from .cases import check_registration
from .dense_cases import (
    CONFIGS,
    SMALL,
    Gradients,
    check_compiled_alike,
    check_out_refusals,
    drawn_case,
    drawn_factors,
    drawn_layout,
    gradients,
    install_interpreter,
    interpreted,
    needs_interpreter,
    weighted,
)

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
WIDTHS = [(33, 19), (16, 32), (1, 1), (18, 64), (1, 7), (40, 0), (1, 0), (9, 1)]  # N and K
Arguments = dict[str, Any]


def bounds_of(counts: list[int], num_rows: int) -> list[tuple[int, int]]:
    """First row and end of every expert's rows."""
    bounds, end = [], 0
    for count in counts:
        first, end = end, min(num_rows, end + max(0, count))
        bounds.append((first, end))
    return bounds


def drawn_counts(draws: random.Random, largest: int = 20) -> tuple[list[int], int]:
    """Rows of every expert, and of x: as many, more or fewer; experts without any; all for one of them."""
    counts = [draws.choice([0, 0, 1, draws.randint(0, largest)]) for _ in range(draws.choice([1, 2, 3, 8]))]
    if draws.random() < 0.2:
        crowded = draws.randrange(len(counts))
        counts = [3 * largest if expert == crowded else 0 for expert in range(len(counts))]
    return counts, max(0, sum(counts) + draws.choice([0, 0, 5, -3]))


def grouped_arguments(case: DenseCase, counts: list[int], draws: random.Random) -> Arguments:
    """The arguments of a dense case, whose columns are those of all experts, as ``grouped_gemm`` takes them."""
    arguments, num_experts = case.arguments("gemm", 0), len(counts)
    num_columns = case.shape[1] // num_experts
    num_packed = num_columns * (2 if case.activation == "swiglu" else 1)
    weight = arguments["weight"].reshape(num_experts, num_packed, case.shape[2])
    kinds = (torch.int32, torch.int64)[max(counts) >> 31 > 0 :]
    arguments |= {"weight": weight, "counts": torch.tensor(counts, dtype=draws.choice(kinds))}
    if (bias := arguments.get("bias")) is not None:
        arguments["bias"] = bias.reshape(weight.shape[:2])
    if isinstance(scale := arguments.get("scale_weight"), torch.Tensor) and scale.dim():
        per_column = scale.reshape(weight.shape[:2])
        arguments["scale_weight"] = draws.choice([per_column, per_column[:, 0]] if num_columns else [per_column])
    num_used = bounds_of(counts, case.shape[0])[-1][1]
    if num_used * num_columns < 32 or (case.activation and num_columns < 8):
        for name in {"x", "weight", "bias"} & set(arguments):  # so few sums must not all but cancel
            arguments[name] = arguments[name].float().abs().to(arguments[name].dtype)
    arguments["x"] = drawn_layout(arguments["x"], draws)
    arguments["weight"] = drawn_weight_layout(arguments["weight"], draws)
    return arguments


def drawn_weight_layout(weight: torch.Tensor, draws: random.Random) -> torch.Tensor:
    """The same values with K or N contiguous, rows behind each other or apart, and experts, too."""
    turned, room = draws.random() < 0.5, draws.choice([(0, 0), (0, 3), (2, 0), (2, 5)])
    values = weight.transpose(1, 2) if turned else weight
    num_experts, outer, inner = values.shape
    view = poisoned((num_experts, outer + room[0], inner + room[1]), weight.dtype)[:, :outer, :inner]
    view.copy_(values)
    return view.transpose(1, 2) if turned else view


def of_each_expert(arguments: Arguments) -> Iterator[tuple[slice, Arguments]]:
    """Every expert's rows, and what ``gemm`` would be given for them, less the type of the result."""

    def part(name: str, index: slice | int) -> Any:
        value = arguments.get(name)
        return value[index] if isinstance(value, torch.Tensor) and value.dim() else value

    bounds = bounds_of(arguments["counts"].tolist(), len(arguments["x"]))
    for expert, rows in enumerate(slice(*each) for each in bounds):
        own = {name: part(name, rows) for name in ("x", "scale_x")}
        own |= {name: part(name, expert) for name in ("weight", "bias", "scale_weight")}
        yield rows, own | {"activation": arguments.get("activation")}


def expected(arguments: Arguments) -> torch.Tensor:
    """Of all rows that belong to an expert, in fp64."""
    return torch.cat([expected_gemm(**own) for _, own in of_each_expert(arguments)])


def check_grouped(case: DenseCase, arguments: Arguments, config: GemmConfig | None, with_out: bool = True) -> None:
    """One call against the oracle; rows of no expert must not have been touched."""
    right = expected(arguments)
    out = poisoned((case.shape[0], right.shape[1]), case.out_dtype)
    result = tileflux.grouped_gemm(**arguments, config=config, out=out if with_out else None)
    assert result.shape == out.shape and (result is out or not with_out)
    x, weight = arguments["x"], arguments["weight"]
    what = f"{tuple(x.shape)} by {tuple(weight.shape)} {weight.stride()} {x.dtype}, {arguments['counts']}, {config}"
    depth = reduction(case, "gemm")
    assert_close(result[: len(right)], right, dtype=case.out_dtype, reduction=depth, what=what)
    if with_out:
        behind = out[len(right) :]
        assert_close(behind, poisoned(behind.shape, case.out_dtype), reduction=0, what=f"behind {what}")


def check_drawn(
    widths: tuple[int, int], dtype: torch.dtype, draws: random.Random, config: GemmConfig | None, largest: int = 20
) -> None:
    counts, num_rows = drawn_counts(draws, largest)
    case = drawn_case("gemm", 1, (num_rows, len(counts) * widths[0], widths[1]), dtype, draws)
    check_grouped(case, grouped_arguments(case, counts, draws), config, draws.random() < 0.8)


def check_counts(counts: list[int], num_rows: int, dtype: torch.dtype, config: GemmConfig | None) -> None:
    """The same with counts that were not drawn."""
    draws = random.Random(str((counts, num_rows, dtype)))
    case = drawn_case("gemm", 1, (num_rows, len(counts) * 10, 12), dtype, draws)
    check_grouped(case, grouped_arguments(case, counts, draws), config)


@pytest.mark.parametrize("dtype", DENSE_DTYPES, ids=str)
def test_every_type(dtype: torch.dtype) -> None:
    draws = random.Random(str(dtype))
    for widths in WIDTHS:
        for config in (*CONFIGS, GemmConfig(64, 32, 16)):
            check_drawn(widths, dtype, draws, config)


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(0, 40), st.sampled_from(DENSE_DTYPES), st.integers(0, 2**32))
def test_drawn(num_columns: int, depth: int, dtype: torch.dtype, seed: int) -> None:
    draws = random.Random(seed)
    check_drawn((num_columns, depth), dtype, draws, draws.choice(CONFIGS))


@needs_interpreter
@pytest.mark.parametrize("dtype", DENSE_DTYPES, ids=str)
def test_interpreted(dtype: torch.dtype) -> None:
    install_interpreter()
    draws = random.Random(str(dtype))
    with interpreted():
        for widths in WIDTHS:
            check_drawn(widths, dtype, draws, SMALL)


@needs_interpreter
@settings(deadline=None, max_examples=15)
@given(st.integers(0, 33), st.integers(0, 33), st.sampled_from(DENSE_DTYPES), st.integers(0, 2**32))
def test_drawn_interpreted(num_columns: int, depth: int, dtype: torch.dtype, seed: int) -> None:
    install_interpreter()
    with interpreted():
        check_drawn((num_columns, depth), dtype, random.Random(seed), SMALL, largest=17)


COUNTS = {
    "none at all": ([0, 0, 0], 0),
    "rows without an expert": ([0, 0, 0], 20),
    "one has everything": ([0, 50, 0], 50),
    "the last has everything": ([0, 0, 50], 50),
    "fewer than there are": ([3, 0, 17], 29),
    "more than there are": ([3, 30, 17], 29),
    "more, from the first on": ([60, 30, 17], 29),
    "a negative one": ([3, -7, 17], 25),
    "a sum that overflows": ([3, 2**62, 2**62, 2**62, 2**62, 4], 25),
}


@pytest.mark.parametrize(("counts", "num_rows"), COUNTS.values(), ids=COUNTS)
def test_counts(counts: list[int], num_rows: int) -> None:
    for dtype in (torch.float32, torch.int8):
        for config in (None, SMALL):
            check_counts(counts, num_rows, dtype, config)


def test_1024_experts() -> None:
    draws = random.Random(1024)
    for counts in ([draws.choice([0, 1, 2, 5]) for _ in range(1024)], [0] * 1023 + [40], [1] * 1024):
        for dtype in (torch.float32, torch.float8_e4m3fn):
            check_counts(counts, sum(counts) + 3, dtype, draws.choice(CONFIGS))


@needs_interpreter
def test_counts_interpreted() -> None:
    install_interpreter()
    many = [0] * 1024
    many[0], many[5], many[511], many[512], many[1023] = 1, 17, 3, 16, 18
    with interpreted():
        for dtype in (torch.float32, torch.int8):
            check_counts(many, sum(many) + 3, dtype, SMALL)
            for name in ("rows without an expert", "the last has everything", "more than there are", "a negative one"):
                check_counts(*COUNTS[name], dtype, SMALL)


def test_every_kind_of_scale_with_every_activation() -> None:
    """What is drawn elsewhere, here without exception."""
    draws = random.Random(3)
    counts, columns = [7, 0, 13, 9], 12
    for dtype in (torch.float8_e5m2, torch.int8):
        for activation in (None, *ACTIVATIONS):
            options: Any = {"activation": activation, "scales": "channel", "bias": True, "out_dtype": torch.float32}
            case = gemm_case((29, len(counts) * columns, 24), dtype, draws.randrange(2**32), **options)
            arguments = grouped_arguments(case, counts, draws)
            scale_x = case.scales_x[0]
            per_column = case.arguments("gemm", 0)["scale_weight"].reshape(arguments["weight"].shape[:2])
            assert isinstance(scale_x, torch.Tensor)
            for of_x in (scale_x, scale_x[0], float(scale_x[0]), scale_x.repeat_interleave(2)[::2]):
                for of_weight in (per_column, per_column[:, 0], per_column[0, 0], per_column.t().contiguous().t()):
                    check_grouped(case, arguments | {"scale_x": of_x, "scale_weight": of_weight}, SMALL)


def check_like_gemm(dtype: torch.dtype, draws: random.Random) -> None:
    """Every expert's rows have the bits that ``gemm`` gives them: the same tiles, from an expert's first row on."""
    counts = [17, 0, 5, 40]
    case = drawn_case("gemm", 1, (62, len(counts) * 37, 45), dtype, draws)
    arguments = grouped_arguments(case, counts, draws)
    y = tileflux.grouped_gemm(**arguments, config=SMALL)
    for rows, own in of_each_expert(arguments):
        alone = tileflux.gemm(**own, out_dtype=case.out_dtype, config=SMALL)
        assert_close(y[rows], alone, reduction=0, what=f"{rows}")


@pytest.mark.parametrize("dtype", DENSE_DTYPES, ids=str)
def test_every_expert_gets_what_gemm_gives(dtype: torch.dtype) -> None:
    draws = random.Random(str(dtype))
    for _ in range(4):
        check_like_gemm(dtype, draws)


@needs_interpreter
def test_every_expert_gets_what_gemm_gives_interpreted() -> None:
    install_interpreter()
    draws = random.Random(8)
    with interpreted():
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
            check_like_gemm(dtype, draws)


def test_the_reference_is_right_too() -> None:
    draws = random.Random(5)
    for dtype in DENSE_DTYPES:
        for _ in range(6):
            counts, num_rows = drawn_counts(draws)
            case = drawn_case("gemm", 1, (num_rows, len(counts) * 20, 24), dtype, draws)
            arguments = grouped_arguments(case, counts, draws)
            y, right = grouped_gemm_reference(**arguments), expected(arguments)
            assert_close(y[: len(right)], right, dtype=case.out_dtype, reduction=reduction(case, "gemm"))
            assert y.shape == (num_rows, right.shape[1]) and not y[len(right) :].any()


def gradients_by_torch(tensors: Sequence[torch.Tensor], counts: list[int], factors: torch.Tensor) -> Gradients:
    """In plain torch and fp64, expert by expert."""

    def loss(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        bounds = enumerate(bounds_of(counts, len(x)))
        y = torch.cat([x[first:end] @ weight[expert].t() + bias[expert] for expert, (first, end) in bounds])
        return (y * factors[: len(y)]).sum()

    return gradients(loss, [tensor.double() for tensor in tensors])


def check_gradients(dtype: torch.dtype, turned: bool, counts: list[int], num_rows: int) -> None:
    num_experts, num_used = len(counts), bounds_of(counts, num_rows)[-1][1]
    shapes = (num_rows, 20), (num_experts, 18, 20), (num_experts, 18)
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in shapes)
    factors = drawn_factors(num_rows, 18)
    x[num_used:] = factors[num_used:] = torch.nan
    if turned:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)

    def loss(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return weighted(tileflux.grouped_gemm(x, weight, torch.tensor(counts), bias, config=SMALL), factors)

    found = gradients(loss, (x, weight, bias))
    rights = gradients_by_torch((x, weight, bias), counts, factors)
    for actual, right, depth in zip(found, rights, (18, num_used, num_used), strict=True):
        assert_close(actual, right, dtype=dtype, reduction=depth)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients(dtype: torch.dtype, turned: bool) -> None:
    """Rows of no expert are NaN, in x and in what comes back: none of it may get into a gradient."""
    for counts, num_rows in (([9, 0, 17, 4], 34), ([9, 0, 17, 40], 34), ([30, 0], 30)):
        check_gradients(dtype, turned, counts, num_rows)


def test_the_gradient_of_a_bias_is_rounded_once() -> None:
    """And not to the type of x before it is summed."""
    x, weight = torch.randn(40, 4).bfloat16(), torch.randn(2, 5, 4).bfloat16()
    bias, factors = torch.zeros(2, 5, requires_grad=True), torch.randn(40, 5)
    y = tileflux.grouped_gemm(x, weight, torch.tensor([15, 25]), bias, out_dtype=torch.float32)
    weighted(y, factors).backward()
    assert bias.grad is not None
    right = torch.stack([part.double().sum(0) for part in factors.split([15, 25])])
    assert_close(bias.grad, right, reduction=25)


def test_gradients_only_where_they_are_needed() -> None:
    counts = torch.tensor([1, 3])
    x, weight = torch.randn(4, 6), torch.randn(2, 5, 6, requires_grad=True)
    tileflux.grouped_gemm(x, weight, counts).sum().backward()
    assert weight.grad is not None and x.grad is None
    sums = torch.stack([x[:1].double().sum(0), x[1:].double().sum(0)])
    assert_close(weight.grad, sums[:, None, :].expand(2, 5, 6), reduction=3)
    assert not tileflux.grouped_gemm(x, weight.detach(), counts).requires_grad


def _compiled(group: tileflux.Group) -> None:
    factors, counts = drawn_factors(9, 5), torch.tensor([4, 0, 5])
    tensors = torch.randn(9, 6), torch.randn(3, 5, 6), torch.randn(3, 5)

    def loss(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return weighted(tileflux.grouped_gemm(x, weight, counts, bias, config=SMALL), factors)

    check_compiled_alike(loss, tensors)


def test_compiled() -> None:
    run_ranks(_compiled, 1, timeout_s=120)


def _registration(group: tileflux.Group) -> None:
    op, counts = torch.ops.tileflux.grouped_gemm.default, torch.tensor([3, 1])
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((4, 3), (2, 6, 3), (2, 6)))
    check_registration(group, op, x, weight, counts, bias, None, None, "", torch.float32, "")
    small = torch.ones(4, 3).to(torch.int8), torch.ones(2, 6, 3).to(torch.int8)
    scales = torch.tensor(0.5), torch.rand(2)
    check_registration(group, op, *small, counts.int(), None, *scales, "swiglu", torch.bfloat16, config_text(SMALL))


def test_registration() -> None:
    run_ranks(_registration, 1, timeout_s=120)


X, WEIGHT, COUNTS_OF_4 = torch.ones(4, 3), torch.ones(2, 5, 3), torch.tensor([1, 3])
INT8 = {"x": X.to(torch.int8), "weight": WEIGHT.to(torch.int8)}
REFUSALS: list[tuple[str, Arguments]] = [
    (r"weight should be a tensor \[E, N, K\], one matrix per expert, not \(5, 3\)", {"weight": WEIGHT[0]}),
    (r"weight should be a tensor \[E, N, K\], one matrix per expert, not list", {"weight": [WEIGHT[0]]}),
    ("weight has 0 experts; there should be from 1 to 1024", {"weight": WEIGHT[:0], "counts": COUNTS_OF_4[:0]}),
    ("weight has 1025 experts; there should be from 1 to 1024", {"weight": torch.ones(1025, 1, 3)}),
    ("weight has layout torch.sparse_coo; only dense", {"weight": WEIGHT.to_sparse()}),
    ("weight is on meta but x is on cpu; move it there", {"weight": WEIGHT.to("meta")}),
    (r"weight has strides \(18, 3\); one of its dimensions must", {"weight": torch.ones(2, 5, 6, 3)[:, :, :3, 0]}),
    (r"x \(4, 2\) and weight \(5, 3\) differ in K", {"x": X[:, :2]}),
    ("swiglu wants gate and up packed", {"activation": "swiglu"}),
    ("counts should be a tensor of integers, not list", {"counts": [1, 3]}),
    (r"counts should be int32 or int64 of shape \(2,\), .* not torch.float32 \(2,\)", {"counts": torch.ones(2)}),
    (r"counts should be int32 or int64 of shape \(2,\), .* not torch.int64 \(1,\)", {"counts": torch.tensor([4])}),
    ("counts is on meta but weight is on cpu; move it there", {"counts": COUNTS_OF_4.to("meta")}),
    ("bias should be a tensor, not int", {"bias": 3}),
    (r"bias should have shape \(2, 5\), not \(5,\)", {"bias": torch.ones(5)}),
    ("bias should .* type float32, float16 or bfloat16, not .* torch.float64", {"bias": torch.ones(2, 5).double()}),
    ("bias is on meta but x is on cpu", {"bias": torch.ones(2, 5, device="meta")}),
    ("scales belong to fp8 and int8; x is torch.float32", {"scale_weight": 1.0}),
    (r"scale_x should be float32 on cpu, a scalar or of shape \(4,\)", {**INT8, "scale_x": torch.ones(2)}),
    (r"scale_weight should be .*\(\), \(2,\) or \(2, 5\), not \(5,\)", {**INT8, "scale_weight": torch.ones(5)}),
    ("scale_weight should be float32 on cpu.* torch.float64", {**INT8, "scale_weight": torch.ones(2).double()}),
    ("scale_weight should be float32 on cpu.* on meta", {**INT8, "scale_weight": torch.ones(2, 5, device="meta")}),
    ("scale_weight should be a number or a float32 tensor, not str", {**INT8, "scale_weight": "1"}),
    ("config should be a tileflux.GemmConfig, not dict", {"config": {}}),
    ("there is no gradient through activation='relu'", {"x": X.clone().requires_grad_(), "activation": "relu"}),
    ("there is no gradient through products of torch.int8", {**INT8, "bias": torch.ones(2, 5, requires_grad=True)}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "wrong"), REFUSALS, ids=[message for message, _ in REFUSALS])
def test_refusals(message: str, wrong: Arguments) -> None:
    with pytest.raises(ValueError, match=f"^grouped_gemm: {message}"):
        tileflux.grouped_gemm(**({"x": X, "weight": WEIGHT, "counts": COUNTS_OF_4} | wrong))


def test_what_may_not_be_given_as_out() -> None:
    def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **named: Any) -> torch.Tensor:
        biases = None if bias is None else bias[None]
        return tileflux.grouped_gemm(x, weight[None], torch.tensor([4]), biases, **named)

    check_out_refusals(call, "grouped_gemm")
