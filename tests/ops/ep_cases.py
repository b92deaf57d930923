"""What the tests of ``ep_dispatch`` and ``ep_combine`` share: problems with everything drawn, and checked calls.

What is right is worked out token by token, in Python.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

import tileflux
from tileflux import CommConfig
from tileflux.ops import Dispatched
from tileflux.symm.group import Group
from tileflux.testing.moe import ROUTING_KINDS, MoeRouting, moe_routing

from .dense_cases import drawn_layout

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SCALED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
NARROW = CommConfig(num_lanes=2, slot_bytes=256, min_lane_bytes=64)
"""Several lanes, several messages, and rows that are longer than one."""


@dataclass(frozen=True, eq=False)
class EpCase:
    """One dispatch as all ranks see it, on the CPU."""

    routing: MoeRouting
    xs: tuple[torch.Tensor, ...]
    scales: tuple[torch.Tensor | None, ...]

    def arguments(self, rank: int, device: torch.device | str = "cpu") -> dict[str, Any]:
        """What ``rank`` passes to ``ep_dispatch``, by name, less its group."""
        given = self.routing.arguments(rank, device)
        del given["ep_size"]
        scale = self.scales[rank]
        return given | {"x": self.xs[rank].to(device), "scale_x": None if scale is None else scale.to(device)}

    def tokens(self, rank: int) -> list[tuple[int, int]]:
        """(rank, token) of those that go to ``rank``, in order."""
        experts, found = self.routing.experts(rank), []
        for source, ids in enumerate(self.routing.expert_ids):
            for token, chosen in enumerate(ids.tolist()):
                if any(expert in experts for expert in chosen):
                    found.append((source, token))
        return found

    @property
    def most(self) -> int:
        """Tokens that come to the rank with the most."""
        return max(len(self.tokens(rank)) for rank in range(self.routing.world_size))

    def sorted_rows(self, rank: int) -> list[tuple[int, int, int]]:
        """(expert, received token, choice) of each row on ``rank``, in order."""
        experts = self.routing.experts(rank)
        rows = []
        for number, (source, token) in enumerate(self.tokens(rank)):
            for choice, expert in enumerate(self.routing.expert_ids[source][token].tolist()):
                if expert in experts:
                    rows.append((expert, number, choice))
        return sorted(rows)

    def combined(self, rank: int, rows: list[torch.Tensor]) -> torch.Tensor:
        """What ``ep_combine`` gives back on ``rank`` for the sorted ``rows`` of all ranks, rounded where it rounds."""
        size, dtype, width = self.routing.sizes[rank], rows[0].dtype, rows[0].shape[1]
        total = torch.zeros(size, width)
        for source in range(self.routing.world_size):
            here, tokens, sums = self.sorted_rows(source), self.tokens(source), torch.zeros(size, width)
            in_order = sorted((number, choice, place) for place, (_, number, choice) in enumerate(here))
            for number, choice, place in in_order:
                owner, token = tokens[number]
                if owner == rank:
                    sums[token] += self.routing.weights[rank][token, choice] * rows[source][place].float()
            total += sums.to(dtype).float()
        return total.to(dtype)


def drawn_case(
    world_size: int, dtype: torch.dtype, draws: random.Random, tokens: int = 24, kind: Any = None, top_k: int = 0
) -> EpCase:
    """A problem of this type, with everything else drawn. All ranks draw alike."""
    sizes = [draws.choice((0, 1, tokens // 2, tokens)) for _ in range(world_size)]
    num_experts, top_k = world_size * draws.randrange(1, 5), top_k or draws.choice((1, 2, 3, 5, 8))
    kind = kind or draws.choice(ROUTING_KINDS)
    routing = moe_routing(sizes, num_experts, top_k, draws.randrange(2**32), ep_size=world_size, kind=kind)
    numbers = torch.Generator().manual_seed(draws.randrange(2**32))
    hidden = draws.choice((1, 5, 16, 33, 40, 130))
    xs = tuple((8 * torch.randn(size, hidden, generator=numbers)).to(dtype) for size in sizes)
    scales: tuple[torch.Tensor | None, ...] = (None,) * world_size
    if dtype in SCALED:
        one = draws.random() < 0.3
        scales = tuple(torch.rand(() if one else (size,), generator=numbers) for size in sizes)
    return EpCase(routing, xs, scales)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """To be compared whatever they mean."""
    return tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else tensor.new_empty(0).byte()


def dispatch(group: Group, case: EpCase, draws: random.Random | None = None, **options: Any) -> Dispatched:
    """One call, with tokens that may lie apart."""
    given = case.arguments(group.rank)
    if draws is not None and given["x"].dtype not in SCALED:
        given["x"] = drawn_layout(given["x"], draws)
    return tileflux.ep_dispatch(**given, group=group, **options)


def check_dispatched(group: Group, case: EpCase, found: Dispatched) -> None:
    """Everything of it against what is right, bit by bit."""
    rank, routing = group.rank, case.routing
    tokens, rows, top_k = case.tokens(rank), case.sorted_rows(rank), routing.top_k
    what = f"rank {rank}, {case.xs[0].dtype} {tuple(case.xs[rank].shape)}, {routing.sizes}, {routing.expert_ids}"
    hidden = case.xs[0].shape[1]
    assert found.tokens.shape == (found.capacity, hidden) and found.tokens.dtype == case.xs[0].dtype
    assert found.experts == routing.experts(rank) and found.top_k == top_k
    for number, (source, token) in enumerate(tokens):
        assert torch.equal(bits(found.tokens[number]), bits(case.xs[source][token])), f"{what}: token {number}"
        scale = case.scales[source]
        if scale is not None:
            assert found.scales is not None and found.scales[number] == scale.expand(routing.sizes[source])[token], what
        for choice, expert in enumerate(routing.expert_ids[source][token].tolist()):
            right = routing.weights[source][token, choice] if expert in found.experts else 0.0
            assert found.weights[number, choice] == right, what
    assert (found.scales is None) == (case.scales[0] is None)
    assert found.counts.tolist() == routing.counts(rank), what
    assert found.row_tokens[: len(rows)].tolist() == [number for _, number, _ in rows], what
    places = {(number, choice): place for place, (_, number, choice) in enumerate(rows)}
    right_positions = [[places.get((number, j), -1) for j in range(top_k)] for number in range(found.capacity)]
    assert found.positions.tolist() == right_positions, what
    order = {token: number for number, token in enumerate(tokens)}
    everybody = [(source, token) for source, size in enumerate(routing.sizes) for token in range(size)]
    assert found.arrived.tolist() == [order.get(token, -1) for token in everybody], what
    sent = [[0] for _ in routing.sizes]
    for peer, line in enumerate(sent):
        goes = {token for source, token in case.tokens(peer) if source == rank}
        for token in range(routing.sizes[rank]):
            line.append(line[-1] + (token in goes))
    assert found.sent.tolist() == sent, what
    found.ensure_fits()
    found.synchronize()


def drawn_rows(case: EpCase, dtype: torch.dtype, seed: int, width: int) -> list[torch.Tensor]:
    """Sorted rows of all ranks: what experts might have made of them."""
    numbers = torch.Generator().manual_seed(seed)
    ranks = range(case.routing.world_size)
    return [torch.randn(len(case.sorted_rows(rank)), width, generator=numbers).to(dtype) for rank in ranks]


def with_room(rows: torch.Tensor, room: int) -> torch.Tensor:
    """Behind the last row, what nobody may look at."""
    return torch.cat((rows, rows.new_full((room - len(rows), rows.shape[1]), torch.nan)))
