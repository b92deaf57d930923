"""Streams under the simulator: in order each, at once together; and what is wrong with copies is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tileflux import env
from tileflux.errors import DataRace, Deadlock
from tileflux.kernels import combine, dense, steps
from tileflux.lang import combine as lang_combine
from tileflux.lang import tiles, turn
from tileflux.symm.group import Group
from tileflux.testing.dense_protocols import simulate_protocol

pytestmark = pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")

Patch = pytest.MonkeyPatch


def _in_order(group: Group) -> tuple[list[str], list[str]]:
    """Queue on four streams; what each has done, and what all have."""
    from tileflux.testing.simulated_streams import on_streams

    done: list[str] = []
    with on_streams(group):
        main = torch.cuda.current_stream()
        opened = None
        for number in range(3):
            main.queue(lambda number=number: done.append(f"main {number}"))  # type: ignore[attr-defined]
            opened = opened or main.record_event()
        for kind in ("closing", "announcing", "sending"):
            with dense.beside(group, after=opened, on=kind):
                here = torch.cuda.current_stream()
                assert here is not main
                for number in range(3):
                    name = f"{kind} {number}"
                    here.queue(lambda name=name: done.append(name))  # type: ignore[attr-defined]
        assert torch.cuda.current_stream() is main
        dense.join(group)
        main.queue(lambda: done.append("main end"))  # type: ignore[attr-defined]
        group.synchronize()
        assert done[-1] == "main end" or done[-1].split()[0] in ("closing", "announcing"), "who synchronizes has waited"
    return done, [each for each in done if each.split()[0] not in ("closing", "announcing")]


def test_streams_keep_their_order_and_wait_for_events() -> None:
    from tileflux.testing.simulated_streams import simulated_streams
    from tileflux.testing.simulator import simulate

    orders = set()
    with simulated_streams():
        for seed in range(12):
            ((done, _),) = simulate(_in_order, 1, seed=seed)
            orders.add(tuple(done))
            for kind in ("main", "sending", "closing", "announcing"):
                mine = [each for each in done if each.startswith(kind)]
                assert mine == sorted(mine)
                assert done.index("main 0") < done.index(mine[-1])
            assert done.index("sending 2") < done.index("main end"), "joined"
    assert len(orders) > 3, "streams run at once"


@triton.jit
def _no_wait(flag, wanted, peer, guard, op):
    """As if all tiles had been counted long ago."""


@triton.jit
def _no_acks(table, wanted, WORLD: tl.constexpr):
    """As if all peers had finished long ago."""


@triton.jit
def _impatient_stage_sums(value, target, place, table, SPEC: tl.constexpr):
    """Adds up rows that other programs may still be multiplying."""
    out, groups, slab, wanted = target
    lang_combine.stage_sums(value, (out, groups, slab, wanted * 0), place, table, SPEC)


@triton.jit
def _sum_of_whoever_is_there(table, chunk, WORLD: tl.constexpr):
    """Does not wait."""


def _plant_hasty_sum(patch: Patch) -> None:
    for name in ("await_everyone", "await_pieces"):
        patch.setattr(steps, name, _sum_of_whoever_is_there)


@triton.jit
def _whole_by_its_first_slab(table, slab, WORLD: tl.constexpr):
    """As if what comes slab by slab were whole, too."""
    turn.await_flags(table, 0, WORLD - 1, WORLD)


def _plant_close(patch: Patch) -> None:
    real = steps.launch_close

    def launch(here: Any, owner: int, num_tiles: tuple[int, ...], *others: Any, **named: Any) -> None:
        real(here, owner, (*num_tiles[:-1], num_tiles[-1] - 1), *others, **named)

    patch.setattr(steps, "launch_close", launch)


def _plant_flags_first(patch: Patch) -> None:
    """Flags before what they announce: as if copies on a stream could overtake each other."""
    from tileflux.testing import simulated_streams

    real = simulated_streams._copy_by_engine
    kept: list[Any] = []

    def copy(to: torch.Tensor, source: torch.Tensor) -> None:
        if to.shape == (1,):
            real(to, source)
            while kept:
                real(*kept.pop())
        else:
            kept.append((to, source))

    patch.setattr(simulated_streams, "_copy_by_engine", copy)


def _plant_announced_early(patch: Patch) -> None:
    """What announces goes on when the copy has been queued."""
    from tileflux.testing import simulated_streams

    real = simulated_streams._Stream.wait_event

    def wait_event(self: Any, event: Any) -> None:
        if not self._name.startswith("announcing"):
            real(self, event)

    patch.setattr(simulated_streams._Stream, "wait_event", wait_event)


FUSED = ("gemm_rs fused", "gemm_rs fused, in slabs", "moe_gemm_rs fused")

BUGS: dict[str, tuple[Callable[[Patch], None], tuple[str, ...]]] = {
    "nobody waits for counts": (lambda p: p.setattr(turn, "wait", _no_wait), FUSED),
    "nobody waits for acks": (lambda p: p.setattr(turn, "await_acks", _no_acks), FUSED),
    "a sum waits for nobody": (_plant_hasty_sum, FUSED),
    "a sum takes a slab for a shard": (
        lambda p: p.setattr(steps, "await_pieces", _whole_by_its_first_slab),
        ("gemm_rs fused, in slabs",),
    ),
    "a shard is sent before its last tile": (_plant_close, FUSED),
    "flags overtake what they announce": (_plant_flags_first, FUSED),
    "a flag does not wait for its copy": (_plant_announced_early, (*FUSED, "ag_gemm fused, one weight")),
    "tokens are added up before their rows are there": (
        lambda p: p.setattr(combine, "COMBINE_STAGE", replace(combine.COMBINE_STAGE, finish=_impatient_stage_sums)),
        ("moe_gemm_rs fused",),
    ),
    "counts of a slab are not set back": (
        lambda p: p.setattr(tiles, "leave_counted", turn.leave),
        ("moe_gemm_rs fused",),
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_found(monkeypatch: Patch, bug: str) -> None:
    plant, protocols = BUGS[bug]
    plant(monkeypatch)
    for protocol in protocols:
        with pytest.raises((DataRace, Deadlock, AssertionError)):
            for seed in range(8):
                simulate_protocol(protocol, 2, seed, by_copies=True)
