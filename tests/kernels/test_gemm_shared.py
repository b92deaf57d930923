"""How many tiles and programs a launch has, and whose SMs they run on."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tileflux
from tileflux.config import GemmConfig
from tileflux.kernels.gemm_shared import (
    address,
    fetches_tiles,
    num_programs,
    num_tiles,
    shares_gpu,
    side_addresses,
    sms_for,
    table_of,
)
from tileflux.kernels.operands import Operands
from tileflux.kernels.roles import COMBINE, COMBINE_SEND, GATHER, GATHERED, PLAIN, SCATTER, SEND, SPREAD
from tileflux.kernels.shards import gather_shards, scatter_shards, spread_shards

CONFIG = GemmConfig(block_m=16, block_n=32, num_feeders=4)
ALONE, SHARED = ("self", "NVLink"), ("self", "same GPU")
rows = st.lists(st.integers(0, 600), min_size=2, max_size=9).filter(any).map(tuple)


def linked(links: tuple[str, ...]) -> SimpleNamespace:
    """A group of which only the links are looked at."""
    return SimpleNamespace(traits=SimpleNamespace(links=links))


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
        feeders, multipliers = num_programs(
            config, None, role, num_tiles(config, role, sum(rows), num_columns, turn), turn
        )
        assert feeders + multipliers <= num_sms and multipliers >= 1
        assert (feeders > 0) == (role is GATHER)
        assert feeders <= num_sms // 2 or feeders == 1, "at least half of the SMs multiply"
    whole = -(-sum(rows) // 16) * -(-num_columns // 32)
    for role, turn in ((PLAIN, None), (SPREAD, spread)):
        assert num_programs(config, None, role, num_tiles(config, role, sum(rows), num_columns, turn), turn) == (
            0,
            max(1, min(num_sms, whole)),
        )
    tiles = len(rows) * -(-max(rows) // 16) * -(-num_columns // 32)
    assert num_tiles(config, SCATTER, sum(rows), num_columns, scatter) == tiles
    assert num_programs(config, None, SCATTER, tiles, scatter) == (0, max(1, min(num_sms, tiles)))


def test_interpreted_programs_are_feeders_and_then_one_that_multiplies() -> None:
    """They run one after the other: a second one that multiplies would come only when the first has ended."""
    (group,) = tileflux.local_groups(1)
    assert sms_for(group) == 1 or torch.cuda.is_available()
    turn = planned(gather_shards("op", (64, 64), 32, False, 1))
    if not torch.cuda.is_available():
        assert num_programs(CONFIG, group, GATHER, 16, turn) == (1, 1)
        assert num_programs(CONFIG, group, SCATTER, 16, turn) == (0, 1)
    group.close()


def test_a_groups_share_of_the_gpu_bounds_its_programs() -> None:
    group = SimpleNamespace(traits=SimpleNamespace(num_sms=6))
    turn = planned(gather_shards("op", (640, 640), 32, False, 1))
    assert sms_for(group) == 6
    assert num_programs(CONFIG, group, GATHER, 160, turn) == (3, 3)
    assert num_programs(CONFIG, group, SCATTER, 160, turn) == (0, 6)


@pytest.mark.parametrize(("fetches", "tiles", "programs"), [(False, 160, 160), (True, 160, 12), (True, 5, 5)])
def test_programs_that_wait_for_nobody_may_be_more_than_fit(fetches: bool, tiles: int, programs: int) -> None:
    traits = SimpleNamespace(num_sms=6, links=SHARED)
    group = SimpleNamespace(traits=traits, device=torch.device("cuda"))
    turn = planned(scatter_shards("op", (640, 640), 64, 2, CONFIG))
    config = dataclasses.replace(CONFIG, fetches=fetches)
    assert num_programs(config, group, SEND, tiles, turn) == (0, programs)
    assert num_programs(dataclasses.replace(config, num_sms=4), group, SEND, 160, turn) == (0, 4), "what is asked for"
    assert num_programs(config, group, SCATTER, tiles, turn) == (0, min(6, tiles)), "these wait"


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


@pytest.mark.parametrize(
    ("links", "wanted", "fetches"), [(SHARED, True, True), (SHARED, False, False), (ALONE, True, False)]
)
def test_tiles_are_fetched_where_it_is_wanted_and_ranks_share_a_gpu(
    links: tuple[str, ...], wanted: bool, fetches: bool
) -> None:
    assert fetches_tiles(linked(links), dataclasses.replace(CONFIG, fetches=wanted), SCATTER) is fetches
    assert not fetches_tiles(None, dataclasses.replace(CONFIG, fetches=True), SCATTER)
    # Who waits for others of its own rank must not be dealt its tiles beforehand.
    for role in (SPREAD, COMBINE, COMBINE_SEND):
        assert fetches_tiles(linked(links), CONFIG, role) is ("same GPU" in links)


def test_what_is_not_there_has_no_address() -> None:
    x, bias, scale = torch.zeros(4, 8), torch.zeros(8), torch.ones(())
    operands = Operands(x, torch.zeros(8, 8), torch.zeros(4, 8), bias, None, scale)
    assert side_addresses(operands) == (bias.data_ptr(), 0, scale.data_ptr())
    assert side_addresses(dataclasses.replace(operands, adds_bias=False)) == (0, 0, scale.data_ptr())
    assert (address(None), address(x)) == (0, x.data_ptr())
    table = torch.zeros(3, dtype=torch.int64)
    assert table_of(SimpleNamespace(table=table), x.device) is table
    assert table_of(None, x.device) is table_of(None, x.device), "made once"
