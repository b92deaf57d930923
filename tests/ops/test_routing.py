"""route: the order of rows and their counts against the oracle, capacity, weights, and refusals."""

from __future__ import annotations

import dataclasses
import random
from typing import Any
from unittest import mock

import pytest
import torch

import tileflux
from tileflux.config import GROUPS
from tileflux.errors import CapacityExceeded
from tileflux.kernels import index, lists
from tileflux.ops.routing import Routing, route_gathered
from tileflux.symm.group import Group
from tileflux.testing import run_ranks
from tileflux.testing.moe import ROUTING_KINDS, MoeRouting, moe_routing

from .dense_cases import install_interpreter, interpreted, needs_interpreter

LAYOUTS = {1: (1,), 2: (1, 2), 3: (1, 3), 4: (1, 2, 4)}
"""Worlds, and the sets of experts that each may have: TP only, both, EP only."""


def route(group: Group, case: MoeRouting, **options: Any) -> Routing:
    return tileflux.route(**case.arguments(group.rank), group=group, **options)


def check_routing(group: Group, case: MoeRouting, found: Routing) -> None:
    """Everything of a routing against the oracle."""
    rows, top_k, what = case.rows(group.rank), case.top_k, f"rank {group.rank}, ep_size={case.ep_size}, {case.sizes}"
    assert found.experts == case.experts(group.rank)
    assert (found.num_experts, found.top_k, found.ep_size) == (case.num_experts, top_k, case.ep_size)
    assert found.sizes == case.sizes and found.num_tokens == sum(case.sizes) and found.group is group
    assert found.counts.tolist() == case.counts(group.rank), what
    assert found.rows.offsets[-1] == len(rows)
    assert found.rows.slots[: len(rows)].tolist() == [row.slot for row in rows], what
    places = {row.slot: number for number, row in enumerate(rows)}
    assert found.rows.positions.tolist() == [places.get(slot, -1) for slot in range(sum(case.sizes) * top_k)], what
    assert found.weights.dtype == torch.float32 and torch.equal(found.weights, torch.cat(case.weights).float()), what
    check_tiles(case, found, rows)
    found.ensure_fits()
    found.synchronize()


