"""What a reduce-scatter queues on which stream."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tileflux import GemmConfig
from tileflux.kernels import scatter
from tileflux.kernels.operands import Operands
from tileflux.kernels.roles import SEND, STAGE
from tileflux.kernels.scatter import departures, run_scatter
from tileflux.kernels.shards import scatter_shards
from tileflux.lang.schedule import departure_order, replay

from .queued import Queued

CONFIG = GemmConfig(block_m=16, block_n=16, block_k=16, num_warps=4, num_chunks=2)


@pytest.mark.parametrize("num_slabs", [1, 2, 3])
@pytest.mark.parametrize("rank", [1, 2])
def test_each_shard_is_sent_behind_its_count_and_the_next_is_counted_meanwhile(
    rank: int, num_slabs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles are counted on a stream of their own; who has no rows is sent nothing, and waits for nobody."""
    rows, config = (20, 5, 0, 33), dataclasses.replace(CONFIG, num_chunks=num_slabs)
    queued = Queued(monkeypatch, scatter, STAGE, config, rank, rows)
    operands = Operands(torch.empty(58, 16), torch.empty(40, 16), torch.empty(rows[rank], 40))
    run_scatter(queued.group, operands, rows, "fused", config)  # type: ignore[arg-type]
    expected: list[tuple[object, ...]] = [
        *[("load",)] * (1 if num_slabs == 1 else 2),
        ("main", "counted"), ("main", "launch_open"), ("main", "event", 1), ("main", "gemm"),
    ]  # fmt: skip
    tall, widths = {0: 2, 1: 1, 3: 3}, {1: [3], 2: [2, 1], 3: [1, 1, 1]}[num_slabs]
    leaving: list[tuple[int, range, tuple[int, ...]]] = []
    for owner in ((rank + 1 + hop) % 4 for hop in range(3)):
        made = [tall[owner] * width for width in widths] if rows[owner] else []
        if owner != (rank - 1) % 4 and made:
            leaving.append((owner, range(num_slabs), tuple(made)))
        elif made:
            leaving += [(owner, range(slab, slab + 1), (count,)) for slab, count in enumerate(made)]
    expected += queued.sent(leaving)
    last = (
        (("launch_sum",) if num_slabs == 1 else ("launch_sum_slabs", "mostly whole"))
        if rows[rank]
        else ("launch_release",)
    )
    # The sum waits on many SMs, and must not be in the way of what tells when to send.
    assert queued.seen == [*expected, ("main", "join", "closing"), ("main", *last), ("main", "join", "announcing")]


@pytest.mark.parametrize("strategy", ["fused", "pipelined"])
def test_where_nobody_is_sent_anything_no_stream_beside_is_touched(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a graph that is captured would have a stream in it that was not forked, or is not joined."""
    rows = (20, 0, 0)
    queued = Queued(monkeypatch, scatter, STAGE, CONFIG, 0, rows)
    monkeypatch.setattr(scatter, "multiply", lambda *given, **named: queued.seen.append(("main", "product")))
    operands = Operands(torch.empty(20, 16), torch.empty(40, 16), torch.empty(20, 40))
    run_scatter(queued.group, operands, rows, strategy, CONFIG)  # type: ignore[arg-type]
    assert {each[0] for each in queued.seen if len(each) > 1} == {"main"} and queued.seen[-1][1].startswith(
        "launch_sum"
    )
    assert not any("join" in each for each in queued.seen)


def test_slabs_leave_in_the_order_in_which_their_tiles_are_completed() -> None:
    """By the order of the tiles themselves, of whatever bands."""
    replayed, rows, num_columns, world_size = replay(departure_order), (64,) * 8, 160, 8
    for span, alone, num_slabs in itertools.product((1, 2, 3, 7, 9), (-1, 0, 1, 3, 7, 8), (1, 2, 4)):
        config = dataclasses.replace(CONFIG, span=span, alone=alone, num_chunks=num_slabs, group_m=10**6)
        plan = scatter_shards("gemm_rs", rows, num_columns, 2, config, by_copies=True)
        num_m, num_n, rank = 4, 10, 3
        last: dict[tuple[int, int], int] = {}
        counts: Counter[tuple[int, int]] = Counter()
        for step in range(world_size * num_m * num_n):
            owner, _, _, n, _ = replayed(step, rank, world_size, 1, num_m, num_n, config.group_m, (span, alone))
            slab = n * config.block_n // plan.slab_columns if plan.slab_columns else 0
            last[owner, slab] = step
            counts[owner, slab] += 1
        found = departures(rank, plan, config, num_columns)
        assert {
            (owner, slab): count for owner, slabs, made in found for slab, count in zip(slabs, made, strict=True)
        } == {each: count for each, count in counts.items() if each[0] != rank}
        ends = [last[owner, slabs[-1]] for owner, slabs, _ in found]
        # Of a band the tiles of all its owners' rows are side by side: none is much later than the next.
        assert all(later > earlier - span * num_m * 3 for earlier, later in itertools.pairwise(ends))
        assert sorted(ends)[-1] == ends[-1], "what is complete last is sent last"
        # All but the last owner's leave whole.
        assert [owner for owner, _, _ in found if owner != 2] == [4, 5, 6, 7, 0, 1]
        assert all(len(slabs) == (1 if owner == 2 else len(plan.slabs(num_columns))) for owner, slabs, _ in found)


@pytest.mark.parametrize("rank", [1, 2])
def test_sums_apart_are_behind_one_program_that_waits_and_the_product_behind_another(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many programs that wait would hold SMs that the rank which is waited for may need."""
    rows, config = (20, 5, 0, 33), dataclasses.replace(CONFIG, sums_apart=True)
    queued = Queued(monkeypatch, scatter, SEND, config, rank, rows, by_copies=False)
    operands = Operands(torch.empty(58, 16), torch.empty(40, 16), torch.empty(rows[rank], 40))
    run_scatter(queued.group, operands, rows, "fused", config)  # type: ignore[arg-type]
    last = (
        [("main", "launch_await_everyone", 0), ("main", "launch_sum")] if rows[rank] else [("main", "launch_release")]
    )
    assert queued.seen == [("load",), ("main", "launch_open"), ("main", "gemm"), *last]


@pytest.mark.parametrize("is_watched", [False, True])
def test_when_a_piece_begins_to_leave_is_noted_for_who_plays_the_peers(
    is_watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its copy: a ghost that went by its end would send a whole copy too late."""
    seen: list[object] = []

    def record_event() -> int:
        seen.append("event")
        return len(seen)

    stream = SimpleNamespace(record_event=record_event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    slot = SimpleNamespace(copy_=lambda piece, non_blocking: seen.append(piece))
    here: Any = SimpleNamespace(
        rank=0, group=SimpleNamespace(device="cuda"), leaving=[] if is_watched else None,
        slabs_at=lambda *place: slot, announce=lambda owner, slab: seen.append(("flag", owner, slab)),
    )  # fmt: skip
    scatter.send_slabs(here, torch.empty(2, 4), lambda owner, *place: f"piece of {owner}", 3, range(1, 2))
    assert seen == [*(["event"] if is_watched else []), "piece of 3", ("flag", 3, 1)]
    assert here.leaving == ([1] if is_watched else None)
