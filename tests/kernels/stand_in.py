"""A kernel that is none: it notes what it is launched with, through Triton and past it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tileflux.kernels import gemm_launch, gemm_shared, prepared
from tileflux.kernels.prepared import Kept


class Kernel:
    """Stands in for a ``JITFunction``: notes launches through Triton, and what it compiles notes those past it."""

    def __init__(self) -> None:
        self.pre_run_hooks: list[object] = []
        self.through_triton: list[tuple[Any, ...]] = []
        self.past_it: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int]) -> Callable[..., object]:
        def launch(*arguments: object, **options: int) -> object:
            self.through_triton.append((*grid, *arguments))
            made = (*arguments[-4:], *options.items())

            def run(*given: Any) -> None:
                assert given[1:9] == (1, 1, 77, "function", made, None, None, None)
                self.past_it.append((given[0], *given[9:]))

            return SimpleNamespace(run=run, function="function", packed_metadata=made)

        return launch


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A kernel that launches again past Triton, as those of a GPU do."""
    monkeypatch.setattr(prepared, "JITFunction", Kernel)
    monkeypatch.setattr(prepared, "_KNOWS_LAUNCHER", True)
    monkeypatch.setattr(prepared, "_steps", Kept())
    monkeypatch.setattr(prepared, "raw_stream", lambda device: 77)
    return Kernel()


def stand_in_for_gemm(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The same in the place of the main loop."""
    kernel = stand_in(monkeypatch)
    monkeypatch.setattr(gemm_launch, "_gemm_kernel", kernel)
    monkeypatch.setattr(gemm_launch, "_has_tma", lambda device: True)
    monkeypatch.setattr(gemm_shared, "_is_interpreted", lambda group: False)
    monkeypatch.setattr(gemm_shared, "sms_for", lambda group: 12)
    monkeypatch.setattr(gemm_launch, "_plain", Kept())
    return kernel


def plain(launch: tuple[Any, ...]) -> list[object]:
    """A launch as numbers: tensors are addresses, descriptors those and the sizes that the launcher takes from them."""
    return [
        (part.base.data_ptr(), [*part.shape], [*part.strides], part.padding)
        if hasattr(part, "padding")
        else part.data_ptr()
        if isinstance(part, torch.Tensor)
        else part
        for part in launch
    ]
