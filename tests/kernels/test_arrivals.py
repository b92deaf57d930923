"""The kernels of ``ep_dispatch`` against torch's functions, bit for bit: interpreted, and on a GPU."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tileflux
from tileflux import env
from tileflux.kernels import arrivals, gather, spread
from tileflux.ops import _ep
from tileflux.ops._ep import Choices, num_missing
from tileflux.symm.group import Group

from .unsynchronised import unsynchronised

needs_interpreter = pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")
INTERPRETED = {"TILEFLUX_CPU_BACKEND": "interpret"}
WIDE = [2**31, 2**32 + 3, -(2**32) + 1, 2**63 - 1, -(2**63)]
"""Nobody's, and some of them somebody's in 32 bits."""


pytestmark = pytest.mark.usefixtures("interpreter_installed")


@dataclass(frozen=True)
class Case:
    """What a rank sends, and what has come to it."""

    choices: Choices
    ids: torch.Tensor
    weights: torch.Tensor
    scale: torch.Tensor | None
    notes: torch.Tensor
    received: torch.Tensor

    @property
    def right(self) -> tuple[torch.Tensor, ...]:
        """Everything by torch's functions, wherever the tensors are."""
        choices, ids = self.choices, self.ids
        num_here = min(choices.capacity, int(self.received[:, choices.group.rank].sum()))
        notes = self.notes.clone()
        notes[num_here:] = -1
        *found, row_tokens, positions = choices.unpack(notes)
        row_tokens[int((positions >= 0).sum()) :] = 0  # where anything may be
        sent, packed = choices.sent(ids), choices.pack(ids, self.weights, self.scale)
        return sent, packed, *found, row_tokens, positions, num_missing(self.received, choices.capacity)

    @property
    def found(self) -> tuple[torch.Tensor, ...]:
        """What is tested."""
        return *self.choices.address(self.ids, self.weights, self.scale), *self.choices.arrive(
            self.notes, self.received
        )

    def check(self, found: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> None:
        """Every bit of every number."""
        names = ("sent", "notes", "weights", "scales", "counts", "row_tokens", "positions", "missing")
        for name, one, other in zip(names, found, right, strict=True):
            assert one.dtype == other.dtype and one.shape == other.shape, name
            if one.dtype == torch.float32:
                one, other = one.view(torch.int32), other.view(torch.int32)
            assert torch.equal(one, other), f"{name}: {one} {other}"


def draw(draws: random.Random, group: Group, num_each: int, top_k: int, tokens: int, come: int) -> Case:
    """Choices of nobody, crowds, any layout, too little room, and notes of nobody behind those that have come."""
    world_size, device = group.world_size, group.device
    num_experts = world_size * num_each
    generator = torch.Generator().manual_seed(draws.randrange(2**31))

    def ids(count: int, wide: bool) -> torch.Tensor:
        found = torch.randint(-1, num_experts + 1, (count, top_k), generator=generator)
        odd = [-2, 2**31 - 1, -(2**31), *(WIDE if wide else [])]
        crowd = draws.choice((None, draws.randrange(num_experts), -1, draws.choice(odd)))
        if crowd is not None:
            found[torch.rand(found.shape, generator=generator) < draws.choice((0.5, 1.0))] = crowd
        return found

    kind, is_scaled = draws.choice((torch.float32, torch.bfloat16, torch.float16, torch.float64)), draws.random() < 0.5
    own = ids(tokens, wide=True).to(device)
    if draws.random() < 0.3:
        own = own.clamp(-(2**31), 2**31 - 1).to(torch.int32)
    gates = torch.randn(tokens, top_k, generator=generator)
    if tokens and kind == torch.float32:  # else it is rounded, and a NaN's bits are anybody's
        gates[0, 0] = draws.choice((float("nan"), -0.0, 1e-45, float("inf")))
    weights = gates.to(kind).to(device)
    if draws.random() < 0.5:
        own, weights = own.t().contiguous().t(), weights.repeat(1, 2)[:, 1 : 1 + top_k].requires_grad_()
    scale = torch.rand(() if draws.random() < 0.3 else (tokens,), generator=generator).to(device) if is_scaled else None
    received = torch.randint(0, come // world_size + 1, (world_size, world_size), generator=generator).int()
    num_here = int(received[:, group.rank].sum())
    capacity = draws.choice((come, come, num_here, num_here + 3, 0, draws.randint(0, num_here)))
    parts = [ids(capacity, wide=False).int(), torch.randn(capacity, top_k, generator=generator).view(torch.int32)]
    if is_scaled:
        parts.append(torch.rand(capacity, 1, generator=generator).view(torch.int32))
    choices = Choices(group, num_experts, top_k, capacity, is_scaled)
    return Case(choices, own, weights, scale, torch.cat(parts, dim=1).to(device), received.to(device))


@needs_interpreter
@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 8), st.sampled_from([1, 3, 8, 64, 130]), st.sampled_from([1, 2, 3, 8, 9]),
    st.sampled_from([(16, 32, 1), (16, 64, 100), (16, 16, 100), (256, 2048, 4)]), st.integers(0, 2**32),
)  # fmt: skip
def test_interpreted(world_size: int, num_each: int, top_k: int, blocks: tuple[int, int, int], seed: int) -> None:
    """Small blocks: that an expert has rows in many of them is what may go wrong. Counted by one launch, or by two."""
    draws = random.Random(seed)
    group = tileflux.local_groups(world_size)[draws.randrange(world_size)]
    case = draw(draws, group, num_each, top_k, draws.choice((0, 1, 40, 70)), draws.choice((0, 1, 30, 120)))
    right = case.right
    with env.scoped(INTERPRETED), pytest.MonkeyPatch.context() as patch:
        for name, value in zip(("_BLOCK", "_CHUNK", "_MAX_CHUNKS"), blocks, strict=True):
            patch.setattr(arrivals, name, value)
        patch.setattr(arrivals, "_TOKENS", 32)
        case.check(case.found, right)