def check_tiles(case: MoeRouting, found: Routing, rows: list[Any]) -> None:
    """Every row is in one tile, of its expert; a tile's stage is that of its last row, and early ones come first."""
    groups, index = found.groups, found.groups.index
    assert groups.picks_rows and groups.num_experts == len(found.experts)
    assert len(found.rows.slots) == found.capacity
    num_tiles = int(index[GROUPS.num_tiles])
    assert num_tiles <= groups.max_tiles
    tiles = index[GROUPS.tiles :][: GROUPS.tile_words * num_tiles].view(-1, GROUPS.tile_words).tolist()
    covered = []
    for expert, first, end, stage in tiles:
        own = range(first, min(end, first + groups.block_m))
        covered += own
        assert len(own) > 0
        assert {rows[number].expert - found.experts.start for number in own} == {expert}
        assert max(rows[number].stage for number in own) == stage
    assert sorted(covered) == list(range(len(rows)))
    stages = [tile[GROUPS.stage] for tile in tiles]
    assert stages == sorted(stages)
    picked = index[int(index[GROUPS.rows]) :][: len(rows)].tolist()
    assert picked == [row.slot // case.top_k for row in rows]


def _all_layouts(group: Group, seed: int) -> int:
    draws, world_size, num_checked = random.Random(seed), group.world_size, 0
    for ep_size in LAYOUTS[world_size]:
        for kind in ROUTING_KINDS:
            sizes = [draws.choice((0, 1, 7, 40)) for _ in range(world_size)]
            num_experts, top_k = 12 * draws.randrange(1, 3), draws.randrange(1, 4)
            case = moe_routing(sizes, num_experts, top_k, draws.randrange(2**32), ep_size=ep_size, kind=kind)
            check_routing(group, case, route(group, case, block_m=draws.choice((None, 16, 32))))
            num_checked += 1
    return num_checked


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_against_the_oracle(world_size: int) -> None:
    counts = run_ranks(_all_layouts, world_size, args=(int(torch.randint(2**30, ())),))
    assert counts == [len(LAYOUTS[world_size]) * len(ROUTING_KINDS)] * world_size


@pytest.mark.parametrize("world_size", [2, 4])
def test_virtual_ranks(world_size: int) -> None:
    run_ranks(_all_layouts, world_size, args=(int(torch.randint(2**30, ())),), where="virtual")


def _interpreted(group: Group, seed: int) -> None:
    """By the kernels: as above; then other types and bits, nothing at all, wrong numbers, and too little room."""
    with interpreted():
        _all_layouts(group, seed)
        _same_sizes(group)
        _nothing(group)
        if group.world_size == 2:
            _out_of_range(group)
            for mirrored in (False, True):
                _capacity(group, mirrored)


@needs_interpreter
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_interpreted(world_size: int) -> None:
    install_interpreter()
    run_ranks(_interpreted, world_size, args=(int(torch.randint(2**30, ())),), timeout_s=120)


def _all_known(group: Group, seed: int) -> None:
    """Of what all ranks chose, without asking them; with room for too few rows, too."""
    draws, world_size = random.Random(seed), group.world_size
    for ep_size in LAYOUTS[world_size]:
        for kind in ROUTING_KINDS:
            sizes = [draws.choice((0, 1, 7, 40)) for _ in range(world_size)]
            case = moe_routing(sizes, 12, draws.randrange(1, 4), draws.randrange(2**32), ep_size=ep_size, kind=kind)
            ids, weights = torch.cat(case.expert_ids), torch.cat(case.weights)
            options: dict[str, Any] = {"num_experts": 12, "group": group, "sizes": sizes, "ep_size": ep_size}
            if group.rank != 1:
                found = route_gathered(ids, weights, **options, block_m=16)
                check_routing(group, case, found)
                assert torch.equal(found.own_weights, case.weights[group.rank])
                small = route_gathered(ids, weights, **options, capacity=0)
                assert small.capacity == 0 and (small.num_missing is None) == (not ids.numel())


def test_where_all_choices_are_known_nobody_is_asked() -> None:
    """Rank 1 makes no call at all."""
    run_ranks(_all_known, 4, args=(int(torch.randint(2**30, ())),))


def _all_known_interpreted(group: Group, seed: int) -> None:
    with interpreted():
        _all_known(group, seed)


@needs_interpreter
def test_the_same_interpreted() -> None:
    install_interpreter()
    run_ranks(_all_known_interpreted, 2, args=(int(torch.randint(2**30, ())),))


def test_what_is_known_must_be_of_all_ranks() -> None:
    (group,) = tileflux.local_groups(1)
    with group, pytest.raises(ValueError, match=r"route: sizes=\[3\] add up to 3 rows, but the tensor has 2"):
        route_gathered(torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1), num_experts=1, group=group, sizes=[3])


def _same_sizes(group: Group) -> None:
    case = moe_routing((5,) * group.world_size, 6, 2, 3)
    arguments = case.arguments(group.rank)
    del arguments["sizes"], arguments["ep_size"]
    arguments["expert_ids"] = arguments["expert_ids"].to(torch.int32)
    arguments["weights"] = arguments["weights"].to(torch.bfloat16).requires_grad_()
    found = tileflux.route(**arguments, group=group)
    assert not found.weights.requires_grad
    rounded = MoeRouting(case.sizes, 6, 1, case.expert_ids, tuple(each.bfloat16() for each in case.weights))
    check_routing(group, rounded, found)
    # Every bit of a weight arrives, whatever it means.
    odd = torch.tensor([[float("nan"), -0.0], [1e-45, float("inf")], [3e38, -1.0]])
    found = tileflux.route(torch.zeros(3, 2, dtype=torch.long), odd, num_experts=1, group=group)
    assert torch.equal(found.weights.view(torch.int32), odd.repeat(group.world_size, 1).view(torch.int32))


@pytest.mark.parametrize("world_size", [1, 3])
def test_defaults_and_types(world_size: int) -> None:
    run_ranks(_same_sizes, world_size)


