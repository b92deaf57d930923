"""The main loop on the CPU: its tiles cover the output, what they wait for is announced, and the numbers are right."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tileflux
from tileflux import Group, env
from tileflux.config import GemmConfig
from tileflux.kernels import gemm_host, host_policies
from tileflux.kernels.gemm_host import Tile, tiles
from tileflux.kernels.operands import Operands, Role
from tileflux.kernels.roles import GATHER, PLAIN, SCATTER, SPREAD
from tileflux.kernels.shards import ShardPlan, gather_shards, scatter_shards, spread_shards
from tileflux.kernels.turns import turn
from tileflux.testing import assert_close, nan_like, poisoned, run_ranks
from tileflux.testing.dense import DENSE_DTYPES, SCALED_DTYPES, expected_gemm, gemm_case, reduction
from tileflux.testing.dense_protocols import COMM, PROTOCOLS, run_protocol
from tileflux.testing.simulator import simulate

configs = st.builds(
    GemmConfig,
    block_m=st.sampled_from([16, 32, 256, 1024]),
    block_n=st.sampled_from([16, 32, 64]),
    group_m=st.integers(1, 4),
    num_chunks=st.integers(1, 16),
    span=st.integers(1, 4),
    alone=st.integers(0, 3),
)
ragged_rows = (
    st.integers(1, 16)
    .flatmap(lambda world_size: st.lists(st.integers(0, 700) | st.just(0), min_size=world_size, max_size=world_size))
    .filter(any)
    .map(tuple)
)
columns = st.integers(1, 100)


def rank_tiles(role: Role, config: GemmConfig, plan: ShardPlan, rank: int, num_columns: int) -> list[Tile]:
    """All tiles of a rank, in order."""
    rows = plan.rows if role.is_sharded else plan.rows[:1]
    shards = gemm_host._Shards(rows, plan.num_chunks, plan.chunk_rows)
    return list(tiles(role, config, rank, shards, num_columns))


def check_cover(found: Sequence[Tile], rows: Sequence[int], num_columns: int) -> None:
    """Every element of every shard is in exactly one tile."""
    covered = [torch.zeros(count, num_columns, dtype=torch.int32) for count in rows]
    for tile in found:
        assert tile.rows, f"an empty tile: {tile}"
        covered[tile.owner][tile.rows.start : tile.rows.stop, tile.columns.start : tile.columns.stop] += 1
    assert all(bool(each.eq(1).all()) for each in covered)


@settings(max_examples=50, deadline=None)
@given(rows=ragged_rows, num_columns=st.just(0) | columns, config=configs)
def test_all_gather_tiles_wait_for_what_is_sent_in_the_order_it_is_sent(
    rows: tuple[int, ...], num_columns: int, config: GemmConfig
) -> None:
    plan = gather_shards("op", rows, 32, False, config.num_chunks)
    ranks = range(len(rows))
    # What the feeders of every rank send (lang/turn.py, whose order tests/lang/test_turn.py takes from the device).
    sent = {
        rank: [
            ((rank - hop) % len(rows), chunk)
            for hop in range(1, len(rows))
            for chunk in range(plan.num_chunks)
            if plan.chunk(rank, chunk)
        ]
        for rank in ranks
    }
    for rank in ranks:
        found = rank_tiles(GATHER, config, plan, rank, num_columns)
        check_cover(found, rows, num_columns)
        for tile in found:
            chunk = plan.chunk(tile.owner, tile.chunk)
            assert chunk.start <= tile.rows.start and tile.rows.stop <= chunk.stop
        needed = list(dict.fromkeys((tile.owner, tile.chunk) for tile in found))
        with_rows = [owner for owner in ((rank + hop) % len(rows) for hop in ranks) if rows[owner]]
        assert list(dict.fromkeys(owner for owner, _ in needed)) == with_rows
        waited = [each for each in needed if each[0] != rank]
        announced = {(source, chunk) for source in ranks for peer, chunk in sent[source] if peer == rank}
        assert set(waited) == announced
        for source in ranks:
            arriving = [chunk for peer, chunk in sent[source] if peer == rank]
            assert arriving == [chunk for owner, chunk in waited if owner == source]
            if arriving:
                # The j-th shard that a rank comes to is sent to it at its source's j-th hop.
                hop = (source - rank) % len(rows)
                before = [peer for peer, _ in sent[source][: sent[source].index((rank, arriving[0]))]]
                assert len(set(before)) == hop - 1


@settings(max_examples=50, deadline=None)
@given(rows=ragged_rows, num_columns=columns, config=configs)
def test_reduce_scatter_tiles_are_announced_by_the_number_their_owner_waits_for(
    rows: tuple[int, ...], num_columns: int, config: GemmConfig
) -> None:
    plan = scatter_shards("op", rows, num_columns, 2, config)
    ranks = range(len(rows))
    by_rank = {rank: rank_tiles(SCATTER, config, plan, rank, num_columns) for rank in ranks}
    raised: Counter[tuple[int, int, int]] = Counter()
    for rank, found in by_rank.items():
        check_cover(found, rows, num_columns)
        owners = list(dict.fromkeys(tile.owner for tile in found))
        assert owners == [owner for owner in ((rank + 1 + hop) % len(rows) for hop in ranks) if rows[owner]]
        raised.update((tile.owner, rank, tile.number) for tile in found if tile.owner != rank)
    waited = {
        (rank, source, tile.number)
        for rank, found in by_rank.items()
        for tile in found
        if tile.owner == rank
        for source in ranks
        if source != rank
    }
    assert set(raised) == waited and set(raised.values()) <= {1}
    assert all(number < plan.num_flags for _, _, number in raised)
    places = {(tile.owner, tile.number, tile.rows, tile.columns) for found in by_rank.values() for tile in found}
    assert len(places) == len(by_rank[0]), "ranks disagree on where a number's tile lies"


@settings(max_examples=50, deadline=None)
@given(world_size=st.integers(1, 16), num_rows=st.integers(1, 300), num_columns=columns, config=configs)
def test_all_reduce_tiles_are_multiplied_before_any_is_summed(
    world_size: int, num_rows: int, num_columns: int, config: GemmConfig
) -> None:
    plan = spread_shards("op", world_size, num_rows, num_columns, 2, config)
    by_rank = [rank_tiles(SPREAD, config, plan, rank, num_columns) for rank in range(world_size)]
    for found in by_rank:
        turns = [tile.turn for tile in found]
        half = len(found) // 2
        assert turns == [0] * half + [1] * half
        for both in (found[:half], found[half:]):
            check_cover(both, [num_rows], num_columns)
            numbers = [tile.number for tile in both]
            assert len(set(numbers)) == len(numbers) and max(numbers) < plan.num_flags
        assert found == by_rank[0]


@settings(max_examples=30, deadline=None)
@given(num_rows=st.integers(0, 200), num_columns=st.integers(0, 200), config=configs)
def test_plain_tiles_cover_the_output(num_rows: int, num_columns: int, config: GemmConfig) -> None:
    shards = gemm_host._Shards((num_rows,), 1, num_rows)
    found = list(tiles(PLAIN, config, 0, shards, num_columns))
    check_cover(found, [num_rows], num_columns)


@pytest.mark.parametrize(("rows", "num_chunks"), [((5, 0, 3, 9), 1), ((300, 0, 520), 2)])
def test_rows_are_sent_to_the_nearest_peer_first(
    monkeypatch: pytest.MonkeyPatch, rows: tuple[int, ...], num_chunks: int
) -> None:
    world_size = len(rows)
    groups = tileflux.local_groups(world_size)
    plan = gather_shards("ag_gemm", rows, 32, True, num_chunks)
    for rank, group in enumerate(groups):
        here = turn(group, plan)
        x, scales = torch.randn(rows[rank], 8), torch.rand(rows[rank])
        sent: list[tuple[int, int, int]] = []
        monkeypatch.setattr(
            group, "copy_async",
            lambda dst, src, signal, sent=sent: sent.append((dst.data_ptr(), src.data_ptr(), signal.word.data_ptr())),
        )  # fmt: skip
        operands = Operands(x, torch.zeros(1, 8), torch.zeros(1, 1), scale_x=scales)
        host_policies._Gather(operands, group, here).feed()
        expected = []
        for hop in range(1, world_size):
            peer = (rank - hop) % world_size
            for index in range(plan.num_chunks):
                if chunk := plan.chunk(rank, index):
                    first = plan.first_rows[rank] + chunk.start
                    dst = here.rows_at(peer, torch.float32, 8)[first:].data_ptr()
                    expected.append((dst, x[chunk.start :].data_ptr(), here.flag(peer, index).data_ptr()))
                    arrived = here.scales_at(peer)[first : first + len(chunk)]
                    assert torch.equal(arrived, scales[chunk.start : chunk.stop])
        assert sent == expected


SMALL = GemmConfig(block_m=16, block_n=32)


@pytest.mark.parametrize("dtype", DENSE_DTYPES, ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu", "swiglu"])
@pytest.mark.parametrize("transposed", [False, True])
def test_numbers(dtype: torch.dtype, activation: str | None, transposed: bool) -> None:
    seed = int(torch.randint(2**31, ()))
    scales = "channel" if dtype in SCALED_DTYPES else "none"
    case = gemm_case(
        (37, 41, 50), dtype, seed, bias=True, activation=activation, scales=scales, transposed_weight=transposed
    )
    operands = case_operands(case)
    right = expected_gemm(
        case.xs[0], case.weights[0], case.biases[0], activation=case.activation,
        scale_x=case.scales_x[0], scale_weight=case.scales_weight[0],
    )  # fmt: skip
    gemm_host.run_gemm(operands, PLAIN, SMALL)
    assert_close(operands.out, right, dtype=case.out_dtype, reduction=reduction(case, "gemm"), what=f"seed {seed}")
    whole = nan_like(operands.out)
    gemm_host.multiply(case_operands(case, whole))
    assert_close(whole, right, dtype=case.out_dtype, reduction=reduction(case, "gemm"), what=f"seed {seed}")


def case_operands(case: object, out: torch.Tensor | None = None) -> Operands:
    """The operands of a case for one rank, with a poisoned output."""
    scale_x, scale_weight = (
        None if scale is None else torch.as_tensor(scale) for scale in (case.scales_x[0], case.scales_weight[0])
    )
    out = poisoned(case.shape[:2], case.out_dtype) if out is None else out
    return Operands(case.xs[0], case.weights[0], out, case.biases[0], scale_x, scale_weight, case.activation)


def test_int8_is_summed_exactly() -> None:
    """fp32 would lose bits of a sum of 100,000 products of 127 and 127."""
    x, weight = torch.full((1, 100_001), 127, dtype=torch.int8), torch.full((1, 100_001), 127, dtype=torch.int8)
    weight[0, 0] = -126
    scale = torch.tensor(2.0**-10)
    out = poisoned((1, 1), torch.float32)
    gemm_host.run_gemm(Operands(x, weight, out, scale_x=scale), PLAIN, SMALL)
    total = 127 * 127 * 100_000 - 127 * 126
    assert out.item() == torch.tensor(total, dtype=torch.float64).float().item() * 2.0**-10


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_through_a_link(protocol: str, world_size: int) -> None:
    """Ranks without rows or columns, several weights, scales, regions that grow, ranks a call ahead of each other."""
    with env.scoped({"TILEFLUX_LINK": "100MB/s,500us"}):
        run_ranks(run_protocol, world_size, args=(protocol, int(torch.randint(1000, ()))))


@pytest.mark.skipif(not env.interpreting(), reason="kernels of this process are compiled")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_no_schedule_of_copies_brings_it_to_a_halt(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    monkeypatch.setattr(env, "cpu_backend", lambda: "host")
    with env.scoped({"TILEFLUX_LINK": "1GB/s"}):
        for seed in range(3):
            # Tiles are not contiguous, which the race detector takes its memory to be.
            simulate(run_protocol, 3, seed=seed, args=(protocol, seed), config=COMM, races=False)


CALLS: dict[str, Any] = {
    "ag_gemm": lambda x, w, **named: tileflux.ag_gemm(x[: len(x) // 2], w, **named),
    "gemm_rs": tileflux.gemm_rs,
    "gemm_ar": lambda x, w, **named: tileflux.gemm_ar(x, w, algorithm="one_shot", **named),
    "gemm_ar, two shot": lambda x, w, **named: tileflux.gemm_ar(x, w, algorithm="two_shot", **named),
}


def _results(group: Group, seed: int, out_dtype: torch.dtype) -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(seed + group.rank)
    x, weight = torch.randn(70, 40, generator=draws), torch.randn(50, 40, generator=draws)
    return [
        call(x, weight, group=group, strategy=strategy, config=SMALL, out_dtype=out_dtype)
        for name, call in CALLS.items()
        for strategy in ("sequential", "pipelined", "fused")
        if (name, strategy) != ("gemm_ar", "pipelined")
    ]


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_link_changes_no_bit(out_dtype: torch.dtype) -> None:
    seed = int(torch.randint(2**31, ()))
    # Fresh processes: a rank forked after threads of this one have multiplied may spin in torch's library for ever.
    fresh: dict[str, Any] = {"where": "spawn", "device": "cpu"}
    direct = run_ranks(_results, 2, args=(seed, out_dtype), **fresh)
    with env.scoped({"TILEFLUX_LINK": "50MB/s,300us"}):
        linked = run_ranks(_results, 2, args=(seed, out_dtype), **fresh)
    for rank, (ours, theirs) in enumerate(zip(linked, direct, strict=True)):
        same = [torch.equal(y, right) for y, right in zip(ours, theirs, strict=True)]
        assert all(same), f"seed {seed}, rank {rank}: {same}"


def _timed(group: Group, name: str, strategy: str, tile_s: float) -> float:
    """Seconds of a call whose every product takes ``tile_s`` and no core, like the link."""
    product = gemm_host._Weight.product

    def slow(*arguments: Any) -> torch.Tensor:
        time.sleep(tile_s)
        return product(*arguments)

    x, weight = torch.randn(128, 16), torch.randn(64, 16)
    config = GemmConfig(block_m=16, block_n=64, num_chunks=1)
    CALLS[name](x, weight, group=group, strategy=strategy, config=config)
    gemm_host._Weight.product = slow  # type: ignore[method-assign]
    group.barrier()
    start = time.monotonic()
    CALLS[name](x, weight, group=group, strategy=strategy, config=config)
    return time.monotonic() - start


@pytest.mark.parametrize(
    ("name", "strategy", "nbytes"),
    [
        ("ag_gemm", "fused", 64 * 16 * 4),
        ("gemm_rs", "pipelined", 64 * 64 * 4),
        ("gemm_rs", "fused", 64 * 64 * 4),
        ("gemm_ar", "fused", 128 * 64 * 4),
    ],
)
def test_what_is_sent_takes_its_time(name: str, strategy: str, nbytes: int) -> None:
    with env.scoped({"TILEFLUX_LINK": f"{nbytes / 0.2}B/s,5ms"}):
        assert min(run_ranks(_timed, 2, args=(name, strategy, 0.0))) >= 0.205


@pytest.mark.parametrize(("name", "nbytes"), [("ag_gemm", 64 * 16 * 4), ("gemm_rs", 64 * 64 * 4)])
def test_sending_and_multiplying_overlap(name: str, nbytes: int) -> None:
    """Eight tiles of a tenth of a second each, and 0.4 s of sending: one after the other would take 1.2 s."""
    longest: list[float] = []
    with env.scoped({"TILEFLUX_LINK": f"{nbytes / 0.4}B/s"}):
        while len(longest) < 3 and min(longest, default=2.0) > 1.0:  # a busy machine may spoil one
            longest.append(max(run_ranks(_timed, 2, args=(name, "fused", 0.1))))
    assert 0.8 <= min(longest) <= 1.0, longest
