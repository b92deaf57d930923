"""Kernels are loaded before anything waits.

Loading a kernel's module synchronises the GPU: where a peer on the same GPU, or an earlier launch of the same rank,
waits for what this rank is about to launch, the load would never return (docs/decisions/0003). So a kernel is launched
once with nothing to do, under a lock, by whoever comes to it first.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Hashable

import torch

__all__ = ["load_once", "lock", "settle_keys"]

lock = threading.RLock()
"""Two virtual ranks that compile a kernel at once both load a copy, and the second load meets the first's launch."""

_loaded: set[Hashable] = set()
_LANG = ("signal", "remote", "mailbox", "exchange", "schedule", "epilogue", "turn", "policy")
_KERNELS = ("copy", "reduce", "steps", "gemm")
_MODULES = (*(f"tileflux.lang.{name}" for name in _LANG), *(f"tileflux.kernels.{name}" for name in _KERNELS))
"""From the bottom up, so that a function comes after what it calls."""


def load_once(device: torch.device, key: Hashable, launch: Callable[[], object]) -> None:
    """Call ``launch``, which launches with nothing to do, unless ``key`` has been loaded on this GPU."""
    if device.type != "cuda" or (device, key) in _loaded:
        return
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "this call loads kernels, which cannot be captured: make the call once before capturing a CUDA graph"
        )
    with lock:
        if (device, key) not in _loaded:
            settle_keys()
            launch()
            _loaded.add((device, key))


@functools.cache
def settle_keys() -> None:
    """Have Triton compute the cache keys of all our functions, in one order.

    A key depends on whose key was computed before it: without this, a process that calls the ops in another order
    finds nothing of what earlier ones have compiled.
    """
    for name in _MODULES:
        functions = vars(importlib.import_module(name))
        for function in sorted(functions):
            getattr(functions[function], "cache_key", None)
