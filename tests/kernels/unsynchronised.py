"""Work on a GPU during which the host must not wait for it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def unsynchronised() -> Iterator[None]:
    """An operation of torch's that waits for the GPU is an error until the end."""
    with warnings.catch_warnings():
        # Torch says once that it may not notice all of them.
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype feature")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
