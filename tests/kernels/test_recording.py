"""Recorded launches: every tile once, its times in order, what was sent to whom; and not a bit of a result changes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tileflux
from tileflux import env
from tileflux.config import TRACE, GemmConfig
from tileflux.kernels import gemm_launch
from tileflux.kernels import recording as module
from tileflux.kernels.gemm_launch import launch_gemm
from tileflux.kernels.operands import Operands
from tileflux.kernels.recording import HostRecording, Launch, Recorder, current_recorder, recording, reserve
from tileflux.kernels.roles import GATHER, PLAIN, SCATTER, SPREAD
from tileflux.kernels.shards import gather_shards, scatter_shards, spread_shards
from tileflux.kernels.turns import turn
from tileflux.perf.timeline import TileSpan, Transfer
from tileflux.symm.group import Group
from tileflux.testing import nan_like, poisoned, run_ranks

interpreted = pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")

CONFIG = GemmConfig(block_m=64, block_n=16, block_k=16, group_m=2, num_warps=4, num_chunks=2, num_feeders=2)
ROWS = (300, 0, 260)
"""With chunks of 256 rows: two chunks, none, and one whole with four rows of the next."""
NUM_COLUMNS, DEPTH = (40, 33, 0), 24
"""A rank without columns still waits for everybody's rows."""

Key = tuple[int, int, int, int, int]


def key(tile: TileSpan) -> Key:
    return tile.owner, tile.chunk, tile.row, tile.column, tile.turn


def check_times(tiles: tuple[TileSpan, ...]) -> None:
    """Each tile goes through its states in order, and a program has one tile at a time."""
    ended: dict[int, float] = {}
    for tile in sorted(tiles, key=lambda tile: (tile.program, tile.begin)):
        assert 0 < tile.begin <= tile.ready <= tile.computed <= tile.finished
        assert ended.get(tile.program, 0) <= tile.begin
        ended[tile.program] = tile.finished


@interpreted
def test_a_plain_product() -> None:
    from tileflux.testing import interpreter

    interpreter.install()
    config = GemmConfig(block_m=16, block_n=32, block_k=16, group_m=2, num_sms=3)
    x, weight = torch.randn(70, 40), torch.randn(50, 40)
    plain = Operands(x, weight, poisoned((70, 50), torch.float32))
    launch_gemm(plain, PLAIN, config)
    recorded = Operands(x, weight, nan_like(plain.out))
    with recording() as recorder:
        launch_gemm(recorded, PLAIN, config)
        launch_gemm(recorded, PLAIN, config, load_only=True)
        launch_gemm(recorded, PLAIN, config)
    launch_gemm(recorded, PLAIN, config)
    first, second = recorder.launches()
    assert torch.equal(recorded.out, plain.out)
    for launch in (first, second):
        assert launch.role == "gemm" and launch.transfers == ()
        assert Counter(map(key, launch.tiles)) == {(0, 0, m, n, 0): 1 for m in range(5) for n in range(2)}
        assert Counter(tile.program for tile in launch.tiles) == {0: 4, 1: 3, 2: 3}
        check_times(launch.tiles)
    assert max(tile.finished for tile in first.tiles) <= min(tile.begin for tile in second.tiles)


def gather(group: Group, seed: int) -> torch.Tensor:
    x, weight = inputs(group, seed, ROWS[group.rank], NUM_COLUMNS[group.rank])
    return tileflux.ag_gemm(x, weight, group=group, sizes=ROWS, strategy="fused", config=CONFIG)


def scatter(group: Group, seed: int) -> torch.Tensor:
    x, weight = inputs(group, seed, sum(ROWS), 40)
    return tileflux.gemm_rs(x, weight, group=group, sizes=ROWS, strategy="fused", config=CONFIG)


def spread(group: Group, seed: int) -> torch.Tensor:
    x, weight = inputs(group, seed, 100, 40)
    return tileflux.gemm_ar(x, weight, group=group, algorithm="one_shot", strategy="fused", config=CONFIG)


def inputs(group: Group, seed: int, num_rows: int, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed + group.rank)
    return torch.randn(num_rows, DEPTH, generator=draws), torch.randn(num_columns, DEPTH, generator=draws)


