"""Rows by expert against plain Python: every choice once and in order, every row in one tile, every tile once."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tileflux.config import GROUPS
from tileflux.kernels import groups as groups_module
from tileflux.kernels.groups import (
    Groups,
    SortedRows,
    cut_tiles,
    max_tiles,
    sort_rows,
    sources_of,
    sum_choices,
)

CPU = torch.device("cpu")
BLOCKS = st.sampled_from([1, 2, 3, 16, 64, 128])


class Row(NamedTuple):
    """Compared as tuples: the order that rows should have."""

    expert: int
    stage: int
    slot: int


class Tile(NamedTuple):
    """In the order of ``GroupsLayout``."""

    expert: int
    first: int
    end: int
    stage: int


@dataclass(frozen=True)
class Choices:
    """What tokens of all ranks have chosen, and what one rank has to do with it."""

    ids: list[list[int]]
    sizes: tuple[int, ...]
    rank: int
    experts: range
    capacity: int
    top_k: int

    @property
    def num_slots(self) -> int:
        return len(self.ids) * self.top_k

    def stages(self) -> list[int]:
        """Of every token, how many ranks come before its own: this rank first, then the next one, around."""
        turn = [*range(self.rank, len(self.sizes)), *range(self.rank)]
        return [turn.index(source) for source, size in enumerate(self.sizes) for _ in range(size)]

    def all_rows(self) -> list[Row]:
        """Also those that there is no room for."""
        stages = self.stages()
        return sorted(
            Row(expert - self.experts.start, stages[token], token * self.top_k + choice)
            for token, chosen in enumerate(self.ids)
            for choice, expert in enumerate(chosen)
            if expert in self.experts
        )

    def rows(self) -> list[Row]:
        return self.all_rows()[: self.capacity]

    def sort(self) -> SortedRows:
        """What is tested."""
        ids = torch.tensor(self.ids, dtype=torch.int64).reshape(-1, self.top_k)
        stages = sources_of(self.sizes, self.rank, CPU)
        return sort_rows(ids, stages, self.experts, len(self.sizes), self.capacity)

    def cut(self, block_m: int, picks: bool = False) -> Groups:
        """What is tested."""
        weights = torch.rand(len(self.ids), self.top_k) if picks else None
        return cut_tiles(self.sort(), self.capacity, block_m, weights)


@st.composite
def drawn_choices(draw: st.DrawFn) -> Choices:
    """Few experts or many, ranks without tokens, choices that were dropped, crowds, and too little room."""
    sizes = tuple(draw(st.lists(st.sampled_from([0, 0, 1, 2, 7, 20]), min_size=1, max_size=5)))
    num_experts, top_k = draw(st.sampled_from([1, 2, 5, 8, 40])), draw(st.integers(1, 4))
    first = draw(st.integers(0, num_experts - 1))
    experts = range(first, draw(st.integers(first + 1, num_experts)))
    crowded = draw(st.lists(st.integers(-1, num_experts - 1), max_size=3))
    draws = random.Random(draw(st.integers(0, 2**32)))
    pool = crowded or range(-1, num_experts)
    ids = [[draws.choice(pool) for _ in range(top_k)] for _ in range(sum(sizes))]
    room = len(ids) * top_k
    capacity = draw(st.just(room) | st.just(room + 5) | st.just(0) | st.integers(0, room))
    return Choices(ids, sizes, draw(st.integers(0, len(sizes) - 1)), experts, capacity, top_k)


def check_rows(choices: Choices) -> None:
    rows, right = choices.sort(), choices.rows()
    num_experts, num_stages = len(choices.experts), len(choices.sizes)
    assert (rows.num_experts, rows.num_stages) == (num_experts, num_stages)
    assert {tensor.dtype for tensor in (rows.slots, rows.positions, rows.starts)} == {torch.int32}
    assert len(rows.slots) == choices.capacity
    assert rows.slots[: len(right)].tolist() == [row.slot for row in right]
    assert all(0 <= slot < max(1, choices.num_slots) for slot in rows.slots.tolist()), "kernels read by these numbers"
    place = {row.slot: number for number, row in enumerate(right)}
    assert rows.positions.tolist() == [place.get(slot, -1) for slot in range(choices.num_slots)]
    sizes = [[0] * num_stages for _ in range(num_experts)]
    for row in right:
        sizes[row.expert][row.stage] += 1
    starts = [0]
    for of_expert in sizes:
        for size in of_expert:
            starts.append(starts[-1] + size)
    assert rows.starts.tolist() == starts
    assert rows.offsets.tolist() == starts[::num_stages]


def listed(groups: Groups) -> list[Tile]:
    """The tiles that a kernel would compute; checks what surrounds them."""
    words = groups.index.tolist()
    assert groups.index.dtype == torch.int32 and groups.index.is_contiguous()
    num_tiles = words[GROUPS.num_tiles]
    assert 0 <= num_tiles <= groups.max_tiles
    end_of_list = GROUPS.tiles + GROUPS.tile_words * groups.max_tiles
    assert words[GROUPS.rows] == (end_of_list if groups.picks_rows else 0)
    assert groups.picks_rows or len(words) == end_of_list
    begins = range(GROUPS.tiles, GROUPS.tiles + GROUPS.tile_words * num_tiles, GROUPS.tile_words)
    places = (GROUPS.expert, GROUPS.first, GROUPS.end, GROUPS.stage)
    return [Tile(*(words[begin + place] for place in places)) for begin in begins]


def check_tiles(choices: Choices, groups: Groups, block_m: int) -> None:
    rows, tiles = choices.rows(), listed(groups)
    assert (groups.num_experts, groups.block_m) == (len(choices.experts), block_m)
    assert groups.max_tiles == max_tiles(choices.capacity, len(choices.experts), block_m)
    num_times = [0] * len(rows)
    for tile in tiles:
        covered = range(tile.first, min(tile.first + block_m, tile.end))
        assert len(covered) > 0
        for number in covered:
            num_times[number] += 1
        assert {rows[number].expert for number in covered} == {tile.expert}
        assert rows[tile.end - 1].expert == tile.expert
        assert tile.end == len(rows) or rows[tile.end].expert > tile.expert, "the end is that of the expert's rows"
        assert tile.stage == rows[covered[-1]].stage == max(rows[number].stage for number in covered)
    assert num_times == [1] * len(rows)
    assert tiles == sorted(tiles, key=lambda tile: (tile.stage, tile.expert, tile.first))
    counts = [sum(row.expert == expert for row in rows) for expert in {row.expert for row in rows}]
    assert len(tiles) == sum(-(-count // block_m) for count in counts), "no more than each expert needs"


@given(st.lists(st.sampled_from([0, 0, 1, 3, 10]), min_size=1, max_size=8), st.integers(0, 7))
def test_own_tokens_arrive_first_then_those_of_the_next_rank(sizes: list[int], rank: int) -> None:
    rank %= len(sizes)
    stages = sources_of(tuple(sizes), rank, CPU)
    assert stages.dtype == torch.int32
    assert stages.tolist() == Choices([], tuple(sizes), rank, range(1), 0, 1).stages()


def test_stages_are_asked_of_the_host_once() -> None:
    assert sources_of((3, 1, 4), 1, CPU) is sources_of((3, 1, 4), 1, CPU)
    assert sources_of((3, 1, 4), 1, CPU).tolist() == [2, 2, 2, 0, 1, 1, 1, 1]
    assert sources_of((3, 1, 4), 2, CPU).tolist() == [1, 1, 1, 2, 0, 0, 0, 0]


def test_a_graph_keeps_the_stages_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many other sizes there are between its capture and its replay."""
    kept = torch.zeros(3)
    monkeypatch.setattr(groups_module, "_sources_of", lambda *_: kept)
    monkeypatch.setattr(groups_module, "_read_by_graphs", {})
    for is_capturing in (False, True, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=is_capturing: now)
        for device in (CPU, torch.device("cuda", 0)):
            assert sources_of((1, 2), 0, device) is kept
        assert groups_module._read_by_graphs == ({((1, 2), 0, torch.device("cuda", 0)): kept} if is_capturing else {})


