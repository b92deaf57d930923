"""What ``tileflux bench ep`` compares: tokens to their experts' ranks and back, by collectives and by ours.

What experts do in between is nothing here: the rows that go back are there beforehand. Index work is in everybody's
time, and the same for all: on a GPU our kernels', whoever moves the rows. Baselines know besides, for nothing, how many
rows go from whom to whom, which the host would have to ask the device for, and in which order they send them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from tileflux import ops
from tileflux.ops import Dispatched
from tileflux.ops._ep import Choices
from tileflux.symm.group import Group
from tileflux.testing.choice_sum import weighted_sum
from tileflux.testing.contenders import Contender, Shape, Suite, draw
from tileflux.testing.moe_rows import Assignment
from tileflux.testing.numerics import assert_close
from tileflux.testing.shapes import Mixture

__all__ = ["ep_suite"]

Exchange = Callable[[torch.Tensor, torch.Tensor, Sequence[int], Sequence[int]], object]
"""Of rows: what comes, what goes, how many of each from and to every rank."""


def ep_suite(group: Group, shape: Shape, mixture: Mixture, dtype: str, strategies: tuple[str, ...]) -> Suite:
    """``ep_dispatch`` and ``ep_combine``, one after the other; M tokens of all ranks, K wide."""
    task = _RoundTrip(group, shape[0], shape[2], mixture, getattr(torch, dtype))
    contenders = [Contender("sequential", partial(task.by_collectives, task.all_to_all), task.check_collectives)]
    suite = Suite({"route": task.index}, contenders, task.poison, "fused")
    if group.transport == "local" or not dist.is_initialized():
        suite.skipped["torch"] = "ranks without a process group have no all_to_all_single"
    else:
        contenders.append(Contender("torch", partial(task.by_collectives, _by_torch), task.check_collectives))
    for strategy in strategies:
        contenders.append(Contender(f"ours {strategy}", partial(task.ours, strategy), task.check))
    return suite


def _by_torch(come: torch.Tensor, go: torch.Tensor, num_come: Sequence[int], num_go: Sequence[int]) -> None:
    """``all_to_all_single``, of bytes: not every backend knows every type."""
    row_bytes = go.shape[1] * go.element_size()
    come_bytes, go_bytes = ([count * row_bytes for count in counts] for counts in (num_come, num_go))
    dist.all_to_all_single(come.view(-1).view(torch.uint8), go.view(-1).view(torch.uint8), come_bytes, go_bytes)


class _RoundTrip:
    """One rank's part of it."""

    def __init__(self, group: Group, num_tokens: int, width: int, mixture: Mixture, dtype: torch.dtype) -> None:
        self.group, self.num_experts = group, mixture.num_experts
        device, rank, ranks = group.device, group.rank, range(group.world_size)
        drawn = self.assignment = Assignment(num_tokens, len(ranks), dataclasses.replace(mixture, ep_size=len(ranks)))
        self.ids, self.weights = (each[drawn.place(rank)].to(device) for each in (drawn.expert_ids, drawn.weights))
        everything = torch.cat([draw(source, (rows, width), dtype, device) for source, rows in enumerate(drawn.sizes)])
        self.x = everything[drawn.place(rank)].clone()
        self.choices = Choices(group, mixture.num_experts, mixture.top_k, num_tokens, is_scaled=False)

        # ``goes[t, d]``: whether token t of all ranks' goes to rank d.
        owners = drawn.expert_ids.div(mixture.num_experts // len(ranks), rounding_mode="floor")
        goes = torch.stack([(owners == peer).any(1) for peer in ranks], dim=1)
        received = torch.stack([part.sum(0) for part in goes.split(list(drawn.sizes))])
        self._received = received.to(torch.int32).to(device)
        self._num_go, self._num_come = received[rank].tolist(), received[:, rank].tolist()
        own = goes[drawn.place(rank)]
        self._order = own.t().nonzero()[:, 1].to(device)
        places = own.t().reshape(-1).cumsum(0).view(len(ranks), -1).t() - 1
        self._places = torch.where(own, places, -1).to(torch.int32).contiguous().to(device)
        self._ones = torch.ones(self._places.shape, device=device)
        self.expected_tokens = everything[goes[:, rank].nonzero()[:, 0].to(device)]
        self._draw_results(everything)
        self._make_room(dtype)
        self._begin()

    def _draw_results(self, everything: torch.Tensor) -> None:
        """What experts have made of this rank's rows, sorted as ``ep_dispatch`` sorts; and what is to come out."""
        drawn, device, top_k = self.assignment, self.group.device, self.choices.top_k
        experts = drawn.experts(self.group.rank)
        local = (drawn.expert_ids - experts.start).flatten()
        slots = ((local >= 0) & (local < len(experts))).nonzero().flatten()
        slots = slots[torch.argsort(local[slots], stable=True)]
        self.expected_counts = torch.bincount(local[slots], minlength=len(experts)).to(torch.int32)
        tokens = slots.div(top_k, rounding_mode="floor").to(device)
        factors = _factor(drawn.expert_ids.flatten()[slots]).to(device)
        self.rows = everything.new_full((len(drawn.expert_ids) * top_k, everything.shape[1]), torch.nan)
        self.rows[: len(slots)] = everything[tokens] * factors[:, None].to(everything.dtype)
        self.expected = torch.zeros(self.x.shape, device=device)
        for choice in range(top_k):
            made = self.x * _factor(self.ids[:, choice])[:, None].to(self.x.dtype)
            share = torch.where(self.ids[:, choice] >= 0, self.weights[:, choice].float(), 0.0)
            self.expected += share[:, None] * made.float()

    def _make_room(self, dtype: torch.dtype) -> None:
        device, width = self.group.device, self.x.shape[1]
        num_go, num_come, words = sum(self._num_go), sum(self._num_come), 2 * self.choices.top_k
        self._go, self._back = (torch.empty((num_go, width), dtype=dtype, device=device) for _ in range(2))
        self._come, self._sums = (torch.empty((num_come, width), dtype=dtype, device=device) for _ in range(2))
        self._notes = torch.empty((num_go, words), dtype=torch.int32, device=device)
        # As long as ours, with nobody's behind the last.
        self._come_notes = torch.full((self.choices.capacity, words), -1, dtype=torch.int32, device=device)
        self.out = torch.empty_like(self.x)
        self._counts = torch.zeros(len(self.expected_counts), dtype=torch.int32, device=device)
        self._found: Dispatched | None = None

    def _begin(self) -> None:
        """All that is used between collectives runs once before the first: no kernel loads while another waits."""
        self.choices.load(self.x, self.ids, self.weights, self.assignment.sizes, "fused")
        self.index()
        self._pick(self.choices.address(self.ids, self.weights, None)[1])
        self._sum(*self.choices.arrive(self._come_notes, self._received))
        weighted_sum(self._back, self._places, self._ones, self.out)
        self.group.synchronize()
        self.group.barrier()

    def index(self) -> None:
        """Who goes where, and who has come."""
        self.choices.address(self.ids, self.weights, None)
        self.choices.arrive(self._come_notes, self._received)

    def all_to_all(self, come: torch.Tensor, go: torch.Tensor, num_come: Sequence[int], num_go: Sequence[int]) -> None:
        """Our own collective."""
        ops.all_to_all(go, group=self.group, input_sizes=num_go, output_sizes=num_come, out=come)

    def _pick(self, notes: torch.Tensor) -> None:
        torch.index_select(self.x, 0, self._order, out=self._go)
        torch.index_select(notes, 0, self._order, out=self._notes)

    def _sum(self, weights: torch.Tensor, *others: torch.Tensor) -> None:
        _, self._counts, _, positions, _ = others
        weighted_sum(self.rows, positions[: len(self._sums)], weights[: len(self._sums)], self._sums)

    def by_collectives(self, exchange: Exchange) -> None:
        """Pick, exchange, sort; add up by token, exchange, add up by rank."""
        _, notes = self.choices.address(self.ids, self.weights, None)
        self._pick(notes)
        exchange(self._come, self._go, self._num_come, self._num_go)
        exchange(self._come_notes[: len(self._come)], self._notes, self._num_come, self._num_go)
        self._sum(*self.choices.arrive(self._come_notes, self._received))
        exchange(self._back, self._sums, self._num_go, self._num_come)
        weighted_sum(self._back, self._places, self._ones, self.out)

    def ours(self, strategy: str) -> None:
        self._found = ops.ep_dispatch(
            self.x, self.ids, self.weights, num_experts=self.num_experts, group=self.group,
            sizes=self.assignment.sizes, strategy=strategy,
        )  # fmt: skip
        ops.ep_combine(self.rows, self._found, strategy=strategy, out=self.out)

    def poison(self) -> None:
        for tensor in (self.out, self._come, self._sums, self._back):
            tensor.fill_(torch.nan)
        self._come_notes.fill_(-1)
        self._counts.fill_(-1)
        self._found = None

    def check(self) -> None:
        assert self._found is not None, "nothing was sent"
        self._check(self._found.tokens[: len(self.expected_tokens)], self._found.counts)

    def check_collectives(self) -> None:
        self._check(self._come, self._counts)

    def _check(self, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        what = f"rank {self.group.rank}"
        assert torch.equal(tokens, self.expected_tokens), f"{what}: tokens are not those that were sent"
        assert torch.equal(counts.cpu(), self.expected_counts), f"{what}: experts' rows are not as many as were chosen"
        terms = self.choices.top_k * self.group.world_size
        assert_close(self.out, self.expected, reduction=terms, what=what)


def _factor(experts: torch.Tensor) -> torch.Tensor:
    """What an expert multiplies with: exact in every type, and not the same for all."""
    return torch.exp2((experts % 3).float())
