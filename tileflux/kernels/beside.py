"""Launching beside the caller's stream: a side stream per group, for what must run while a product fills the GPU."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch

from tileflux.symm.group import Group

__all__ = ["beside", "join"]

_sides: weakref.WeakKeyDictionary[Group, dict[bool, torch.cuda.Stream]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def beside(
    group: Group, *used: torch.Tensor, after: torch.cuda.Event | None = None, closing: bool = False
) -> Iterator[None]:
    """Launch on the group's side stream, after an event, or what the caller's stream holds so far.

    There are two: with ``closing``, that of kernels that tell when something may be sent. In one stream the next of
    them would wait for what is being sent, and what can be sent next for it. Nothing to do on the CPU.
    """
    if group.device.type != "cuda":
        yield
        return
    side = _stream(group, closing)
    if after is None:
        side.wait_stream(torch.cuda.current_stream(group.device))
    else:
        side.wait_event(after)
    for tensor in used:
        tensor.record_stream(side)
    with torch.cuda.stream(side):
        yield


def join(group: Group, *, closing: bool = False) -> None:
    """Let the caller's stream wait for what was sent beside it; or, ``closing``, for what told when to send.

    A kernel that waits for peers on many SMs comes behind the latter: beside it none of them may find a place, and
    peers wait for what is not sent. Seen on an H200, with room for many on every SM.
    """
    if group.device.type == "cuda":
        torch.cuda.current_stream(group.device).wait_stream(_stream(group, closing))


def _stream(group: Group, closing: bool) -> torch.cuda.Stream:
    streams = _sides.setdefault(group, {})
    if closing not in streams:
        # Of high priority: its few programs must get in while the products fill the GPU.
        streams[closing] = torch.cuda.Stream(group.device, priority=-1)
    return streams[closing]