@settings(deadline=None)
@given(drawn_choices())
def test_every_choice_of_a_local_expert_is_one_row(choices: Choices) -> None:
    check_rows(choices)


@settings(deadline=None)
@given(drawn_choices(), BLOCKS)
def test_every_row_is_in_one_tile(choices: Choices, block_m: int) -> None:
    check_tiles(choices, choices.cut(block_m), block_m)


@settings(deadline=None)
@given(drawn_choices(), BLOCKS)
def test_picked_rows_lie_behind_the_tiles(choices: Choices, block_m: int) -> None:
    weights, rows = torch.rand(len(choices.ids), choices.top_k), choices.sort()
    groups = cut_tiles(rows, choices.capacity, block_m, weights)
    check_tiles(choices, groups, block_m)
    tokens = [row.slot // choices.top_k for row in choices.rows()]
    assert groups.tokens.shape == (choices.capacity,) and groups.tokens[: len(tokens)].tolist() == tokens
    assert torch.equal(groups.positions, rows.positions.view(weights.shape)) and torch.equal(groups.weights, weights)
    index, num_slots = groups.index, weights.numel()
    assert index[GROUPS.top_k] == choices.top_k
    # As a kernel finds them.
    for name, wanted in (
        ("rows", groups.tokens),
        ("positions", rows.positions),
        ("weights", weights.view(torch.int32)),
    ):
        place = int(index[getattr(GROUPS, name)])
        assert torch.equal(index[place : place + wanted.numel()], wanted.flatten())
    assert len(index) == int(index[GROUPS.weights]) + num_slots


@settings(deadline=None)
@given(drawn_choices(), BLOCKS, st.booleans())
def test_every_tile_is_of_one_stage(choices: Choices, block_m: int, picks: bool) -> None:
    groups = choices.cut(block_m, picks)
    before, together = groups.index.clone(), []
    for stage in range(len(choices.sizes)):
        part = groups.of_stages(stage, stage + 1)
        assert dataclasses.replace(part, index=groups.index).__dict__ == groups.__dict__
        assert len(part.index) == len(groups.index)
        own = listed(part)
        assert own == [tile for tile in listed(groups) if tile.stage == stage]
        behind = GROUPS.tiles + GROUPS.tile_words * groups.max_tiles
        assert torch.equal(part.index[behind:], groups.index[behind:])
        together += own
    assert together == listed(groups)
    assert torch.equal(groups.index, before)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(0, 20), st.integers(1, 40))
