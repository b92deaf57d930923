"""Every rank, and every program of every kernel it launches, as a coroutine in one process.

The kernels run interpreted, under a scheduler that a seed determines (``coroutines.py``). It may switch at every poll
and before every access to shared memory. A poll blocks its coroutine until the flag is reached; when all wait, that is
a ``Deadlock``, which names the flags. Accesses that no signal orders are a ``DataRace`` (``races.py``).

What it cannot see: memory is sequentially consistent and a program is one thread, so a missing CTA barrier or proxy
fence goes unnoticed (the compile gate looks for those); accesses by torch on the host are not checked for races.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from tileflux import env
from tileflux.config import CommConfig
from tileflux.symm.group import local_groups
from tileflux.symm.host_signal import reached, wrap
from tileflux.testing import interpreter
from tileflux.testing._interpreter_builder import AccessKind, Array, Order, Program
from tileflux.testing._simulated_host import simulated_host
from tileflux.testing.coroutines import Coroutine, Scheduler
from tileflux.testing.races import AddressMap, Block, RaceDetector, SharedRange

__all__ = ["Simulator", "simulate"]

T = TypeVar("T")
MAX_STEPS = 200_000
_NS_PER_STEP = 1000


class Simulator:
    """Runs coroutines that launch interpreted kernels. Used once: spawn, then run."""

    def __init__(
        self,
        seed: int,
        *,
        races: bool = True,
        max_steps: int = MAX_STEPS,
        switch_everywhere: bool = False,
        starved: bool = False,
    ) -> None:
        """``races=False`` looks for deadlocks alone. ``switch_everywhere``: at accesses to private memory too.

        ``starved``: of every launch only some programs, drawn from the seed and at least one, run at a time; the others
        begin one by one, in the order of their numbers, as these end. So it is where other ranks hold the SMs.
        """
        interpreter.install()
        self.seed = seed
        self._scheduler = Scheduler(seed, max_steps)
        self._memory = AddressMap()
        self._races = RaceDetector(seed, lambda address: _word(address).value) if races else None
        self._switch_everywhere = switch_everywhere
        self._random = random.Random(seed) if starved else None
        self._roots: list[Coroutine] = []
        self._named_slots: dict[str, int] = {}
        self._kept_alive: list[torch.Tensor] = []

    @property
    def schedule(self) -> list[int]:
        """Which coroutine was chosen, switch point by switch point; the same for the same seed."""
        return self._scheduler.schedule

    def share(self, memory: torch.Tensor, name: str, describe: Callable[[int], str] | None = None) -> torch.Tensor:
        """Declare that several coroutines use ``memory``; ``describe`` puts a byte offset in it into words.

        Only shared memory is checked for races, and only before accesses to it does the scheduler switch.
        """
        if not memory.is_contiguous() or memory.device.type != "cpu":
            raise ValueError(f"'{name}' should be contiguous on the CPU, not {memory.stride()} on {memory.device}")
        self._kept_alive.append(memory)
        self.share_range(memory.data_ptr(), memory.nbytes, name, describe)
        return memory

    def share_range(self, address: int, nbytes: int, name: str, describe: Callable[[int], str] | None = None) -> None:
        """``share`` for bare addresses, which must stay valid."""
        if nbytes:
            self._memory.add(SharedRange(address, nbytes, name, describe))

    def spawn(self, function: Callable[[], Any], name: str | None = None) -> Coroutine:
        """Add a coroutine; its ``result`` can be read after ``run()``."""
        name = f"coroutine {len(self._roots)}" if name is None else name
        root = self._new_coroutine(function, name, None if self._races is None else self._races.start(name))
        self._roots.append(root)
        return root

    def run(self) -> list[Any]:
        """Run to the end; returns what the spawned functions returned, or raises the first error of any coroutine."""
        self._scheduler.run()
        return [root.result for root in self._roots]

    # What host code does in a running coroutine.

    @property
    def here(self) -> bool:
        """Whether the calling thread is one of this simulation's coroutines."""
        return interpreter.conductor() is self

    def block_until(self, ready: Callable[[], bool], what: str) -> None:
        """Let others run until ``ready()``; ``what`` says what is waited for if that never comes."""
        self._scheduler.block(_HostWait(ready, what))

    def release(self, where: Hashable) -> None:
        """Publish what the coroutine has done at a flag's address, or at any other key an ``acquire`` will name."""
        self._scheduler.switch()
        if self._races is not None:
            self._races.release(self._slot, where, is_flag=isinstance(where, int))

    def acquire(self, where: Hashable) -> None:
        """What was published at ``where`` comes before what the coroutine does next."""
        if self._races is not None:
            self._races.acquire(self._slot, where)

    def touch(self, kind: AccessKind, memory: torch.Tensor) -> None:
        """Host code is about to read or write all of ``memory``, which is contiguous."""
        blocks = self._memory.span(memory.data_ptr(), memory.nbytes, memory.element_size())
        if blocks:
            self._scheduler.switch()
        if self._races is not None:
            for block in blocks:
                self._races.access(self._slot, kind, block)

    def go_on_as(self, name: str, function: Callable[[], Any]) -> Coroutine:
        """Start a coroutine that comes after the earlier ones of that name, which must have ended."""
        slot = self._named_slots.get(name)
        if slot is None and self._races is not None:
            slot = self._named_slots[name] = self._races.start(name)
        return self._new_coroutine(function, name, slot)

    # What kernels do: the interpreter's Conductor.

    def launch(self, kernel: str, programs: Sequence[Program]) -> None:
        """Run each program as a coroutine of its own; the launching one waits for them."""
        parent = self._scheduler.running
        assert parent is not None
        parent.data.num_launches += 1
        children: list[Coroutine] = []
        num_sms = len(programs) if self._random is None else self._random.randint(1, max(1, len(programs)))
        for index, (position, run) in enumerate(programs):
            if index >= num_sms:
                run = partial(self._run_late, run, _Sm(children[:index], num_sms))
            name = f"{parent.name} launch {parent.data.num_launches} {kernel}{_position_text(position)}"
            slot = None if self._races is None else self._races.fork(self._slot, index, name)
            children.append(self._new_coroutine(run, name, slot))
        self._scheduler.run_children(children)
        if self._races is not None:
            for child in children:
                self._races.join(self._slot, child.data.slot)

    def access(self, kind: AccessKind, addresses: Array, mask: Array, itemsize: int, order: Order) -> None:
        """A kernel is about to touch memory."""
        blocks = self._memory.blocks(addresses, mask, itemsize)
        if not (blocks or order or self._switch_everywhere):
            return
        self._scheduler.switch()
        if self._races is None:
            return
        slot = self._slot
        for block in blocks:
            self._races.access(slot, "atomic" if order else kind, block)
        if order:
            for address in addresses.reshape(-1)[np.broadcast_to(mask, addresses.shape).reshape(-1)].tolist():
                if order in ("acquire", "acq_rel"):
                    self._races.acquire(slot, address)
                if order in ("release", "acq_rel"):
                    self._races.release(slot, address, keep=kind == "atomic", is_flag=itemsize == 4)

    def poll(self, address: int, wanted: int) -> int:
        """Block until the flag is reached, and join what was published with that."""
        word = _word(address)
        self._scheduler.block(_FlagWait(self._memory, address, word, wanted))
        if self._races is not None:
            shared = self._memory.find(address)
            if shared is not None:
                offset = address - shared.start
                self._races.access(self._slot, "poll", Block(shared, offset, offset + 4, 4))
            self._races.acquire_flag(self._slot, address, wanted)
        return word.value

    def now_ns(self) -> int:
        """Simulated time: deadlines in kernels follow steps, not the speed of this machine."""
        return self._scheduler.num_steps * _NS_PER_STEP

    @property
    def _slot(self) -> int:
        running = self._scheduler.running
        assert running is not None
        slot: int = running.data.slot
        return slot

    def _run_late(self, run: Callable[[], None], sm: _Sm) -> None:
        self._scheduler.block(sm)
        run()

    def _new_coroutine(self, function: Callable[[], Any], name: str, slot: int | None) -> Coroutine:
        def conducted() -> Any:
            with interpreter.conducted(self):
                return function()

        coroutine = self._scheduler.spawn(conducted, name)
        coroutine.data = _Data(slot)
        return coroutine


