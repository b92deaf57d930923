"""The dense ops in their strategies: the same numbers from all, and no schedule that breaks the protocol."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import tileflux
from tileflux import GemmConfig, env
from tileflux.config import CONTROL
from tileflux.kernels import dense, gemm_launch, library, turns
from tileflux.kernels.dense import gather_rows, run_gather
from tileflux.kernels.operands import Operands
from tileflux.kernels.scatter import run_scatter, run_spread
from tileflux.kernels.shards import gather_shards
from tileflux.symm.group import Group
from tileflux.testing import poisoned, run_ranks
from tileflux.testing.dense_protocols import PROTOCOLS, Call, simulate_protocol

CONFIG = GemmConfig(block_m=16, block_n=16, block_k=16, num_warps=4, num_chunks=2)
STRATEGIES = ("sequential", "pipelined", "fused")
interpreted = pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")

NUM_SEEDS = {1: 1, 2: 8, 3: 3, 4: 2}
"""More is for ``scripts/simulate-dense``."""


@interpreted
@pytest.mark.parametrize("world_size", NUM_SEEDS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_schedule_gives_the_right_result(protocol: str, world_size: int) -> None:
    for seed in range(NUM_SEEDS[world_size]):
        simulate_protocol(protocol, world_size, seed)


@interpreted
@pytest.mark.parametrize(("world_size", "num_seeds"), [(2, 6), (3, 2), (4, 1)])
@pytest.mark.parametrize("protocol", ["gemm_rs fused", "gemm_rs fused, in slabs", "ag_gemm fused, one weight"])
def test_every_schedule_of_shards_sent_by_copies_gives_the_right_result(
    protocol: str, world_size: int, num_seeds: int
) -> None:
    for seed in range(num_seeds):
        simulate_protocol(protocol, world_size, seed, by_copies=True)


@interpreted
@pytest.mark.parametrize(
    "protocol",
    ["ag_gemm fused", "moe_ag_gemm fused", "moe_gemm_rs fused", "gemm_rs fused", "gemm_ar one_shot", "mixed"],
)
def test_every_schedule_of_a_large_world_gives_the_right_result(protocol: str) -> None:
    simulate_protocol(protocol, 8, 0)


@interpreted
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    "protocol",
    [
        "ag_gemm fused",
        "moe_ag_gemm fused",
        "moe_gemm_rs fused",
        "gemm_rs fused",
        "gemm_ar one_shot",
        "many tiles",
        "mixed",
    ],
)
def test_every_schedule_of_ranks_that_share_a_gpu_gives_the_right_result(protocol: str, world_size: int) -> None:
    """Tiles are fetched, and some programs begin very late, or only when there is nothing left to do."""
    for seed in range(max(2, NUM_SEEDS[world_size] // 2)):
        simulate_protocol(protocol, world_size, seed, fetches=True, starved=True)


def _fetch(group: Group, seed: int) -> None:
    """Interpreted programs run one after the other: the second that multiplies begins when the first has ended."""
    from tileflux.testing import interpreter

    interpreter.install()
    with (
        env.scoped({"TILEFLUX_CPU_BACKEND": "interpret"}),
        mock.patch.object(gemm_launch, "fetches_tiles", lambda group, config, role: True),
    ):
        for number, call in enumerate((*PROTOCOLS["many tiles"], *PROTOCOLS["gemm_rs fused"])):
            call.run(group, seed + number)
    used = [each._control.view(dtype=torch.int32) for each in turns._turns[group].values()]
    assert len(used) >= 3 and all(words[CONTROL.epoch] > 0 for words in used)
    assert all(words[CONTROL.fetched] == words[CONTROL.done] == 0 for words in used)


@interpreted
@pytest.mark.parametrize("world_size", [2, 4])
def test_programs_that_run_do_the_tiles_of_those_that_have_not_begun(world_size: int) -> None:
    seed = int(torch.randint(2**20, ()))
    # Fresh processes: forked after the threads of a simulation have multiplied, a rank may spin in MKL for ever.
    run_ranks(_fetch, world_size, args=(seed,), where="spawn", device="cpu", timeout_s=120)


def draw(seed: int, *shape: int, largest: int = 2) -> torch.Tensor:
    """Small whole numbers: every sum of their products is exact, so all strategies must agree to the bit."""
    return torch.randint(-largest, largest + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def _gather_all_ways(group: Group, dtype: torch.dtype, seed: int) -> int:
    """Ragged rows, two weights of different widths, scales that travel with the rows, and the rows themselves."""
    rank, rows, depth = group.rank, (20, 0, 7, 300)[: group.world_size], 24
    is_scaled = dtype == torch.int8
    whole, scale = draw(seed, sum(rows), depth), draw(seed + 1, sum(rows)).abs() + 1
    mine = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
    weights = [draw(seed + 2 + 10 * rank + index, width, depth) for index, width in enumerate((18, 40))]
    exact = [(scale[:, None] if is_scaled else 1.0) * (whole @ weight.t()) for weight in weights]
    num_checked = 0
    for strategy in STRATEGIES:
        for wants_rows in (False, True):
            parts = [
                Operands(
                    whole[mine].to(dtype), weight.to(dtype), poisoned(right.shape, torch.float32),
                    scale_x=scale[mine] if is_scaled else None,
                )
                for weight, right in zip(weights, exact, strict=True)
            ]  # fmt: skip
            gathered = poisoned(whole.shape, dtype) if wants_rows else None
            run_gather(group, parts, rows, strategy, CONFIG, gathered)
            for part, right in zip(parts, exact, strict=True):
                assert torch.equal(part.out, right), f"{strategy}, with rows: {wants_rows}"
                num_checked += 1
            assert gathered is None or torch.equal(gathered.float(), whole)
    return num_checked


def _scatter_all_ways(group: Group, dtype: torch.dtype, seed: int) -> int:
    rank, rows, width = group.rank, (20, 0, 33, 2)[: group.world_size], 40
    xs = [draw(seed + source, sum(rows), 16 + source) for source in range(group.world_size)]
    weights = [draw(seed + 10 + source, width, 16 + source) for source in range(group.world_size)]
    bias = draw(seed + 20, width)
    exact = bias + sum(x @ weight.t() for x, weight in zip(xs, weights, strict=True))
    mine = Operands(xs[rank].to(dtype), weights[rank].to(dtype), torch.empty(0), bias=bias, adds_bias=rank == 0)
    for strategy in STRATEGIES:
        out = poisoned((rows[rank], width), torch.float32)
        run_scatter(group, dataclasses.replace(mine, out=out), rows, strategy, CONFIG)
        first = sum(rows[:rank])
        assert torch.equal(out, exact[first : first + rows[rank]]), strategy
        everything = poisoned(exact.shape, torch.float32)
        gather_rows(group, "test", out, everything, rows)
        assert torch.equal(everything, exact), strategy
    out = poisoned(exact.shape, torch.float32)
    run_spread(group, dataclasses.replace(mine, out=out), CONFIG)
    assert torch.equal(out, exact)
    return len(STRATEGIES) + 1


def _all_ways(group: Group, seed: int, backend: str, dtypes: tuple[torch.dtype, ...]) -> int:
    with env.scoped({"TILEFLUX_CPU_BACKEND": backend}):
        return sum(run(group, dtype, seed) for run in (_gather_all_ways, _scatter_all_ways) for dtype in dtypes)


@pytest.mark.parametrize(
    ("backend", "world_size", "dtypes"),
    [
        ("host", 4, (torch.float32, torch.bfloat16, torch.int8)),
        pytest.param("interpret", 3, (torch.bfloat16, torch.int8), marks=interpreted),
    ],
)
def test_all_strategies_agree_to_the_bit(backend: str, world_size: int, dtypes: tuple[torch.dtype, ...]) -> None:
    if backend == "interpret":
        from tileflux.testing import interpreter

        interpreter.install()
    seed = int(torch.randint(2**20, ()))
    counts = run_ranks(_all_ways, world_size, args=(seed, backend, dtypes), timeout_s=120)
    assert counts == [len(dtypes) * (12 + 4)] * world_size


def _host_meets_kernel(group: Group, seed: int) -> None:
    """Even ranks run the host twin, odd ranks the kernel."""
    with env.scoped({"TILEFLUX_CPU_BACKEND": "interpret" if group.rank % 2 else "host"}):
        config = dataclasses.replace(CONFIG, num_sms=None)
        for call in (
            Call("ag_gemm", 20, ragged=True, config=config),
            Call("gemm_rs", 20, columns=40, config=config),
            Call("gemm_ar", 20, columns=40, algorithm="one_shot", config=config),
            Call("ag_gemm", 5, dtype=torch.int8, scales="channel", num_weights=2, config=config),
            Call("gemm_rs", 3, ragged=True, config=config),
            Call("gemm_ar", 3, algorithm="two_shot", config=config),
        ):
            call.run(group, seed)


@interpreted
def test_host_twin_and_kernel_speak_the_same_protocol() -> None:
    from tileflux.testing import interpreter

    interpreter.install()
    run_ranks(_host_meets_kernel, 3, args=(int(torch.randint(2**20, ())),), timeout_s=120)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_multiplies_and_copies(strategy: str) -> None:
    (group,) = tileflux.local_groups(1)
    x, weight = draw(1, 9, 8), draw(2, 5, 8)
    out, rows = poisoned((9, 5), torch.float32), poisoned((9, 8), torch.float32)
    run_gather(group, [Operands(x, weight, out)], (9,), strategy, CONFIG, rows)
    assert torch.equal(out, x @ weight.t()) and torch.equal(rows, x)
    out = poisoned((9, 5), torch.float32)
    run_scatter(group, Operands(x, weight, out), (9,), strategy, CONFIG)
    assert torch.equal(out, x @ weight.t())
    group.close()


def _pipelined(group: Group) -> None:
    for op in ("ag_gemm", "gemm_rs"):
        Call(op, 3, strategy="pipelined", config=CONFIG).run(group, 0)


@interpreted
def test_pipelined_products_have_the_tiles_they_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """One announcement per shard is no reason for one tile per shard, which no GPU has the registers for."""
    from tileflux.testing.simulator import simulate

    seen = set()
    real = library.multiply

    def multiply(operands: Operands, config: GemmConfig) -> None:
        seen.add((config.block_m, config.block_n))
        real(operands, config)

    monkeypatch.setattr(dense.library, "multiply", multiply)
    simulate(_pipelined, 2, seed=0)
    assert seen == {(16, 16)}


@pytest.mark.parametrize(("rows", "num_parts"), [(4096, 1), (4097, 2), (12288, 3), (1, 1)])
def test_a_product_too_large_for_a_share_of_a_gpu_is_made_in_parts(
    rows: int, num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense.library, "uses_torch", lambda operands: True)
    x, weight = torch.empty(rows, 1, device="meta"), torch.empty(12288, 1, device="meta")
    operands = Operands(x, weight, torch.empty(rows, 12288, device="meta"))
    shared = SimpleNamespace(traits=SimpleNamespace(links=("self", "same GPU")))
    parts = dense._parts(shared, operands)
    assert len(parts) == num_parts and sum(len(part.x) for part in parts) == rows
    assert all(len(part.x) == len(part.out) and part.out.numel() <= 4096 * 12288 for part in parts)
    assert dense._parts(SimpleNamespace(traits=SimpleNamespace(links=("self", "NVLink"))), operands) == [operands]
    monkeypatch.setattr(dense.library, "uses_torch", lambda operands: False)
    assert dense._parts(shared, operands) == [operands]


@pytest.mark.parametrize(
    ("num_stages", "span", "heights"),
    [
        (8, 1, [1] * 8),
        (8, 2, [2, 2, 2, 2]),
        (8, 3, [2, 3, 3]),
        (8, 7, [1, 7]),
        (2, 1, [1, 1]),
        (4, 2, [2, 2]),
        (1, 1, [1]),
        (3, 5, [1, 2]),
    ],
)
def test_stages_go_through_the_weights_in_bands(num_stages: int, span: int, heights: list[int]) -> None:
    bands = dense._bands(num_stages, span)
    assert [len(band) for band in bands] == heights
    assert [stage for band in bands for stage in band] == list(range(num_stages))


@pytest.mark.parametrize("num_rows", [4, 0])
def test_copies_of_rows_follow_each_other_and_are_announced_on_another_stream(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the call ends behind both; but for a rank without rows, which has queued nothing there."""
    seen: list[tuple[object, ...]] = []
    current = ["main"]

    @contextlib.contextmanager
    def beside(group: object, *used: object, after: object = None, on: str = "sending") -> Iterator[None]:
        before, current[0] = current[0], on
        seen.append((on, "after", after))
        yield
        current[0] = before

    def place(peer: int, *what: object) -> Any:
        return SimpleNamespace(copy_=lambda rows, non_blocking: seen.append((current[0], "copy", peer)))

    monkeypatch.setattr(dense, "beside", beside)
    monkeypatch.setattr(dense, "join", lambda group, on="sending": seen.append((current[0], "join", on)))
    monkeypatch.setattr(dense.steps, "launch_open", lambda *given: seen.append((current[0], "open")))
    stream = SimpleNamespace(record_event=lambda: f"what is {current[0]}")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    here: Any = SimpleNamespace(
        plan=gather_shards("ag_gemm", (num_rows, 4, 4), 32, False, 1), count_call=lambda: None, chunk_at=place,
        announce=lambda owner, index: seen.append((current[0], "flag", owner)),
    )  # fmt: skip
    group: Any = SimpleNamespace(rank=0, world_size=3, device=torch.device("cuda"))
    x = torch.empty(num_rows, 8)
    dense._feed_apart(group, here, x, None)
    dense._join_apart(group, here, x)
    sent = [
        each
        for peer in (2, 1)
        for each in (
            ("sending", "copy", peer), ("announcing", "after", "what is sending"), ("announcing", "flag", peer)
        )
    ]  # fmt: skip
    joins = [("main", "join", "sending"), ("main", "join", "announcing")]
    begin = [("main", "open"), ("sending", "after", None)]
    assert seen == ([*begin, *sent, *joins] if num_rows else [*begin, joins[0]])
