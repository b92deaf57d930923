"""Set-up of the test session. What is set at the top must be set before anything imports numpy, triton or tileflux."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Interpreted kernels do thousands of tiny products, which several BLAS threads only slow down, and forked ranks must
# not inherit a thread pool whose threads they do not have.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
# What has been measured on this machine must not change what is tested.
os.environ["TILEFLUX_TUNE_DIR"] = ""
# Before CUDA starts: virtual ranks whose streams share a hardware queue, or which load kernels late, may wait for each
# other.
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
os.environ["CUDA_MODULE_LOADING"] = "EAGER"

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
IS_BESIDE_OTHERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1
if not HAS_GPU:
    # Read by @triton.jit when it decorates, so it cannot be changed later in this process. Tests that compile
    # kernels start children without it.
    os.environ["TRITON_INTERPRET"] = "1"
torch.set_num_threads(1)

SHM = Path("/dev/shm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine's GPUs are not enough for."""
    num_gpus = torch.cuda.device_count() if HAS_GPU else 0
    for item in items:
        for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
            if item.get_closest_marker(marker) and num_gpus < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} or more CUDA devices, sees {num_gpus}"))
            elif item.get_closest_marker(marker) and IS_BESIDE_OTHERS:
                item.add_marker(pytest.mark.skip(reason="wants the GPU to itself: scripts/gpu-test"))


@pytest.fixture(scope="session", autouse=True)
def nothing_left_in_shared_memory() -> Iterator[None]:
    """Shared memory outlives processes: a name left behind is a leak until the machine restarts."""
    before = _shared_memory_names()
    yield
    left = sorted(_shared_memory_names() - before)
    assert not left, f"tests left {', '.join(left)} in {SHM}"


def _shared_memory_names() -> set[str]:
    """Entries that this session or a rank of it made: ours by name, or torch's with our process id in them."""
    marks = ("tileflux", f"torch_{os.getpid()}_")
    return {entry.name for entry in SHM.iterdir() if entry.name.startswith(marks)} if SHM.is_dir() else set()
