"""Ghosts keep a fused op's protocol: rows and partial sums in, flags and acks in step, call after call."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tileflux import ops
from tileflux.config import CONTROL, GemmConfig
from tileflux.errors import PeerTimeout, TransportUnavailable
from tileflux.kernels.plan import split_rows
from tileflux.kernels.shards import combine_shards, gather_shards, scatter_shards
from tileflux.kernels.turns import Turn, turn
from tileflux.symm.group import Group
from tileflux.testing import assert_close, ghost, poisoned, run_ranks
from tileflux.testing.ghost import Ghosts, ghost_group
from tileflux.testing.hopper_cases import hopper_config

WORLD = 4
CONFIG = GemmConfig(128, 128, 64, num_warps=8, num_stages=3, num_feeders=4)


@pytest.mark.parametrize("world_size", [-1, 0, 1])
def test_a_world_without_ghosts_is_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match=rf"world_size={world_size} should be at least 2"):
        ghost_group(world_size)


def test_a_cpu_has_no_link_to_the_host() -> None:
    with pytest.raises(ValueError, match="device=cpu should be a GPU"):
        ghost_group(2, "cpu")


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TransportUnavailable, match="a ghost world needs a GPU"):
        ghost_group(2)


def fake_ghosts(world_size: int) -> Ghosts:
    """What of ghosts needs no stream."""
    made = object.__new__(Ghosts)
    made.group = SimpleNamespace(world_size=world_size, rank=0)  # type: ignore[assignment]
    made._epochs = {}
    return made


def test_calls_are_counted_by_op() -> None:
    ghosts = fake_ghosts(2)
    assert [ghosts._next("ag_gemm") for _ in range(3)] == [0, 1, 2]
    assert ghosts._next("gemm_rs") == 0
    assert (ghosts.num_calls("ag_gemm"), ghosts.num_calls("gemm_rs"), ghosts.num_calls("gemm")) == (3, 1, 0)


def words_of(plan: Any) -> Any:
    """A turn whose words and slots are their names."""
    return SimpleNamespace(
        plan=plan,
        staged=lambda owner, slab: ("staged", owner, slab),
        flag=lambda owner, slab, source=0: ("flag", owner, slab, source),
        ack=lambda owner, peer: ("ack", owner, peer),
        slabs_at=lambda owner, source, slabs, dtype, n: ("slot", owner, source, slabs, dtype, n),
    )


@pytest.mark.parametrize(
    "order",
    [
        [(owner, range(slab, slab + 1)) for slab in range(2) for owner in (1, 2, 3)],
        [(1, range(2)), (2, range(2)), (3, range(1)), (3, range(1, 2))],
    ],
)
@pytest.mark.parametrize("watch_staging", [True, False])
def test_slabs_are_sent_when_as_much_has_been_staged_or_leaves(
    watch_staging: bool, order: list[tuple[int, range]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every direction the order in which ranks come to each other; no ack before the last slab has come."""
    rows, num_columns = (3, 4, 0, 5), 40
    config = GemmConfig(16, 16, 16, num_chunks=2)
    plan = combine_shards("moe_gemm_rs", rows, 8, num_columns, 4, config, by_copies=True)
    seen: list[tuple] = []
    here = words_of(plan)
    ghosts = fake_ghosts(4)
    watching = SimpleNamespace(record_event=lambda: sum(each[0] == "wait" for each in seen))
    sending = SimpleNamespace(
        record_event=lambda: sum(each[0] == "send" for each in seen),
        wait_event=lambda number: seen.append(("when told", number)),
    )
    announcing = SimpleNamespace(wait_event=lambda number: seen.append(("after", number)))
    made: Any = ghosts
    made._watching, made._sending, made._announcing, made._answering = watching, sending, announcing, "answering"
    names = {id(watching): "watching", id(sending): "sending", id(announcing): "announcing"}
    ghosts._epochs = {"moe_gemm_rs": 6}
    monkeypatch.setattr(
        torch.cuda, "stream", lambda stream: contextlib.nullcontext(seen.append((names.get(id(stream), stream),)))
    )
    monkeypatch.setattr(ghost, "stream_wait", lambda word, value: seen.append(("wait", word, value)))
    monkeypatch.setattr(ghost, "stream_write", lambda word, value: seen.append(("write", word, value)))
    monkeypatch.setattr(
        ghosts, "_send", lambda source, chunk, to, slab: seen.append(("send", source, chunk, to, slab)), raising=True
    )
    partials = [torch.randn(3, 40) for _ in rows]
    leaving: Any = None if watch_staging else [f"begin {owner} {slabs[0]}" for owner, slabs in order if rows[owner]]
    ghosts.scatter(here, partials, order=order, leaving=leaving)
    expected: list[tuple] = [("sending",)]
    sent: list[torch.Tensor] = []
    num_told = 0
    for number, (owner, slabs) in enumerate(order, 1):
        source, first = {1: 3, 2: 2, 3: 1}[owner], slabs[0]
        if rows[owner] and watch_staging:
            num_told += 1
            expected += [("watching",), ("wait", ("staged", owner, slabs[-1]), 7), ("when told", num_told)]
        elif rows[owner]:
            expected.append(("when told", f"begin {owner} {first}"))
        expected += [("send", source, first, ("slot", 0, source, slabs, torch.float32, num_columns))]
        expected += [("announcing",), ("after", number), ("write", ("flag", 0, first, source), 7)]
        # Slabs of 32 and of 8 columns, with all rows of each together.
        begin, end = (0 if first == 0 else 3 * 32), (3 * 32 if slabs[-1] == 0 else 3 * 40)
        sent.append(partials[source].view(-1)[begin:end])
    expected.append(("answering",))
    for peer in (1, 2, 3):
        if rows[peer]:
            last = next(slabs[0] for owner, slabs in reversed(order) if owner == peer)
            expected.append(("wait", ("flag", peer, last, 0), 7))
        expected.append(("write", ("ack", 0, peer), 7))
    assert [each[:4] for each in seen] == [each[:4] for each in expected]
    found = [each[4] for each in seen if each[0] == "send"]
    assert all(one.shape[0] == 3 and torch.equal(one.view(-1), other) for one, other in zip(found, sent, strict=True))
    assert ghosts.num_calls("moe_gemm_rs") == 7


