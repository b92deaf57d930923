"""The protocols of the dense ops find what they are there for: bugs planted in the device functions."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import triton
import triton.language as tl

import tileflux
from tileflux import env
from tileflux.config import TABLE
from tileflux.errors import DataRace, Deadlock
from tileflux.kernels import combine, dense, scatter, steps
from tileflux.kernels.turns import Turn
from tileflux.lang import combine as lang_combine
from tileflux.lang import policy, tiles, turn
from tileflux.lang.policy import _sum_tile, slot, store_block, wait_for_word
from tileflux.lang.remote import copy_run, part
from tileflux.lang.signal import arrive, signal
from tileflux.lang.turn import (
    _DONE,
    _FETCHED,
    RANK,
    SCALES,
    SLOT_BYTES,
    _control,
    ack_word,
    current_epoch,
    data,
    entry,
    flag_word,
    word,
)
from tileflux.testing import dense_protocols
from tileflux.testing.dense_protocols import PROTOCOLS, Call, MoeCall, calls, simulate_protocol

pytestmark = pytest.mark.skipif(not env.interpreting(), reason="kernels were not decorated for the interpreter")

Patch = pytest.MonkeyPatch


@triton.jit
def _no_wait(flag, wanted, peer, guard, op):
    """As if the peer had finished long ago."""


@triton.jit
def _hasty_push_run(to, source, nbytes, flag, value, counter, feeder, num_feeders, BLOCK: tl.constexpr):
    begin, length = part(nbytes, feeder, num_feeders)
    copy_run(to + begin, source + begin, length, BLOCK)
    if feeder == 0:
        signal(flag, value)


@triton.jit
def _hasty_release(table, WORLD: tl.constexpr):
    rank = word(table, RANK)
    epoch = current_epoch(table, WORLD)
    if tl.program_id(0) == 0:
        for hop in range(1, WORLD):
            signal(ack_word(table, (rank + hop) % WORLD, rank, WORLD), epoch + 1)
    turn.release(table, WORLD)


@triton.jit
def _same_half(table, owner, source, epoch, WORLD: tl.constexpr):
    return data(table, owner, WORLD) + source.to(tl.int64) * tl.load(table + SLOT_BYTES)


@triton.jit
def _flag_by_plan(table, owner, source, index, WORLD: tl.constexpr):
    """``Turn.words`` is made to put the plan's number of flags where the scales begin, which sums have none of."""
    first = source * tl.load(table + SCALES).to(tl.int32)
    return entry(table, 3, owner, WORLD).to(tl.pointer_type(tl.int32)) + first + index


@triton.jit
def _impatient_scatter_tile(value, out, place, table, SPEC: tl.constexpr):
    """Sums without its left-hand neighbour's signal."""
    rank = word(table, RANK)
    epoch = current_epoch(table, SPEC.world_size)
    owner, _, row, column, num_rows, N, number, _ = place
    store_block(value, slot(table, owner, rank, epoch, SPEC.world_size), row, column, num_rows, N, SPEC)
    if owner != rank:
        signal(flag_word(table, owner, rank, number, SPEC.world_size), epoch + 1)
    else:
        for hop in range(2, SPEC.world_size):
            source = (rank + SPEC.world_size - hop) % SPEC.world_size
            wait_for_word(flag_word(table, rank, source, number, SPEC.world_size), epoch + 1, source, table, SPEC)
        _sum_tile(value.shape, out, place, table, SPEC)


@triton.jit
def _hasty_wait_for_stages(table, stage, chunk, SPEC: tl.constexpr):
    """Without the rank that arrives last."""
    policy.wait_for_stages(table, stage - 1, chunk, SPEC)


def _plant_stages(patch: Patch) -> None:
    feeding = replace(dense.GATHERING_GROUPED.feeding, wait=_hasty_wait_for_stages)
    patch.setattr(dense, "GATHERING_GROUPED", dense.GATHERING_GROUPED._replace(feeding=feeding))


@triton.jit
def _impatient_combine_tile(value, target, place, table, SPEC: tl.constexpr):
    """Adds up rows that other programs may still be multiplying."""
    out, groups, slab, wanted = target
    lang_combine.combine_tile(value, (out, groups, slab, wanted * 0), place, table, SPEC)


def _plant_combine(patch: Patch) -> None:
    patch.setattr(combine, "COMBINE", replace(combine.COMBINE, finish=_impatient_combine_tile))


def _plant_flags_by_plan(patch: Patch) -> None:
    original = Turn.words

    def words(self: Turn) -> list[int]:
        found = original(self)
        found[TABLE.scales] = self.plan.num_flags
        return found

    patch.setattr(Turn, "words", words)
    patch.setattr(policy, "flag_word", _flag_by_plan)


