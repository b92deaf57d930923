"""How many programs a launch has, when TMA fits, and which variants are loaded for virtual ranks."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tileflux
from tileflux.config import GemmConfig
from tileflux.kernels import gemm_launch
from tileflux.kernels.gemm_launch import (
    GATHER,
    GATHERED,
    PLAIN,
    SCATTER,
    SPREAD,
    launch_gemm,
    num_programs,
    shares_gpu,
    sms_for,
)
from tileflux.kernels.operands import Operands, make_spec
from tileflux.kernels.turns import gather_shards, scatter_shards, spread_shards
from tileflux.kernels.turns import turn as make_turn

CONFIG = GemmConfig(block_m=16, block_n=32, num_feeders=4)
rows = st.lists(st.integers(0, 600), min_size=2, max_size=9).filter(any).map(tuple)


def planned(plan: object) -> SimpleNamespace:
    """A turn of which only the plan is looked at."""
    return SimpleNamespace(plan=plan)


@given(
    rows=rows, num_columns=st.integers(0, 300), num_sms=st.integers(2, 200), num_feeders=st.integers(1, 300),
    num_chunks=st.integers(1, 16),
)  # fmt: skip
def test_programs_are_resident_at_once_and_none_is_idle(
    rows: tuple[int, ...], num_columns: int, num_sms: int, num_feeders: int, num_chunks: int
) -> None:
    config = dataclasses.replace(CONFIG, num_sms=num_sms, num_feeders=num_feeders, num_chunks=num_chunks)
    gather = planned(gather_shards("op", rows, 32, False, num_chunks))
    scatter = planned(scatter_shards("op", rows, max(1, num_columns), 2, config))
    spread = planned(spread_shards("op", len(rows), sum(rows), max(1, num_columns), 2, config))
    for role, turn in ((PLAIN, None), (GATHER, gather), (GATHERED, gather), (SCATTER, scatter), (SPREAD, spread)):
        feeders, multipliers = num_programs(config, None, role, sum(rows), num_columns, turn)
        assert feeders + multipliers <= num_sms and multipliers >= 1
        assert (feeders > 0) == (role is GATHER)
        assert feeders <= num_sms // 2 or feeders == 1, "at least half of the SMs multiply"
    whole = -(-sum(rows) // 16) * -(-num_columns // 32)
    for role, turn in ((PLAIN, None), (SPREAD, spread)):
        assert num_programs(config, None, role, sum(rows), num_columns, turn) == (0, max(1, min(num_sms, whole)))
    tiles = len(rows) * -(-max(rows) // 16) * -(-num_columns // 32)
    assert num_programs(config, None, SCATTER, sum(rows), num_columns, scatter) == (0, max(1, min(num_sms, tiles)))


def test_interpreted_programs_are_feeders_and_then_one_that_multiplies() -> None:
    """They run one after the other: a second one that multiplies would come only when the first has ended."""
    (group,) = tileflux.local_groups(1)
    assert sms_for(group) == 1 or torch.cuda.is_available()
    turn = planned(gather_shards("op", (64, 64), 32, False, 1))
    if not torch.cuda.is_available():
        assert num_programs(CONFIG, group, GATHER, 128, 64, turn) == (1, 1)
        assert num_programs(CONFIG, group, SCATTER, 128, 64, turn) == (0, 1)
    group.close()


def test_a_groups_share_of_the_gpu_bounds_its_programs() -> None:
    group = SimpleNamespace(traits=SimpleNamespace(num_sms=6))
    turn = planned(gather_shards("op", (640, 640), 32, False, 1))
    assert sms_for(group) == 6
    assert num_programs(CONFIG, group, GATHER, 1280, 64, turn) == (3, 3)
    assert num_programs(CONFIG, group, SCATTER, 1280, 64, turn) == (0, 6)


@pytest.mark.parametrize(
    ("links", "shares"),
    [
        (("self", "same GPU"), True),
        (("NVLink", "self", "same GPU", "NVLink"), True),
        (("self", "NVLink"), False),
        (("PCIe", "self"), False),
        (("self", "shared memory"), False),
        (("self", "same process"), False),
    ],
)
def test_who_shares_a_gpu_is_told_by_the_links(links: tuple[str, ...], shares: bool) -> None:
    assert shares_gpu(SimpleNamespace(traits=SimpleNamespace(links=links))) == shares
    assert not shares_gpu(None)


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
    monkeypatch.setattr(gemm_launch, "fetches_tiles", lambda group, config: shares)
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
    assert gemm_launch._fits_tma(operands) == fits


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