def test_the_list_has_room_however_rows_are_shared_out(counts: list[int], num_spare: int, block_m: int) -> None:
    capacity = sum(counts) + num_spare
    room = max_tiles(capacity, len(counts), block_m)
    assert sum(-(-count // block_m) for count in counts) <= room
    assert room <= len(counts) + -(-capacity // block_m), "all of it is sorted in every call"


@pytest.mark.parametrize(("num_experts", "capacity", "block_m"), [(4, 4, 1), (7, 7, 16), (1, 33, 16), (9, 2, 8)])
def test_the_list_has_room_in_the_worst_case(num_experts: int, capacity: int, block_m: int) -> None:
    """One row for every expert, and the rest for one of them."""
    counts = [1] * min(num_experts, capacity)
    counts[0] += capacity - len(counts)
    assert sum(-(-count // block_m) for count in counts) <= max_tiles(capacity, num_experts, block_m)
    assert max_tiles(0, num_experts, block_m) == 0


@pytest.mark.parametrize("capacity", [3000, 5000, 700])
@pytest.mark.parametrize(("num_experts", "experts"), [(512, range(512)), (1024, range(1024)), (1024, range(768, 1024))])
def test_many_experts(num_experts: int, experts: range, capacity: int) -> None:
    draws = random.Random(capacity)
    sizes = (120, 0, 301, 79)
    ids = [draws.sample(range(-1, num_experts), 6) for _ in range(sum(sizes))]
    choices = Choices(ids, sizes, draws.randrange(4), experts, capacity, 6)
    assert len({row.expert for row in choices.rows()}) > 100
    check_rows(choices)
    for block_m in (1, 16, 128):
        check_tiles(choices, choices.cut(block_m, picks=True), block_m)


@pytest.mark.parametrize("expert", [0, 3, 1023])
def test_all_to_one_expert(expert: int) -> None:
    sizes = (33, 64, 0)
    choices = Choices([[expert, -1, expert]] * 97, sizes, 1, range(1024), 194, 3)
    check_rows(choices)
    for block_m in (16, 128, 512):
        groups = choices.cut(block_m)
        check_tiles(choices, groups, block_m)
        assert {tile.expert for tile in listed(groups)} == {expert}


@pytest.mark.parametrize("capacity", [0, 1, 12, 40])
def test_no_rows_at_all(capacity: int) -> None:
    """All choices dropped, or another rank's; no tokens anywhere."""
    dropped = Choices([[-1, -1]] * 6, (4, 2), 0, range(8), capacity, 2)
    elsewhere = Choices([[0, 9]] * 6, (4, 2), 1, range(1, 9), capacity, 2)
    for choices in (dropped, elsewhere, Choices([], (0, 0, 0), 2, range(1), capacity, 2)):
        check_rows(choices)
        assert choices.sort().positions.tolist() == [-1] * choices.num_slots
        for picks in (False, True):
            groups = choices.cut(16, picks)
            check_tiles(choices, groups, 16)
            assert listed(groups) == [] == listed(groups.of_stages(0, 1))


@pytest.mark.parametrize("capacity", [0, 1, 15, 16, 17, 47])
def test_what_there_is_no_room_for_is_left_out(capacity: int) -> None:
    draws = random.Random(capacity)
    choices = Choices([draws.sample(range(6), 4) for _ in range(12)], (3, 0, 9), 2, range(6), capacity, 4)
    left_out = choices.all_rows()[capacity:]
    assert left_out and len(choices.rows()) == capacity
    check_rows(choices)
    check_tiles(choices, choices.cut(4, picks=True), 4)
    positions = choices.sort().positions
    assert all(positions[row.slot] == -1 for row in left_out)


def test_both_types_of_numbers_are_taken() -> None:
    ids = torch.randint(-1, 8, (40, 3))
    sorted_alike = [
        sort_rows(ids.to(dtype), sources_of((15, 25), 0, CPU), range(8), 2, 120) for dtype in (torch.int32, torch.int64)
    ]
    for name in ("slots", "positions", "starts"):
        assert torch.equal(*(getattr(rows, name) for rows in sorted_alike))


def test_nothing_is_asked_of_the_device() -> None:
    """Tensors without values would refuse it; a CUDA graph, too."""
    ids = torch.zeros((40, 3), dtype=torch.int32, device="meta")
    rows = sort_rows(ids, sources_of((15, 25), 0, torch.device("meta")), range(8), 2, 100)
    groups = cut_tiles(rows, 100, 16, torch.rand(40, 3, device="meta")).of_stages(1, 2)
    assert groups.index.shape == (GROUPS.tiles + GROUPS.tile_words * max_tiles(100, 8, 16) + 100 + 2 * 120,)


@settings(deadline=None)
@given(drawn_choices(), st.booleans())
def test_a_tokens_choices_are_added_up_in_their_order(choices: Choices, weighted: bool) -> None:
    rows, weights = choices.sort(), torch.rand(len(choices.ids), choices.top_k)
    values = torch.rand(choices.capacity, 3)
    positions = rows.positions.view(weights.shape)
    found = sum_choices(values, positions, weights if weighted else None)
    total = torch.zeros(len(choices.ids), 3)
    for token, places in enumerate(positions.tolist()):
        for choice, place in enumerate(places):
            if place >= 0:
                total[token] += values[place] * (weights[token, choice] if weighted else 1.0)
    assert torch.equal(found, total)
    values[len(choices.rows()) :] = torch.nan
    assert torch.equal(sum_choices(values, positions, weights if weighted else None), total), "rows of nobody"
