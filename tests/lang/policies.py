"""What tests of policies share: turns of ranks that make no calls, and what a policy waits for and signals, noted."""

from types import SimpleNamespace

import pytest
import torch
import triton.language as tl

import tileflux
from tileflux.config import CONTROL, MAX_CHUNKS, GemmConfig
from tileflux.kernels.shards import ShardPlan
from tileflux.kernels.turns import Turn
from tileflux.kernels.turns import turn as make_turn
from tileflux.lang import combine, policy, turn
from tileflux.testing import interpreter
from tileflux.testing._interpreter_launch import scalar

WORLD = 3
CONFIG = GemmConfig(block_m=16, block_n=16)


def make_turns(plan: ShardPlan, epoch: int = 0) -> list[Turn]:
    """The turns of all ranks of a new virtual group, as if ``epoch`` calls were over everywhere."""
    interpreter.install()
    turns = []
    for group in tileflux.local_groups(WORLD):
        turns.append(made := make_turn(group, plan))
        made.kept_alive = group
        words = made._control.view(dtype=torch.int32)
        words[CONTROL.epoch] = epoch
        words[CONTROL.ack : CONTROL.ack + WORLD] = epoch
    return turns


def make_spec(
    dtype: tl.dtype = tl.float32, *, aligned: bool = True, use_tma: bool = False, alone: int = 0
) -> SimpleNamespace:
    """What policies read of a ``GemmSpec``."""
    return SimpleNamespace(
        world_size=WORLD, out_type=dtype, out_aligned=aligned, use_tma=use_tma, is_hopper=False, settles=False,
        alone=alone,
    )  # fmt: skip


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What policies wait for and signal, in order; both return at once. Flags looked at together are a list."""
    seen: list[tuple] = []
    monkeypatch.setattr(
        policy, "wait", lambda flag, wanted, peer, *_: seen.append(("wait", scalar(flag), scalar(wanted), scalar(peer)))
    )
    for module in (policy, combine):
        monkeypatch.setattr(module, "signal", lambda flag, value: seen.append(("signal", scalar(flag), scalar(value))))
    monkeypatch.setattr(
        turn, "reached_all", lambda flags, at, wanted: (seen.append(("all", chosen(flags, at), scalar(wanted))), 1)[1]
    )
    monkeypatch.setattr(
        turn,
        "signal_all",
        lambda flags, at, value: seen.extend(("signal", flag, scalar(value)) for flag in chosen(flags, at)),
    )
    return seen


def chosen(flags: tl.tensor, at: tl.tensor) -> list[int]:
    """Addresses of those flags of a block that are meant."""
    return [int(address) for address in flags.handle.data[at.handle.data]]


def ack(here: Turn, rank: int, peer: int) -> int:
    """Address of the word that tells ``rank`` how far ``peer`` is."""
    return here._control.address(rank) + 4 * (CONTROL.ack + peer)


def flag(here: Turn, owner: int, source: int, index: int) -> int:
    """Address of a flag."""
    return here._flags.address(owner) + 4 * (index * WORLD + source)


def counters(here: Turn) -> torch.Tensor:
    """By peer and chunk."""
    return here._control.view(dtype=torch.int32)[CONTROL.counters(WORLD) :][: WORLD * MAX_CHUNKS].view(WORLD, -1)
