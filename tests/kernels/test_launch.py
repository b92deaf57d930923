"""Tables of ragged plans live in memory allocated once, and make room for each other."""

from __future__ import annotations

import pytest
import torch

import tileflux
from tileflux import env
from tileflux.kernels import launch
from tileflux.kernels.launch import DeviceTables, extents_table, on_host
from tileflux.kernels.plan import gather_plan


def test_an_even_plan_needs_no_table() -> None:
    group = tileflux.local_groups(2)[0]
    assert extents_table(group, gather_plan(0, (8, 8)))[0] == 0


def test_tables_are_kept_and_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_NUM_ROWS", 4)
    group = tileflux.local_groups(2)[0]
    plans = [gather_plan(0, (size, size + 1)) for size in range(11)]
    seen = set()
    for plan in plans:
        ragged, table = extents_table(group, plan)
        assert ragged == 1 and table.tolist() == list(plan.table)
        assert extents_table(group, plan)[1].data_ptr() == table.data_ptr()
        seen.add(table.data_ptr())
    assert len(seen) == 4, "eleven plans, four rows"
    assert extents_table(group, plans[-1])[1].tolist() == list(plans[-1].table)


def test_rows_are_filled_once_per_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_NUM_ROWS", 2)
    tables = DeviceTables(torch.device("cpu"), 3)
    asked: list[int] = []

    def words(number: int) -> list[int]:
        asked.append(number)
        return [number, -number, 2**62 + number]

    for number in (1, 2, 1, 2, 3, 3, 1):
        row = tables.find(("key", number), lambda number=number: words(number))
        assert row.tolist() == [number, -number, 2**62 + number] and row.dtype == torch.int64
    assert asked == [1, 2, 3, 1], "the third took the place of the first two"


def test_rows_that_a_graph_reads_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_NUM_ROWS", 2)
    tables = DeviceTables(torch.device("cpu"), 1)
    kept = tables.find("captured", lambda: [7])
    tables._captured.add("captured")
    for number in range(5):
        assert tables.find(number, lambda number=number: [number]).item() == number
    assert kept.item() == 7 and tables.find("captured", lambda: pytest.fail("filled again")) is not None
    tables._captured.add(4)
    with pytest.raises(ValueError, match="CUDA graphs of this group hold 2 different lists"):
        tables.find("one too many", lambda: [0])


def test_the_backend_follows_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    group = tileflux.local_groups(1)[0]
    with env.scoped({"TILEFLUX_CPU_BACKEND": "host"}):
        assert on_host(group)
    with env.scoped({"TILEFLUX_CPU_BACKEND": "interpret"}):
        monkeypatch.setattr(launch, "_interpreter_repaired", False)
        with pytest.raises(ValueError, match="and a call of tileflux.testing.interpreter.install"):
            on_host(group)
        monkeypatch.setattr(launch, "_interpreter_repaired", True)
        assert not on_host(group)
    with env.scoped({"TILEFLUX_CPU_BACKEND": "gpu"}), pytest.raises(ValueError, match="'gpu' is not one of host"):
        on_host(group)


@pytest.mark.gpu
def test_new_sizes_are_refused_while_capturing() -> None:
    (group,) = tileflux.local_groups(1, "cuda")
    assert group.stream is not None
    x = torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(group.stream):
        tileflux.barrier(group=group)
    ragged = gather_plan(0, (1, 2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=group.stream):
        with pytest.raises(ValueError, match="before capturing"):
            extents_table(group, ragged)
        x.add_(1)
    group.close()


def test_tables_count_their_evictions() -> None:
    tables = DeviceTables(torch.device("cpu"), 2)
    for number in range(launch._NUM_ROWS):
        tables.find(number, lambda: [1, 2])
    assert tables.num_evictions == 0
    tables.find("one more", lambda: [1, 2])
    assert tables.num_evictions == 1
