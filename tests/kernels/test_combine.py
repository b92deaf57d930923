"""``moe_gemm_rs`` by the copy engine, and slab by slab: what is queued where and when, and the same bits."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tileflux import env, local_groups, moe_gemm_rs
from tileflux.config import GROUPS, GemmConfig
from tileflux.kernels import combine, gemm_host, slabs
from tileflux.kernels.combine import departing_hops
from tileflux.kernels.groups import Groups, cut_counts
from tileflux.kernels.operands import Operands
from tileflux.kernels.roles import COMBINE, COMBINE_SEND, COMBINE_STAGE, PLAIN
from tileflux.kernels.shards import combine_shards, slab_shards
from tileflux.ops._dense import Inputs
from tileflux.ops._moe import grouped_operands
from tileflux.symm.group import Group
from tileflux.testing.dense_protocols import SLABS, CombineCall, simulate_protocol

from .queued import Queued

interpreted = pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")

CONFIG = GemmConfig(block_m=16, block_n=16, block_k=16, num_chunks=2)
NUM_SEEDS = {2: 3, 3: 1}


@interpreted
@pytest.mark.parametrize("world_size", NUM_SEEDS)
def test_every_schedule_gives_the_right_result_by_copies(world_size: int) -> None:
    for protocol in ("moe_gemm_rs fused", "moe_gemm_rs pipelined", "moe_gemm_rs pipelined, one slab"):
        for seed in range(NUM_SEEDS[world_size]):
            simulate_protocol(protocol, world_size, seed, by_copies=True)


def _combine(group: Group, by_copies: bool, num_slabs: int, seed: int, strategy: str) -> torch.Tensor:
    from tileflux.testing.simulated_streams import on_streams

    config = dataclasses.replace(SLABS, num_chunks=num_slabs, span=2)
    call = CombineCall(
        "moe_gemm_rs", 11, columns=64, depth=48, ragged=True, kind="skewed", dtype=torch.bfloat16, config=config
    )
    case, routing = call.moe_case(group.world_size, seed), call.routed(group, seed)
    rows, weight = case.xs[group.rank], case.weights[group.rank]
    h = rows.new_zeros((routing.capacity, rows.shape[1]))
    h[: len(rows)] = rows
    with on_streams(group) if by_copies else contextlib.nullcontext():
        out = moe_gemm_rs(h, weight, routing, strategy=strategy, config=config)
        group.synchronize()
    return out


@interpreted
@pytest.mark.parametrize(("world_size", "num_slabs"), [(2, 4), (3, 2), (2, 1), (4, 1)])
def test_copies_give_the_bits_that_stores_give(world_size: int, num_slabs: int) -> None:
    from tileflux.testing.simulated_streams import simulated_streams
    from tileflux.testing.simulator import simulate

    seed = int(torch.randint(2**20, ()))
    by_stores = simulate(_combine, world_size, seed=seed, args=(False, num_slabs, seed, "fused"))
    found = [simulate(_combine, world_size, seed=seed, args=(False, num_slabs, seed, "pipelined"))]
    with simulated_streams():
        for strategy in ("fused", "pipelined"):
            found.append(simulate(_combine, world_size, seed=seed, args=(True, num_slabs, seed, strategy)))
    for others in found:
        for one, other in zip(by_stores, others, strict=True):
            assert torch.equal(one, other) and one.dtype == torch.bfloat16
    assert any(each.numel() and each.abs().max() > 0 for each in by_stores)


def run(
    queued: Queued, rows: tuple[int, ...], num_columns: int, config: GemmConfig = CONFIG, strategy: str = "fused"
) -> None:
    groups = Groups(torch.zeros(8, dtype=torch.int32), 1, 16, 32, sum(rows), 2)
    out = torch.empty(rows[queued.group.rank], num_columns)
    operands = Operands(torch.empty(32, 16), torch.empty(num_columns, 16), out, groups=groups)
    combine.run_combine(queued.group, operands, rows, strategy, config)  # type: ignore[arg-type]
    (plan,) = queued.plans
    if strategy == "pipelined":
        by_copies = not queued.group.traits.copies_need_sms
        assert plan == slab_shards(COMBINE.name, rows, 32, num_columns, 4, config, by_copies)
        return
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
    expected += queued.sent(
        [
            (owner, range(slab, slab + 1), (tall * across,))
            for slab, across in ((0, 2), (1, 1))
            for owner, tall in ((3, 3), (0, 2))
        ]
    )
    joins = [("main", "join", "closing"), ("main", "launch_sum_slabs"), ("main", "join", "announcing")]
    assert queued.seen == [*expected, *joins]


def test_who_has_no_tokens_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    queued = Queued(monkeypatch, combine, COMBINE_STAGE, CONFIG, 2, (20, 5, 0, 33))
    run(queued, (20, 5, 0, 33), 40)
    assert queued.seen[-2:] == [("main", "launch_release"), ("main", "join", "announcing")]
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


def _note_slabs(queued: Queued, monkeypatch: pytest.MonkeyPatch, *, hops: bool = False) -> None:
    def noted(name: str, at: int) -> Any:
        return lambda *given: queued.seen.append((queued._stream, name, given[at]))

    for name, at in (("launch_spaced", 3), ("launch_sums", 4 if hops else 3), ("launch_push_slab", 2)):
        monkeypatch.setattr(slabs, name, noted(name, at))


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("by_copies", [True, False])
def test_pipelined_each_slab_is_sent_beside_the_next_ones_product(
    rank: int, by_copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel counts, and none is loaded behind one that waits. Where SMs send, some are left to them."""
    rows = (20, 5, 0, 33)
    tiles = CONFIG if by_copies else dataclasses.replace(CONFIG, num_sms=2)
    queued = Queued(monkeypatch, combine, PLAIN, tiles, rank, rows, by_copies=by_copies)
    _note_slabs(queued, monkeypatch)
    run(queued, rows, 64, strategy="pipelined")
    expected: list[tuple] = [("load",), ("load",), ("main", "launch_spaced", 2), ("main", "load gemm")]
    if by_copies:
        expected += [("main", "counted"), ("main", "launch_open")]
    for slab in range(2):
        one = range(slab, slab + 1)
        expected += [("main", "gemm"), ("main", "launch_sums", slab), ("sending", "after", "all")]
        if not by_copies:
            expected.append(("sending", "launch_push_slab", slab))
        for owner in ((3, 0) if rank == 1 else (3, 0, 1)) if by_copies else ():
            expected += [
                ("sending", "copy", owner, rank, one, ("staged", owner, one)), ("sending", "flag", owner, slab)
            ]  # fmt: skip
    last: list[tuple] = [("main", "launch_sum_slabs") if rows[rank] else ("main", "launch_release")]
    if not by_copies and rows[rank]:
        last.insert(0, ("main", "launch_await_everyone", 1))
    joined = ("main", "join", "sending")
    assert queued.seen == [*expected, *([*last, joined] if by_copies else [joined, *last])]
    assert len({part.out.data_ptr() for part in queued.products}) == 1
    assert {part.out.shape for part in queued.products} == {(32, 32)}


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("span", [1, 2, 5])
def test_pipelined_in_one_slab_owners_sums_leave_beside_the_next_ones_product(
    span: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The farthest rank's first, one's own last, and nothing for who has no tokens."""
    rows, config = (20, 5, 0, 33), dataclasses.replace(CONFIG, num_chunks=1, span=span)
    queued = Queued(monkeypatch, combine, PLAIN, config, rank, rows)
    _note_slabs(queued, monkeypatch, hops=True)
    run(queued, rows, 64, config, strategy="pipelined")
    expected: list[tuple] = [
        ("load",), ("load",), ("main", "load gemm"), ("main", "counted"), ("main", "launch_open")
    ]  # fmt: skip
    bands = {1: [[3], [2], [1]], 2: [[3, 2], [1]], 5: [[3, 2, 1]]}[span]
    for band in bands:
        expected += [("main", "gemm"), ("main", "launch_sums", range(band[-1], band[0] + 1))]
        owners = [owner for hop in band if rows[owner := (rank + hop) % 4]]
        expected += [("sending", "after", "all")] if owners else []
        for owner in owners:
            one = range(1)
            expected += [("sending", "copy", owner, rank, one, ("staged", owner, one)), ("sending", "flag", owner, 0)]
    expected += [("main", "gemm"), ("main", "launch_sums", range(1))]
    last = ("main", "launch_sum_slabs") if rows[rank] else ("main", "launch_release")
    assert queued.seen == [*expected, last, ("main", "join", "sending")]
    assert {part.out.data_ptr() for part in queued.products} == {queued.products[0].out.data_ptr()}
    assert {part.out.shape for part in queued.products} == {(32, 64)}


def test_every_peer_departs_once_and_the_farthest_first() -> None:
    for world_size in range(2, 9):
        for span in range(1, 10):
            bands = departing_hops(world_size, span)
            hops = [hop for band in bands for hop in reversed(band)]
            assert hops == [*range(world_size - 1, 0, -1), 0] and bands[-1] == range(1)
            assert all(len(band) == span for band in bands[:-2])


@pytest.mark.parametrize("num_slabs", [1, 2])
@pytest.mark.parametrize("strategy", ["fused", "pipelined"])
def test_where_nobody_is_sent_anything_no_stream_beside_is_touched(
    strategy: str, num_slabs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, role = (
        dataclasses.replace(CONFIG, num_chunks=num_slabs),
        PLAIN if strategy == "pipelined" else COMBINE_STAGE,
    )
    queued = Queued(monkeypatch, combine, role, config, 0, (20, 0, 0))
    _note_slabs(queued, monkeypatch)
    run(queued, (20, 0, 0), 64, config, strategy=strategy)
    assert {each[0] for each in queued.seen if len(each) > 1} == {"main"}
    assert queued.seen[-1] == ("main", "launch_sum_slabs"), "and none is joined"


@pytest.mark.parametrize("k_major", [True, False])
def test_the_product_of_a_slab_is_that_of_its_columns(k_major: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every expert, also its scales: by the host's loop, which reads operands as kernels do."""
    num_experts, num_columns, depth, width = 3, 48, 8, 16
    groups = cut_counts(torch.tensor([5, 0, 20]), 30, 16)
    weight = torch.randn(num_experts, num_columns, depth)
    if not k_major:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    scales = torch.rand(num_experts, num_columns)
    inputs = Inputs(torch.randn(30, depth), weight, None, None, scales)
    operands = grouped_operands(inputs, torch.empty(30, num_columns), groups, "")
    assert operands.k_major == k_major
    (group,) = local_groups(1)
    gemm_host.run_gemm(operands, PLAIN, CONFIG)
    products = torch.full((30, width), torch.nan)
    monkeypatch.setattr(slabs, "launch_spaced", _space)
    part = combine._cut_slabs(group, operands, groups, products)
    for slab in range(num_columns // width):
        gemm_host.run_gemm(part(slab), PLAIN, CONFIG)
        assert torch.equal(products[:25], operands.out[:25, slab * width : (slab + 1) * width])
        assert products[25:].isnan().all()


def _space(group: Group, index: torch.Tensor, spaced: torch.Tensor, times: int) -> None:
    """As the kernel does, which is compared with this elsewhere."""
    spaced.copy_(index[: len(spaced)])
    spaced[GROUPS.tiles :].view(-1, GROUPS.tile_words)[:, GROUPS.expert] *= times
