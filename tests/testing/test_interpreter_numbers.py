"""What interpreted kernels compute, by values that the stock interpreter gets wrong."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tileflux import env
from tileflux.testing import interpreter

pytestmark = pytest.mark.skipif(not env.interpreting(), reason="kernels of this process are compiled")


@pytest.fixture(autouse=True, scope="module")
def repaired() -> None:
    interpreter.install()


@triton.jit
def _dot(a_ptr, b_ptr, c_ptr, N: tl.constexpr):
    rows = tl.arange(0, N)[:, None]
    cols = tl.arange(0, N)[None, :]
    a = tl.load(a_ptr + rows * N + cols)
    b = tl.load(b_ptr + rows * N + cols)
    tl.store(c_ptr + rows * N + cols, tl.dot(a, b))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16])
def test_dot_of_small_floats_is_that_of_their_values(dtype: torch.dtype) -> None:
    # Small whole numbers: the products and sums are exact in fp32.
    a, b = (torch.randint(-3, 4, (16, 16)).float() for _ in range(2))
    c = torch.full((16, 16), float("nan"))
    _dot[(1,)](a.to(dtype), b.to(dtype), c, 16)
    assert torch.equal(c, a @ b)


@triton.jit
def _dot_of_descriptors(a_desc, b_desc, c_ptr, N: tl.constexpr):
    rows = tl.arange(0, N)[:, None]
    cols = tl.arange(0, N)[None, :]
    tl.store(c_ptr + rows * N + cols, tl.dot(a_desc.load([0, 0]), b_desc.load([0, 0])))


def test_dot_of_bf16_through_host_descriptors() -> None:
    a, b = (torch.randint(-3, 4, (16, 16)).float() for _ in range(2))
    c = torch.full((16, 16), float("nan"))
    descriptors = [TensorDescriptor.from_tensor(x.bfloat16(), [16, 16]) for x in (a, b)]
    _dot_of_descriptors[(1,)](*descriptors, c, 16)
    assert torch.equal(c, a @ b)


@triton.jit
def _cast(x_ptr, y_ptr, N: tl.constexpr):
    elements = tl.arange(0, N)
    tl.store(y_ptr + elements, tl.load(x_ptr + elements).to(y_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16])
def test_casts_from_fp32_round_to_nearest_even(dtype: torch.dtype) -> None:
    x = torch.randn(4096)
    halfway = (1 + 2.0 ** -torch.arange(1, 12).float())[:, None] + torch.tensor([0.0, 2.0**-20, -(2.0**-20)])
    x[: halfway.numel()] = halfway.reshape(-1)
    y = torch.zeros(4096, dtype=dtype)
    _cast[(1,)](x, y, 4096)
    assert torch.equal(y.float(), x.to(dtype).float())


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)])
def test_casts_to_fp8_saturate(dtype: torch.dtype, largest: float) -> None:
    x = torch.tensor([1e6, -1e6, float("inf"), float("nan")])
    y = torch.zeros(4, dtype=dtype)
    _cast[(1,)](x, y, 4)
    assert y.float()[:3].tolist() == [largest, -largest, largest]
    assert y.float()[3].isnan()


@pytest.mark.parametrize("other", [torch.float32, torch.float16, torch.float64, torch.int32, torch.int64, torch.int8])
def test_bf16_converts_to_and_from_every_type(other: torch.dtype) -> None:
    x = torch.arange(-8, 8)
    there, back = torch.zeros(16, dtype=torch.bfloat16), torch.zeros(16, dtype=other)
    _cast[(1,)](x.to(other), there, 16)
    assert there.tolist() == x.tolist()
    _cast[(1,)](there, back, 16)
    assert back.tolist() == x.tolist()


@triton.jit
def _arithmetic(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    elements = tl.arange(0, N)
    x = tl.load(x_ptr + elements)
    y = tl.load(y_ptr + elements)
    tl.store(out_ptr + elements, x + y)
    tl.store(out_ptr + N + elements, x * y)
    tl.store(out_ptr + 2 * N + elements, -x)
    tl.store(out_ptr + 3 * N + elements, tl.where(x < y, x, y))
    tl.store(out_ptr + 4 * N + elements, tl.full((N,), 1.5, tl.bfloat16) - x)
    tl.store(out_ptr + 5 * N + elements, tl.sum(x, axis=0))


def test_arithmetic_on_bf16() -> None:
    x, y = torch.randn(64).bfloat16(), torch.randn(64).bfloat16()
    out = torch.zeros(6, 64, dtype=torch.bfloat16)
    _arithmetic[(1,)](x, y, out, 64)
    assert torch.equal(out[:5], torch.stack([x + y, x * y, -x, torch.minimum(x, y), 1.5 - x]))
    assert abs(out[5, 0].item() - x.double().sum().item()) < 2**-7 * max(1.0, abs(x.double().sum().item()))


@triton.jit
def _wrap(out_ptr, x):
    tl.store(out_ptr, x + 1)
    tl.store(out_ptr + 1, x * 2)
    tl.store(out_ptr + 2, (x + 1) - x)


def test_int32_wraps_as_compiled() -> None:
    out = torch.zeros(3, dtype=torch.int32)
    _wrap[(1,)](out, 2**31 - 1)
    assert out.tolist() == [-(2**31), -2, 1]


@triton.jit
def _overflow(out_ptr):
    tl.store(out_ptr + tl.arange(0, 4), tl.exp(tl.arange(0, 4).to(tl.float32) * 100.0))


def test_float_overflow_does_not_warn() -> None:
    out = torch.zeros(4)
    _overflow[(1,)](out)
    assert out[3].isinf()


@triton.jit
def _integers(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    for i in range(N):
        x = tl.load(x_ptr + i)
        y = tl.load(y_ptr + i)
        tl.store(out_ptr + i * 8 + 0, x // y)
        tl.store(out_ptr + i * 8 + 1, x % y)
        tl.store(out_ptr + i * 8 + 2, x - y * 3)
        tl.store(out_ptr + i * 8 + 3, (x & y) + (x < y) + (x >= y) * 10 + (x != y) * 100)
        tl.store(out_ptr + i * 8 + 4, x.to(tl.int64) * 65536 // 65536)
        tl.store(out_ptr + i * 8 + 5, (1 - x) // y)
        tl.store(out_ptr + i * 8 + 6, x % 4)
        tl.store(out_ptr + i * 8 + 7, (x + 0.5) * 2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_scalar_integers_behave_as_in_c(dtype: torch.dtype) -> None:
    values = [(7, 2), (-7, 2), (7, -2), (-7, -2), (1000003, 3), (0, 5)]
    x, y = (torch.tensor([pair[side] for pair in values], dtype=dtype) for side in (0, 1))
    out = torch.zeros(len(values), 8, dtype=torch.int64)
    _integers[(1,)](x, y, out, len(values))
    for (a, b), row in zip(values, out.tolist(), strict=True):
        quotient = int(np.trunc(a / b))
        flags = (a & b) + (a < b) + (a >= b) * 10 + (a != b) * 100
        expected = [quotient, a - b * quotient, a - 3 * b, flags, a, int(np.trunc((1 - a) / b)), int(np.fmod(a, 4))]
        assert row == [*expected, 2 * a + 1]


@triton.jit
def _loop(out_ptr, n, wide):
    for i in range(0, n, 2):
        tl.store(out_ptr + i, i.to(tl.int64) + 10)
    for i in range(wide - 1, wide):
        # Too large for 32 bits unless the variable is as wide as its bounds.
        tl.store(out_ptr + 1, i * 4)
    for i in tl.range(n, num_stages=2):
        tl.store(out_ptr + 2 + i, i.to(tl.float32).to(tl.int64))


def test_loop_variables_are_tensors() -> None:
    out = torch.full((8,), -1)
    _loop[(1,)](out, 3, 2**31)
    assert out.tolist() == [10, (2**31 - 1) * 4, 0, 1, 2, -1, -1, -1]


def test_host_code_keeps_its_range() -> None:
    assert "range" not in _loop.fn.__globals__
    assert list(range(2)) == [0, 1]


@triton.jit
def _count(out_ptr, n, step):
    count = 0
    for _ in range(0, n, step):
        count += 1
    for _ in tl.static_range(n):
        count += 100
    if n > step:
        count += 10000
    tl.store(out_ptr, count)


def test_scalars_bound_loops_with_every_numpy() -> None:
    # numpy >= 2.4 refuses to make an int of a one-element array, as the stock interpreter does; before that it warns.
    out = torch.zeros(1, dtype=torch.int32)
    _count[(1,)](out, 6, 2)
    assert out.item() == 10603
