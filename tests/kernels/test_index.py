"""The kernels of routing against torch's functions, bit for bit: interpreted, and on a GPU."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tileflux
from tileflux import env
from tileflux.config import GROUPS
from tileflux.kernels import groups as grouping
from tileflux.kernels import index, lists
from tileflux.kernels.groups import Groups, SortedRows, cut_tiles, num_missing, route_rows, sort_rows, sources_of
from tileflux.ops.routing import Routing, _Sorting
from tileflux.symm.group import Group

from .unsynchronised import unsynchronised

needs_interpreter = pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")
INTERPRETED = {"TILEFLUX_CPU_BACKEND": "interpret"}
Found = tuple[SortedRows, Groups, torch.Tensor | None]


pytestmark = pytest.mark.usefixtures("interpreter_installed")


@dataclass(frozen=True)
class Case:
    """What all ranks have chosen, and one of them."""

    ids: torch.Tensor
    sizes: tuple[int, ...]
    rank: int
    num_experts: int
    num_sets: int
    capacity: int
    block_m: int

    @property
    def experts(self) -> range:
        num_each, ranks = self.num_experts // self.num_sets, len(self.sizes) // self.num_sets
        return range(self.rank // ranks * num_each, (self.rank // ranks + 1) * num_each)

    @property
    def top_k(self) -> int:
        return self.ids.shape[1]

    def packed(self, device: str = "cpu") -> torch.Tensor:
        bits = torch.rand(self.ids.shape).view(torch.int32)
        return torch.cat((self.ids.to(torch.int32), bits), dim=1).to(device)

    def route(self, group: Group, packed: torch.Tensor) -> Found:
        """What is tested."""
        return route_rows(group, packed, self.sizes, self.experts, self.num_sets, self.capacity, self.block_m)

    def right(self, packed: torch.Tensor) -> Found:
        """The same by torch's functions, wherever the tensor is."""
        ids, bits = packed.split(self.top_k, dim=1)
        stages = sources_of(self.sizes, self.rank, packed.device)
        rows = sort_rows(ids, stages, self.experts, len(self.sizes), self.capacity)
        groups = cut_tiles(rows, self.capacity, self.block_m, bits.contiguous().view(torch.float32))
        missing = num_missing(ids, len(self.experts), self.num_sets, self.capacity)
        return rows, groups, missing if self.capacity < ids.numel() else None


def check(case: Case, found: Found, right: Found) -> None:
    """Every number is the same; behind the last row, where anything may be, 0."""
    (rows, groups, missing), (right_rows, right_groups, right_missing) = found, right
    num_rows = int(right_rows.starts[-1])
    assert torch.equal(rows.positions, right_rows.positions)
    assert torch.equal(rows.starts, right_rows.starts)
    assert torch.equal(rows.offsets, right_rows.offsets) and rows.offsets.is_contiguous()
    right_rows.slots[num_rows:] = 0
    assert torch.equal(rows.slots, right_rows.slots)
    right_groups.tokens[num_rows:] = 0
    assert torch.equal(groups.index, right_groups.index)
    assert {**vars(groups), "index": None} == {**vars(right_groups), "index": None}
    assert (missing is None) == (right_missing is None)
    if missing is not None and right_missing is not None:
        assert missing.dtype == right_missing.dtype and int(missing) == int(right_missing)
    kept = rows.positions[rows.positions >= 0].sort().values
    assert torch.equal(kept.cpu(), torch.arange(num_rows, dtype=torch.int32)), "a row is one choice's"
    if case.capacity >= case.ids.numel():
        is_here = (case.ids >= case.experts.start) & (case.ids < case.experts.stop)
        assert torch.equal(rows.positions.cpu() >= 0, is_here.flatten()), "a choice is one row"


