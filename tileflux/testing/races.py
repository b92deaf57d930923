"""Finds accesses to shared memory that nothing orders: vector clocks and a shadow of the memory.

Every coroutine has a vector clock. A release publishes the clock at an address, an acquire of that address joins what
lies there, and a launch carries the clock into its programs and back. Two accesses of the same bytes, at least one
of them a write, are a race when neither coroutine's clock shows that the other access came before, whatever order this
particular schedule put them in. So one schedule tells of errors that would go wrong only under another.

In the same spirit a poll for a value joins what the first release of such a value published, even if by now there is a
larger one: the larger one is luck. A kernel that makes use of a larger value it has seen has to poll for that.

The shadow keeps the last write, the last atomic write and each coroutine's last read. It starts with the cell size of
the first access and is refined when an access is smaller, so that neighbours are never taken for one another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tileflux.errors import DataRace
from tileflux.symm.host_signal import reached
from tileflux.testing._interpreter_builder import AccessKind, Array

__all__ = ["AddressMap", "Block", "RaceDetector", "SharedRange"]

Check = AccessKind | Literal["poll"]
Selection = slice | npt.NDArray[np.int64]
Clock = npt.NDArray[np.int32]
_COARSEST = 8


class SharedRange:
    """A range of addresses that several coroutines use, with a name for messages."""

    def __init__(self, start: int, nbytes: int, name: str, describe: Callable[[int], str] | None = None) -> None:
        self.start, self.nbytes, self.name = start, nbytes, name
        self._describe = describe
        self.shadow: _Shadow | None = None

    def name_of(self, offset: int) -> str:
        """What lies ``offset`` bytes into the range."""
        return f"{self.name}.{self._describe(offset)}" if self._describe else f"{self.name}+{offset}"


class Block:
    """The part of an access that falls into one range: all of it, in the usual case."""

    __slots__ = ("indices", "itemsize", "range", "start", "stop")

    def __init__(self, range_: SharedRange, start: int, stop: int, itemsize: int, indices: Any = None) -> None:
        self.range, self.start, self.stop, self.itemsize = range_, start, stop, itemsize
        self.indices: npt.NDArray[np.int64] | None = indices
        """Byte offsets of the elements where they do not lie side by side."""


class AddressMap:
    """The shared ranges, by address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: list[SharedRange] = []

    def add(self, range_: SharedRange) -> None:
        """Add a range; where it overlaps a known one, the addresses were handed out twice."""
        at = bisect_right(self._starts, range_.start)
        before, after = self._ranges[:at], self._ranges[at:]
        if (before and before[-1].start + before[-1].nbytes > range_.start) or (
            after and range_.start + range_.nbytes > after[0].start
        ):
            raise ValueError(f"'{range_.name}' overlaps memory that is shared already")
        self._starts.insert(at, range_.start)
        self._ranges.insert(at, range_)

    def find(self, address: int) -> SharedRange | None:
        """The range an address lies in."""
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        found = self._ranges[at]
        return found if address < found.start + found.nbytes else None

    def name_of(self, address: int) -> str:
        """An address in words."""
        found = self.find(address)
        return hex(address) if found is None else found.name_of(address - found.start)

    def blocks(self, addresses: Array, mask: Array, itemsize: int) -> list[Block]:
        """The shared parts of an access."""
        flat = addresses.reshape(-1)
        if not mask.all():
            flat = flat[np.broadcast_to(mask, addresses.shape).reshape(-1)]
            if not flat.size:
                return []
        first, last = int(flat[0]), int(flat[-1])
        if flat.size == 1 or (
            last - first == (flat.size - 1) * itemsize and bool((flat[1:] - flat[:-1] == itemsize).all())
        ):
            return self.span(first, last + itemsize - first, itemsize)
        return self._scattered(flat, itemsize)

    def span(self, start: int, nbytes: int, itemsize: int = 1) -> list[Block]:
        """The shared parts of ``nbytes`` bytes in a row."""
        found = self.find(start)
        if found is not None and start + nbytes <= found.start + found.nbytes:
            return [Block(found, start - found.start, start + nbytes - found.start, itemsize)]
        blocks = []
        for range_ in self._ranges[max(bisect_right(self._starts, start) - 1, 0) :]:
            low, high = max(start, range_.start), min(start + nbytes, range_.start + range_.nbytes)
            if low < high:
                blocks.append(Block(range_, low - range_.start, high - range_.start, itemsize))
            if range_.start >= start + nbytes:
                break
        return blocks

    def _scattered(self, flat: Array, itemsize: int) -> list[Block]:
        blocks = []
        low, high = int(flat.min()), int(flat.max())
        for range_ in self._ranges[max(bisect_right(self._starts, low) - 1, 0) : bisect_right(self._starts, high)]:
            end = range_.start + range_.nbytes
            inside = flat if range_.start <= low and high < end else flat[(flat >= range_.start) & (flat < end)]
            if inside.size:
                offsets = (inside - np.uint64(range_.start)).astype(np.int64)
                blocks.append(Block(range_, int(offsets.min()), int(offsets.max()) + itemsize, itemsize, offsets))
        return blocks


