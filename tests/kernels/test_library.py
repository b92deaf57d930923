"""The plain product: who does it, and that all of them come to the same numbers."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from tileflux import env
from tileflux.config import GemmConfig
from tileflux.kernels import library
from tileflux.kernels.library import multiply, uses_torch
from tileflux.kernels.operands import Operands
from tileflux.testing import assert_close, nan_like, poisoned
from tileflux.testing.dense import DenseCase, expected, gemm_case, reduction

CONFIG = GemmConfig(block_m=16, block_n=32, block_k=16)


def make_operands(case: DenseCase) -> Operands:
    """Of rank 0, with a poisoned output."""
    out = poisoned(case.shape[:2], case.out_dtype)
    return Operands(case.xs[0], case.weights[0], out, case.biases[0], activation=case.activation)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu", "swiglu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_every_way_gives_the_product(activation: str | None, bias: bool, transposed: bool) -> None:
    seed = int(torch.randint(2**31, ()))
    case = gemm_case((37, 24, 40), torch.float32, seed, bias=bias, activation=activation, transposed_weight=transposed)
    operands, right = make_operands(case), expected(case, "gemm")
    ways = {"host": lambda: multiply(operands, CONFIG), "torch": lambda: library._multiply_with_torch(operands)}
    if env.interpreting():
        ways["interpreted"] = lambda: _interpreted(operands)
    for name, way in ways.items():
        operands.out.fill_(float("nan"))
        way()
        assert_close(
            operands.out, right, dtype=torch.float32, reduction=reduction(case, "gemm"), what=f"{name}, seed {seed}"
        )


def _interpreted(operands: Operands) -> None:
    from tileflux.testing import interpreter

    interpreter.install()
    with env.scoped({"TILEFLUX_CPU_BACKEND": "interpret"}):
        multiply(operands, CONFIG)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu", "swiglu"])
def test_torchs_library_in_half_precision(dtype: torch.dtype, activation: str | None) -> None:
    case = gemm_case((33, 24, 64), dtype, int(torch.randint(2**31, ())), bias=True, activation=activation)
    operands = make_operands(case)
    library._multiply_with_torch(operands)
    assert_close(operands.out, expected(case, "gemm"), dtype=dtype, reduction=reduction(case, "gemm"))


def test_a_bias_that_another_rank_adds_is_left_out() -> None:
    case = gemm_case((9, 24, 16), torch.float32, int(torch.randint(2**31, ())), bias=True)
    operands = dataclasses.replace(make_operands(case), adds_bias=False)
    right = expected(dataclasses.replace(case, biases=(None,)), "gemm")
    library._multiply_with_torch(operands)
    assert_close(operands.out, right, dtype=torch.float32, reduction=16)
    whole = nan_like(operands.out)
    multiply(dataclasses.replace(operands, out=whole), CONFIG)
    assert_close(whole, right, dtype=torch.float32, reduction=16)


def test_no_terms_leave_the_bias_and_no_elements_leave_nothing() -> None:
    bias = torch.randn(5)
    out = poisoned((3, 5), torch.float32)
    multiply(Operands(torch.empty(3, 0), torch.empty(5, 0), out, bias), CONFIG)
    assert torch.equal(out, bias.expand(3, 5))
    for m, n in ((0, 5), (3, 0)):
        multiply(Operands(torch.randn(m, 4), torch.randn(n, 4), torch.empty(m, n)), CONFIG)


def fake(shape: tuple[int, ...], dtype: torch.dtype, *, cuda: bool = True) -> SimpleNamespace:
    """As much of a tensor as is asked for."""
    return SimpleNamespace(shape=shape, dtype=dtype, is_cuda=cuda)


@pytest.mark.parametrize(
    ("x", "weight", "out", "bias", "uses"),
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16, None, True),
        (torch.float32, torch.float32, torch.float32, torch.float32, True),
        (torch.bfloat16, torch.bfloat16, torch.float32, None, False),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32, False),
        (torch.int8, torch.int8, torch.bfloat16, None, False),
        (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16, None, False),
    ],
)
def test_torchs_library_takes_one_type_throughout(
    x: torch.dtype, weight: torch.dtype, out: torch.dtype, bias: torch.dtype | None, uses: bool
) -> None:
    operands = Operands(
        fake((4, 8), x), fake((6, 8), weight), fake((4, 6), out), None if bias is None else fake((6,), bias)
    )
    assert uses_torch(operands) == uses
    assert not uses_torch(dataclasses.replace(operands, x=fake((4, 8), x, cuda=False)))
    assert not uses_torch(dataclasses.replace(operands, out=fake((0, 6), out)))
    assert not uses_torch(dataclasses.replace(operands, x=fake((4, 0), x), weight=fake((6, 0), weight)))
