"""Who multiplies which rows with which experts, worked out on the host: what baselines and exact results are made of.

Nothing here is asked of the library that is measured. Plain code gets its index for nothing, as ours gets its routing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tileflux.kernels.plan import split_rows
from tileflux.testing.contenders import product
from tileflux.testing.moe import moe_routing
from tileflux.testing.shapes import Mixture

__all__ = ["Assignment", "Picked", "exact_rows", "multiply_by_expert"]


@dataclass(frozen=True, eq=False)
class Picked:
    """Rows in the order of experts, each a token's choice."""

    slots: torch.Tensor
    """``[R]``, int64: token times k, and the number of the choice."""
    counts: tuple[int, ...]
    """Rows of each of the rank's experts."""
    ends: torch.Tensor
    """``[experts]``, int32: where each expert's rows end."""
    top_k: int

    @property
    def tokens(self) -> torch.Tensor:
        """``[R]``: the token of each row."""
        return self.slots.div(self.top_k, rounding_mode="floor")

    def positions(self, first: int, num_tokens: int) -> torch.Tensor:
        """``[num_tokens, k]``, int32: the row of each choice of these tokens, or -1."""
        places = torch.full((num_tokens * self.top_k,), -1, dtype=torch.int32, device=self.slots.device)
        rows = torch.arange(len(self.slots), dtype=torch.int32, device=self.slots.device)
        local = self.slots - first * self.top_k
        is_here = (local >= 0) & (local < len(places))
        places[local[is_here]] = rows[is_here]
        return places.view(num_tokens, self.top_k)


class Assignment:
    """What M tokens of ``world_size`` ranks chose, and who works on it. The same on every rank."""

    def __init__(self, num_tokens: int, world_size: int, mixture: Mixture, seed: int = 1) -> None:
        self.mixture, self.world_size = mixture, world_size
        self.sizes = split_rows(num_tokens, world_size)
        drawn = moe_routing(
            self.sizes, mixture.num_experts, mixture.top_k, seed,
            ep_size=mixture.ep_size, kind=mixture.routing,  # type: ignore[arg-type]
        )  # fmt: skip
        self._drawn = drawn
        self.expert_ids, self.weights = torch.cat(drawn.expert_ids), torch.cat(drawn.weights)
        """``[T, k]`` of all ranks, on the CPU."""
        self.sources = torch.repeat_interleave(torch.arange(world_size), torch.tensor(self.sizes))
        """``[T]``: the rank that each token is on."""

    def place(self, rank: int) -> slice:
        """The tokens of ``rank`` among all."""
        first = sum(self.sizes[:rank])
        return slice(first, first + self.sizes[rank])

    def experts(self, rank: int) -> range:
        """Those of a rank."""
        return self._drawn.experts(rank)

    def share(self, rank: int, width: int) -> int:
        """A rank's part of the width of its experts."""
        tp_size = self._drawn.tp_size
        return split_rows(width, tp_size)[rank % tp_size]

    def rows(self, rank: int, device: torch.device | str = "cpu", source: int | None = None) -> Picked:
        """The rows of ``rank``, by expert and then as their tokens arrive; of one ``source``'s tokens alone, if given.

        That is the order of ``route`` (docs/ops/routing.md).
        """
        experts, top_k = self.experts(rank), self.mixture.top_k
        local = self.expert_ids - experts.start
        is_here = (local >= 0) & (local < len(experts))
        if source is not None:
            is_here &= (self.sources == source)[:, None]
        keys = local * self.world_size + ((self.sources - rank) % self.world_size)[:, None]
        slots = is_here.flatten().nonzero().flatten()
        slots = slots[torch.argsort(keys.flatten()[slots], stable=True)]
        counts = torch.bincount(local.flatten()[slots], minlength=len(experts))
        ends = counts.cumsum(0).to(torch.int32)
        return Picked(slots.to(device), tuple(counts.tolist()), ends.to(device), top_k)


def multiply_by_expert(rows: torch.Tensor, weight: torch.Tensor, picked: Picked) -> torch.Tensor:
    """``rows [R, K]`` times their experts' ``weight [E, N, K]``, by torch.

    By ``torch._grouped_mm`` where that is made for such operands, else expert by expert, their counts being known.
    """
    if _is_for_grouped_mm(rows, weight):
        result: torch.Tensor = torch._grouped_mm(rows, weight.transpose(1, 2), offs=picked.ends)
        return result
    out = rows.new_empty((len(rows), weight.shape[1]))
    first = 0
    for expert, count in enumerate(picked.counts):
        if count:
            torch.mm(rows[first : first + count], weight[expert].t(), out=out[first : first + count])
        first += count
    return out


def _is_for_grouped_mm(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """bf16 on a GPU, in whole 16-byte units."""
    fits = rows.is_cuda and rows.dtype == torch.bfloat16 and len(rows) > 0
    return fits and hasattr(torch, "_grouped_mm") and weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0


def exact_rows(rows: torch.Tensor, weight: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
    """The same in fp32."""
    parts = [product(part, each) for part, each in zip(rows.split(list(counts)), weight, strict=True)]
    return torch.cat(parts)
