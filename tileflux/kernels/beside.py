"""Launching beside the caller's stream: a side stream per group, for what must run while a product fills the GPU."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch

from tileflux.symm.group import Group

__all__ = ["beside", "join"]

_sides: weakref.WeakKeyDictionary[Group, torch.cuda.Stream] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def beside(group: Group, *used: torch.Tensor, after: torch.cuda.Event | None = None) -> Iterator[None]:
    """Launch on the group's side stream, after an event, or what the caller's stream holds so far.

    Nothing to do on the CPU.
    """
    if group.device.type != "cuda":
        yield
        return
    side = _sides.get(group)
    if side is None:
        # Of high priority: its few programs must get in while the products fill the GPU.
        side = _sides[group] = torch.cuda.Stream(group.device, priority=-1)
    if after is None:
        side.wait_stream(torch.cuda.current_stream(group.device))
    else:
        side.wait_event(after)
    for tensor in used:
        tensor.record_stream(side)
    with torch.cuda.stream(side):
        yield


def join(group: Group) -> None:
    """Let the caller's stream wait for what was launched beside it."""
    if group.device.type == "cuda":
        torch.cuda.current_stream(group.device).wait_stream(_sides[group])