def _loading(group: Group) -> list[object]:
    """What virtual ranks on a GPU load beforehand: who loads while a peer waits would wait too."""
    keys: list[object] = []

    def load(device: torch.device, key: object, launch: Any, group: Group | None = None) -> None:
        launch()
        if group is not None:
            keys.append(key)

    with (
        interpreted(),
        mock.patch.object(index, "load_once", load),
        mock.patch.object(lists, "load_once", load),
        mock.patch.object(Group, "stream", property(lambda group: "its own")),
    ):
        for number, sizes in enumerate(((3, 40), (0, 5), (7, 7))):
            case = moe_routing(sizes, 4, 2, number)
            check_routing(group, case, route(group, case))
    return keys


@needs_interpreter
def test_virtual_ranks_load_the_same_whatever_tokens_each_has() -> None:
    install_interpreter()
    first, second = run_ranks(_loading, 2)
    assert first == second and first[:2] * 3 == first, "once for all sizes"


def _nothing(group: Group) -> None:
    for ep_size in (1, group.world_size):
        empty = moe_routing((0,) * group.world_size, 2 * group.world_size, 2, 0, ep_size=ep_size)
        check_routing(group, empty, route(group, empty))
        check_routing(group, empty, route(group, empty, capacity=5))
    dropped = moe_routing((3,) * group.world_size, 4, 2, 0)
    dropped = MoeRouting(
        dropped.sizes, 4, 1, tuple(-torch.ones_like(ids) for ids in dropped.expert_ids), dropped.weights
    )
    found = route(group, dropped)
    check_routing(group, dropped, found)
    assert found.counts.tolist() == [0] * 4 and (found.rows.positions == -1).all()


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_tokens_and_no_choices(world_size: int) -> None:
    run_ranks(_nothing, world_size)


OUT_OF_RANGE = (-1, -2, -(2**31), 8, 9, 1000, 2**31 - 1)
TOO_WIDE = (2**31, 2**32, 2**32 + 3, -(2**32) + 1, 2**63 - 1, -(2**63))


def _out_of_range(group: Group) -> None:
    """A number that is no expert's is a choice that was dropped, also one that 32 bits are not enough for."""
    for dtype, wrong in ((torch.int32, OUT_OF_RANGE), (torch.int64, OUT_OF_RANGE + TOO_WIDE)):
        for ep_size in (1, 2):
            ids = torch.tensor([[3, number] for number in wrong], dtype=dtype)
            sizes = (len(wrong),) * group.world_size
            case = MoeRouting(sizes, 8, ep_size, (ids.long(),) * 2, (torch.rand(len(wrong), 2),) * 2)
            given = case.arguments(group.rank) | {"expert_ids": ids, "weights": case.weights[group.rank]}
            found = tileflux.route(**given, group=group)
            assert found.counts.sum() == (2 * len(wrong) if 3 in found.experts else 0)
            assert found.counts.tolist() == case.counts(group.rank)
            assert found.rows.positions.tolist()[1::2] == [-1] * (2 * len(wrong))


def test_numbers_of_no_expert_are_dropped() -> None:
    run_ranks(_out_of_range, 2)


def _capacity(group: Group, mirrored: bool) -> None:
    """What matters is the set with the most rows: ranks that have room come to the same end as those that have not."""
    case = moe_routing((9, 4), 4, 2, 1, ep_size=2)
    if mirrored:  # the set with the most is the other one
        case = dataclasses.replace(case, expert_ids=tuple(3 - ids for ids in case.expert_ids))
    counts = [len(case.rows(rank)) for rank in range(2)]
    most = max(counts)
    assert min(counts) < most
    for room in (most, most + 50):
        found = route(group, case, capacity=room)
        check_routing(group, case, found)
        assert found.capacity == room and not found.num_missing
        found.synchronize()
    for missing in (1, 3, most):
        tight = route(group, case, capacity=most - missing)
        message = (
            f"{missing} of {most} rows of a rank's experts did not fit: capacity={most - missing} should be at least"
        )
        for ask in (tight.ensure_fits, tight.synchronize):
            with pytest.raises(CapacityExceeded, match=message):
                ask()
        # What fits is in order, and nothing points behind it.
        kept = [row.slot for row in case.rows(group.rank)][: most - missing]
        assert tight.rows.slots[: len(kept)].tolist() == kept and int(tight.counts.sum()) == len(kept)
        assert int(tight.rows.positions.max()) == len(kept) - 1