def _plant_halves_by_plan(patch: Patch) -> None:
    original = Turn.__init__

    def init(self: Turn, *args: Any) -> None:
        original(self, *args)
        self._half_bytes = self.plan.data_bytes // 2

    patch.setattr(Turn, "__init__", init)


def _plant_same_half(patch: Patch) -> None:
    patch.setattr(policy, "slot", _same_half)
    patch.setattr(steps, "slot", _same_half)


@triton.jit
def _hasty_announce_part(SHAPE: tl.constexpr, owner, chunk, num_rows, num_columns, table, SPEC: tl.constexpr):
    """By the first tile, not the last."""
    epoch = current_epoch(table, SPEC.world_size)
    signal(flag_word(table, owner, word(table, RANK), chunk, SPEC.world_size), epoch + 1)


@triton.jit
def _await_nobody(table, chunk, WORLD: tl.constexpr):
    """As if every peer's had come."""


@triton.jit
def _hasty_open_call(table, WORLD: tl.constexpr):
    """As if every peer had finished the call before."""


def _plant_announcement(patch: Patch) -> None:
    for module in (policy, lang_combine):
        patch.setattr(module, "announce_part", _hasty_announce_part)


def _plant_scatter(**policies: Any) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(scatter, "SCATTER", replace(scatter.SCATTER, **policies))


BUGS: dict[str, tuple[Callable[[Patch], None], str, int]] = {
    "a feeder does not wait for the buffer": (lambda p: p.setattr(turn, "wait", _no_wait), "ag_gemm fused", 2),
    "the first feeder raises the flag": (lambda p: p.setattr(turn, "push_run", _hasty_push_run), "ag_gemm fused", 2),
    "the first pusher raises the flag": (
        lambda p: p.setattr(steps, "push_run", _hasty_push_run),
        "gemm_rs pipelined",
        2,
    ),
    "the first program gives back": (lambda p: p.setattr(tiles, "release", _hasty_release), "ag_gemm fused", 2),
    "a tile does not wait for the last of its ranks": (_plant_stages, "moe_ag_gemm fused", 3),
    "tokens are added up before their rows are there": (_plant_combine, "moe_gemm_rs fused", 2),
    "counts of a slab are not set back": (
        lambda p: p.setattr(tiles, "release_counted", turn.release),
        "moe_gemm_rs fused",
        2,
    ),
    "no tile waits for its slot": (_plant_scatter(wait=policy.wait_for_nothing), "gemm_rs fused", 2),
    "a sum does not wait for a neighbour": (_plant_scatter(finish=_impatient_scatter_tile), "gemm_rs fused", 2),
    "halves do not alternate": (_plant_same_half, "gemm_rs fused", 2),
    "halves do not alternate, one_shot": (_plant_same_half, "gemm_ar one_shot", 2),
    "the first tile announces all": (_plant_announcement, "gemm_rs fused, summed apart", 2),
    "the first sum announces its slab": (_plant_announcement, "moe_gemm_rs fused, summed apart", 2),
    "a sum apart waits for nobody": (
        lambda p: p.setattr(steps, "await_everyone", _await_nobody),
        "gemm_rs fused, summed apart",
        2,
    ),
    "tiles go to slots that are being read": (
        lambda p: (p.setattr(steps, "open_call", _hasty_open_call), _plant_same_half(p)),
        "gemm_rs fused, summed apart",
        2,
    ),
    "halves are the plan's": (_plant_halves_by_plan, "gemm_rs fused", 2),
    "flags are the plan's": (_plant_flags_by_plan, "gemm_rs fused", 3),
}
"""What is broken: how, and the protocol and world that show it."""


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_found(monkeypatch: Patch, bug: str) -> None:
    plant, protocol, world_size = BUGS[bug]
    plant(monkeypatch)
    with pytest.raises((DataRace, Deadlock, AssertionError)):
        for seed in range(8):
            simulate_protocol(protocol, world_size, seed)


@triton.jit
def _forgetful_leave(table, WORLD: tl.constexpr):
    return arrive(_control(table, word(table, RANK), WORLD) + _DONE, tl.num_programs(0))


@triton.jit
def _hasty_leave(table, WORLD: tl.constexpr):
    control = _control(table, word(table, RANK), WORLD)
    tl.store(control + _FETCHED, 0)
    return arrive(control + _DONE, tl.num_programs(0))


@triton.jit
def _take_in_two_steps(counter):
    before = tl.load(counter)
    tl.store(counter, before + 1)
    return before + tl.arange(0, 512) * 0


