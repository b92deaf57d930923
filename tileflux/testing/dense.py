"""Problems for the dense ops with their exact results: ``gemm``, ``ag_gemm``, ``gemm_rs``, ``gemm_ar``.

A case is drawn from a seed on the CPU, for all ranks at once. Every rank draws it again by itself and computes in
fp64 what it must receive, so the check needs neither a group nor anything of the library that is checked.

Letters: W ranks; M rows, N columns and K terms of the whole product; a subscript r means rank r's part.

What is drawn keeps results of order one, whatever K is: no activation is only tried where it is flat or straight,
bias and product weigh the same, and fp16 does not overflow. Values have mixed signs, except where a rank's result is
so small that its sums might all but cancel: ``assert_close`` has no tolerance for that, so they are positive there,
although a positive sum of many terms hardly shows which terms it is made of.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from tileflux.testing.shapes import GemmShape

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = [
    "ACTIVATIONS",
    "DENSE_DTYPES",
    "SCALED_DTYPES",
    "DenseCase",
    "ag_case",
    "dense_shapes",
    "expected",
    "expected_ag",
    "expected_ar",
    "expected_gemm",
    "expected_rs",
    "gathered",
    "gemm_case",
    "ragged_sizes",
    "reduction",
    "rs_case",
]

SCALED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
"""Inputs that take scales, and whose results have another dtype: bf16 unless told otherwise."""
DENSE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, *SCALED_DTYPES)
"""Every dtype that the dense ops multiply."""

Activation = Literal["relu", "gelu", "silu", "swiglu"]
Scales = Literal["none", "tensor", "channel"]
Scale = float | torch.Tensor | None
Shape = GemmShape | tuple[int, int, int]

_MIN_SIGNED = 32  # results per rank from which on the root mean square of sums of mixed sign is that of their terms
_MIN_SIGNED_COLUMNS = 8  # with an activation: a column next to zero, for its bias is low, must not be all there is
_ACTIVATION_ROUNDINGS = 8
_INT8_MAX = 127
_MAX_UNSCALED_FP16 = 20_000  # of 65,504, so that a bias still fits on top


@dataclass(frozen=True, eq=False)
class DenseCase:
    """One problem as all ranks see it, on the CPU. Everything that differs by rank is indexed by it."""

    ops: tuple[str, ...]
    """The ops whose sharding this is."""
    shape: tuple[int, int, int]
    """M, N and K of the whole product; N counts columns of the result, also where ``swiglu`` needs two rows each."""
    xs: tuple[torch.Tensor, ...]
    weights: tuple[torch.Tensor, ...]
    biases: tuple[torch.Tensor | None, ...]
    scales_x: tuple[Scale, ...]
    scales_weight: tuple[Scale, ...]
    activation: Activation | None
    out_dtype: torch.dtype
    sizes: tuple[int, ...]
    """Rows per rank: what each brings to ``ag_gemm`` and gets from ``gemm_rs``."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.xs)

    def arguments(self, op: str, rank: int, device: torch.device | str = "cpu") -> dict[str, Any]:
        """What ``rank`` passes to ``op``, by name, less its group; only what is not the default, as a user would."""
        _check_op(self, op)
        given: dict[str, Any] = {
            "x": self.xs[rank],
            "weight": self.weights[rank],
            "bias": self.biases[rank],
            "scale_x": self.scales_x[rank],
            "scale_weight": self.scales_weight[rank],
            "activation": self.activation,
        }
        if self.out_dtype != _default_out_dtype(self.xs[rank].dtype):
            given["out_dtype"] = self.out_dtype
        usual = {"ag_gemm": (self.sizes[0],) * self.world_size, "gemm_rs": _even(self.shape[0], self.world_size)}
        if self.sizes != usual.get(op, self.sizes):
            given["sizes"] = list(self.sizes)
        return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in given.items() if v is not None}