def on_gpu(function: object, *args: object) -> None:
    """In a process of its own, which can be stopped if a stream never ends."""
    run_ranks(
        function, 1, args=args, where="spawn", device="cuda:0", make_group=False, timeout_s=120  # type: ignore[arg-type]
    )  # fmt: skip


def load_products(x: torch.Tensor, weight: torch.Tensor, counts: set[int]) -> None:
    """The library's kernels for so many rows: one that it loads while a stream waits may never be loaded."""
    for count in counts:
        torch.mm(x[:count], weight.t(), out=x.new_empty(count, len(weight)))
    torch.cuda.synchronize()


def tiles(num_chunks: int, hopper: bool) -> GemmConfig:
    if hopper:
        return dataclasses.replace(hopper_config(64, 64), num_chunks=num_chunks)
    return GemmConfig(64, 64, 64, num_warps=4, num_stages=2, num_feeders=2, num_chunks=num_chunks)


class Gathering:
    """Calls of ``ag_gemm`` with fresh numbers, and what must come of them."""

    def __init__(self, group: Group, m: int, n: int, k: int, num_chunks: int, hopper: bool = False) -> None:
        self.rows = split_rows(m, group.world_size)
        self.sizes = list(self.rows)
        everything = torch.randn(m, k, device="cuda").bfloat16()
        self.weight = torch.randn(n, k, device="cuda").bfloat16()
        self.x, self.k = everything[: self.rows[0]].clone(), k
        self.sent = torch.empty(m, k, dtype=torch.bfloat16, pin_memory=True).copy_(everything)
        self.expected = everything.double() @ self.weight.double().t()
        self.out = poisoned((m, n), torch.bfloat16, "cuda")
        self.config = tiles(num_chunks, hopper)
        self.here = turn(group, gather_shards("ag_gemm", self.rows, 2 * k, False, num_chunks))
        plan = self.here.plan
        chunks = [plan.chunk(rank, index) for rank in range(group.world_size) for index in range(plan.num_chunks)]
        load_products(everything, self.weight, {len(chunk) for chunk in chunks})

    def call(self, group: Group, ghosts: Ghosts, strategy: str) -> None:
        ghosts.start()
        ops.ag_gemm(
            self.x, self.weight, group=group, sizes=self.sizes, strategy=strategy, config=self.config, out=self.out
        )
        ghosts.gather(self.here, self.sent)
        ghosts.join()

    def check(self) -> None:
        assert_close(self.out, self.expected, reduction=self.k)

    def check_received(self, epoch: int) -> None:
        for peer in range(1, len(self.rows)):
            received = self.here.rows_at(peer, torch.bfloat16, self.k)[: self.rows[0]]
            assert torch.equal(received, self.x.cpu()), f"ghost {peer} did not get the real rank's rows"


