"""Kernels are loaded before anything waits.

Loading a kernel's module synchronises the GPU: where a peer on the same GPU, or an earlier launch of the same rank,
waits for what this rank is about to launch, the load would never return (docs/decisions/0003). So a kernel is launched
once with nothing to do, under a lock, by whoever comes to it first.

Virtual ranks share their GPU with each other: while one of them loads, kernels that are running must end before others
can start, and a running one may wait for another rank's. So a virtual rank loads only when no rank of its world has
work on the GPU, and none of them launches meanwhile. A product between two ops, which knows no group, is a virtual
rank's if it is on one's stream.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator

import torch

from tileflux import env
from tileflux.symm.group import Group, virtual_rank_on

__all__ = ["launching", "launching_on", "load_once", "lock", "settle_keys"]

lock = threading.RLock()
"""Two virtual ranks that compile a kernel at once both load a copy, and the second load meets the first's launch."""

_LOOK_S = 0.001
_nothing = contextlib.nullcontext()

_loaded: set[Hashable] = set()
_LANG = (
    "hopper",
    "signal",
    "trace",
    "remote",
    "mailbox",
    "exchange",
    "schedule",
    "epilogue",
    "turn",
    "tiles",
    "policy",
)
_KERNELS = ("fill", "copy", "reduce", "steps", "gemm", "gemm_hopper")
_MODULES = (
    *(f"tileflux.lang.{name}" for name in _LANG),
    *(f"tileflux.kernels.{name}" for name in _KERNELS),
    "tileflux.lang.rows",
    "tileflux.kernels.spread",
    "tileflux.kernels.gather",
    "tileflux.kernels.lists",
    "tileflux.kernels.index",
    "tileflux.lang.combine",
    "tileflux.kernels.choices",
    "tileflux.kernels.arrivals",
    "tileflux.kernels.direct",
    "tileflux.kernels.slabs",
)
"""From the bottom up, so that a function comes after what it calls. New ones at the end: the keys of others stay."""


def launching(group: Group | None) -> contextlib.AbstractContextManager[object]:
    """Held around a launch: keeps virtual ranks from launching while one of them loads."""
    return lock if group is not None and group.stream is not None else _nothing


def launching_on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The same where nobody says whose launch it is: it may be a virtual rank's."""
    return lock if device.type == "cuda" else _nothing


def load_once(device: torch.device, key: Hashable, launch: Callable[[], object], group: Group | None = None) -> None:
    """Call ``launch``, which launches with nothing to do, unless ``key`` has been loaded on this GPU."""
    if device.type != "cuda" or (device, key) in _loaded:
        return
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "this call loads kernels, which cannot be captured: make the call once before capturing a CUDA graph"
        )
    if group is None:
        group = virtual_rank_on(torch.cuda.current_stream(device).cuda_stream)
    with _standstill(device, key, group):
        if (device, key) not in _loaded:
            settle_keys()
            launch()
            _loaded.add((device, key))


@contextlib.contextmanager
def _standstill(device: torch.device, key: Hashable, group: Group | None) -> Iterator[None]:
    """The lock; for a virtual rank, taken when no rank of its world has work on the GPU, or ``key`` has been loaded.

    Who waits here has no work of its own that a peer could wait for: what it has queued is done first. Past the
    deadline it goes on anyway, and whoever then waits in vain says so.
    """
    if group is None or group.stream is None:
        with lock:
            yield
        return
    group.stream.synchronize()
    deadline = time.monotonic() + group.timeout_s
    while True:
        with lock:
            if (device, key) in _loaded or group.is_idle() or time.monotonic() > deadline:
                yield
                return
        time.sleep(_LOOK_S)


@functools.cache
def settle_keys() -> None:
    """Have Triton compute the cache keys of all our functions, in one order.

    A key depends on whose key was computed before it: without this, a process that calls the ops in another order
    finds nothing of what earlier ones have compiled.
    """
    if env.interpreting():
        return  # nothing is compiled, and Gluon's functions find interpreted ones among those they call
    for name in _MODULES:
        functions = vars(importlib.import_module(name))
        for function in sorted(functions):
            getattr(functions[function], "cache_key", None)