class _Shadow:
    """Who touched each cell of a range last. A clock of 0 stands for nobody."""

    def __init__(self, nbytes: int, cell: int) -> None:
        self._nbytes = nbytes
        self._cell = cell
        self.writer, self.written, self.atomic_writer, self.atomic_written = (self._zeros() for _ in range(4))
        self.read: dict[int, Clock] = {}  # by reader

    def select(self, block: Block) -> Selection:
        """The cells of an access."""
        if block.indices is None:
            self._refine(block.start | block.itemsize)
            return slice(block.start // self._cell, block.stop // self._cell)
        self._refine(int(np.bitwise_or.reduce(block.indices)) | block.itemsize)
        cells = block.indices // self._cell
        per_item = block.itemsize // self._cell
        return cells if per_item == 1 else (cells[:, None] + np.arange(per_item)).reshape(-1)

    def offset_of(self, selection: Selection, position: int) -> int:
        """The byte offset of the ``position``-th selected cell."""
        cell = selection.start + position if isinstance(selection, slice) else int(selection[position])
        return int(cell) * self._cell

    def enter_read(self, reader: int, clock: int, cells: Selection) -> None:
        """Note a read."""
        if reader not in self.read:
            self.read[reader] = self._zeros()
        self.read[reader][cells] = clock

    def _zeros(self) -> Clock:
        return np.zeros(-(-self._nbytes // self._cell), np.int32)

    def _refine(self, bits: int) -> None:
        cell = _finest(bits, self._cell)
        if cell < self._cell:
            ratio = self._cell // cell
            self._cell = cell
            self.writer, self.written = self.writer.repeat(ratio), self.written.repeat(ratio)
            self.atomic_writer = self.atomic_writer.repeat(ratio)
            self.atomic_written = self.atomic_written.repeat(ratio)
            self.read = {reader: clocks.repeat(ratio) for reader, clocks in self.read.items()}


def _finest(bits: int, cell: int) -> int:
    """The largest power of two, up to ``cell``, that divides all the numbers that were or-ed into ``bits``."""
    return min(bits & -bits, cell)


class _Release:
    """A clock published at an address, and the value the flag there got by it, once that is known."""

    __slots__ = ("clock", "value")

    def __init__(self, clock: Clock, value: int | None = None) -> None:
        self.clock, self.value = clock, value


class RaceDetector:
    """The clocks of all coroutines, and the rules by which they move."""

    def __init__(self, seed: int, read_flag: Callable[[int], int]) -> None:
        self._seed, self._read_flag = seed, read_flag
        self._clocks: list[Clock] = []
        self._capacity = 8
        self._published: dict[Hashable, list[_Release]] = {}
        self._children: dict[tuple[int, int], int] = {}
        self._names: list[list[tuple[int, str]]] = []  # per slot: from which clock on, who

    def start(self, name: str) -> int:
        """A slot for a coroutine that nothing came before."""
        slot = len(self._clocks)
        if slot == self._capacity:
            self._capacity *= 2
            self._clocks = [np.pad(clock, (0, len(clock))) for clock in self._clocks]
        clock = np.zeros(self._capacity, np.int32)
        clock[slot] = 1
        self._clocks.append(clock)
        self._names.append([(1, name)])
        return slot

    def fork(self, parent: int, index: int, name: str) -> int:
        """A slot for the ``index``-th program of a launch by ``parent``, ordered after all the parent has done.

        The slot is that of the same program of the parent's previous launch, which has ended: clocks stay short.
        """
        slot = self._children.get((parent, index))
        if slot is None:
            slot = self._children[parent, index] = self.start(name)
        clock = self._clocks[slot]
        own = int(clock[slot]) + 1
        np.maximum(clock, self._clocks[parent], out=clock)
        clock[slot] = own
        self._names[slot].append((own, name))
        self.tick(parent)
        return slot

    def join(self, slot: int, other: int) -> None:
        """What ``other`` has done so far comes before what ``slot`` does next."""
        np.maximum(self._clocks[slot], self._clocks[other], out=self._clocks[slot])

    def tick(self, slot: int) -> None:
        """What ``slot`` does next is not yet known to those that joined it."""
        self._clocks[slot][slot] += 1

    def acquire(self, slot: int, where: Hashable) -> None:
        """Join what was last published at an address, or under another key."""
        if history := self._published.get(where):
            _join(self._clocks[slot], history[-1].clock)

    def acquire_flag(self, slot: int, address: int, wanted: int) -> None:
        """Join what was published with the first value, since the flag was last below it, that reached ``wanted``."""
        history = self._published.get(address, [])
        self._settle(address, history)
        first = None
        for release in reversed(history):
            if release.value is not None and not reached(release.value, wanted):
                break
            first = release
        if first is not None:
            _join(self._clocks[slot], first.clock)

    def release(self, slot: int, where: Hashable, *, keep: bool = False, is_flag: bool = False) -> None:
        """Publish there, before the access itself; ``is_flag`` if ``where`` is the address of a 32-bit word.

        ``keep`` what others published there, as an atomic update does and a store does not.
        """
        history = self._published.setdefault(where, [])
        if is_flag:
            assert isinstance(where, int)
            self._settle(where, history)
            if not history:
                history.append(_Release(np.zeros(0, np.int32), self._read_flag(where)))
        clock = self._clocks[slot].copy()
        if keep and history:
            _join(clock, history[-1].clock)
        history.append(_Release(clock))
        self.tick(slot)

    def _settle(self, address: int, history: list[_Release]) -> None:
        """Note the value that the last release left at the address: nobody has written there since."""
        if history and history[-1].value is None:
            history[-1].value = self._read_flag(address)

    def access(self, slot: int, kind: Check, block: Block) -> None:
        """Check an access against the shadow, and enter it there. Atomic accesses do not race with each other."""
        shared = block.range
        if shared.shadow is None:
            shared.shadow = _Shadow(shared.nbytes, _finest(block.start | block.itemsize, _COARSEST))
        shadow = shared.shadow
        cells = shadow.select(block)
        clock = self._clocks[slot]
        self._check(slot, kind, "wrote", shadow.written[cells], shadow.writer[cells], block, cells)
        if kind == "poll":
            return
        if kind != "atomic":
            name = "atomically wrote"
            self._check(slot, kind, name, shadow.atomic_written[cells], shadow.atomic_writer[cells], block, cells)
        if kind == "load":
            shadow.enter_read(slot, int(clock[slot]), cells)
            return
        for reader, clocks in shadow.read.items():
            self._check_reader(slot, kind, reader, clocks[cells], block, cells)
        if kind == "atomic":
            shadow.atomic_writer[cells] = slot
            shadow.atomic_written[cells] = clock[slot]
            return
        shadow.writer[cells] = slot
        shadow.written[cells] = clock[slot]
        self._forget_published(shared.start + block.start, shared.start + block.stop)

    def _check(
        self, slot: int, kind: Check, done: str, clocks: Clock, slots: Clock, block: Block, cells: Selection
    ) -> None:
        unordered = clocks > self._clocks[slot][slots]
        if unordered.any():
            at = int(unordered.argmax())
            self._report(slot, kind, done, int(slots[at]), int(clocks[at]), block, cells, at)

    def _check_reader(self, slot: int, kind: Check, reader: int, clocks: Clock, block: Block, cells: Selection) -> None:
        unordered = clocks > self._clocks[slot][reader]
        if unordered.any():
            at = int(unordered.argmax())
            self._report(slot, kind, "read", reader, int(clocks[at]), block, cells, at)

    def _report(
        self, slot: int, kind: Check, done: str, other: int, clock: int, block: Block, cells: Selection, at: int
    ) -> None:
        assert block.range.shadow is not None
        doing = {"load": "reads", "store": "writes", "atomic": "atomically writes", "poll": "polls"}[kind]
        where = block.range.name_of(block.range.shadow.offset_of(cells, at))
        who, whom = self._name(slot, int(self._clocks[slot][slot])), self._name(other, clock)
        raise DataRace(f"{who} {doing} {where}, which {whom} {done}; no signal orders the two (seed {self._seed})")

    def _name(self, slot: int, clock: int) -> str:
        names = self._names[slot]
        return names[bisect_right(names, clock, key=lambda entry: entry[0]) - 1][1]

    def _forget_published(self, start: int, stop: int) -> None:
        """A plain store to a flag publishes nothing, and hides what was."""
        for address in [a for a in self._published if isinstance(a, int) and start <= a < stop]:
            del self._published[address]


def _join(clock: Clock, other: Clock) -> None:
    """Clocks grow with the number of coroutines; ``other`` may be from before."""
    mine = clock[: len(other)]
    np.maximum(mine, other, out=mine)
