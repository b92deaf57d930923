"""What virtual ranks on a GPU load before the exchange of tokens: all that is used later, and the same on all ranks."""

from __future__ import annotations

import itertools
import random
from typing import Any
from unittest import mock

import torch

from tileflux.kernels.choices import WIDTH
from tileflux.ops import _ep
from tileflux.ops._call import REDUCIBLE
from tileflux.symm.group import Group
from tileflux.testing import run_ranks

from .ep_cases import FLOATS, SCALED, check_dispatched, dispatch, drawn_case


def _loading(group: Group) -> list[object]:
    """What virtual ranks on a GPU run beforehand, run here; by whichever comes first, so all must come to the same."""
    keys: list[object] = []

    def load(device: torch.device, key: object, launch: Any, group: Group | None = None) -> None:
        keys.append(key)
        launch()

    with (
        mock.patch.object(_ep, "load_once", load),
        mock.patch.object(Group, "stream", property(lambda group: "its own")),
    ):
        draws = random.Random(9)
        for dtype in (*FLOATS, *SCALED):
            case = drawn_case(group.world_size, dtype, draws)
            for strategy in ("fused", "sequential"):
                room = draws.choice((None, case.most, case.most + 1))
                check_dispatched(group, case, dispatch(group, case, capacity=room, strategy=strategy))
    return keys


def test_what_virtual_ranks_load_is_the_same_on_all() -> None:
    first, *others = run_ranks(_loading, 3)
    assert len(first) == 3 * len((*FLOATS, *SCALED)) and all(other == first for other in others)


def _summing(group: Group) -> set[tuple[torch.dtype, bool]]:
    """Of which rows sums are made when virtual ranks load: their type, and whether they are whole units."""
    summed: set[tuple[torch.dtype, bool]] = set()
    right = _ep.sum_choices

    def sum_choices(rows: torch.Tensor, *others: Any) -> torch.Tensor:
        summed.add((rows.dtype, rows.shape[1] % WIDTH == 0))
        return right(rows, *others)

    with (
        mock.patch.object(_ep, "load_once", lambda device, key, launch, group=None: launch()),
        mock.patch.object(_ep, "sum_choices", sum_choices),
        mock.patch.object(Group, "stream", property(lambda group: "its own")),
    ):
        dispatch(group, drawn_case(group.world_size, torch.bfloat16, random.Random(3)), strategy="sequential")
    return summed


def test_virtual_ranks_load_what_sums_rows_of_any_width() -> None:
    """The way back would load it while a peer waits for what this rank launches next."""
    for summed in run_ranks(_summing, 2):
        assert summed == set(itertools.product(REDUCIBLE, (True, False)))
