"""``moe_gemm_rs`` by the copy engine: what is queued where and when, and the same bits as by stores of SMs."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tileflux import env, moe_gemm_rs
from tileflux.config import GemmConfig
from tileflux.kernels import combine
from tileflux.kernels.groups import Groups
from tileflux.kernels.operands import Operands
from tileflux.kernels.roles import COMBINE, COMBINE_SEND, COMBINE_STAGE
from tileflux.kernels.shards import combine_shards
from tileflux.symm.group import Group
from tileflux.testing.dense_protocols import SLABS, CombineCall, simulate_protocol

from .queued import Queued

interpreted = pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")

CONFIG = GemmConfig(block_m=16, block_n=16, block_k=16, num_chunks=2)
NUM_SEEDS = {2: 3, 3: 1}


@interpreted
@pytest.mark.parametrize("world_size", NUM_SEEDS)
def test_every_schedule_gives_the_right_result_by_copies(world_size: int) -> None:
    for seed in range(NUM_SEEDS[world_size]):
        simulate_protocol("moe_gemm_rs fused", world_size, seed, by_copies=True)


def _combine(group: Group, by_copies: bool, num_slabs: int, seed: int) -> torch.Tensor:
    from tileflux.testing.simulated_streams import on_streams

    config = dataclasses.replace(SLABS, num_chunks=num_slabs)
    call = CombineCall(
        "moe_gemm_rs", 11, columns=56, depth=48, ragged=True, kind="skewed", dtype=torch.bfloat16, config=config
    )
    case, routing = call.moe_case(group.world_size, seed), call.routed(group, seed)
    rows, weight = case.xs[group.rank], case.weights[group.rank]
    h = rows.new_zeros((routing.capacity, rows.shape[1]))
    h[: len(rows)] = rows
    with on_streams(group) if by_copies else contextlib.nullcontext():
        out = moe_gemm_rs(h, weight, routing, strategy="fused", config=config)
        group.synchronize()
    return out


@interpreted
@pytest.mark.parametrize(("world_size", "num_slabs"), [(2, 4), (3, 2), (2, 1)])
def test_copies_give_the_bits_that_stores_give(world_size: int, num_slabs: int) -> None:
    from tileflux.testing.simulated_streams import simulated_streams
    from tileflux.testing.simulator import simulate

    seed = int(torch.randint(2**20, ()))
    by_stores = simulate(_combine, world_size, seed=seed, args=(False, num_slabs, seed))
    with simulated_streams():
        by_copies = simulate(_combine, world_size, seed=seed, args=(True, num_slabs, seed))
    for one, other in zip(by_stores, by_copies, strict=True):
        assert torch.equal(one, other) and one.dtype == torch.bfloat16
    assert any(each.numel() and each.abs().max() > 0 for each in by_stores)


def run(queued: Queued, rows: tuple[int, ...], num_columns: int, config: GemmConfig = CONFIG) -> None:
    groups = Groups(torch.zeros(8, dtype=torch.int32), 1, 16, 32, sum(rows), 2)
    out = torch.empty(rows[queued.group.rank], num_columns)
    operands = Operands(torch.empty(32, 16), torch.empty(num_columns, 16), out, groups=groups)
    combine.run_combine(queued.group, operands, rows, "fused", config)  # type: ignore[arg-type]
    (plan,) = queued.plans
    how = {"by_slab": True} if config.sums_apart else {"by_copies": True}
    assert plan == combine_shards(COMBINE.name, rows, 32, num_columns, 4, config, **how)


def test_each_owners_slab_is_sent_behind_its_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three slabs of tiles in two: the last has fewer. The next rank's come first; who has no tokens gets nothing."""
    rows, rank = (20, 5, 0, 33), 1
    queued = Queued(monkeypatch, combine, COMBINE_STAGE, CONFIG, rank, rows)
    run(queued, rows, 40)
    expected: list[tuple] = [
        ("load",), ("main", "counted"), ("main", "launch_open"), ("main", "event", 1), ("main", "gemm")
    ]  # fmt: skip
    number = 1
    for slab, across in ((0, 2), (1, 1)):
        for owner, tall in ((3, 3), (0, 2)):
            number += 1
            expected += [
                ("closing", "after", 1),
                ("closing", "launch_close", owner, tall * across, slab),
                ("closing", "event", number),
                ("sending", "after", number),
                ("sending", "copy", owner, rank, slab, ("staged", owner, slab)),
                ("sending", "flag", owner, slab),
            ]
    joins = [("main", "join", "closing"), ("main", "launch_sum_slabs"), ("main", "join", "sending")]
    assert queued.seen == [*expected, *joins]


def test_who_has_no_tokens_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    queued = Queued(monkeypatch, combine, COMBINE_STAGE, CONFIG, 2, (20, 5, 0, 33))
    run(queued, (20, 5, 0, 33), 40)
    assert queued.seen[-2:] == [("main", "launch_release"), ("main", "join", "sending")]
    assert ("main", "launch_sum_slabs") not in queued.seen


def test_virtual_ranks_and_the_cpu_do_not_send_by_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[object] = []
    monkeypatch.setattr(combine, "turn", lambda group, plan: launched.append(plan.by_copies))
    monkeypatch.setattr(combine, "on_host", lambda group: False)
    monkeypatch.setattr(combine, "launch_gemm", lambda operands, role, config, **named: launched.append((role, named)))
    groups = Groups(torch.zeros(8, dtype=torch.int32), 1, 16, 32, 8, 2)
    operands = Operands(torch.empty(32, 16), torch.empty(40, 16), torch.empty(4, 40), groups=groups)
    traits = SimpleNamespace(copies_need_sms=True)
    for device in ("cuda", "cpu"):
        group: Any = SimpleNamespace(device=torch.device(device), rank=0, world_size=2, traits=traits)
        combine.run_combine(group, operands, (4, 4), "fused", CONFIG)
        by_copies, (role, named) = launched[-2:]
        assert not by_copies and role is COMBINE and named["releases"]


@pytest.mark.parametrize("rank", [1, 2])
def test_sums_apart_are_behind_one_program_that_waits_for_the_last_slab(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, config = (20, 5, 0, 33), dataclasses.replace(CONFIG, sums_apart=True)
    queued = Queued(monkeypatch, combine, COMBINE_SEND, config, rank, rows, by_copies=False)
    run(queued, rows, 40, config)
    last = [("main", "launch_await_everyone", 1), ("main", "launch_sum_slabs")]
    if not rows[rank]:
        last = [("main", "launch_release")]
    assert queued.seen == [("load",), ("main", "launch_open"), ("main", "gemm"), *last]
