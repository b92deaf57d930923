"""The race detector alone, fed with accesses by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tileflux.errors import DataRace
from tileflux.testing.races import AddressMap, RaceDetector, SharedRange

START, NBYTES = 4096, 256
FLAG = START + 128


class World:
    """Two coroutines, ``a`` and ``b``, and one shared range."""

    def __init__(self) -> None:
        self.memory = AddressMap()
        self.memory.add(SharedRange(START, NBYTES, "heap"))
        self.flag = 0
        self.detector = RaceDetector(9, lambda address: self.flag)
        self.a, self.b = self.detector.start("a"), self.detector.start("b")

    def touch(self, slot: int, kind: str, offset: int = 0, count: int = 4, itemsize: int = 4, stride: int = 1) -> None:
        addresses = START + offset + np.arange(count, dtype=np.uint64) * np.uint64(itemsize * stride)
        for block in self.memory.blocks(addresses, np.ones(count, np.bool_), itemsize):
            self.detector.access(slot, kind, block)

    def pass_on(self, giver: int, taker: int) -> None:
        self.detector.release(giver, FLAG)
        self.detector.acquire(taker, FLAG)


@pytest.mark.parametrize(
    ("first", "second", "is_race"),
    [
        ("store", "store", True),
        ("store", "load", True),
        ("load", "store", True),
        ("load", "load", False),
        ("atomic", "atomic", False),
        ("atomic", "load", True),
        ("load", "atomic", True),
        ("store", "poll", True),
        ("atomic", "poll", False),
    ],
)
@pytest.mark.parametrize("ordered", [True, False])
def test_conflicting_accesses_need_an_order(first: str, second: str, is_race: bool, ordered: bool) -> None:
    world = World()
    world.touch(world.a, first)
    if ordered:
        world.pass_on(world.a, world.b)
    if is_race and not ordered:
        with pytest.raises(DataRace, match=r"b .* heap\+0, which a .*no signal orders the two \(seed 9\)"):
            world.touch(world.b, second)
    else:
        world.touch(world.b, second)


def test_release_does_not_cover_what_follows_it() -> None:
    world = World()
    world.detector.release(world.a, FLAG)
    world.touch(world.a, "store")
    world.detector.acquire(world.b, FLAG)
    with pytest.raises(DataRace, match=r"b reads heap\+0, which a wrote"):
        world.touch(world.b, "load")


def test_order_is_carried_on_by_third_parties() -> None:
    world = World()
    c = world.detector.start("c")
    world.touch(world.a, "store")
    world.pass_on(world.a, world.b)
    world.pass_on(world.b, c)
    world.touch(c, "store")


def test_poll_joins_only_what_the_value_it_asked_for_guarantees() -> None:
    for wanted, num_ordered in ((1, 1), (2, 2), (3, 3), (0, 0)):
        world = World()
        for value in (1, 2, 3):
            world.touch(world.a, "store", 16 * value)
            world.detector.release(world.a, FLAG, is_flag=True)
            world.flag = value
        world.detector.acquire_flag(world.b, FLAG, wanted)
        for value in (1, 2, 3):
            if value <= num_ordered:
                world.touch(world.b, "load", 16 * value)
            else:
                with pytest.raises(DataRace):
                    world.touch(world.b, "load", 16 * value)


def test_poll_of_a_flag_that_was_set_back_joins_what_came_after() -> None:
    world = World()
    for value in (1, 0, 1):
        world.touch(world.a, "store")
        world.detector.release(world.a, FLAG, is_flag=True)
        world.flag = value
    world.detector.acquire_flag(world.b, FLAG, 1)
    world.touch(world.b, "load")


def test_poll_of_a_counter_joins_all_who_counted() -> None:
    world = World()
    c = world.detector.start("c")
    for count, slot in enumerate((world.a, world.b), start=1):
        world.touch(slot, "store", 16 * count)
        world.detector.release(slot, FLAG, keep=True, is_flag=True)
        world.flag = count
    world.detector.acquire_flag(c, FLAG, 2)
    world.touch(c, "load", 16)
    world.touch(c, "load", 32)


def test_store_replaces_what_was_published_and_update_adds_to_it() -> None:
    for keep in (False, True):
        world = World()
        c = world.detector.start("c")
        world.touch(world.a, "store")
        world.detector.release(world.a, FLAG)
        world.detector.release(world.b, FLAG, keep=keep)
        world.detector.acquire(c, FLAG)
        if keep:
            world.touch(c, "load")
        else:
            with pytest.raises(DataRace):
                world.touch(c, "load")


def test_plain_store_to_a_flag_publishes_nothing() -> None:
    world = World()
    world.touch(world.a, "store")
    world.detector.release(world.a, FLAG)
    world.touch(world.a, "store", FLAG - START, 1)
    world.detector.acquire(world.b, FLAG)
    with pytest.raises(DataRace):
        world.touch(world.b, "load")


def test_every_reader_counts() -> None:
    world = World()
    c = world.detector.start("c")
    world.touch(world.a, "load")
    world.touch(world.b, "load")
    world.pass_on(world.b, c)
    with pytest.raises(DataRace, match=r"c writes heap\+0, which a read"):
        world.touch(c, "store")
    world.pass_on(world.a, c)
    world.touch(c, "store")


def test_neighbours_are_no_conflict_down_to_the_byte() -> None:
    world = World()
    world.touch(world.a, "store", 0, 1, 8)
    world.touch(world.a, "store", 9, 1, 1)
    world.touch(world.b, "store", 8, 1, 1)
    world.touch(world.b, "store", 10, 3, 2)
    with pytest.raises(DataRace, match=r"heap\+4,"):
        world.touch(world.b, "load", 4, 1, 2)
    with pytest.raises(DataRace, match=r"heap\+9,"):
        world.touch(world.b, "load", 8, 1, 4)


def test_earlier_reads_are_kept_when_cells_get_smaller() -> None:
    world = World()
    world.touch(world.a, "load", 16, 2, 8)
    world.touch(world.b, "store", 15, 1, 1)
    world.touch(world.b, "store", 32, 1, 1)
    for offset in (16, 31):
        with pytest.raises(DataRace, match=rf"b writes heap\+{offset}, which a read"):
            world.touch(world.b, "store", offset, 1, 1)


def test_large_scattered_elements_cover_several_cells() -> None:
    world = World()
    world.touch(world.b, "load", 0, 1, 4)
    world.touch(world.a, "store", 16, 3, 8, stride=2)
    world.touch(world.b, "load", 24, 2, 4)
    with pytest.raises(DataRace, match=r"heap\+36,"):
        world.touch(world.b, "load", 36, 1, 4)


def test_scattered_accesses_touch_only_what_they_touch() -> None:
    world = World()
    world.touch(world.a, "store", 0, 8, 4, stride=2)
    world.touch(world.b, "store", 4, 8, 4, stride=2)
    with pytest.raises(DataRace, match=r"heap\+24,"):
        world.touch(world.b, "load", 20, 2)


def test_masked_and_private_elements_are_left_out() -> None:
    world = World()
    world.memory.add(SharedRange(START + NBYTES + 64, 64, "other"))
    ends = np.array([START - 8, START, START + 300, START + NBYTES + 64], np.uint64)
    assert world.memory.blocks(ends, np.zeros(4, np.bool_), 4) == []
    found = world.memory.blocks(ends, np.ones(4, np.bool_), 4)
    assert [(block.range.name, block.start, block.stop) for block in found] == [("heap", 0, 4), ("other", 0, 4)]
    found = world.memory.blocks(ends, np.array([True, True, False, False]), 4)
    assert [block.range.name for block in found] == ["heap"]
    row = START - 8 + 4 * np.arange(400, dtype=np.uint64)
    for found in (world.memory.span(START - 8, 1600), world.memory.blocks(row, np.ones(400, np.bool_), 4)):
        assert [(block.range.name, block.start, block.stop) for block in found] == [("heap", 0, 256), ("other", 0, 64)]


def test_programs_come_after_their_launch_and_before_its_end() -> None:
    world = World()
    world.touch(world.a, "store")
    first = world.detector.fork(world.a, 0, "a's first")
    second = world.detector.fork(world.a, 1, "a's second")
    world.touch(first, "load")
    world.touch(second, "load")
    with pytest.raises(DataRace, match=r"a's second writes heap\+0, which a's first read"):
        world.touch(second, "store")
    world.detector.join(world.a, first)
    world.detector.join(world.a, second)
    world.touch(world.a, "store")


def test_what_a_launcher_does_next_is_unknown_to_whom_its_programs_signalled() -> None:
    world = World()
    program = world.detector.fork(world.a, 0, "program")
    world.pass_on(program, world.b)
    world.detector.join(world.a, program)
    world.touch(world.a, "store")
    with pytest.raises(DataRace, match="b reads .* a wrote"):
        world.touch(world.b, "load")


def test_next_launch_takes_over_the_slot_and_the_name() -> None:
    world = World()
    for launch in range(3):
        program = world.detector.fork(world.a, 0, f"launch {launch}")
        world.touch(program, "store", 16 * launch)
        world.detector.join(world.a, program)
    assert program == 2
    with pytest.raises(DataRace, match=r"b reads heap\+16, which launch 1 wrote"):
        world.touch(world.b, "load", 16)


def test_many_coroutines() -> None:
    world = World()
    slots = [world.detector.start(f"coroutine {i}") for i in range(40)]
    world.touch(slots[39], "store")
    world.pass_on(slots[39], world.a)
    world.touch(world.a, "load")
    with pytest.raises(DataRace, match="coroutine 20 reads .* coroutine 39 wrote"):
        world.touch(slots[20], "load")


def test_address_map_names_and_refuses_overlap() -> None:
    memory = AddressMap()
    memory.add(SharedRange(100, 50, "flags", lambda offset: f"word {offset // 4}"))
    memory.add(SharedRange(200, 50, "data"))
    assert memory.name_of(108) == "flags.word 2"
    assert memory.name_of(249) == "data+49"
    assert memory.name_of(250) == "0xfa"
    assert memory.name_of(99) == "0x63"
    for start in (60, 149, 195):
        with pytest.raises(ValueError, match="overlaps"):
            memory.add(SharedRange(start, 50, "again"))
