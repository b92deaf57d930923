"""The simulator against a protocol that is right, and against the same with mistakes planted in it."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tileflux import env
from tileflux.errors import DataRace, Deadlock
from tileflux.lang.signal import GLOBALTIMER, poll, signal, wait
from tileflux.testing.simulator import Simulator

pytestmark = pytest.mark.skipif(not env.interpreting(), reason="kernels of this process are compiled")

N = 8
NUM_EPOCHS = 3  # per call: one more than there are buffers


@pytest.fixture(autouse=True)
def no_threads_left_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


@triton.jit
def _await(flag, wanted):
    while poll(flag, wanted) - wanted < 0:
        pass


@triton.jit
def _gather(
    x_ptr, out_ptr, inboxes, readies, acks, rank, base, EPOCHS: tl.constexpr, N: tl.constexpr, WORLD: tl.constexpr,
    SIGNALS: tl.constexpr, LEAD: tl.constexpr,
):  # fmt: skip
    """All-gather through double-buffered inboxes. Half of the programs send, to one peer each; the others receive."""
    pid = tl.program_id(0)
    peer = pid % WORLD
    elements = tl.arange(0, N)
    ready = tl.load(readies + rank).to(tl.pointer_type(tl.int32)) + peer
    ack = tl.load(acks + rank).to(tl.pointer_type(tl.int32)) + peer
    inbox = tl.load(inboxes + rank).to(tl.pointer_type(tl.float32))
    peer_ready = tl.load(readies + peer).to(tl.pointer_type(tl.int32)) + rank
    peer_ack = tl.load(acks + peer).to(tl.pointer_type(tl.int32)) + rank
    peer_inbox = tl.load(inboxes + peer).to(tl.pointer_type(tl.float32))
    for i in range(EPOCHS):
        epoch = base + i + 1
        if pid < WORLD:
            _await(ack, epoch - LEAD)
            slot = peer_inbox + ((epoch % 2) * WORLD + rank) * N
            tl.store(slot + elements, tl.load(x_ptr + i * N + elements))
            if SIGNALS or (rank != 1) or (peer != 0):
                signal(peer_ready, epoch)
        else:
            _await(ready, epoch)
            slot = inbox + ((epoch % 2) * WORLD + peer) * N
            tl.store(out_ptr + (i * WORLD + peer) * N + elements, tl.load(slot + elements))
            signal(peer_ack, epoch)


@dataclass
class Gather:
    """The all-gather above with everything it needs, and its mistakes."""

    world_size: int
    signals: bool = True
    lead: int = 2  # epochs a sender may be ahead of its receiver
    advances: bool = True
    tensors: list[torch.Tensor] = field(default_factory=list)

    def simulate(self, seed: int, races: bool = True, num_calls: int = 2) -> Simulator:
        """Run it; asserts that every rank got every rank's rows of every epoch."""
        world_size = self.world_size
        simulator = Simulator(seed, races=races)
        inboxes = self._shared(simulator, "inbox", [2, world_size, N], torch.float32)
        readies = self._shared(simulator, "ready", [world_size], torch.int32)
        acks = self._shared(simulator, "ack", [world_size], torch.int32)
        x = torch.randn(num_calls, world_size, NUM_EPOCHS, N)
        out = torch.full((num_calls, world_size, NUM_EPOCHS, world_size, N), float("nan"))

        def run(rank: int) -> None:
            for call in range(num_calls):
                base = call * NUM_EPOCHS if self.advances else 0
                _gather[(2 * world_size,)](
                    x[call, rank], out[call, rank], inboxes, readies, acks, rank, base, NUM_EPOCHS, N, world_size,
                    self.signals, self.lead,
                )  # fmt: skip

        for rank in range(world_size):
            simulator.spawn(lambda rank=rank: run(rank), f"rank {rank}")
        simulator.run()
        expected = x.transpose(1, 2)[:, None].expand_as(out)
        assert torch.equal(out, expected), "wrong data"
        return simulator

    def _shared(self, simulator: Simulator, name: str, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        addresses = []
        itemsize = dtype.itemsize
        for rank in range(self.world_size):
            memory = torch.zeros(shape, dtype=dtype)
            simulator.share(memory, f"rank {rank}", lambda offset: f"{name}[{offset // itemsize}]")
            self.tensors.append(memory)
            addresses.append(memory.data_ptr())
        return torch.tensor(addresses)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_right_protocol_passes_under_every_schedule(world_size: int) -> None:
    for seed in range(12 if world_size < 4 else 6):
        Gather(world_size).simulate(seed)


@pytest.mark.parametrize("races", [True, False])
def test_missing_signal_is_a_deadlock_that_names_the_flag(races: bool) -> None:
    gather = Gather(2, signals=False)
    with pytest.raises(Deadlock) as caught:
        gather.simulate(0, races=races)
    message = str(caught.value)
    assert "rank 0 launch 1 _gather[3] waits for rank 0.ready[1] to reach 1; it stands at 0" in message
    # The sender cannot know better than to wait for its chunk to be read.
    assert "rank 1 launch 1 _gather[0] waits for rank 1.ack[0] to reach 1; it stands at 0" in message
    assert "seed 0" in message
    assert message.count(" waits for ") == 2


RACE_IN_INBOX = r"(reads|writes) rank \d\.inbox\[\d+\], which rank \d launch \d _gather\[\d\] (read|wrote);"


@pytest.mark.parametrize(
    "mistake",
    [{"advances": False}, {"lead": 1000}, {"lead": 3}],
    ids=["flag value reused", "end of use not awaited", "end of use awaited one epoch too early"],
)
def test_overwritten_data_is_a_race_under_every_schedule(mistake: dict[str, Any]) -> None:
    for seed in range(10):
        with pytest.raises(DataRace, match=RACE_IN_INBOX):
            Gather(2, **mistake).simulate(seed)


@pytest.mark.parametrize(
    "mistake", [{"advances": False}, {"lead": 1000}], ids=["flag value reused", "end of use not awaited"]
)
def test_some_schedule_shows_wrong_data_without_the_detector(mistake: dict[str, Any]) -> None:
    def is_wrong(seed: int) -> bool:
        try:
            Gather(2, **mistake).simulate(seed, races=False)
        except AssertionError as error:
            return "wrong data" in str(error)
        return False

    assert any(is_wrong(seed) for seed in range(20))


def test_seed_determines_the_schedule() -> None:
    schedules = [Gather(3).simulate(seed).schedule for seed in (5, 5, 6)]
    assert len(schedules[0]) > 100
    assert schedules[0] == schedules[1]
    assert schedules[0] != schedules[2]


@triton.jit
def _publish_with_atomic(data, flag, SEM: tl.constexpr, PLAIN: tl.constexpr):
    tl.store(data, 7)
    if PLAIN:
        tl.store(flag, 1)
    else:
        tl.atomic_xchg(flag, 1, sem=SEM, scope="sys")


@triton.jit
def _await_with_atomic(data, flag, out, SEM: tl.constexpr):
    while tl.atomic_add(flag, 0, sem=SEM, scope="sys") < 1:
        pass
    tl.store(out, tl.load(data))


@pytest.mark.parametrize(
    ("release", "plain", "acquire", "is_race"),
    [
        ("release", False, "acquire", False),
        ("acq_rel", False, "acq_rel", False),
        ("relaxed", False, "acquire", True),
        ("release", False, "relaxed", True),
        ("release", True, "acquire", True),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_atomics_order_as_their_semantics_say(
    seed: int, release: str, plain: bool, acquire: str, is_race: bool
) -> None:
    simulator = Simulator(seed)
    data = simulator.share(torch.zeros(1, dtype=torch.int32), "data")
    flag = simulator.share(torch.zeros(1, dtype=torch.int32), "flag")
    out = torch.zeros(1, dtype=torch.int32)
    simulator.spawn(lambda: _publish_with_atomic[(1,)](data, flag, release, plain), "writer")
    simulator.spawn(lambda: _await_with_atomic[(1,)](data, flag, out, acquire), "reader")
    if is_race:
        with pytest.raises(DataRace):
            simulator.run()
    else:
        simulator.run()
        assert out.item() == 7


@triton.jit
def _add_one(counter):
    tl.store(counter, tl.load(counter) + 1)


def test_launches_of_a_coroutine_are_ordered_and_those_of_two_are_not() -> None:
    counter = torch.zeros(1, dtype=torch.int32)

    def twice() -> None:
        _add_one[(1,)](counter)
        _add_one[(1,)](counter)

    simulator = Simulator(0)
    simulator.share(counter, "counter")
    simulator.spawn(twice, "rank 0")
    simulator.run()
    assert counter.item() == 2
    simulator = Simulator(0)
    simulator.share(counter, "counter")
    simulator.spawn(twice, "rank 0")
    simulator.spawn(twice, "rank 1")
    with pytest.raises(DataRace, match=r"counter\+0"):
        simulator.run()


@triton.jit
def _last_writes(counter):
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(counter, 5)


def test_next_launch_comes_after_every_program_of_the_last() -> None:
    simulator = Simulator(0)
    counter = simulator.share(torch.zeros(1, dtype=torch.int32), "counter")

    def run() -> None:
        _last_writes[(3,)](counter)
        _add_one[(1,)](counter)

    simulator.spawn(run)
    simulator.run()
    assert counter.item() == 6


def test_lost_update_shows_without_the_detector() -> None:
    def total(seed: int) -> int:
        simulator = Simulator(seed, races=False)
        counter = simulator.share(torch.zeros(1, dtype=torch.int32), "counter")
        simulator.spawn(lambda: _add_one[(3,)](counter))
        simulator.run()
        return int(counter.item())

    assert {total(seed) for seed in range(20)} == {1, 2, 3}


def test_first_error_of_any_coroutine_comes_out_and_the_others_end() -> None:
    started, ended = [], []

    def wait_for_ever() -> None:
        started.append(True)
        try:
            _await_forever[(1,)](flag)
        finally:
            ended.append(True)

    def fail() -> None:
        simulator.block_until(lambda: len(started) == 2, "the others to start")
        raise KeyError("planted")

    simulator = Simulator(3)
    flag = simulator.share(torch.zeros(1, dtype=torch.int32), "flag")
    simulator.spawn(wait_for_ever)
    simulator.spawn(wait_for_ever)
    simulator.spawn(fail, "the bad one")
    with pytest.raises(KeyError, match="planted") as caught:
        simulator.run()
    assert "in the bad one, simulated with seed 3" in caught.value.__notes__[0]
    assert len(ended) == 2


@triton.jit
def _await_forever(flag):
    _await(flag, 1)


@triton.jit
def _spin_forever(flag):
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
        pass


def test_step_limit_ends_a_spin_that_is_not_a_poll() -> None:
    simulator = Simulator(0, max_steps=50)
    flag = torch.zeros(1, dtype=torch.int32)
    simulator.spawn(lambda: _spin_forever[(1,)](flag), "spinner")
    with pytest.raises(Deadlock, match=r"50 steps .*\n.*spinner launch 1 _spin_forever\[0\] runs"):
        simulator.run()


def test_shared_memory_must_be_addressable() -> None:
    simulator = Simulator(0)
    with pytest.raises(ValueError, match="contiguous"):
        simulator.share(torch.zeros(4, 4)[:, 0], "column")
    simulator.share(torch.zeros(4), "whole")
    memory = simulator.share(torch.zeros(8), "more")
    with pytest.raises(ValueError, match="'again' overlaps"):
        simulator.share(memory[4:], "again")


@triton.jit
def _wait_guarded(flag, guard):
    wait(flag, 1, 0, guard, 0)


@triton.jit
def _signal_only(flag, value):
    signal(flag, value)


def test_deadlines_of_waits_do_not_run_in_simulations() -> None:
    guard = torch.zeros(16, dtype=torch.int64)  # no time at all, and no block to write a record to
    for seed in range(5):
        simulator = Simulator(seed)
        flag = simulator.share(torch.zeros(1, dtype=torch.int32), "flag")
        simulator.spawn(lambda flag=flag: _wait_guarded[(1,)](flag, guard))
        simulator.spawn(lambda flag=flag: _signal_only[(1,)](flag, 1))
        simulator.run()


def test_kernels_read_simulated_time() -> None:
    times = torch.zeros(2, dtype=torch.int64)
    simulator = Simulator(0, switch_everywhere=True)
    simulator.spawn(lambda: _read_clock_twice[(1,)](times))
    simulator.run()
    assert 0 < times[0].item() < times[1].item() < 1_000_000


@triton.jit
def _read_clock_twice(out):
    for i in range(2):
        lanes = tl.arange(0, 1)
        now = tl.inline_asm_elementwise(GLOBALTIMER, "=l,r", [lanes], dtype=tl.int64, is_pure=False, pack=1)
        tl.store(out + i + lanes, now)


def test_flags_are_compared_across_the_wrap() -> None:
    for has_signaller in (True, False):
        simulator = Simulator(1)
        flag = simulator.share(torch.full((1,), 2**31 - 1, dtype=torch.int32), "flag")
        simulator.spawn(lambda flag=flag: _await_value[(1,)](flag, -(2**31)))
        if has_signaller:
            simulator.spawn(lambda flag=flag: _signal_only[(1,)](flag, -(2**31)))
            simulator.run()
        else:
            message = r"every coroutine waits .*\n.* flag\+0 to reach -2147483648; it stands at 2147483647"
            with pytest.raises(Deadlock, match=message):
                simulator.run()


@triton.jit
def _await_value(flag, value):
    _await(flag, value)


@triton.jit
def _from_the_last(flags, NUM: tl.constexpr):
    """Every program waits for the one behind it."""
    pid = tl.program_id(0)
    if pid < NUM - 1:
        _await(flags + pid + 1, 1)
    signal(flags + pid, 1)


def _run_from_the_last(seed: int, starved: bool) -> str:
    simulator = Simulator(seed, starved=starved)
    flags = simulator.share(torch.zeros(4, dtype=torch.int32), "flags", lambda offset: f"of program {offset // 4}")
    simulator.spawn(lambda: _from_the_last[(4,)](flags, 4))
    try:
        simulator.run()
    except Deadlock as error:
        return str(error)
    return "ended"


def test_starved_programs_begin_when_others_of_their_launch_have_ended() -> None:
    assert {_run_from_the_last(seed, False) for seed in range(4)} == {"ended"}
    locked = [end for seed in range(12) if (end := _run_from_the_last(seed, True)) != "ended"]
    assert 0 < len(locked) < 12, "as many programs run at a time as the seed says"
    assert all("_from_the_last[0] waits for flags.of program 1" in end for end in locked), "the first always runs"
    assert all("[3] waits for another program of its launch to end" in end for end in locked)
