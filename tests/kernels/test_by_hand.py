"""Ranks one after the other, with what their peers would have sent put there by hand: nothing has to wait.

So compute-sanitizer, under which no kernel starts while another waits for it, can run both main loops in the roles of
fused ops, descriptors and all; ``test_gang.py`` has ranks that do wait. Interpreted, this is an ordinary test.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import tileflux
from tileflux import GemmConfig, env
from tileflux.kernels.gemm_launch import launch_gemm
from tileflux.kernels.operands import Operands, Role
from tileflux.kernels.roles import ARRIVING, GATHER, SCATTER, STAGE
from tileflux.kernels.shards import ShardPlan, gather_shards, scatter_shards
from tileflux.kernels.turns import Turn, turn
from tileflux.symm.group import Group
from tileflux.testing import assert_close, poisoned
from tileflux.testing.hopper_cases import hopper_config

pytestmark = pytest.mark.usefixtures("interpreter_installed")

TRITON = GemmConfig(64, 64, 64, num_warps=4, num_stages=2, num_feeders=2, num_chunks=2)
HOPPER = dataclasses.replace(hopper_config(64, 64), num_feeders=2, num_chunks=2)
ROWS = ((70, 0, 33), (64, 128, 64), (300, 5, 261))
"""With ends of tiles and of chunks anywhere, and where tiles leave by TMA: only whole ones do."""
NUM_COLUMNS, DEPTH = 72, 80

EVERYWHERE = pytest.mark.parametrize(
    ("config", "device"),
    [
        pytest.param(
            TRITON,
            "cpu",
            marks=pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter"),
            id="interpreted",
        ),
        pytest.param(TRITON, "cuda", marks=pytest.mark.gpu, id="triton"),
        pytest.param(HOPPER, "cuda", marks=pytest.mark.gpu, id="hopper"),
    ],
)


class World:
    """Virtual ranks, and where each of them keeps what."""

    def __init__(self, world_size: int, device: str) -> None:
        self.groups = tileflux.local_groups(world_size, device, timeout_s=60)
        self.device = self.groups[0].device

    def turns(self, plan: ShardPlan) -> list[Turn]:
        return [turn(group, plan) for group in self.groups]

    def launch(self, operands: Operands, role: Role, config: GemmConfig, here: Turn) -> None:
        """What a fused op launches on one rank; done when it returns."""
        group = here.group
        self.wait()
        with on_its_stream(group):
            launch_gemm(operands, role, config, group=group, turn=here, releases=role is not STAGE)
        self.wait()
        group.ensure_usable()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        for group in self.groups:
            group.close()


def on_its_stream(group: Group) -> Any:
    return torch.cuda.stream(group.stream)  # of None, nothing


def config_for(config: GemmConfig, dtype: torch.dtype) -> GemmConfig:
    return dataclasses.replace(config, block_k=128) if dtype.itemsize == 1 and config.hopper else config


def drawn(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape).div(4).to(dtype).to(device)


@EVERYWHERE
@pytest.mark.parametrize("role", [GATHER, ARRIVING], ids=["fed", "sent by copies"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_rows_that_are_there(role: Role, dtype: torch.dtype, config: GemmConfig, device: str) -> None:
    config, world = config_for(config, dtype), World(3, device)
    for number, rows in enumerate((*ROWS, ROWS[0])):
        scaled = dtype.itemsize == 1
        plan = gather_shards("ag_gemm", rows, DEPTH * dtype.itemsize, scaled, config.num_chunks)
        turns = world.turns(plan)
        whole = drawn((sum(rows), DEPTH), dtype, world.device)
        scales = (torch.rand(sum(rows)) + 0.5).to(world.device)
        starts = [sum(rows[:rank]) for rank in range(len(rows))]
        for here in turns:
            rank = here.rank
            own = slice(starts[rank], starts[rank] + rows[rank])
            for source in (source for source in range(len(rows)) if source != rank):
                theirs = slice(starts[source], starts[source] + rows[source])
                here.gathered(dtype, DEPTH)[theirs] = whole[theirs]
                if scaled:
                    here.gathered_scales()[theirs] = scales[theirs]
                for chunk in range(plan.num_chunks):
                    here.flag(rank, chunk, source).fill_(number + 1)
            weight = drawn((NUM_COLUMNS, DEPTH), dtype, world.device)
            out = poisoned((sum(rows), NUM_COLUMNS), torch.bfloat16, world.device)
            operands = Operands(whole[own], weight, out, scale_x=scales[own] if scaled else None)
            world.launch(operands, role, config, here)
            right = whole.double() @ weight.double().t() * (scales.double()[:, None] if scaled else 1)
            assert_close(out.cpu(), right.cpu(), reduction=DEPTH, what=f"{rows} on rank {rank}")
    world.close()


@EVERYWHERE
def test_sums_of_what_is_there(config: GemmConfig, device: str) -> None:
    world = World(3, device)
    for number, rows in enumerate((*ROWS, ROWS[0])):
        plan = scatter_shards("gemm_rs", rows, NUM_COLUMNS, 2, config)
        turns = world.turns(plan)
        xs, weights = (
            [drawn((count, DEPTH), torch.bfloat16, world.device) for _ in rows] for count in (sum(rows), NUM_COLUMNS)
        )
        parts = [x.double() @ weight.double().t() for x, weight in zip(xs, weights, strict=True)]
        right = sum(parts).split(rows)  # type: ignore[union-attr]
        for here in turns:
            rank = here.rank
            for source in (source for source in range(len(rows)) if source != rank):
                slot = here.slot(rank, source, torch.bfloat16, NUM_COLUMNS, number)
                slot[: rows[rank]] = parts[source].split(rows)[rank].to(torch.bfloat16)
                for index in range(plan.num_flags):
                    here.flag(rank, index, source).fill_(number + 1)
            out = poisoned((rows[rank], NUM_COLUMNS), torch.bfloat16, world.device)
            world.launch(Operands(xs[rank], weights[rank], out), SCATTER, config, here)
            assert_close(out.cpu(), right[rank].cpu(), reduction=DEPTH * len(rows), what=f"{rows} on rank {rank}")
    world.close()


@EVERYWHERE
@pytest.mark.parametrize("num_columns", [72, 128], ids=["uneven slabs", "even slabs"])
def test_what_copies_would_send(num_columns: int, config: GemmConfig, device: str) -> None:
    for rows in ROWS:
        world = World(3, device)
        plan = scatter_shards("gemm_rs", rows, num_columns, 2, config, by_copies=True)
        x, weight = (drawn((count, DEPTH), torch.bfloat16, world.device) for count in (sum(rows), num_columns))
        right = (x.double() @ weight.double().t()).split(rows)
        for here in world.turns(plan):
            out = poisoned((rows[here.rank], num_columns), torch.bfloat16, world.device)
            world.launch(Operands(x, weight, out), STAGE, config, here)
            for owner, whole in enumerate(right):
                for number, columns in enumerate(plan.slabs(num_columns)):
                    slab = range(number, number + 1)
                    if owner == here.rank:
                        found = here.slabs_at(owner, owner, slab, torch.bfloat16, num_columns)
                    else:
                        found = here.staged_slabs(owner, slab, torch.bfloat16, num_columns)
                    exact = whole[:, columns.start : columns.stop]
                    what = f"{rows}, slab {number} for rank {owner} on rank {here.rank}"
                    assert_close(found.cpu(), exact.cpu(), reduction=DEPTH, what=what)
        world.close()
