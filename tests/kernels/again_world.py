"""Two ranks whose launches are noted, for ``test_again.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tileflux
from tileflux import GemmConfig
from tileflux.kernels import dense, gemm_launch, library, scatter, steps
from tileflux.kernels.again import Again

from .stand_in import Kernel, plain

CONFIG = GemmConfig(block_m=16, block_n=32, block_k=32)
M, N, K = 32, 48, 64


class World:
    """Two ranks, of which one calls; and what comes of its calls."""

    def __init__(self, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernel, self.patch = kernel, monkeypatch
        self.groups = tileflux.local_groups(2)
        self.group = self.groups[0]
        self.num_long = 0
        """Launches that were not made by an ``Again``."""
        self.queued: list[str] = []
        """Steps around the GEMM, and it."""
        real = gemm_launch.launch_gemm

        def counted(*given: Any, **named: Any) -> object:
            self.num_long += 1
            return real(*given, **named)

        for module in (dense, library, scatter):
            monkeypatch.setattr(module, "on_host", lambda where: False, raising=False)
            monkeypatch.setattr(module, "launch_gemm", counted)
        monkeypatch.setattr(scatter, "sms_for", lambda group: 12)
        for name in ("launch_open", "launch_sum", "launch_await_everyone", "launch_release"):
            monkeypatch.setattr(steps, name, lambda *given, name=name: self.note(name))

    def note(self, name: str) -> Callable[..., None]:
        """Something was queued; returns what queues it again."""
        self.queued.append(name)
        return lambda *given: self.queued.append(name)

    def call(self, op: str, dtype: torch.dtype = torch.bfloat16, **given: Any) -> Any:
        """With fresh tensors, unless they are given."""
        place = {} if op == "gemm" else {"group": self.group, "strategy": "fused"}
        tensors = {"x": make(M, K, dtype), "weight": make(N, K, dtype)}
        return getattr(tileflux, op)(**{**tensors, **place, "config": CONFIG, **given})

    def is_short(self, op: str, **given: Any) -> bool:
        """Makes a call, and says whether it went past everything. Its launch is what the long way would launch."""
        before = self.num_long
        x, weight = make(M, K, given.get("dtype", torch.bfloat16)), make(N, K, given.get("dtype", torch.bfloat16))
        given = {"x": x, "weight": weight, **given}
        out = self.call(op, **given)
        is_short, launched = self.num_long == before, (self.kernel.past_it or self.kernel.through_triton)[-1]
        if is_short:
            with self.patch.context() as patch:
                patch.setattr(Again, "fits", lambda *_: False)
                self.call(op, **given, out=out) if "out" not in given else self.call(op, **given)
            assert plain(launched) == plain(self.kernel.past_it[-1]) and self.num_long == before + 1
        return is_short


def make(rows: int, columns: int, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """So many elements into memory that is aligned."""
    return torch.zeros(rows * columns + offset, dtype=dtype)[offset:].view(rows, columns)