@pytest.mark.parametrize("mirrored", [False, True])
def test_capacity(mirrored: bool) -> None:
    run_ranks(_capacity, 2, args=(mirrored,))


def _refused_by_op(group: Group) -> None:
    """An op does not run on rows that are not all there, and the group is still good for the next call."""
    case = moe_routing((4, 4), 4, 2, 1)
    x, weight = torch.ones(4, 3), torch.ones(4, 5, 3)
    tight = route(group, case, capacity=15)
    with pytest.raises(CapacityExceeded, match="1 of 16 rows of a rank's experts did not fit"):
        tileflux.moe_ag_gemm(x, weight, tight)
    assert torch.equal(tileflux.moe_ag_gemm(x, weight, route(group, case)), torch.full((16, 5), 3.0))


def test_ops_refuse_what_did_not_fit() -> None:
    run_ranks(_refused_by_op, 2)


def _many_experts(group: Group) -> None:
    for num_experts in (512, 1024):
        for ep_size in (1, 2):
            for kind in ("uniform", "skewed"):
                case = moe_routing((70, 33), num_experts, 8, num_experts, ep_size=ep_size, kind=kind)  # type: ignore[arg-type]
                check_routing(group, case, route(group, case, block_m=16))


def test_many_experts() -> None:
    run_ranks(_many_experts, 2)


def _refusals(group: Group) -> None:
    ids, weights = torch.zeros(4, 2, dtype=torch.long), torch.ones(4, 2)

    def call(ids: Any = ids, weights: Any = weights, **changes: Any) -> None:
        tileflux.route(ids, weights, **({"num_experts": 4, "group": group} | changes))

    for message, given in (
        ("route: group should be a tileflux.Group, not str", {"group": "world"}),
        ("route: expert_ids should be a tensor, not list", {"ids": [[0]]}),
        ("route: weights should be a tensor, not float", {"weights": 1.0}),
        ("route: expert_ids is on meta but the group is on cpu; move it there", {"ids": ids.to("meta")}),
        ("route: weights is on meta but the group is on cpu; move it there", {"weights": weights.to("meta")}),
        (r"route: expert_ids \(4, 2\) and weights \(4, 1\) should both be \[tokens, k\]", {"weights": weights[:, :1]}),
        (r"route: expert_ids \(4,\) and weights \(4,\) should both be", {"ids": ids[:, 0], "weights": weights[:, 0]}),
        ("expert_ids should be int32 or int64 and weights floating, not torch.float32", {"ids": weights}),
        ("expert_ids should be int32 or int64 and weights floating, not torch.int16", {"ids": ids.short()}),
        ("expert_ids should be int32 or int64 and weights floating, not torch.int64, torch.int64", {"weights": ids}),
        ("route: num_experts=0 should be from 1 to 1024", {"num_experts": 0}),
        ("route: num_experts=1025 should be from 1 to 1024", {"num_experts": 1025}),
        ("route: ep_size=0 should divide the 2 ranks and the 4 experts", {"ep_size": 0}),
        ("route: ep_size=-1 should divide the 2 ranks and the 4 experts", {"ep_size": -1}),
        ("route: ep_size=4 should divide the 2 ranks and the 4 experts", {"ep_size": 4}),
        ("route: ep_size=2 should divide the 2 ranks and the 3 experts", {"ep_size": 2, "num_experts": 3}),
        (rf"route: expert_ids has 4 rows but sizes\[{group.rank}\] is 3", {"sizes": [3, 3]}),
        (r"route: sizes=\[4\] has 1 entries for 2 ranks", {"sizes": [4]}),
        (r"route: sizes=\[4, -1\] has a negative entry", {"sizes": [4, -1]}),
        ("route: capacity=-1 should not be negative", {"capacity": -1}),
        (
            r"expert_ids \(4, 0\) and weights \(4, 0\) .* with one choice",
            {"ids": ids[:, :0], "weights": weights[:, :0]},
        ),
        *((f"route: block_m={n} should be a power of two from 16 to 1024", {"block_m": n}) for n in (0, 8, 24, 2048)),
    ):
        with pytest.raises(ValueError, match=message):
            call(**given)
    call()  # nobody has been left waiting


def test_refusals() -> None:
    run_ranks(_refusals, 2)