def gemm_case(
    shape: Shape,
    dtype: torch.dtype,
    seed: int,
    *,
    bias: bool = False,
    activation: Activation | None = None,
    scales: Scales = "none",
    transposed_weight: bool = False,
    weight_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> DenseCase:
    """For ``gemm``, or ``ag_gemm`` on one rank: x ``[M, K]``, weight ``[N, K]``. Keywords as of ``ag_case``."""
    draw = _Draw(shape, dtype, seed, weight_dtype, out_dtype, activation, scales, transposed_weight)
    return draw.case(("gemm", "ag_gemm"), (draw.m,), bias)


def ag_case(
    world_size: int,
    shape: Shape,
    dtype: torch.dtype,
    seed: int,
    *,
    ragged: bool = False,
    bias: bool = False,
    activation: Activation | None = None,
    scales: Scales = "none",
    transposed_weight: bool = False,
    weight_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> DenseCase:
    """For ``ag_gemm``: x ``[m_r, K]``, weight ``[N_r, K]``; with ``swiglu`` ``[2 N_r, K]``, rank r's gate above its up.

    Rows are divided evenly, or by ``ragged_sizes``; columns evenly, so that ranks may have different numbers, or none.
    ``scales``: ``"tensor"`` is one of x and one of the weight per rank, ``"channel"`` one per row and one per row of
    the weight. ``transposed_weight``: the weight lies in memory as ``[K, N_r]``. ``weight_dtype``: where not x's. The
    bias has x's dtype, or that of the result where x is fp8 or int8.
    """
    draw = _Draw(shape, dtype, seed, weight_dtype, out_dtype, activation, scales, transposed_weight)
    sizes = ragged_sizes(draw.m, world_size, seed) if ragged else _even(draw.m, world_size)
    return draw.case(("ag_gemm",), sizes, bias)


def rs_case(
    world_size: int,
    shape: Shape,
    dtype: torch.dtype,
    seed: int,
    *,
    ragged: bool = False,
    bias: bool = False,
    scales: Scales = "none",
    transposed_weight: bool = False,
    weight_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> DenseCase:
    """For ``gemm_rs`` and ``gemm_ar``: x ``[M, K_r]``, weight ``[N, K_r]``. Keywords as of ``ag_case``.

    Terms are divided evenly, so that a rank may have none. Each rank has a bias of its own, of which only rank 0's
    counts: one that is added once too often, or taken from elsewhere, shows.
    """
    draw = _Draw(shape, dtype, seed, weight_dtype, out_dtype, None, scales, transposed_weight)
    sizes = ragged_sizes(draw.m, world_size, seed) if ragged else _even(draw.m, world_size)
    return draw.case(("gemm_rs", "gemm_ar"), sizes, bias)


def ragged_sizes(num_rows: int, world_size: int, seed: int) -> tuple[int, ...]:
    """Rows per rank, skewed: none on one rank, most on another and few on the rest; the seed says on which."""
    ranks = random.Random(seed).sample(range(world_size), world_size)
    bulk, empty = ranks[0], ranks[-1]
    sizes = [num_rows // (4 * world_size)] * world_size
    sizes[empty] = sizes[bulk] = 0
    sizes[bulk] = num_rows - sum(sizes)
    return tuple(sizes)


def expected_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: Activation | None = None,
    scale_x: Scale = None,
    scale_weight: Scale = None,
) -> torch.Tensor:
    """What ``gemm`` should return before it is rounded to its dtype, in fp64."""
    left, right = x.detach().double(), weight.detach().double().T
    # On the CPU by numpy's library: in torch's a forked rank may spin for ever, on locks of threads it has not.
    y = left @ right if left.is_cuda else torch.from_numpy(left.numpy() @ right.numpy())
    if scale_x is not None:
        y = y * torch.as_tensor(scale_x).double().reshape(-1, 1)
    if scale_weight is not None:
        y = y * torch.as_tensor(scale_weight).double().reshape(1, -1)
    if bias is not None:
        y = y + bias.double()
    return y if activation is None else ACTIVATIONS[activation](y)


def expected(case: DenseCase, op: str, rank: int = 0) -> torch.Tensor:
    """What ``op`` should return on ``rank`` before it is rounded, in fp64."""
    _check_op(case, op)
    if op == "gemm_ar":
        return expected_ar(case)
    return expected_rs(case, rank) if op == "gemm_rs" else expected_ag(case, rank)


def expected_ag(case: DenseCase, rank: int) -> torch.Tensor:
    """What ``ag_gemm`` should return on ``rank``: fp64 ``[M, N_r]``."""
    _check_op(case, "ag_gemm")
    with_rows = zip(case.scales_x, case.sizes, strict=True)
    scales = [torch.as_tensor(1.0 if scale is None else scale).double().expand(rows) for scale, rows in with_rows]
    return expected_gemm(
        gathered(case),
        case.weights[rank],
        case.biases[rank],
        activation=case.activation,
        scale_x=torch.cat(scales),
        scale_weight=case.scales_weight[rank],
    )


def expected_ar(case: DenseCase) -> torch.Tensor:
    """What ``gemm_ar`` should return on every rank: fp64 ``[M, N]``, the true sum, with no partial result rounded."""
    _check_op(case, "gemm_ar")
    total = torch.zeros(case.shape[:2], dtype=torch.float64)
    parts = zip(case.xs, case.weights, case.scales_x, case.scales_weight, strict=True)
    for x, weight, scale_x, scale_weight in parts:
        total += expected_gemm(x, weight, scale_x=scale_x, scale_weight=scale_weight)
    return total if case.biases[0] is None else total + case.biases[0].double()


def expected_rs(case: DenseCase, rank: int) -> torch.Tensor:
    """What ``gemm_rs`` should return on ``rank``: its rows of ``expected_ar``, fp64 ``[m_r, N]``."""
    begin = sum(case.sizes[:rank])
    return expected_ar(case)[begin : begin + case.sizes[rank]]


def gathered(case: DenseCase) -> torch.Tensor:
    """All ranks' rows, as ``ag_gemm`` returns them with ``return_gathered=True``: moved, so equal bit for bit."""
    _check_op(case, "ag_gemm")
    return torch.cat(case.xs)


def reduction(case: DenseCase, op: str) -> int:
    """How many terms are summed into a result of ``op``: what ``assert_close`` should be told.

    At least 1, as 0 stands for values only moved. ``swiglu`` multiplies two sums, whose errors add up. An activation
    that is not straight takes about as many roundings as a few more terms, which shows in fp32 where K is small. That
    ranks' partial results are rounded is in ``assert_close``'s model.
    """
    _check_op(case, op)
    num_terms = max(1, case.shape[2]) * (2 if case.activation == "swiglu" else 1)
    return num_terms + (0 if case.activation in (None, "relu") else _ACTIVATION_ROUNDINGS)


def dense_shapes(largest: int = 72) -> SearchStrategy[tuple[int, int, int]]:
    """Hypothesis strategy for M, N and K: none, one, and whatever lies next to 16, 32 and 64 more often than the rest.

    Hypothesis is imported here, as only the development environment has it.
    """
    from hypothesis import strategies as st

    edges = [0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65]
    dim = st.sampled_from([edge for edge in edges if edge <= largest]) | st.integers(0, largest)
    return st.tuples(dim, dim, dim)


@dataclass
class _Draw:
    """Draws one problem: whole matrices, which are then divided among the ranks, and what each rank has of its own."""

    shape: Shape
    dtype: torch.dtype
    seed: int
    given_weight_dtype: torch.dtype | None
    given_out_dtype: torch.dtype | None
    activation: Activation | None
    scales: Scales
    transposed_weight: bool

    def __post_init__(self) -> None:
        self.m, self.n, self.k = self.shape[1:4] if isinstance(self.shape, GemmShape) else self.shape
        self.root_k = math.sqrt(max(1, self.k))
        self.weight_dtype = self.given_weight_dtype or self.dtype
        self.out_dtype = self.given_out_dtype or _default_out_dtype(self.dtype)
        self.is_scaled = self.dtype in SCALED_DTYPES
        self.generator = torch.Generator().manual_seed(self.seed)
        self.num_parts = 2 if self.activation == "swiglu" else 1
        if self.scales != "none" and not self.is_scaled:
            raise ValueError(f"scales={self.scales!r} are for fp8 and int8, not for {self.dtype}")
        if self.is_scaled and self.scales == "none" and self.num_parts == 2 and self.out_dtype == torch.float16:
            raise ValueError(f"swiglu of {self.dtype} would overflow fp16; give scales or another out_dtype")

    def case(self, ops: tuple[str, ...], sizes: tuple[int, ...], bias: bool) -> DenseCase:
        """Draw everything, and divide it as ``ops`` do."""
        world_size, splits_terms = len(sizes), "gemm_rs" in ops
        results = [(r, self.n) for r in sizes] if splits_terms else [(self.m, c) for c in _even(self.n, world_size)]
        min_columns = 1 if self.activation is None else _MIN_SIGNED_COLUMNS
        self.signed = all(r * c >= _MIN_SIGNED and c >= min_columns for r, c in results if r * c)
        x = self._values((self.m, self.k), self.dtype)
        weight = self._values((self.num_parts, self.n, self.k), self.weight_dtype)
        if not self.is_scaled:
            weight = (weight.float() / self.root_k).to(self.weight_dtype)
        if splits_terms:
            xs, weights = x.tensor_split(world_size, dim=1), weight.tensor_split(world_size, dim=2)
        else:
            xs, weights = x.split(sizes), weight.tensor_split(world_size, dim=1)
        size_x, size_weight = self._size(self.dtype), self._size(self.weight_dtype) * self.root_k
        flat = [each.flatten(0, 1) for each in weights]
        own_weights = [_own(each.t()).t() if self.transposed_weight else _own(each) for each in flat]
        return DenseCase(
            ops=ops,
            shape=(self.m, self.n, self.k),
            xs=tuple(_own(each) for each in xs),
            weights=tuple(own_weights),
            biases=tuple(self._bias(len(each)) if bias else None for each in own_weights),
            scales_x=tuple(self._scale(len(each), size_x, as_number=False) for each in xs),
            scales_weight=tuple(self._scale(len(each), size_weight, as_number=True) for each in own_weights),
            activation=self.activation,
            out_dtype=self.out_dtype,
            sizes=sizes,
        )

    def _values(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if dtype == torch.int8:
            largest = self._largest_int
            drawn = torch.randint(-largest, largest + 1, tuple(shape), generator=self.generator)
            return (drawn if self.signed else drawn.abs()).to(dtype)
        return self._floats(shape).to(dtype)

    def _floats(self, shape: Sequence[int]) -> torch.Tensor:
        """Normal, less the outliers: two partial results far above the rest that cancel are beyond any tolerance."""
        drawn = torch.randn(tuple(shape), generator=self.generator).clamp(-3.0, 3.0)
        return drawn if self.signed else drawn.abs()

    def _factors(self, *shape: int) -> torch.Tensor:
        """Around one: far enough apart that the wrong one shows, not so far that a few results outweigh the rest."""
        return 0.75 + 0.5 * torch.rand(shape, generator=self.generator)

    def _bias(self, num_columns: int) -> torch.Tensor:
        is_unscaled = self.is_scaled and self.scales == "none"
        size = self._size(self.dtype) * self._size(self.weight_dtype) * self.root_k if is_unscaled else 1.0
        return (size * self._floats((num_columns,))).to(self.out_dtype if self.is_scaled else self.dtype)

    def _scale(self, num_rows: int, size: float, *, as_number: bool) -> Scale:
        """One per row, or one: a tensor without dimensions or a plain number, since ops should accept both."""
        if self.scales == "none":
            return None
        if self.scales == "channel":
            return self._factors(num_rows) / size
        scale = self._factors() / size
        return scale.item() if as_number else scale

    def _size(self, dtype: torch.dtype) -> float:
        """Root mean square of what ``_values`` draws."""
        return self._largest_int / math.sqrt(3) if dtype == torch.int8 else 1.0

    @property
    def _largest_int(self) -> int:
        if self.scales != "none" or self.out_dtype != torch.float16:
            return _INT8_MAX
        return max(1, min(_INT8_MAX, math.isqrt(_MAX_UNSCALED_FP16 // max(1, self.k))))


def _swiglu(y: torch.Tensor) -> torch.Tensor:
    gate, up = y.chunk(2, dim=1)
    return gate * torch.sigmoid(gate) * up


ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": lambda y: y.clamp_min(0.0),
    "gelu": lambda y: 0.5 * y * torch.erfc(y * -math.sqrt(0.5)),
    "silu": lambda y: y * torch.sigmoid(y),
    "swiglu": _swiglu,
}
"""The activations by name, from their definitions. ``swiglu`` takes ``[gate, up]`` side by side and halves them."""


def _even(total: int, world_size: int) -> tuple[int, ...]:
    return tuple(len(part) for part in torch.empty(total, device="meta").tensor_split(world_size))


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy: a part of a larger tensor need not be aligned, and would change with it."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _default_out_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype in SCALED_DTYPES else dtype


def _check_op(case: DenseCase, op: str) -> None:
    if op not in case.ops:
        raise ValueError(f"op={op!r}, and the case is for {' and '.join(case.ops)}")
