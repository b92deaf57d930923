"""When TMA fits, which loop runs, and which variants are loaded for virtual ranks."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tileflux
from tileflux.config import GemmConfig
from tileflux.kernels import gemm_launch
from tileflux.kernels.gemm_launch import launch_gemm
from tileflux.kernels.gemm_shared import Launch
from tileflux.kernels.operands import Operands, make_spec
from tileflux.kernels.roles import GATHER, GATHERED, PLAIN, SCATTER, SPREAD
from tileflux.kernels.shards import gather_shards
from tileflux.kernels.turns import turn as make_turn

CONFIG = GemmConfig(block_m=16, block_n=32, num_feeders=4)


class _Launched(Exception):
    """Instead of a launch."""


@pytest.mark.parametrize("shares", [False, True])
def test_tiles_are_fetched_where_ranks_share_a_gpu_and_take_turns(
    monkeypatch: pytest.MonkeyPatch, shares: bool
) -> None:
    asked = []

    def note(*arguments: object, fetches: bool, **settings: object) -> None:
        asked.append(fetches)
        raise _Launched

    monkeypatch.setattr(gemm_launch, "make_spec", note)
    monkeypatch.setattr(gemm_launch, "fetches_tiles", lambda group, config, role: shares)
    groups = tileflux.local_groups(2)
    here = make_turn(groups[0], gather_shards("op", (20, 20), 128, False, 1))
    for role, used in ((GATHER, here), (GATHERED, here), (SCATTER, here), (SPREAD, here), (PLAIN, None)):
        with pytest.raises(_Launched):
            launch_gemm(make(40, 24, 64), role, CONFIG, group=groups[0], turn=used)
    assert asked == [shares] * 4 + [False]
    for group in groups:
        group.close()


def make(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Operands:
    """Operands of these sizes."""
    return Operands(torch.zeros(m, k, dtype=dtype), torch.zeros(n, k, dtype=dtype), torch.zeros(m, n, dtype=dtype))


@pytest.mark.parametrize(
    ("operands", "fits"),
    [
        (make(4, 5, 64), True),
        (make(4, 5, 60), False),
        (make(4, 5, 60, torch.float32), True),
        (make(0, 5, 64), False),
        (make(4, 5, 0), False),
        (dataclasses.replace(make(4, 5, 64), weight=torch.zeros(64, 5, dtype=torch.bfloat16).t()), False),
        (dataclasses.replace(make(4, 8, 64), weight=torch.zeros(64, 8, dtype=torch.bfloat16).t()), True),
        (dataclasses.replace(make(4, 5, 64), x=torch.zeros(4, 70, dtype=torch.bfloat16)[:, :64]), False),
        (dataclasses.replace(make(4, 5, 64), x=torch.zeros(4, 72, dtype=torch.bfloat16)[:, :64]), True),
        (dataclasses.replace(make(4, 5, 64), x=torch.zeros(257, dtype=torch.bfloat16)[1:].view(4, 64)), False),
    ],
)
def test_tma_wants_rows_of_whole_units(operands: Operands, fits: bool) -> None:
    assert gemm_launch._fits_tma(operands, CONFIG) == fits


def test_tma_is_of_hopper_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not gemm_launch._has_tma(torch.device("cpu"))
    for index, (capability, has) in enumerate([((8, 9), False), ((9, 0), True), ((12, 0), True)]):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert gemm_launch._has_tma(torch.device("cuda", 90 + index)) == has


def test_descriptors_cover_what_is_there() -> None:
    operands = make(20, 24, 64)
    a, rows_descriptor, b = gemm_launch._descriptors(operands, CONFIG, None)
    assert rows_descriptor is None
    assert (a.shape, a.strides, a.block_shape) == ([20, 64], [64, 1], [16, 64])
    assert (b.shape, b.strides, b.block_shape) == ([24, 64], [64, 1], [32, 64])
    turned = dataclasses.replace(operands, weight=torch.zeros(64, 24, dtype=torch.bfloat16).t())
    *_, b = gemm_launch._descriptors(turned, CONFIG, None)
    assert (b.shape, b.strides, b.block_shape) == ([64, 24], [24, 1], [64, 32])
    assert b.base.data_ptr() == turned.weight.data_ptr()
    buffer = torch.zeros(60, 64, dtype=torch.bfloat16)
    turn = SimpleNamespace(gathered=lambda dtype, depth: buffer)
    _, gathered, _ = gemm_launch._descriptors(operands, CONFIG, turn)
    assert (gathered.shape, gathered.strides, gathered.block_shape) == ([60, 64], [64, 1], [16, 64])
    assert gathered.base.data_ptr() == buffer.data_ptr()


@pytest.mark.parametrize("fetches", [False, True])
@pytest.mark.parametrize("has_tma", [False, True])
def test_virtual_ranks_load_whatever_one_of_them_may_need(
    monkeypatch: pytest.MonkeyPatch, has_tma: bool, fetches: bool
) -> None:
    monkeypatch.setattr(gemm_launch, "_has_tma", lambda device: has_tma)
    settings = {"world_size": 4, "num_feeders": 2, "releases": True, "fetches": fetches}
    for operands in (make(20, 24, 64), make(20, 23, 64), make(20, 24, 63)):
        mine = make_spec(operands, GATHER, CONFIG, use_tma=False, plain=True, **settings)
        family = set(gemm_launch._family(operands, GATHER, CONFIG, mine))
        for width in (24, 23):
            for depth, use_tma in ((64, True), (64, False), (63, False)):
                if has_tma or not use_tma:
                    other = make_spec(make(9, width, depth), GATHER, CONFIG, use_tma=use_tma, plain=True, **settings)
                    assert other in family


def test_blank_descriptors_have_the_types_of_real_ones() -> None:
    for weight in (torch.zeros(24, 64, dtype=torch.bfloat16), torch.zeros(64, 24, dtype=torch.bfloat16).t()):
        operands = dataclasses.replace(make(20, 24, 64), weight=weight)
        turn = SimpleNamespace(gathered=lambda dtype, depth: torch.zeros(60, 64, dtype=torch.bfloat16))
        for role, used in ((GATHER, turn), (SCATTER, None)):
            real = gemm_launch._descriptors(operands, CONFIG, used)
            blank = gemm_launch._blank_descriptors(operands, CONFIG, role)
            assert [None if each is None else (each.base.dtype, each.block_shape) for each in blank] == [
                None if each is None else (each.base.dtype, each.block_shape) for each in real
            ]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "the GPU is not of Hopper's kind"),
        ({"is_hopper": True, "fetches": True}, "its programs do not fetch tiles"),
        ({"is_hopper": True, "dtype": torch.float32}, "tiles of 128 x 128 x 64 with 8 warps: it wants 32 of K"),
        ({"is_hopper": True, "use_tma": False}, "rows or addresses are not multiples of 16 bytes"),
    ],
)
def test_what_hoppers_loop_does_not_take_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], why: str
) -> None:
    monkeypatch.setattr(gemm_launch, "is_hopper", lambda device: changes.get("is_hopper", False))
    gemm_launch._say_once.cache_clear()
    config, operands = GemmConfig(hopper=True), make(128, 128, 128, changes.get("dtype", torch.bfloat16))
    launch = Launch(
        PLAIN, config, num_rows=128, num_feeders=0, num_programs=1, world_size=1, releases=False,
        use_tma=changes.get("use_tma", True), fetches=changes.get("fetches", False),
        records=False, trace=None,
    )  # fmt: skip
    with caplog.at_level(logging.INFO, "tileflux"):
        for _ in range(3):
            assert gemm_launch._runs_on_hopper(operands, launch) is ("use_tma" in changes), "virtual ranks load both"
    (said,) = caplog.messages
    assert said.startswith("gemm runs Triton's loop although GemmConfig(hopper=True): ") and why in said


def test_hoppers_loop_runs_only_what_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_launch, "is_hopper", lambda device: True)
    launch = SimpleNamespace(config=GemmConfig(), role=PLAIN, fetches=False, use_tma=True)
    assert not gemm_launch._runs_on_hopper(make(128, 128, 128), launch)
    launch.config = GemmConfig(hopper=True)
    assert gemm_launch._runs_on_hopper(make(128, 128, 128), launch)