def tiles_of(num_rows: int, num_columns: int) -> set[tuple[int, int]]:
    return {(m, n) for m in range(-(-num_rows // 64)) for n in range(-(-num_columns // 16))}


def gather_tiles(rank: int) -> set[Key]:
    chunks = {(0, 0): 256, (0, 1): 44, (2, 0): 256, (2, 1): 4}
    return {
        (owner, chunk, m, n, 0)
        for (owner, chunk), count in chunks.items()
        for m, n in tiles_of(count, max(1, NUM_COLUMNS[rank]))
    }


def scatter_tiles(rank: int) -> set[Key]:
    return {(owner, 0, m, n, 0) for owner, count in enumerate(ROWS) for m, n in tiles_of(count, 40)}


def spread_tiles(rank: int) -> set[Key]:
    return {(0, 0, m, n, turn) for m, n in tiles_of(100, 40) for turn in (0, 1)}


CALLS: dict[str, tuple[Callable[[Group, int], torch.Tensor], Callable[[int], set[Key]]]] = {
    "ag_gemm": (gather, gather_tiles),
    "gemm_rs": (scatter, scatter_tiles),
    "gemm_ar": (spread, spread_tiles),
}
SENT = {
    0: {(0, 1): 256, (0, 2): 256, (1, 1): 44, (1, 2): 44},
    1: {},
    2: {(0, 0): 256, (0, 1): 256, (1, 0): 4, (1, 1): 4},
}
"""Rows by (chunk, peer) that a rank sends in ``gather``."""


def _record(group: Group, op: str, seed: int) -> tuple[list[Launch], bool]:
    call = CALLS[op][0]
    plain = call(group, seed)
    with recording() as recorder:
        recorded = call(group, seed)
    after = call(group, seed)
    return recorder.launches(), torch.equal(recorded, plain) and torch.equal(after, plain)


def check_call(rank: int, op: str, launches: list[Launch]) -> None:
    """One launch: every tile of the rank once, and the rows it sends to everybody else."""
    (launch,) = launches
    assert launch.role == op
    assert Counter(map(key, launch.tiles)) == dict.fromkeys(CALLS[op][1](rank), 1)
    check_times(launch.tiles)
    sent = {(each.chunk, each.target): each.nbytes for each in launch.transfers}
    assert len(sent) == len(launch.transfers)
    assert sent == ({place: rows * DEPTH * 4 for place, rows in SENT[rank].items()} if op == "ag_gemm" else {})
    for transfer in launch.transfers:
        assert transfer.source == rank and 0 < transfer.begin <= transfer.end


def check_arrivals(found: list[list[Launch]]) -> None:
    """No tile was ready before its rows had been announced: the clock is one for all ranks."""
    sent = {(each.source, each.target, each.chunk): each.begin for (launch,) in found for each in launch.transfers}
    for rank, (launch,) in enumerate(found):
        for tile in launch.tiles:
            if tile.owner != rank:
                assert tile.ready >= sent[tile.owner, rank, tile.chunk]


@interpreted
@pytest.mark.parametrize("fetches", [False, True], ids=["dealt", "fetched"])
@pytest.mark.parametrize("op", CALLS)
def test_an_interpreted_launch_among_virtual_ranks(monkeypatch: pytest.MonkeyPatch, op: str, fetches: bool) -> None:
    from tileflux.testing import interpreter

    interpreter.install()
    monkeypatch.setattr(gemm_launch, "fetches_tiles", lambda group, config, role: fetches)
    seed = int(torch.randint(2**31, ()))
    with env.scoped({"TILEFLUX_CPU_BACKEND": "interpret"}):
        found = run_ranks(_record, 3, args=(op, seed), where="virtual", timeout_s=120)
    for rank, (launches, is_same) in enumerate(found):
        assert is_same, f"seed {seed}: recording changed the result of rank {rank}"
        check_call(rank, op, launches)
    if op == "ag_gemm":
        check_arrivals([launches for launches, _ in found])


@pytest.mark.parametrize("where", ["virtual", "fork"])
@pytest.mark.parametrize("op", CALLS)
def test_the_host_twin(op: str, where: Any) -> None:
    """Writes down what the kernel would, tile for tile."""
    seed = int(torch.randint(2**31, ()))
    with env.scoped({"TILEFLUX_CPU_BACKEND": "host"}):
        found = run_ranks(_record, 3, args=(op, seed), where=where)
    for rank, (launches, is_same) in enumerate(found):
        assert is_same, f"seed {seed}: recording changed the result of rank {rank}"
        check_call(rank, op, launches)
    if op == "ag_gemm":
        check_arrivals([launches for launches, _ in found])


def _record_linked(group: Group, op: str, seed: int) -> list[Launch]:
    with recording() as recorder:
        CALLS[op][0](group, seed)
    return recorder.launches()


def test_what_leaves_through_a_link_is_a_transfer_each() -> None:
    """Tiles of gemm_rs travel like rows there; all together they are announced when their bytes have had their time."""
    with env.scoped({"TILEFLUX_LINK": "20MB/s,1ms"}):
        gathered, scattered = (run_ranks(_record_linked, 3, args=(op, 7)) for op in ("ag_gemm", "gemm_rs"))
    check_arrivals(gathered)
    for rank, (launch,) in enumerate(gathered):
        assert {(each.chunk, each.target) for each in launch.transfers} == set(SENT[rank])
    for rank, (launch,) in enumerate(scattered):
        targets = Counter(each.target for each in launch.transfers)
        assert targets == {owner: len(tiles_of(ROWS[owner], 40)) for owner in (0, 2) if owner != rank}
        nbytes = sum(each.nbytes for each in launch.transfers)
        assert nbytes == 4 * 40 * sum(ROWS[owner] for owner in range(3) if owner != rank)
    for (launch,) in (*gathered, *scattered):
        if launch.transfers:
            begin, end = min(each.begin for each in launch.transfers), max(each.end for each in launch.transfers)
            assert end - begin >= 1e6 + 1e9 * sum(each.nbytes for each in launch.transfers) / 20e6
            assert all(each.begin <= each.end for each in launch.transfers)


def _record_two_weights(group: Group) -> list[str]:
    x, weight = inputs(group, 3, 20, 16)
    named: dict[str, Any] = {"group": group, "config": CONFIG}
    with recording() as recorder:
        tileflux.ag_gemm(x, [weight, weight], strategy="fused", **named)
        tileflux.ag_gemm(x, weight, strategy="sequential", **named)
    return [launch.role for launch in recorder.launches()]


def test_every_launch_of_a_call_is_recorded() -> None:
    for roles in run_ranks(_record_two_weights, 2):
        assert roles == ["ag_gemm", "ag_gemm, rows already here", "gemm"]


def test_outside_nothing_is_reserved() -> None:
    operands = Operands(torch.randn(20, 8), torch.randn(30, 8), torch.empty(20, 30))
    cpu = torch.device("cpu")
    assert current_recorder() is None and reserve(PLAIN, operands, CONFIG, None, cpu) is None
    with recording() as recorder:
        assert current_recorder() is recorder
        words = reserve(PLAIN, operands, CONFIG, None, cpu)
        assert words is not None and words.dtype == torch.int64 and words.eq(0).all()
        assert len(words) == TRACE.num_words(1, 2), "one tile of rows, two of columns"
    assert current_recorder() is None and reserve(PLAIN, operands, CONFIG, None, cpu) is None
    assert recorder.launches() == [Launch("gemm", (), ())], "a launch that has written nothing"


def test_there_is_room_for_every_step() -> None:
    groups = tileflux.local_groups(3)
    operands = Operands(torch.randn(300, 8), torch.randn(33, 8), torch.empty(300, 33))
    plans = {
        GATHER: (gather_shards("ag_gemm", ROWS, 32, False, 2), 3 * 2 * 4 * 3),
        SCATTER: (scatter_shards("gemm_rs", ROWS, 33, 4, CONFIG), 3 * 5 * 3),
        SPREAD: (spread_shards("gemm_ar", 3, 300, 33, 4, CONFIG), 2 * 5 * 3),
    }
    for role, (plan, num_steps) in plans.items():
        with recording():
            words = reserve(role, operands, CONFIG, turn(groups[0], plan), torch.device("cpu"))
        assert words is not None and len(words) == TRACE.num_words(3, num_steps)


def test_recordings_nest_and_end_with_their_block() -> None:
    with recording() as outer:
        current_recorder().add(HostRecording("first"))  # type: ignore[union-attr]
        with recording() as inner:
            current_recorder().add(HostRecording("second"))  # type: ignore[union-attr]
        assert current_recorder() is outer
        with pytest.raises(KeyError), recording():
            raise KeyError
        assert current_recorder() is outer
        current_recorder().add(HostRecording("third"))  # type: ignore[union-attr]
    assert current_recorder() is None
    assert [launch.role for launch in outer.launches()] == ["first", "third"]
    assert [launch.role for launch in inner.launches()] == ["second"]


def test_threads_do_not_record_each_other() -> None:
    seen: list[Recorder | None] = []
    with recording() as mine:

        def other() -> None:
            seen.append(current_recorder())
            with recording() as theirs:
                seen.append(theirs)
                seen.append(current_recorder())

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert current_recorder() is mine
    assert seen[0] is None and seen[1] is seen[2] is not mine


def test_words_are_read_as_the_layout_says() -> None:
    words = torch.zeros(TRACE.num_words(2, 3), dtype=torch.int64)
    words[2 * (1 * 16 + 3) :][:2] = torch.tensor([50, 60])
    tile = words[TRACE.first_tile(2) + TRACE.tile_words :][: TRACE.tile_words]
    tile[:4] = torch.tensor([40, 10, 20, 30])
    for word, (low, high) in enumerate([(131, 7), (1, 3), (2**31 - 1, 9), (1, 1)], 4):
        tile[word] = low | high << 32
    read = module._read(module._DeviceRecording("role", 0, 2, (1, 2, 3, 4), words))
    assert read.tiles == (TileSpan(131, 7, 1, 3, 2**31 - 1, 9, 1, 10, 20, 30, 40),)
    assert read.transfers == (Transfer(0, 1, 3, 50, 60, 4),)
