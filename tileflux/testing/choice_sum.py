"""The sum of a token's rows, as plain code would have it done: one small kernel that picks, weights and adds up.

What the baselines of ``moe_gemm_rs`` use between their product and their reduce-scatter. It goes over memory once.
"""

import torch
import triton
import triton.language as tl

from tileflux.kernels.groups import sum_choices

__all__ = ["weighted_sum"]

_BLOCK = 1024
_NUM_WARPS = 4


def weighted_sum(rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """``out[t] = sum over j of weights[t, j] * rows[positions[t, j]]``, in fp32, rounded once; -1 is left out.

    ``rows [R, H]``, ``positions [T, k]`` (int32), ``weights [T, k]`` (fp32) and ``out [T, H]`` are contiguous.
    """
    if not rows.is_cuda:
        out.copy_(sum_choices(rows, positions, weights))
    elif out.numel():
        launch_sum(rows, positions, weights, out)


def launch_sum(rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """The kernel, whatever it runs on."""
    grid = (out.shape[0], triton.cdiv(out.shape[1], _BLOCK))
    _sum_kernel[grid](rows, positions, weights, out, out.shape[1], positions.shape[1], _BLOCK, num_warps=_NUM_WARPS)


@triton.jit
def _sum_kernel(rows_ptr, positions_ptr, weights_ptr, out_ptr, num_columns, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < num_columns
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        row = tl.load(positions_ptr + token * TOP_K + choice).to(tl.int64)
        weight = tl.load(weights_ptr + token * TOP_K + choice)
        value = tl.load(rows_ptr + row * num_columns + columns, mask=is_column & (row >= 0), other=0.0)
        total += weight * value.to(tl.float32)
    tl.store(out_ptr + token * num_columns + columns, total.to(out_ptr.dtype.element_ty), mask=is_column)
