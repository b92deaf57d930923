"""Launching beside the caller's stream: streams of a group, for what must run while a product fills the GPU."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch

from tileflux import env
from tileflux.symm.group import Group

__all__ = ["ANNOUNCING", "CLOSING", "SENDING", "beside", "join"]

SENDING, CLOSING, ANNOUNCING = "sending", "closing", "announcing"
"""What a stream is for. Closing it is what tells when something may be sent: in the stream that sends, the next such
kernel would wait for what is being sent, and what can be sent next for it. A flag behind a copy is not written there
either: the copy engine goes from one copy to the next at once, but not past anything else queued between them."""

_sides: weakref.WeakKeyDictionary[Group, dict[str, torch.cuda.Stream]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def beside(
    group: Group, *used: torch.Tensor, after: torch.cuda.Event | None = None, on: str = SENDING
) -> Iterator[None]:
    """Launch on one of the group's streams, after an event, or what the current stream holds so far. Not on the CPU."""
    if group.device.type != "cuda":
        yield
        return
    side = _stream(group, on)
    if after is None:
        side.wait_stream(torch.cuda.current_stream(group.device))
    else:
        side.wait_event(after)
    for tensor in used:
        tensor.record_stream(side)
    with torch.cuda.stream(side):
        yield


def join(group: Group, *, on: str = SENDING) -> None:
    """Let the caller's stream wait for what was queued there.

    A kernel that waits for peers on many SMs comes behind what closes: beside it none of them may find a place, and
    peers wait for what is not sent. Seen on an H200, with room for many on every SM.
    """
    if group.device.type == "cuda":
        torch.cuda.current_stream(group.device).wait_stream(_stream(group, on))


def _stream(group: Group, name: str) -> torch.cuda.Stream:
    if name == ANNOUNCING and env.single_queue():
        name = SENDING  # or a flag that waits for its copy would keep the product waiting
    streams = _sides.setdefault(group, {})
    if name not in streams:
        # Of high priority: its few programs must get in while the products fill the GPU.
        streams[name] = torch.cuda.Stream(group.device, priority=-1)
    return streams[name]
