"""Ops rehearsed without a GPU: what they would launch on one is compiled into Triton's cache, and nothing runs.

A first run on a GPU spends most of its time compiling, one kernel after the other. Here ops take the ways that they
take where kernels are interpreted, on CPU tensors, and a launch ends when its kernel is compiled: in as many processes
as there are cores, on any machine.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch

from tileflux import env
from tileflux.kernels import launch, library
from tileflux.kernels.gemm_launch import launch_gemm
from tileflux.symm.group import Group, local_groups
from tileflux.testing.compiling import pretend
from tileflux.tune import lookup
from tileflux.tune.lookup import Gpu

__all__ = ["H200", "rehearse", "stand_in_for"]

H200 = Gpu(90, 132, "NVIDIA H200")


def rehearse(gpu: Gpu) -> None:
    """Make this process one whose ops compile for ``gpu`` and launch nothing: for good, so only in one of its own."""
    if env.interpreting():
        raise ValueError("TRITON_INTERPRET=1: kernels that are interpreted are not compiled; unset it to rehearse")
    env.run_kernels_on_cpu()
    launch.allow_interpreter()
    pretend(gpu.arch)
    vars(lookup)["_gpu_of"] = lambda device: gpu


def stand_in_for(world_size: int, rank: int, *, is_virtual: bool) -> Group:
    """A rank of ranks that share the GPU, as far as what they launch depends on it: virtual, or processes."""
    num_sms = lookup._gpu_of(torch.device("cpu")).num_sms
    group = local_groups(world_size)[rank]
    links = tuple("self" if peer == rank else "same GPU" for peer in range(world_size))
    transport: Any = group._transport
    transport.traits = dataclasses.replace(
        transport.traits, copies_need_sms=True, links=links, num_sms=max(1, num_sms // world_size)
    )
    if is_virtual:
        group.__class__ = _OnAStream
    # Virtual ranks multiply with our own kernels where others call the library: see ``kernels/dense.py``.
    vars(library)["launch_gemm"] = partial(launch_gemm, group=group) if is_virtual else launch_gemm
    return group


class _OnAStream(Group):
    @property
    def stream(self) -> Any:
        """Something that is not None."""
        return self