@needs_interpreter
def test_more_blocks_than_are_added_up_at_a_time() -> None:
    """A row of counts has 1024 experts, so that four blocks are read at a time."""
    group = tileflux.local_groups(2)[1]
    for seed in range(3):
        case = draw(random.Random(seed), group, 512 + seed, 4, 10, 90)
        right = case.right
        with env.scoped(INTERPRETED), pytest.MonkeyPatch.context() as patch:
            patch.setattr(arrivals, "_BLOCK", 16)
            patch.setattr(arrivals, "_MAX_CHUNKS", 0)
            case.check(case.found, right)


@needs_interpreter
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=lambda dtype: str(dtype)
)
def test_picked_rows(dtype: torch.dtype) -> None:
    for width in (0, 1, 3, 16, 40, 1500):
        x = torch.randint(-100, 100, (9, width)).to(dtype)
        index = torch.randint(0, 9, (20,), dtype=torch.int32)
        right = x.float()[index.long()].to(dtype)
        for these in (x, x.repeat(1, 2)[:, :width] if width else x):
            with env.scoped(INTERPRETED):
                picked = _ep._pick(these, index)
            assert picked.shape == right.shape and torch.equal(picked.float(), right.float())
    with env.scoped(INTERPRETED):
        assert _ep._pick(torch.rand(5), torch.tensor([4, 4], dtype=torch.int32)).shape == (2,)
        assert _ep._pick(torch.rand(5, 3), index[:0]).shape == (0, 3)


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """What torch runs, less views and memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if not func.is_view and name not in ("aten::empty", "aten::empty.memory_format"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@needs_interpreter
@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
def test_a_round_trip_takes_few_launches_and_none_of_torch(monkeypatch: pytest.MonkeyPatch, many: bool) -> None:
    """Kernels are not run here: what the interpreter does for them is torch's."""
    (group,) = tileflux.local_groups(1)
    names: list[str] = []

    def launch_step(kernel: Any, *arguments: Any) -> None:
        names.append(kernel.fn.__name__)

    def launch_rows(group: Group, op: str, kernel: Any, *arguments: Any) -> None:
        names.append(kernel.fn.__name__)

    monkeypatch.setattr(arrivals, "launch_step", launch_step)
    monkeypatch.setattr(spread, "launch_rows", launch_rows)
    monkeypatch.setattr(gather, "launch_rows", launch_rows)
    tokens = 5000 if many else 4000
    x, ids, weights = torch.rand(tokens, 8).half(), torch.randint(0, 8, (tokens, 2)), torch.rand(tokens, 2)
    dispatch, combine = (sys.modules[f"tileflux.ops.{name}"] for name in ("ep_dispatch", "ep_combine"))
    with env.scoped(INTERPRETED), Calls() as calls:
        received, shares, scales, counts, row_tokens, positions, arrived, sent, _ = dispatch._run(
            x, ids, weights, None, group.name, [tokens], tokens, 8, "auto"
        )
        rows = _ep._rows(received, row_tokens, positions)
        combine._run(rows, shares, positions, row_tokens, counts, arrived, sent, group.name, [tokens], "auto")
    counted = ["_count_kernel"] if many else []
    assert names == [
        "_addresses_kernel",
        "_spread_kernel",
        *counted,
        "_arrive_kernel",
        "_pick_kernel",
        "_gather_kernel",
    ]
    assert calls.names == []


@needs_interpreter
def test_everything_is_loaded_with_as_many_arguments_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of nothing bind their arguments."""
    loaded: list[object] = []

    def load(device: torch.device, key: object, launch: Any, group: Group | None = None) -> None:
        loaded.append(key)
        launch()

    monkeypatch.setattr(arrivals, "load_once", load)
    (group,) = tileflux.local_groups(1)
    with env.scoped(INTERPRETED):
        arrivals.load_arrivals(group, 8, torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1))
    assert loaded == [("arrivals", torch.int64, torch.float32, 1, 1, 32), "rows picked"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("world_size", "num_each", "top_k", "tokens", "come"),
    [(1, 8, 2, 4096, 4096), (8, 8, 8, 128, 1024), (8, 32, 8, 700, 4000), (4, 256, 6, 2000, 9000), (3, 1, 1, 0, 5)],
)
def test_on_a_gpu(world_size: int, num_each: int, top_k: int, tokens: int, come: int) -> None:
    groups = tileflux.local_groups(world_size, "cuda")
    for seed in range(12):
        draws = random.Random(seed)
        group = groups[draws.randrange(world_size)]
        case = draw(draws, group, num_each, top_k, tokens, come)
        right = case.right
        arrivals.load_arrivals(group, num_each, case.ids, case.weights)
        torch.cuda.synchronize()
        with torch.cuda.stream(group.stream), unsynchronised():
            found = case.found
            row_tokens = found[5]
            picked = _ep._pick(case.notes, row_tokens) if case.choices.capacity else case.notes[:0]
        torch.cuda.synchronize()
        case.check(found, right)
        assert torch.equal(picked, case.notes[row_tokens.long()])
    for group in groups:
        group.close()
