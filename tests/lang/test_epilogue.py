"""Scales, bias and activation of an accumulated tile, in fp32 and in this order."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from tileflux import env
from tileflux.lang.epilogue import activate, scaled
from tileflux.testing import assert_close, interpreter, poisoned
from tileflux.testing.dense import ACTIVATIONS

pytestmark = pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")

ROWS, COLUMNS = 16, 32
BIAS_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _scaled_kernel(out_ptr, total_ptr, scale_a, scale_b, bias, num_rows, num_columns, SPEC: tl.constexpr):
    rows = tl.arange(0, 16)
    columns = tl.arange(0, 32)
    places = rows[:, None] * 32 + columns[None, :]
    total = tl.load(total_ptr + places)
    value = scaled(
        total, rows, rows < num_rows, columns, columns < num_columns,
        scale_a.to(tl.int64), scale_b.to(tl.int64), bias.to(tl.int64), SPEC,
    )  # fmt: skip
    tl.store(out_ptr + places, value)


@triton.jit
def _activate_kernel(out_ptr, value_ptr, gate_ptr, SPEC: tl.constexpr):
    places = tl.arange(0, 512)
    tl.store(out_ptr + places, activate(tl.load(value_ptr + places), tl.load(gate_ptr + places), SPEC))


def make_scale(kind: str, count: int) -> torch.Tensor | None:
    """As an op gets it."""
    return None if kind == "none" else 0.5 + torch.rand(count if kind == "channel" else ())


def address(tensor: torch.Tensor | None) -> int:
    """Where it is; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


@pytest.mark.parametrize("kinds", list(itertools.product(("none", "tensor", "channel"), repeat=2)))
@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("total_dtype", [torch.float32, torch.int32], ids=str)
def test_scales_and_bias(kinds: tuple[str, str], bias_dtype: torch.dtype | None, total_dtype: torch.dtype) -> None:
    interpreter.install()
    num_rows, num_columns = 13, 27
    total = (100 * torch.randn(ROWS, COLUMNS)).to(total_dtype)
    scale_a, scale_b = make_scale(kinds[0], num_rows), make_scale(kinds[1], num_columns)
    bias = None if bias_dtype is None else 100 * torch.randn(num_columns).to(bias_dtype)
    out = poisoned((ROWS, COLUMNS), torch.float32)
    spec = SimpleNamespace(
        scale_a=kinds[0], scale_b=kinds[1], has_bias=bias is not None,
        bias_type=BIAS_TYPES[bias_dtype or torch.float32],
    )  # fmt: skip
    _scaled_kernel[(1,)](out, total, address(scale_a), address(scale_b), address(bias), num_rows, num_columns, spec)
    right = total[:num_rows, :num_columns].double()
    if scale_a is not None:
        right = right * scale_a.double().reshape(-1, 1)
    if scale_b is not None:
        right = right * scale_b.double()
    if bias is not None:
        right = right + bias.double()
    assert_close(out[:num_rows, :num_columns], right, reduction=3)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_activations(activation: str | None) -> None:
    interpreter.install()
    value, gate = 3 * torch.randn(512), 3 * torch.randn(512)
    value[:3], gate[:3] = torch.tensor([0.0, 60.0, -60.0]), torch.tensor([0.0, 60.0, -60.0])
    out = poisoned((512,), torch.float32)
    _activate_kernel[(1,)](out, value, gate, SimpleNamespace(activation=activation or ""))
    if activation is None:
        assert torch.equal(out, value)
        return
    if activation == "swiglu":
        right = ACTIVATIONS["swiglu"](torch.stack([gate, value], dim=1).double()).flatten()
    else:
        right = ACTIVATIONS[activation](value.double())
    assert_close(out, right, dtype=torch.float32, reduction=8)
