"""``copy_async`` on a GPU: a stream of its own, and a flag written behind the data on that stream."""

from __future__ import annotations

import torch

from tileflux.symm.base import Copy, FlagWrite

__all__ = ["StreamCopier", "write_flag"]


class _StreamCopy(Copy):
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class StreamCopier:
    """Copies in order on one side stream; the copy engine carries what crosses a link."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def copy(self, dst: torch.Tensor, src: torch.Tensor, signal: FlagWrite | None) -> Copy:
        """Queue a copy behind the caller's stream."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            dst.copy_(src, non_blocking=True)
            if signal is not None:
                self._write_flag(signal)
            event = torch.cuda.Event()
            event.record(stream)
        # The allocator may not hand the memory to somebody else before the side stream is done with it.
        for tensor in (dst, src):
            if tensor.is_cuda:
                tensor.record_stream(stream)
        return _StreamCopy(event, self._device)

    def close(self) -> None:
        """Forget the stream; what is queued on it still runs."""
        self._stream = None

    def _write_flag(self, signal: FlagWrite) -> None:
        if isinstance(signal.value, torch.Tensor):
            signal.word.copy_(signal.value, non_blocking=True)
        else:
            write_flag(signal.word, signal.value)


def write_flag(word: torch.Tensor, value: int) -> None:
    """Set one int32 word, on a GPU or pinned on the host, from the current stream, behind all that it has written.

    A stream memory operation: it needs no SM, and no turn of a copy engine. A CUDA graph would repeat the number.
    """
    if word.is_cuda:
        from tileflux.symm import cuda

        cuda.write_flag(word, value)
    else:
        from tileflux.symm import ghost

        ghost.stream_write(word, value)
