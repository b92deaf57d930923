"""Kernels are loaded before anything waits.

Loading a kernel's module synchronises the GPU: where a peer on the same GPU, or an earlier launch of the same rank,
waits for what this rank is about to launch, the load would never return (docs/decisions/0003). So a kernel is launched
once with nothing to do, under a lock, by whoever comes to it first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

import torch

__all__ = ["lock", "load_once"]

lock = threading.RLock()
"""Two virtual ranks that compile a kernel at once both load a copy, and the second load meets the first's launch."""

_loaded: set[Hashable] = set()


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
            launch()
            torch.cuda.current_stream(device).synchronize()
            _loaded.add((device, key))