class _Data:
    def __init__(self, slot: int | None) -> None:
        self.slot = slot
        self.num_launches = 0


class _HostWait:
    def __init__(self, ready: Callable[[], bool], what: str) -> None:
        self.ready, self._what = ready, what

    def describe(self) -> str:
        return self._what


class _Sm:
    """A program's wait for a place to run: fewer than ``num_sms`` of those before it do."""

    def __init__(self, earlier: Sequence[Coroutine], num_sms: int) -> None:
        self._earlier, self._num_sms = earlier, num_sms

    def ready(self) -> bool:
        return sum(not program.done for program in self._earlier) < self._num_sms

    def describe(self) -> str:
        return "another program of its launch to end"


class _FlagWait:
    def __init__(self, memory: AddressMap, address: int, word: ctypes.c_int32, wanted: int) -> None:
        self._memory, self._address, self._word, self._wanted = memory, address, word, wanted

    def ready(self) -> bool:
        return reached(self._word.value, self._wanted)

    def describe(self) -> str:
        return f"{self._memory.name_of(self._address)} to reach {wrap(self._wanted)}; it stands at {self._word.value}"


def _word(address: int) -> ctypes.c_int32:
    return ctypes.c_int32.from_address(address)


def _position_text(position: tuple[int, int, int]) -> str:
    shown = list(position)
    while len(shown) > 1 and shown[-1] == 0:
        shown.pop()
    return str(shown)


def simulate(
    function: Callable[..., T],
    world_size: int,
    *,
    seed: int,
    args: Sequence[Any] = (),
    config: CommConfig | None = None,
    races: bool = True,
    max_steps: int = MAX_STEPS,
    starved: bool = False,
) -> list[T]:
    """Run ``function(group, *args)`` for every rank of a new virtual group; returns the results by rank.

    The ranks' collectives run their kernels interpreted. All regions of the group are shared memory to the simulator.
    """
    simulator = Simulator(seed, races=races, max_steps=max_steps, starved=starved)
    with env.scoped({"TILEFLUX_CPU_BACKEND": "interpret"}), simulated_host(simulator):
        groups = local_groups(world_size, "cpu", config=config)
        try:
            for group in groups:
                simulator.spawn(partial(function, group, *args), f"rank {group.rank}")
            return simulator.run()
        finally:
            for group in groups:
                group.close()