def _plant_leave(leave: Any) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        patch.setattr(turn, "leave", leave)
        patch.setattr(tiles, "leave", leave)

    return plant


FETCHING_BUGS: dict[str, Callable[[Patch], None]] = {
    "the count is not set back": _plant_leave(_forgetful_leave),
    "the first program sets the count back": _plant_leave(_hasty_leave),
    "two programs may take the same step": lambda patch: patch.setattr(turn, "take", _take_in_two_steps),
}


@pytest.mark.parametrize("bug", FETCHING_BUGS)
def test_planted_bug_of_fetching_is_found(monkeypatch: Patch, bug: str) -> None:
    FETCHING_BUGS[bug](monkeypatch)
    with pytest.raises((DataRace, Deadlock, AssertionError)):
        for seed in range(8):
            simulate_protocol("many tiles", 2, seed, fetches=True)


@pytest.mark.parametrize("world_size", [2, 3])
def test_tiles_dealt_out_to_programs_that_do_not_begin_are_a_deadlock(world_size: int) -> None:
    """Why tiles are fetched where ranks share a GPU."""
    simulate_protocol("many tiles", world_size, 0)
    with pytest.raises(Deadlock, match="another program of its launch to end"):
        for seed in range(8):
            simulate_protocol("many tiles", world_size, seed, starved=True)


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs", "gemm_ar"])
def test_results_that_are_not_written_are_noticed(monkeypatch: Patch, op: str) -> None:
    (group,) = tileflux.local_groups(1)
    Call(op, 9).run(group, 0)
    monkeypatch.setattr(dense_protocols, op, lambda **arguments: None)
    with pytest.raises(AssertionError, match=f"{op} fused auto on rank 0: 144 of 144 elements are NaN"):
        Call(op, 9).run(group, 0)
    group.close()


def test_several_weights_and_gathered_rows_are_compared(monkeypatch: Patch) -> None:
    call = next(call for call in PROTOCOLS["mixed"] if call.num_weights > 1 and call.returns_rows)
    real = dense_protocols.ag_gemm

    def wrong_rows(**arguments: Any) -> Any:
        values, rows = real(**arguments)
        return values, rows.flip(0)

    def wrong_order(**arguments: Any) -> Any:
        return real(**arguments | {"weight": arguments["weight"][::-1]})

    (group,) = tileflux.local_groups(1)
    call.run(group, 5)
    for wrong, message in ((wrong_rows, "the gathered rows"), (wrong_order, "off by more than rounding")):
        monkeypatch.setattr(dense_protocols, "ag_gemm", wrong)
        with pytest.raises(AssertionError, match=message):
            call.run(group, 5)
    group.close()


def test_rows_of_experts_are_compared(monkeypatch: Patch) -> None:
    call = next(call for call in PROTOCOLS["moe_ag_gemm fused"] if call.returns_rows)
    real = dense_protocols.moe_ag_gemm

    def wrong_rows(**arguments: Any) -> Any:
        values, rows = real(**arguments)
        return values, rows.flip(0)

    def nothing_written(**arguments: Any) -> Any:
        return real(**arguments | {"out": None})

    def too_much_written(**arguments: Any) -> Any:
        result = real(**arguments)
        arguments["out"][0][-1] = 0.0
        return result

    def another_expert(**arguments: Any) -> Any:
        return real(**arguments | {"weight": [weight.roll(1, 0) for weight in arguments["weight"]]})

    (group,) = tileflux.local_groups(1)
    call.run(group, 5)
    for wrong, message in (
        (wrong_rows, "the gathered rows"),
        (nothing_written, "elements are NaN"),
        (too_much_written, "written behind the last row"),
        (another_expert, "off by more than rounding"),
    ):
        monkeypatch.setattr(dense_protocols, "moe_ag_gemm", wrong)
        with pytest.raises(AssertionError, match=message):
            call.run(group, 5)
    group.close()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_calls_of_a_large_world_are_few_and_of_the_same_ops(protocol: str) -> None:
    many, few = calls(protocol, 2), calls(protocol, 8)
    assert many == PROTOCOLS[protocol] and 2 <= len(few) <= 3
    assert {call.op for call in few} == {call.op for call in many}
    for call in few:
        rows = max(call.moe_case(8, 0).routing.sizes if isinstance(call, MoeCall) else call.case(8, 0).sizes)
        is_cut = call.op in ("ag_gemm", "moe_ag_gemm") and call.config.num_chunks > 1  # others have slabs of columns
        assert rows <= call.config.block_m and (not is_cut or rows > 256)
