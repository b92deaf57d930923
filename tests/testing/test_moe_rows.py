"""Who multiplies which rows: as the oracle of the ops has it, and as route does."""

from __future__ import annotations

import pytest
import torch

from tileflux.symm.group import Group
from tileflux.testing import assert_close, run_ranks
from tileflux.testing import moe_rows as module
from tileflux.testing.contenders import draw
from tileflux.testing.moe import moe_routing
from tileflux.testing.moe_contenders import router
from tileflux.testing.moe_rows import Assignment, exact_rows, multiply_by_expert
from tileflux.testing.shapes import Mixture

WORLDS = [(1, 1), (3, 1), (4, 2), (4, 4)]
CPU = torch.device("cpu")


@pytest.mark.parametrize(("world_size", "ep_size"), WORLDS)
@pytest.mark.parametrize("kind", ["uniform", "skewed"])
def test_rows_are_those_of_the_oracle(world_size: int, ep_size: int, kind: str) -> None:
    """With 41 tokens ranks have different numbers of them."""
    mixture = Mixture(8, 3, ep_size, kind)
    found = Assignment(41, world_size, mixture, seed=5)
    oracle = moe_routing(found.sizes, 8, 3, 5, ep_size=ep_size, kind=kind)  # type: ignore[arg-type]
    assert sum(found.sizes) == 41 and found.expert_ids.shape == (41, 3)
    for rank in range(world_size):
        rows = oracle.rows(rank)
        picked = found.rows(rank)
        assert picked.slots.tolist() == [row.slot for row in rows]
        assert list(picked.counts) == oracle.counts(rank) == picked.ends.diff(prepend=torch.tensor([0])).tolist()
        assert picked.tokens.tolist() == [row.slot // 3 for row in rows] and picked.ends.dtype == torch.int32
        places = {row.slot: number for number, row in enumerate(rows)}
        assert picked.positions(0, 41).flatten().tolist() == [places.get(slot, -1) for slot in range(3 * 41)]
        for source in range(world_size):
            own = [row for row in rows if row.stage == (source - rank) % world_size]
            shard = found.rows(rank, source=source)
            assert shard.slots.tolist() == [row.slot for row in own]
            assert shard.counts == tuple(
                sum(row.expert == expert for row in own) for expert in found.experts(rank)
            )  # fmt: skip
            places = {row.slot: number for number, row in enumerate(own)}
            place = found.place(source)
            wanted = [places.get(slot, -1) for slot in range(3 * place.start, 3 * place.stop)]
            assert shard.positions(place.start, found.sizes[source]).flatten().tolist() == wanted


@pytest.mark.parametrize(("world_size", "ep_size"), WORLDS)
def test_ranks_that_share_experts_divide_their_width(world_size: int, ep_size: int) -> None:
    found = Assignment(8, world_size, Mixture(4, 1, ep_size))
    tp_size = world_size // ep_size
    for first in range(0, world_size, tp_size):
        shares = [found.share(rank, 13) for rank in range(first, first + tp_size)]
        assert sum(shares) == 13 and max(shares) - min(shares) <= 1


def _as_routed(group: Group, ep_size: int) -> None:
    found = Assignment(30, group.world_size, Mixture(8, 2, ep_size))
    routing = router(group, found)()
    picked = found.rows(group.rank)
    assert routing.rows.slots[: len(picked.slots)].tolist() == picked.slots.tolist()
    assert routing.counts.tolist() == list(picked.counts) and routing.sizes == found.sizes
    assert torch.equal(routing.weights, found.weights)


@pytest.mark.parametrize("ep_size", [1, 2])
def test_route_comes_to_the_same_order(ep_size: int) -> None:
    run_ranks(_as_routed, 2, args=(ep_size,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_by_expert(dtype: torch.dtype) -> None:
    picked = Assignment(20, 1, Mixture(6, 2, 1, "skewed")).rows(0)
    rows, weight = draw(1, (40, 16), dtype, CPU), draw(2, (6, 9, 16), dtype, CPU)
    experts = [expert for expert, count in enumerate(picked.counts) for _ in range(count)]
    wanted = torch.stack([weight[e].double() @ row.double() for e, row in zip(experts, rows, strict=True)])
    assert_close(exact_rows(rows, weight, picked.counts), wanted, reduction=16)
    assert_close(multiply_by_expert(rows, weight, picked), wanted, reduction=16)


def test_torchs_grouped_product_is_given_what_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU it runs too, slowly; the same call is made on a GPU."""
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("this torch has none")
    picked = Assignment(20, 1, Mixture(4, 2)).rows(0)
    rows, weight = draw(1, (40, 16), torch.bfloat16, CPU), draw(2, (4, 24, 16), torch.bfloat16, CPU)
    asked = []
    right = torch._grouped_mm
    monkeypatch.setattr(module, "_is_for_grouped_mm", lambda rows, weight: True)
    monkeypatch.setattr(torch, "_grouped_mm", lambda *given, **named: asked.append(named) or right(*given, **named))
    assert_close(multiply_by_expert(rows, weight, picked), exact_rows(rows, weight, picked.counts), reduction=16)
    assert [list(each) for each in asked] == [["offs"]] and asked[0]["offs"] is picked.ends
    monkeypatch.undo()
    assert not module._is_for_grouped_mm(rows, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 63])
def test_products_by_expert_on_a_gpu(dtype: torch.dtype, width: int) -> None:
    device = torch.device("cuda", 0)
    picked = Assignment(200, 1, Mixture(6, 2, 1, "skewed")).rows(0, device)
    rows, weight = draw(1, (400, width), dtype, device), draw(2, (6, 40, width), dtype, device)
    found = multiply_by_expert(rows, weight, picked)
    assert_close(found, exact_rows(rows, weight, picked.counts), reduction=width)
    assert module._is_for_grouped_mm(rows, weight) == (dtype == torch.bfloat16 and width == 64)
