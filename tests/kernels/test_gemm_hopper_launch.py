"""What Hopper's loop takes, what fits, and which variant a launch gets."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tileflux.config import GemmConfig
from tileflux.kernels import gemm_hopper_launch
from tileflux.kernels.gemm_hopper_launch import HopperSpec, hopper_family, make_hopper_spec, why_not_hopper
from tileflux.kernels.gemm_shared import Launch
from tileflux.kernels.groups import Groups
from tileflux.kernels.operands import Operands
from tileflux.kernels.roles import ARRIVING, GATHER, GATHERED, PLAIN, SCATTER, SEND, SPREAD, STAGE
from tileflux.kernels.shards import scatter_shards
from tileflux.testing.hopper_cases import TILES, hopper_config

SHARED_BYTES = 232448


def operands(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Operands:
    x, weight = torch.zeros(512, 256, dtype=dtype), torch.zeros(512, 256, dtype=dtype)
    out = torch.zeros(512, 512, dtype=torch.bfloat16)
    return dataclasses.replace(Operands(x, weight, out), **changes)


def groups(picks_rows: bool = False) -> Groups:
    return Groups(torch.zeros(4, dtype=torch.int32), 2, 128, 8, picks_rows=picks_rows)


def test_it_takes_rows_that_are_sorted_by_expert() -> None:
    given = operands(groups=groups(), out=torch.zeros(512, 256, dtype=torch.bfloat16))
    assert why_not_hopper(given, PLAIN, hopper_config(128, 256)) is None
    spec = make_hopper_spec(given, launch(hopper_config(128, 256)), None)
    assert spec.is_grouped and not spec.out_by_tma  # behind a tile's last row may be another expert's


@pytest.mark.parametrize("role", [PLAIN, ARRIVING, GATHER, GATHERED, SCATTER, STAGE, SPREAD])
def test_it_takes_what_it_is_for(role: Any) -> None:
    for tile in TILES:
        assert why_not_hopper(operands(), role, hopper_config(*tile)) is None
    assert why_not_hopper(operands(torch.float16), role, hopper_config(128, 256)) is None
    for scale_x in (None, torch.ones(()), torch.ones(512)):
        fp8 = operands(torch.float8_e4m3fn, scale_x=scale_x)
        assert why_not_hopper(fp8, role, hopper_config(128, 128, torch.float8_e4m3fn)) is None


@pytest.mark.parametrize(
    ("given", "config", "role"),
    [
        (operands(), GemmConfig(128, 256, 32, hopper=True), PLAIN),
        (operands(), GemmConfig(128, 256, 64, num_warps=4, hopper=True), PLAIN),
        (operands(), GemmConfig(256, 256, 64, hopper=True), PLAIN),
        (operands(), GemmConfig(32, 128, 64, num_warps=8, hopper=True), PLAIN),
        (operands(), GemmConfig(128, 32, 64, hopper=True), PLAIN),
        (operands(torch.float32), GemmConfig(128, 128, 32, hopper=True), PLAIN),
        (operands(torch.int8), GemmConfig(128, 128, 128, hopper=True), PLAIN),
        (operands(torch.float8_e4m3fn), hopper_config(128, 256, torch.float8_e4m3fn), PLAIN),
        (
            operands(torch.float8_e4m3fn, weight=torch.zeros(256, 512).to(torch.float8_e4m3fn).t()),
            hopper_config(128, 128, torch.float8_e4m3fn),
            PLAIN,
        ),
        (
            operands(torch.float8_e4m3fn, out=torch.zeros(512, 512)),
            hopper_config(128, 128, torch.float8_e4m3fn),
            PLAIN,
        ),
        (operands(activation="swiglu"), hopper_config(128, 256), PLAIN),
        (operands(activation="gelu"), hopper_config(128, 256), ARRIVING),
        (operands(activation="gelu", groups=groups()), hopper_config(128, 256), PLAIN),
        (operands(groups=groups(picks_rows=True)), hopper_config(128, 256), PLAIN),
    ],
)
def test_the_rest_is_left_to_the_other_loop(given: Operands, config: GemmConfig, role: Any) -> None:
    assert why_not_hopper(given, role, config)


def launch(config: GemmConfig, role: Any = PLAIN, **changes: Any) -> Launch:
    made = Launch(
        role, config, num_rows=512, num_feeders=0, num_programs=132,
        world_size=1, releases=False, fetches=False, use_tma=True, records=False, trace=None,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
def test_stages_fill_shared_memory_and_no_more(tile: tuple[int, int], out: torch.dtype) -> None:
    given = operands(out=torch.zeros(512, 512, dtype=out))
    spec = make_hopper_spec(given, launch(hopper_config(*tile)), None)
    stage = 2 * 64 * sum(tile)
    leaving = tile[0] * 64 * out.itemsize * (2 if spec.out_by_tma else 1)
    assert spec.out_by_tma == (out == torch.bfloat16)
    assert 3 <= spec.num_stages <= 8 and spec.num_stages * stage + leaving < SHARED_BYTES
    assert spec.num_stages == 8 or (spec.num_stages + 1) * stage + leaving > SHARED_BYTES - 4096


def test_a_tile_is_stored_whole_only_where_it_ends_with_its_rows() -> None:
    config = hopper_config(128, 256)

    def spec_of(role: Any, plan: Any) -> HopperSpec:
        turn: Any = SimpleNamespace(plan=plan)
        return make_hopper_spec(operands(), launch(config, role, world_size=2), turn)

    def by_tma(role: Any, rows: tuple[int, ...], chunk_rows: int) -> bool:
        return spec_of(role, SimpleNamespace(rows=rows, chunk_rows=chunk_rows)).out_by_tma

    assert by_tma(ARRIVING, (256, 256), 256) and by_tma(ARRIVING, (512, 512), 256)
    assert not by_tma(ARRIVING, (256, 255), 256)
    assert not by_tma(ARRIVING, (192, 192), 192)
    assert not by_tma(SEND, (256, 256), 256)
    for rows, num_slabs, width, is_even in (
        ((256, 256), 1, 256, True), ((256, 128), 2, 256, True), ((256, 0), 2, 256, True), ((256, 200), 1, 256, False),
        ((256, 256), 3, 64, False),
    ):  # fmt: skip
        tiles = dataclasses.replace(config, block_n=width, num_chunks=num_slabs)
        spec = spec_of(STAGE, scatter_shards("gemm_rs", rows, 512, 2, tiles, by_copies=True))
        assert (spec.out_by_tma, spec.settles) == (is_even, is_even), (rows, num_slabs, width)
    assert not spec_of(ARRIVING, SimpleNamespace(rows=(256, 256), chunk_rows=256)).settles
    odd = operands(out=torch.zeros(512, 509, dtype=torch.bfloat16), weight=torch.zeros(509, 256, dtype=torch.bfloat16))
    assert not make_hopper_spec(odd, launch(config), None).out_by_tma


def test_virtual_ranks_find_any_variant_that_one_of_them_needs_among_those_loaded_for_all() -> None:
    config = hopper_config(128, 256)
    odd = operands(out=torch.zeros(512, 509, dtype=torch.bfloat16), weight=torch.zeros(509, 256, dtype=torch.bfloat16))
    for role in (PLAIN, GATHER, SCATTER):
        how = launch(config, role)
        family = hopper_family(operands(), how)
        assert family == hopper_family(odd, how)
        for given in (operands(), odd):
            for rows in ((256, 256), (250, 262)):
                turn: Any = SimpleNamespace(plan=SimpleNamespace(rows=rows, chunk_rows=rows[1]))
                assert make_hopper_spec(given, how, turn) in family


def test_only_a_hopper_has_this_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, expected in (((9, 0), True), ((10, 0), False), ((8, 9), False)):
        gemm_hopper_launch.is_hopper.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert gemm_hopper_launch.is_hopper(torch.device("cuda", 0)) is expected
    gemm_hopper_launch.is_hopper.cache_clear()
    assert not gemm_hopper_launch.is_hopper(torch.device("cpu"))
