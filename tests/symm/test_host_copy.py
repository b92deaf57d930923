"""``copy_async`` on the CPU: the flag is set after the bytes, in the order asked for, and when a link says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import tileflux
from tileflux import FlagWrite, env
from tileflux.errors import GroupClosed
from tileflux.link import Link
from tileflux.symm import host_copy
from tileflux.symm.base import Traits
from tileflux.symm.group import Group
from tileflux.symm.host_copy import HostCopier
from tileflux.symm.host_signal import HostWords
from tileflux.testing import nan_like, run_ranks


def _push_to_neighbour(group: Group) -> None:
    peer = (group.rank + 1) % group.world_size
    data = group.region("data", 4000)
    flags = group.region("flags", 64)
    word = flags.view(peer, torch.int32)[0:1]
    own = HostWords(flags.view())
    for epoch in range(1, 21):
        source = torch.full((1000,), float(100 * epoch + group.rank))
        value: int | torch.Tensor = epoch if epoch % 2 else torch.tensor([epoch], dtype=torch.int32)
        done = group.copy_async(data.view(peer, torch.float32), source, signal=FlagWrite(word, value))
        own.wait(0, epoch, lambda seen, seconds: seconds > 10)
        left = (group.rank - 1) % group.world_size
        assert (data.view(dtype=torch.float32) == 100 * epoch + left).all()
        done.wait()
        group.barrier()


@pytest.mark.parametrize("where", ["fork", "virtual"])
def test_neighbours_see_bytes_before_the_flag(where: str) -> None:
    run_ranks(_push_to_neighbour, 3, where=where)  # type: ignore[arg-type]


def _bad_copies(group: Group) -> None:
    with pytest.raises(ValueError, match="shapes and dtypes must match"):
        group.copy_async(torch.zeros(3), torch.zeros(4))
    with pytest.raises(ValueError, match="one int32 word"):
        FlagWrite(torch.zeros(2, dtype=torch.int32), 1)


def test_bad_copies_are_refused() -> None:
    run_ranks(_bad_copies, 1, where="virtual")


def test_an_error_in_the_worker_reaches_the_caller() -> None:
    copier = HostCopier("test")
    with pytest.raises(RuntimeError):
        copier.copy(torch.zeros(3), torch.zeros(4), None).wait()
    copier.copy(torch.zeros(3), torch.ones(3), None).wait()
    copier.close()


class Sender:
    """A copier with a link, and what it needs to send: fresh bytes, a poisoned place, a flag."""

    def __init__(self, link: str) -> None:
        self.copier = HostCopier("test", Link.parse(link))
        self.flag = torch.zeros(1, dtype=torch.int32)
        self.num_sent = 0

    def send(self, nbytes: int) -> tuple[host_copy.Copy, torch.Tensor, torch.Tensor]:
        """The copy under way, its destination and its source."""
        source = torch.randint(1, 256, (nbytes,), dtype=torch.uint8)
        place = torch.zeros_like(source)
        self.num_sent += 1
        return self.copier.copy(place, source, FlagWrite(self.flag, self.num_sent)), place, source


@pytest.fixture
def senders() -> Iterator[type[Sender]]:
    made: list[Sender] = []

    class Closed(Sender):
        def __init__(self, link: str) -> None:
            super().__init__(link)
            made.append(self)

    yield Closed
    for sender in made:
        sender.copier.close()


def test_bytes_and_flag_come_when_the_link_has_carried_them(senders: type[Sender]) -> None:
    sender = senders("100MB/s,30ms")
    start = time.monotonic()
    copy, place, source = sender.send(8_000_000)
    while not place[-1].item() and sender.flag.item() == 0:
        time.sleep(0.005)
    assert time.monotonic() - start >= 0.11, "bytes or flag came before their time"
    copy.wait()
    assert torch.equal(place, source) and sender.flag.item() == 1


def test_copies_share_the_bandwidth(senders: type[Sender]) -> None:
    copier = senders("100MB/s").copier
    source = torch.randint(256, (4_000_000,), dtype=torch.uint8)
    places = [torch.empty_like(source) for _ in range(3)]
    start = time.monotonic()
    copies = [copier.copy(place, source, None) for place in places]
    for number, (copy, place) in enumerate(zip(copies, places, strict=True), 1):
        copy.wait()
        assert time.monotonic() - start >= 0.04 * number
        assert torch.equal(place, source)
    assert time.monotonic() - start < 2.0


def test_latencies_overlap(senders: type[Sender]) -> None:
    sender = senders("1GB/s,200ms")
    start = time.monotonic()
    copies = [sender.send(10) for _ in range(10)]
    for copy, place, source in copies:
        copy.wait()
        assert time.monotonic() - start >= 0.2
        assert torch.equal(place, source)
    assert time.monotonic() - start < 10 * 0.2


def test_time_in_which_nothing_is_sent_is_lost(senders: type[Sender]) -> None:
    sender = senders("100MB/s")
    sender.send(1000)[0].wait()
    time.sleep(0.1)
    start = time.monotonic()
    sender.send(5_000_000)[0].wait()
    assert time.monotonic() - start >= 0.05


def test_a_copy_of_nothing_takes_no_time_but_waits_its_turn(senders: type[Sender]) -> None:
    sender = senders("1MB/s,400ms")
    start = time.monotonic()
    sender.send(0)[0].wait()
    alone = time.monotonic() - start
    sender.send(100)
    sender.send(0)[0].wait()
    assert alone < 0.4 <= time.monotonic() - start and sender.flag.item() == 3


@pytest.mark.parametrize("overshoot", [0.0, 0.3, 0.9, 7.5])
def test_a_sleep_that_ends_late_does_not_lower_the_rate(monkeypatch: pytest.MonkeyPatch, overshoot: float) -> None:
    """With a made-up clock: copies of one second each, and sleeps that always end late."""
    now = 100.0

    def wait(seconds: float) -> bool:
        nonlocal now
        now += seconds + overshoot
        return False

    monkeypatch.setattr(host_copy, "time", SimpleNamespace(monotonic=lambda: now))
    wire = host_copy._Wire(Link(10.0, 0.5), SimpleNamespace(wait=wait))  # type: ignore[arg-type]
    for number in range(1, 101):
        assert wire.carry(100.0, 10)
        assert 100.0 + number + 0.5 <= now <= 100.0 + number + 0.5 + overshoot


def test_the_thread_sleeps_while_the_link_is_busy(senders: type[Sender]) -> None:
    sender = senders("1MB/s")
    sender.send(0)[0].wait()
    thread = sender.copier._thread
    assert thread is not None and thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    before = time.clock_gettime(clock)
    sender.send(400_000)[0].wait()
    assert time.clock_gettime(clock) - before < 0.04, "more than a tenth of the 0.4 s was spent on a core"


def test_closing_delivers_at_once_what_is_under_way() -> None:
    sender = Sender("1B/s,1000s")
    copies = [sender.send(1000) for _ in range(3)]
    time.sleep(0.05)
    thread = sender.copier._thread
    assert thread is not None and thread.is_alive() and sender.flag.item() == 0
    start = time.monotonic()
    sender.copier.close()
    assert time.monotonic() - start < 2.0 and not thread.is_alive()
    for copy, place, source in copies:
        copy.wait()
        assert torch.equal(place, source)
    assert sender.flag.item() == 3


def test_closing_after_an_error_delivers_nothing() -> None:
    sender = Sender("1B/s,1000s")
    copies = [sender.send(nbytes) for nbytes in (1000, 0, 1000)]
    start = time.monotonic()
    sender.copier.close(orderly=False)
    for copy, place, _ in copies:
        with pytest.raises(GroupClosed, match="closed before this copy had landed"):
            copy.wait()
        assert not place.any()
    assert time.monotonic() - start < 2.0 and sender.flag.item() == 0


def test_without_a_link_closing_after_an_error_finishes_what_is_queued() -> None:
    copier = HostCopier("test")
    source, place = torch.randn(1_000_000), torch.zeros(1_000_000)
    copy = copier.copy(place, source, None)
    copier.close(orderly=False)
    copy.wait()
    assert torch.equal(place, source)


def test_a_copier_may_be_used_after_closing(senders: type[Sender]) -> None:
    sender = senders("1MB/s")
    for _ in range(2):
        start = time.monotonic()
        sender.send(50_000)[0].wait()
        assert time.monotonic() - start >= 0.05
        sender.copier.close()


def test_a_copy_that_has_landed_holds_no_memory() -> None:
    copier = HostCopier("test")
    copy = copier.copy(torch.zeros(3), torch.ones(3), None)
    copy.wait()
    assert not any(isinstance(value, torch.Tensor) for value in vars(copy).values())
    copier.close()


def _timed_push(group: Group) -> tuple[Link | None, float]:
    data = group.region("data", 100_000)
    place = data.view((group.rank + 1) % group.world_size, torch.float32)
    start = time.monotonic()
    group.copy_async(place, nan_like(place)).wait()
    return group.traits.link, time.monotonic() - start


@pytest.mark.parametrize("where", ["fork", "virtual"])
def test_ranks_on_the_cpu_have_the_link_that_is_asked_for(where: str) -> None:
    with env.scoped({"TILEFLUX_LINK": "1MB/s,50ms"}):
        for link, seconds in run_ranks(_timed_push, 2, where=where):  # type: ignore[arg-type]
            assert link == Link(1e6, 0.05) and seconds >= 0.15
    for link, _ in run_ranks(_timed_push, 2, where=where):  # type: ignore[arg-type]
        assert link is None
    assert Traits(False, False, ("self",), 0).link is None


def test_a_link_that_makes_no_sense_is_refused_before_anything_starts() -> None:
    before = threading.active_count()
    with env.scoped({"TILEFLUX_LINK": "quick"}), pytest.raises(ValueError, match="TILEFLUX_LINK='quick' is not a link"):
        tileflux.local_groups(2)
    assert threading.active_count() == before