class Scattering:
    """The same of ``gemm_rs``."""

    def __init__(self, group: Group, m: int, n: int, k: int, num_chunks: int, hopper: bool = False) -> None:
        self.rows = split_rows(m, group.world_size)
        self.sizes = list(self.rows)
        self.x, self.weight = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16()
        self.exact, self.k = self.x.double() @ self.weight.double().t(), k
        partials = torch.randn(group.world_size, self.rows[0], n) * k**0.5
        self.sent = [torch.empty_like(each, dtype=torch.bfloat16, pin_memory=True).copy_(each) for each in partials]
        self.expected = self.exact[: self.rows[0]] + sum(each.double().cuda() for each in self.sent[1:])
        self.out = poisoned((self.rows[0], n), torch.bfloat16, "cuda")
        self.config = tiles(num_chunks, hopper)
        self.here: Turn
        load_products(self.x, self.weight, set(self.rows))

    def call(self, group: Group, ghosts: Ghosts, strategy: str) -> None:
        from tileflux.kernels.dense import pipelined_tiles
        from tileflux.kernels.scatter import departures

        n, tiles = self.weight.shape[0], self.config if strategy == "fused" else pipelined_tiles(self.config)
        plan = scatter_shards("gemm_rs", self.rows, n, 2, tiles, by_copies=True)
        cuts = [slice(columns.start, columns.stop) for columns in plan.slabs(n)]
        by_slab = [torch.cat([each[:, cut].reshape(-1) for cut in cuts]).view(-1, n) for each in self.sent]
        slabs = [each.pin_memory() for each in by_slab]
        order = [(each.owner, each.slabs) for each in departures(0, plan, tiles, n)]
        self.here = turn(group, plan)
        self.here.leaving = None if strategy == "fused" else []
        ghosts.start()
        ops.gemm_rs(
            self.x, self.weight, group=group, sizes=self.sizes, strategy=strategy, config=self.config, out=self.out
        )
        ghosts.scatter(self.here, slabs, order=order, leaving=self.here.leaving)
        ghosts.join()

    def check(self) -> None:
        assert_close(self.out, self.expected, reduction=self.k)

    def check_received(self, epoch: int) -> None:
        for peer in range(1, len(self.rows)):
            n, first = self.weight.shape[0], sum(self.rows[:peer])
            for index, columns in enumerate(self.here.plan.slabs(n)):
                slab = self.here.slabs_at(peer, 0, range(index, index + 1), torch.bfloat16, n)
                exact = self.exact[first : first + self.rows[peer], columns.start : columns.stop]
                assert_close(slab.cuda(), exact, reduction=self.k)


OPS: dict[str, Any] = {"ag_gemm": Gathering, "gemm_rs": Scattering}


