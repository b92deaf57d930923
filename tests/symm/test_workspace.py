"""Regions: the same bytes for the same request, an error for any other."""

from __future__ import annotations

import time

import pytest
import torch

import tileflux
from tileflux.errors import MismatchError, RegionError
from tileflux.symm.group import Group
from tileflux.symm.workspace import Workspace
from tileflux.testing import run_ranks


def _ask(group: Group) -> None:
    first = group.region("gathered", 1000)
    assert group.region("gathered", 1000) is first
    assert first.view().eq(0).all()
    other = group.region("other", 300, describe=lambda offset: f"flag {offset // 4}")
    assert other.offset % 256 == 0
    own = other.view(dtype=torch.int32)
    own.fill_(group.rank)
    group.barrier()
    for rank in range(group.world_size):
        assert other.view(rank, torch.int32).eq(rank).all()
        assert other.table[rank].item() == other.address(rank) == other.view(rank).data_ptr()
    assert other.name_of(other.address(group.rank) + 8) == "other.flag 2"
    assert first.view().eq(0).all(), "regions overlap"
    with pytest.raises(RegionError, match="'gathered' has 1000 bytes and was asked for again with 1001"):
        group.region("gathered", 1001)
    with pytest.raises(ValueError, match="does not fit region 'other' of 300"):
        other.view(shape=(301,))
    with pytest.raises(ValueError, match="rank 9 is not in a group"):
        other.view(9)
    with pytest.raises(ValueError, match="cannot have -1 bytes"):
        group.region("negative", -1)


@pytest.mark.parametrize("where", ["fork", "virtual"])
def test_regions(where: str) -> None:
    run_ranks(_ask, 3, where=where)  # type: ignore[arg-type]


def _grow(group: Group) -> tuple[int, int]:
    small = group.region("rows", 100_000, grow=True)
    small.view().fill_(7)
    assert group.region("rows", 50_000, grow=True) is small
    large = group.region("rows", 300_000, grow=True)
    assert large.nbytes == 524_288
    assert small.view().eq(7).all() and large.view().eq(0).all(), "outgrown bytes were handed out again"
    summary = group.memory_summary()
    assert summary.retired_bytes == 100_000 and "outgrown" in str(summary)
    return summary.region_bytes["rows"], summary.heap_bytes


def test_growth_is_collective_and_visible() -> None:
    for rows, heap in run_ranks(_grow, 2):
        assert rows == 524_288 and heap >= 624_288


def test_a_region_belongs_to_the_code_that_asked() -> None:
    (group,) = tileflux.local_groups(1)
    group.region("mine", 10)
    with pytest.raises(RegionError, match=r"'mine' belongs to .*test_workspace and cannot be used by elsewhere"):
        group._workspace.region("mine", 10, owner="elsewhere")
    group.close()


def _differ(group: Group, by: str) -> str:
    with pytest.raises(RegionError) as caught:
        if by == "size":
            group.region("data", 100 + group.rank)
        elif by == "name":
            group.region(f"data{group.rank}", 100)
        elif group.rank == 0:
            group.region("data", 100)
        else:
            time.sleep(1.5)
            raise RegionError("stayed away")
    return str(caught.value)


def test_ranks_that_ask_differently_are_told() -> None:
    limits = {"timeout_s": 1.0}
    for text in run_ranks(_differ, 2, args=("size",), group_kwargs=limits):
        assert "100 bytes" in text and "101 bytes" in text
    for text in run_ranks(_differ, 2, args=("name",), group_kwargs=limits):
        assert "region 'data0'" in text and "region 'data1'" in text
    text = run_ranks(_differ, 2, args=("absence",), group_kwargs=limits)[0]
    assert "region 'data': asked for by ranks [0] but not by [1] within 1 s" in text


def _after_a_failure(group: Group) -> None:
    if group.rank == 0:
        with pytest.raises(RegionError, match=r"not by \[1\]"):
            group.region("x", 1000)
        with pytest.raises(RegionError, match="an earlier region of this group failed"):
            group.region("y", 1000)
    else:
        time.sleep(2.5)
        group.region("x", 1000)  # the other's note is still there: this rank alone has it
        with pytest.raises(RegionError, match=r"not by \[0\]"):
            group.region("y", 1000)


def test_after_a_failure_no_region_is_handed_out_at_differing_offsets() -> None:
    run_ranks(_after_a_failure, 2, group_kwargs={"timeout_s": 0.5})


def test_virtual_ranks_that_ask_differently_are_told() -> None:
    first, second = tileflux.local_groups(2)
    first.region("data", 100)
    with pytest.raises(RegionError, match="rank 1 has 200 bytes .* but rank 0 has 100 bytes"):
        second.region("data", 200)
    assert issubclass(RegionError, tileflux.TilefluxError) and not issubclass(MismatchError, RegionError)
    for group in (first, second):
        group.close()


def test_summary_lists_regions() -> None:
    (group,) = tileflux.local_groups(1)
    group.region("scratch", 1 << 20)
    text = str(group.memory_summary())
    assert "scratch: 1.00 MiB" in text and "mailbox" in text
    assert isinstance(group._workspace, Workspace)
    group.close()


@pytest.mark.parametrize("where", ["fork", "virtual"])
def test_what_a_call_in_inference_mode_needs_first_can_be_written_outside_of_it(where: str) -> None:
    run_ranks(_infer_first, 2, where=where)  # type: ignore[arg-type]


def _infer_first(group: Group) -> None:
    with torch.inference_mode():
        region = group.region("large", 1 << 20)
    region.view().fill_(1)
    assert not any(view.is_inference() for view in group._workspace._segments[-1].views)
