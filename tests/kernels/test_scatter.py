"""What a reduce-scatter queues on which stream."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tileflux import GemmConfig
from tileflux.kernels import scatter
from tileflux.kernels.operands import Operands
from tileflux.kernels.roles import SEND, STAGE
from tileflux.kernels.scatter import run_scatter

from .queued import Queued

CONFIG = GemmConfig(block_m=16, block_n=16, block_k=16, num_warps=4, num_chunks=2)


@pytest.mark.parametrize("rank", [1, 2])
def test_each_shard_is_sent_behind_its_count_and_the_next_is_counted_meanwhile(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles are counted on a stream of their own; who has no rows is sent nothing, and waits for nobody."""
    rows = (20, 5, 0, 33)
    queued = Queued(monkeypatch, scatter, STAGE, CONFIG, rank, rows)
    operands = Operands(torch.empty(58, 16), torch.empty(40, 16), torch.empty(rows[rank], 40))
    run_scatter(queued.group, operands, rows, "fused", CONFIG)  # type: ignore[arg-type]
    expected: list[tuple[object, ...]] = [
        ("load",), ("main", "counted"), ("main", "launch_open"), ("main", "event", 1), ("main", "gemm")
    ]  # fmt: skip
    tall = {0: 2, 1: 1, 3: 3}
    owners = [owner for owner in ((rank + 1 + hop) % 4 for hop in range(3)) if rows[owner]]
    for number, owner in enumerate(owners, start=2):
        expected += [
            ("closing", "after", 1),
            ("closing", "launch_close", owner, tall[owner] * 3, 0),
            ("closing", "event", number),
            ("sending", "after", number),
            ("sending", "copy", owner, ("staged", owner)),
            ("sending", "flag", owner, 0),
        ]
    last = "launch_sum" if rows[rank] else "launch_release"
    # The sum waits on many SMs, and must not be in the way of what tells when to send.
    assert queued.seen == [*expected, ("main", "join", "closing"), ("main", last), ("main", "join", "sending")]


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