def _play(rank: int, world_size: int, op: str) -> None:
    # Also in Hopper's loop, where this is one.
    for strategy, hopper in (("fused", False), ("fused", True), ("pipelined", False)):
        with ghost_group(WORLD, timeout_s=5) as group:
            _play_many(group, op, strategy, hopper)


def _play_many(group: Group, op: str, strategy: str, hopper: bool) -> None:
    """Twenty calls of two problems in any order, nobody synchronising: each leaves its numbers in the other's way."""
    ghosts = Ghosts(group)
    # The largest first: the other then uses the same memory.
    problems = [OPS[op](group, m, 320, 256, num_chunks=2, hopper=hopper) for m in (2048, 301)]
    for problem in problems:
        problem.call(group, ghosts, strategy)
        group.synchronize()
        problem.check()
        problem.check_received(ghosts.num_calls(op) - 1)
        problem.out.fill_(torch.nan)
    results: list[tuple[int, torch.Tensor]] = []
    for _ in range(20):
        number = int(torch.randint(2, ()))
        problems[number].call(group, ghosts, strategy)
        results.append((number, problems[number].out.clone()))
    group.synchronize()
    assert ghosts.num_calls(op) == 22
    counted = problems[0].here._control.view(dtype=torch.int32)[CONTROL.epoch]
    assert counted.item() == 22, "the real rank has counted as many"
    for call, (number, result) in enumerate(results):
        assert_close(result, problems[number].expected, reduction=256, what=f"{strategy}, {hopper=}, call {call}")


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_calls_back_to_back(op: str) -> None:
    on_gpu(_play, op)


def _stamp(rank: int, world_size: int) -> None:
    with ghost_group(WORLD, timeout_s=5) as group:
        for op, make in OPS.items():
            ghosts = Ghosts(group, stamps=[])
            problem = make(group, 2048, 256, 256, num_chunks=2)
            problem.call(group, ghosts, "fused")
            group.synchronize()
            problem.check()
            assert ghosts.stamps is not None and {stamp.source for stamp in ghosts.stamps} == {1, 2, 3}
            for source in range(1, WORLD):
                mine = [stamp for stamp in ghosts.stamps if stamp.source == source]
                assert sum(stamp.nbytes for stamp in mine) == 512 * 256 * 2, "a shard of rows, or of the result"
                assert [stamp.chunk for stamp in mine] == list(range(len(mine)))
                assert all(stamp.begin.elapsed_time(stamp.end) >= 0 for stamp in mine)
            # Rows come in chunks, two of every peer; partial sums whole, but for the last peer's.
            assert len(ghosts.stamps) == (3 * 2 if op == "ag_gemm" else 2 + 2)


@pytest.mark.gpu
def test_transfers_are_timed_where_somebody_asks() -> None:
    on_gpu(_stamp)


def _wrong(rank: int, world_size: int) -> None:
    """What ghosts send is what the result is made of: changed numbers are seen in it."""
    with ghost_group(WORLD, timeout_s=5) as group:
        ghosts = Ghosts(group)
        for op, make in OPS.items():
            problem = make(group, 301, 256, 256, num_chunks=1)
            (problem.sent if op == "ag_gemm" else problem.sent[2])[-1].zero_()
            problem.call(group, ghosts, "fused")
            group.synchronize()
            with pytest.raises(AssertionError, match="off by more than rounding explains"):
                problem.check()
    for op, make in OPS.items():
        # Nobody plays: the op ends with a timeout, and the group can be closed.
        group = ghost_group(WORLD, timeout_s=0.5)
        problem = make(group, 301, 256, 256, num_chunks=1)
        silent = SimpleNamespace(
            **dict.fromkeys(("start", "gather", "scatter", "join"), lambda *arguments, **options: None)
        )
        problem.call(group, silent, "fused")
        with pytest.raises(PeerTimeout) as caught:
            group.synchronize()
        assert caught.value.op == op and caught.value.peer in (1, 2, 3)
        group.close()


@pytest.mark.gpu
def test_ghosts_that_send_something_else_or_nothing_are_noticed() -> None:
    on_gpu(_wrong)