def draw(draws: random.Random, world_size: int, num_experts: int, top_k: int, counts: tuple[int, ...]) -> Case:
    """Uneven and no tokens, choices of nobody, crowds, and too little room."""
    sizes = tuple(draws.choice(counts) for _ in range(world_size))
    num_slots = sum(sizes) * top_k
    num_sets = draws.choice([n for n in range(1, world_size + 1) if world_size % n == num_experts % n == 0])
    generator = torch.Generator().manual_seed(draws.randrange(2**31))
    ids = torch.randint(-1, num_experts + 1, (sum(sizes), top_k), generator=generator)
    crowd = draws.choice(("none", "one", "dropped"))
    if crowd != "none":
        ids[torch.rand(ids.shape, generator=generator) < draws.choice((0.5, 1.0))] = (
            draws.randrange(num_experts) if crowd == "one" else draws.choice((-1, num_experts, 2**31 - 1, -(2**31)))
        )
    capacity = draws.choice((num_slots, num_slots, num_slots + 5, 0, draws.randint(0, num_slots)))
    return Case(
        ids, sizes, draws.randrange(world_size), num_experts, num_sets, capacity, draws.choice((1, 3, 16, 32, 64, 128))
    )


@needs_interpreter
@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 8), st.sampled_from([1, 3, 8, 64, 512, 1024]), st.integers(1, 8), st.sampled_from([16, 64, 256]),
    st.integers(0, 2**32),
)  # fmt: skip
def test_interpreted(world_size: int, num_experts: int, top_k: int, block: int, seed: int) -> None:
    """Small blocks: that a stage has several of them, and an expert rows in all of them, is what may go wrong."""
    case = draw(random.Random(seed), world_size, num_experts, top_k, (0, 0, 1, 2, 7, 40))
    group, packed = tileflux.local_groups(world_size)[case.rank], case.packed()
    right = case.right(packed)
    with env.scoped(INTERPRETED), pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "_BLOCK", block)
        check(case, case.route(group, packed), right)


@needs_interpreter
def test_more_blocks_than_are_added_up_at_a_time() -> None:
    case = draw(random.Random(3), 2, 8, 4, (300,))
    group, packed = tileflux.local_groups(2)[case.rank], case.packed()
    with env.scoped(INTERPRETED), pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "_BLOCK", 16)
        patch.setattr(index, "_SCAN_ROWS", 32)
        assert index._stages(group, case.sizes, 4)[0] == 150
        check(case, case.route(group, packed), case.right(packed))


def sorting(group: Group, ids: torch.Tensor, num_experts: int) -> _Sorting:
    return _Sorting(group, (len(ids),) * group.world_size, ids.shape[1], num_experts, 1, ids.numel(), 16)


@needs_interpreter
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("id_type", [torch.int32, torch.int64], ids=str)
def test_packing(id_type: torch.dtype, kind: torch.dtype) -> None:
    """Also of what does not lie in order, of numbers that 32 bits are not enough for, and of weights of any bits."""
    (group,) = tileflux.local_groups(1)
    wide = [2**31, 2**32 + 3, -(2**32) + 1, 2**63 - 1, -(2**63)] if id_type == torch.int64 else []
    ids = torch.tensor([0, 7, 8, -1, -2, 2**31 - 1, -(2**31), *wide, *range(30)], dtype=id_type)
    ids = ids[torch.randint(len(ids), (700, 3))]
    weights = torch.randn(700, 3).to(kind)
    if kind == torch.float32:
        weights[:5, 0] = torch.tensor([float("nan"), -0.0, 1e-45, float("inf"), -3e38])
    for these, those in (
        (ids, weights),
        (ids.t().contiguous().t(), weights.repeat(1, 2)[:, 1:4].requires_grad_()),
        (ids[::2, :2], weights.flip(0)[::2, 1:]),
        (ids[:0], weights[:0]),
    ):
        pack = sorting(group, these, 8).pack
        right = pack(these, those)
        with env.scoped(INTERPRETED):
            assert torch.equal(pack(these, those), right)
        assert set(right[:, : these.shape[1]].flatten().tolist()) <= {-1, *range(9)}


