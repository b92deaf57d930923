"""Adding up the rows of each token's choices on the device, as ``sum_choices`` in ``kernels/groups.py`` says it."""

import functools

import torch
import triton
import triton.language as tl

from tileflux.kernels.loading import launching_on, load_once
from tileflux.kernels.prepared import launch_step
from tileflux.lang.combine import add_choices
from tileflux.lang.remote import typed

__all__ = ["SUMMED", "WIDTH", "launch_choices"]

SUMMED = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
"""What can be added up, and what sums are rounded to."""

_TOKENS, _COLUMNS = 4, 512
_NUM_WARPS = 4
WIDTH = 8
"""Elements that a thread loads at a time, of fp32 in two accesses; rows that are not so many make another kernel."""


def launch_choices(
    rows: torch.Tensor,
    positions: torch.Tensor,
    weights: torch.Tensor | None,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[num_tokens, ...]``: of each token the rows at its ``positions``, weighted and added up."""
    num_tokens, top_k = positions.shape
    if out is None:
        out = torch.empty((num_tokens, *rows.shape[1:]), dtype=dtype, device=rows.device)
    width = rows.shape[1:].numel()
    if rows.dim() != 2 or rows.stride(1) != 1:
        rows = rows.reshape(len(rows), width).contiguous()
    positions = positions.to(torch.int32).contiguous()
    if weights is not None:
        weights = weights.float().contiguous()
    pitch, address = rows.stride(0), rows.data_ptr()
    is_aligned = address % 16 == out.data_ptr() % 16 == pitch % WIDTH == width % WIDTH == 0
    arguments = (
        address, positions.data_ptr(), 0 if weights is None else weights.data_ptr(), pitch, width, num_tokens, top_k,
        out,
    )  # fmt: skip
    constants = (SUMMED[rows.dtype], SUMMED[dtype], weights is not None, is_aligned, _TOKENS, _COLUMNS, WIDTH)
    grid = triton.cdiv(num_tokens, _TOKENS) * triton.cdiv(width, _COLUMNS)
    launch = functools.partial(launch_step, _choices_kernel)
    load_once(rows.device, ("choices", *constants), lambda: launch(0, arguments, constants, _NUM_WARPS))
    with launching_on(rows.device):
        launch(grid, arguments, constants, _NUM_WARPS)
    return out


@triton.jit(
    do_not_specialize=("rows", "positions", "weights", "pitch", "width", "num_tokens", "top_k", "out_ptr"),
)
def _choices_kernel(
    rows: tl.int64,
    positions: tl.int64,
    weights: tl.int64,
    pitch: tl.int64,
    width: tl.int32,
    num_tokens: tl.int32,
    top_k: tl.int32,
    out_ptr,
    ROW: tl.constexpr,
    OUT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ALIGNED: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    num_parts = tl.cdiv(width, COLUMNS)
    if ALIGNED:
        # So that the compiler can tell, and does not load element by element.
        pitch = pitch // WIDTH * WIDTH
        width = width // WIDTH * WIDTH
    tokens = tl.program_id(0) // num_parts * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(0) % num_parts * COLUMNS + tl.arange(0, COLUMNS)
    is_token = tokens < num_tokens
    is_column = columns < width
    total = add_choices(
        typed(positions, tl.int32, False), typed(weights, tl.float32, False), tokens.to(tl.int64) * top_k, top_k,
        is_token, typed(rows, ROW, ALIGNED), pitch, columns, is_column, WEIGHTED,
    )  # fmt: skip
    offsets = tokens[:, None].to(tl.int64) * width + columns[None, :]
    tl.store(typed(out_ptr, OUT, ALIGNED) + offsets, total.to(OUT), mask=is_token[:, None] & is_column[None, :])
