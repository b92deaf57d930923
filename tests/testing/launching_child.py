"""Launches as the ops make them, on a GPU that is not there: what Triton compiles for them lands in its cache.

``python -m tests.testing.launching_child`` reads what to launch from stdin, pickled, and prints how many kernels it
compiled that the cache did not have. Nothing of the launcher is replaced but what asks a GPU what it is.
"""

from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tileflux.config import GemmConfig
from tileflux.kernels import gemm_launch, gemm_shared, roles
from tileflux.kernels.loading import settle_keys
from tileflux.kernels.operands import Operands
from tileflux.kernels.prepared import Kept
from tileflux.kernels.shards import gather_shards

NUM_SMS = 132


class Launches:
    """A driver of an sm_90 that takes every launch and does nothing."""

    utils = SimpleNamespace(
        load_binary=lambda *arguments: (1, 2, 255, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": 1 << 20},
    )

    def __init__(self) -> None:
        self.num_launches = 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, src: object, metadata: object) -> Any:
        def run(*arguments: object) -> None:
            self.num_launches += 1

        return run


def launch(name: str, config: GemmConfig, shape: tuple[int, int, int], world_size: int, is_virtual: bool) -> None:
    """One launch, with descriptors of real sizes and a table, as within a call."""
    (m, n, k), role, kind = shape, getattr(roles, name), torch.bfloat16
    is_alone = world_size == 1
    group = SimpleNamespace(
        name="a group", world_size=world_size,
        traits=SimpleNamespace(num_sms=NUM_SMS, links=("same GPU" if is_virtual else "PCIe",) * world_size),
        stream=object() if is_virtual else None, device=torch.device("cpu"),
    )  # fmt: skip
    here = None
    if role is not roles.PLAIN:
        plan = gather_shards("ag_gemm", (m // world_size,) * world_size, 2 * k, False, config.num_chunks)
        gathered = torch.empty(m, k, dtype=kind)
        table = torch.zeros(50, dtype=torch.int64)
        staging = torch.empty(m, n, dtype=kind)
        here = SimpleNamespace(
            plan=plan, launches=Kept(), table=table, rank=0, gathered=lambda dtype, depth: gathered,
            staging=lambda dtype, columns: staging, slot=lambda *place: staging[: m // world_size],
        )  # fmt: skip
    x = torch.empty(m // world_size if role.gathers else m, k, dtype=kind)
    operands = Operands(x, torch.empty(n, k, dtype=kind), torch.empty(m, n, dtype=kind))
    group = None if is_alone else group  # type: ignore[assignment]
    releases = here is not None and role is not roles.STAGE
    gemm_launch.launch_gemm(operands, role, config, group=group, turn=here, releases=releases)  # type: ignore[arg-type]


def main() -> None:
    """Make the launches that are asked for."""
    found = []
    knobs.compilation.listener = lambda **known: found.append(known["cache_hit"])
    gpu = Launches()
    driver.set_active(gpu)  # type: ignore[arg-type]
    gemm_launch._has_tma = lambda device: True  # type: ignore[assignment]
    gemm_launch.is_hopper = lambda device: True  # type: ignore[assignment]
    gemm_shared._is_interpreted = lambda group: False
    gemm_shared.sms_for = lambda group: NUM_SMS
    settle_keys()
    for asked in pickle.load(sys.stdin.buffer):
        launch(*asked)
        gemm_launch._plain.clear()
    print(len(found) - sum(found), gpu.num_launches)


if __name__ == "__main__":
    main()