@needs_interpreter
def test_a_routing_takes_four_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    (group,) = tileflux.local_groups(1)
    names: list[str] = []

    def note(kernel: Any, *arguments: Any) -> None:
        names.append(kernel.fn.__name__)
        launch(kernel, *arguments)

    launch = index.launch_step
    monkeypatch.setattr(index, "launch_step", note)
    monkeypatch.setattr(lists, "launch_step", note)
    for name in ("sort_rows", "cut_tiles", "num_missing"):
        monkeypatch.setattr(grouping, name, None)  # nothing of it is torch's
    ids = torch.randint(0, 8, (40, 2))
    with env.scoped(INTERPRETED):
        work = sorting(group, ids, 8)
        work.unpack(work.pack(ids, torch.rand(40, 2)), torch.rand(40, 2)).groups.of_stages(0, 1)
    assert names == ["_pack_kernel", "_count_kernel", "_scan_kernel", "_place_kernel", "_stages_kernel"]


SIZES = [(1, 8, 2, (4096,)), (8, 64, 8, (0, 100, 2048)), (4, 1024, 6, (1, 900, 3000)), (8, 512, 4, (128,))]


@pytest.mark.gpu
@pytest.mark.parametrize(("world_size", "num_experts", "top_k", "counts"), SIZES)
def test_on_a_gpu(world_size: int, num_experts: int, top_k: int, counts: tuple[int, ...]) -> None:
    groups = tileflux.local_groups(world_size, "cuda")
    for seed in range(12):
        case = draw(random.Random(seed), world_size, num_experts, top_k, counts)
        group, packed = groups[case.rank], case.packed("cuda")
        right = case.right(packed)
        torch.cuda.synchronize()
        with torch.cuda.stream(group.stream), unsynchronised():
            found = case.route(group, packed)
            by_stage = found[1].by_stages([range(stage, stage + 1) for stage in range(world_size)])
            in_order = found[1].of_stages(0, world_size)
        torch.cuda.synchronize()
        check(case, found, right)
        whole = dataclasses.replace(right[1], index=right[1].index.cpu())  # by torch's functions again
        for stage, part in enumerate(by_stage):
            assert torch.equal(part.index.cpu(), whole.of_stages(stage, stage + 1).index)
        assert torch.equal(in_order.index.cpu(), whole.of_stages(0, world_size).index)
    for group in groups:
        group.close()


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_choices() -> None:
    (group,) = tileflux.local_groups(1, "cuda")
    ids, weights = torch.zeros(500, 4, dtype=torch.int64, device="cuda"), torch.ones(500, 4, device="cuda")

    def route() -> Routing:
        return tileflux.route(ids, weights, num_experts=40, group=group, block_m=16)

    with torch.cuda.stream(group.stream):
        route()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=group.stream):
            routing = route()
        for seed in range(5):
            case = draw(random.Random(seed), 1, 40, 4, (500,))
            ids.copy_(case.ids)
            weights.copy_(torch.rand(500, 4))
            graph.replay()
            torch.cuda.synchronize()
            exact = Case(case.ids, (500,), 0, 40, 1, 2000, 16)
            packed = torch.cat((case.ids.clamp(-1, 40).int().cuda(), weights.view(torch.int32)), dim=1)
            right = exact.right(packed)
            check(exact, (routing.rows, routing.groups, routing.num_missing), right)
            assert torch.equal(routing.weights, weights)
    group.close()


def test_the_header_has_room_for_what_is_stored() -> None:
    places = (GROUPS.num_tiles, GROUPS.top_k, GROUPS.rows, GROUPS.positions, GROUPS.weights)
    assert len(set(places)) == len(places) and max(places) < GROUPS.tiles
    assert GROUPS.tiles & (GROUPS.tiles - 1) == 0, "it is stored as one block"
