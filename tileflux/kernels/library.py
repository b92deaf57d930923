"""The plain product, by whoever does it best where it runs: torch's library on a GPU, else our own main loop.

What the sequential and pipelined strategies multiply with, and what a fused op has to beat.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tileflux.config import GemmConfig
from tileflux.kernels import gemm_host
from tileflux.kernels.gemm_launch import PreparedGemm, launch_gemm
from tileflux.kernels.launch import on_host
from tileflux.kernels.operands import Operands
from tileflux.kernels.roles import PLAIN

__all__ = ["multiply", "multiply_tiles", "uses_torch"]

_LIBRARY_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def uses_torch(operands: Operands) -> bool:
    """Whether torch's library takes these operands as they are."""
    if not operands.x.is_cuda or 0 in operands.out.shape or operands.depth == 0 or operands.groups is not None:
        return False
    types = {operands.x.dtype, operands.weight.dtype, operands.out.dtype}
    if operands.bias is not None:
        types.add(operands.bias.dtype)
    return len(types) == 1 and operands.x.dtype in _LIBRARY_TYPES


def multiply(operands: Operands, config: GemmConfig) -> None:
    """Fill ``operands.out``."""
    if uses_torch(operands):
        _multiply_with_torch(operands)
    else:
        multiply_tiles(operands, config)


def multiply_tiles(operands: Operands, config: GemmConfig) -> PreparedGemm | None:
    """Fill ``operands.out`` with our own main loop. Returns the launch, if there was one and it can be repeated."""
    if 0 in operands.out.shape:
        return None
    if not on_host(operands.out):
        return launch_gemm(operands, PLAIN, config)
    gemm_host.run_gemm(operands, PLAIN, config)
    return None


def _multiply_with_torch(operands: Operands) -> None:
    x, weight, out = operands.x, operands.weight.t(), operands.out
    whole = torch.empty((len(x), weight.shape[1]), dtype=out.dtype, device=out.device) if operands.is_gated else out
    bias = operands.bias
    if bias is None:
        torch.mm(x, weight, out=whole)
    else:
        # Zeroes where another rank adds it: ranks that share a GPU must all have the same kernel loaded.
        torch.addmm(bias if operands.adds_bias else torch.zeros_like(bias), x, weight, out=whole)
    if operands.activation == "swiglu":
        gate, up = whole.float().chunk(2, dim=1)
        out.copy_(functional.silu(gate).mul_(up))
    elif operands.activation == "relu":
        out.relu_()
    elif operands.activation == "silu":
        functional.silu(out, inplace=True)
    elif operands.activation == "gelu":
        out.copy_(gemm_host.gelu(out))
