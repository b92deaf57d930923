"""Channels on the host: order, back-pressure, and counts that pass 2**31."""

from __future__ import annotations

import pytest
import torch

import tileflux
from tileflux import env
from tileflux.config import NUM_SLOTS, CommConfig
from tileflux.errors import PeerTimeout
from tileflux.symm.group import Group
from tileflux.symm.host_signal import HostWords, wrap
from tileflux.testing import run_ranks
from tileflux.testing.collectives import check_collectives


def start_counting_at(group: Group, count: int) -> None:
    """Set every channel's counts, as if ``count`` messages had passed."""
    layout = group.mailbox.layout
    words = HostWords(group.mailbox.region.view())
    for index in range(4 * layout.num_lanes * layout.world_size):
        words.store(index, count)
    group.barrier()


def test_messages_arrive_in_order_and_slots_are_not_reused_early() -> None:
    sender, receiver = tileflux.local_groups(2, timeout_s=0.3, config=CommConfig(1, 256))
    for number in range(NUM_SLOTS):
        sender.channels.acquire(0, 1, "test").fill_(number)
        sender.channels.publish(0, 1)
    with pytest.raises(PeerTimeout, match=r"mailbox.ack\[lane 0, rank 1\] should have reached 1 but stands at 0"):
        sender.channels.acquire(0, 1, "test")
    for number in range(NUM_SLOTS):
        assert receiver.channels.receive(0, 0, "test").eq(number).all()
        receiver.channels.release(0, 0)
    assert sender.channels.acquire(0, 1, "test").eq(0).all(), "the first slot is free again"
    for group in (sender, receiver):
        group.close()


def test_an_announcement_counts_as_sent_and_is_seen_when_it_is_made() -> None:
    sender, receiver = tileflux.local_groups(2, timeout_s=0.3, config=CommConfig(2, 256))
    slots = []
    for number in range(NUM_SLOTS):
        slot = sender.channels.acquire(1, 1, "test")
        slots.append((slot, sender.channels.announcement(1, 1), number))
    with pytest.raises(PeerTimeout, match=r"mailbox.ack\[lane 1, rank 1\] should have reached 1 but stands at 0"):
        sender.channels.acquire(1, 1, "test")
    for slot, flag, number in slots:
        layout = receiver.mailbox.layout
        arrived = layout.word(layout.data, 1, 0)
        words = HostWords(receiver.mailbox.region.view())
        assert words.load(arrived) == number
        slot.fill_(number)
        HostWords(flag.word).store(0, int(flag.value))
        assert words.load(arrived) == number + 1
        assert receiver.channels.receive(1, 0, "test").eq(number).all()
        receiver.channels.release(1, 0)
    sender.channels.acquire(1, 1, "test")
    for group in (sender, receiver):
        group.close()


def _across_the_wrap(group: Group, start: int) -> int:
    start_counting_at(group, start)
    check_collectives(group, [(13, 8), (257, 129)], [torch.bfloat16])
    layout = group.mailbox.layout
    sent = layout.word(layout.sent, 0, (group.rank + 1) % group.world_size)
    return HostWords(group.mailbox.region.view()).load(sent)


@pytest.mark.parametrize("link", [None, "1GB/s,1ms"])
def test_counts_wrap(link: str | None) -> None:
    start = 2**31 - 5
    with env.scoped({"TILEFLUX_LINK": link}):
        ends = run_ranks(_across_the_wrap, 3, args=(start,))
    for end in ends:
        assert end < 0 and wrap(end - start) > 5, "the counts did not pass the wrap"
