"""What every collective does before it moves a byte: check the caller's tensors and the group, then line up."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from tileflux.errors import TilefluxError
from tileflux.kernels.prepare import prepare
from tileflux.symm.group import Group

__all__ = [
    "REDUCIBLE",
    "as_bytes",
    "begin",
    "check_apart",
    "check_out",
    "check_reducible",
    "check_sizes",
    "check_tensor",
    "dense",
    "guarded",
    "stopped",
    "sum_in_rank_order",
]

REDUCIBLE = (torch.float32, torch.float16, torch.bfloat16)


def check_tensor(op: str, name: str, tensor: torch.Tensor, group: Group) -> None:
    """Refuse what is not a dense tensor on the group's device."""
    if not isinstance(group, Group):
        raise ValueError(
            f"{op}: group should be a tileflux.Group, not {type(group).__name__}; see Group.from_process_group"
        )
    if not torch.compiler.is_compiling():
        group.ensure_usable()
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{op}: {name} should be a tensor, not {type(tensor).__name__}")
    if tensor.device != group.device:
        raise ValueError(f"{op}: {name} is on {tensor.device} but the group is on {group.device}; move it there")
    if tensor.layout != torch.strided:
        raise ValueError(f"{op}: {name} has layout {tensor.layout}; only dense tensors are moved")


def check_reducible(op: str, tensor: torch.Tensor) -> None:
    """Refuse element types that have no fp32 sum. Where bytes are summed, since a gradient gets there by itself."""
    if tensor.dtype not in REDUCIBLE:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in REDUCIBLE)
        raise ValueError(f"{op}: cannot sum {tensor.dtype}; convert to one of {names}")


def check_out(
    op: str,
    out: torch.Tensor | None,
    shape: tuple[int, ...],
    like: torch.Tensor,
    own_place: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    others: Sequence[torch.Tensor | None] = (),
) -> torch.Tensor:
    """The tensor to fill: ``out`` if it fits, else a new one.

    Bytes that ``out`` shares with the input ``like`` must lie ``own_place`` bytes into ``out``, in one piece, where
    they belong anyway; anywhere else they would be overwritten before they are sent. ``dtype`` is that of ``like``
    unless given; ``others`` are further inputs.
    """
    dtype = dtype or like.dtype
    if out is None:
        return torch.empty(shape, dtype=dtype, device=like.device)
    inputs = [like, *[other for other in others if other is not None]]
    # Lists: on the way of every repeated call a generator takes longer than what it asks.
    if torch.is_grad_enabled() and (out.requires_grad or any([tensor.requires_grad for tensor in inputs])):  # noqa: C419
        raise ValueError(
            f"{op}: out= records no gradient, and a tensor here requires one; leave it away, or use no_grad"
        )
    if out.is_conj() or out.is_neg():
        raise ValueError(f"{op}: out is a lazily conjugated or negated view; pass a plain tensor")
    if out.shape != shape or out.dtype != dtype or out.device != like.device or not out.is_contiguous():
        raise ValueError(
            f"{op}: out should be contiguous {shape} {dtype} on {like.device}, "
            f"not {tuple(out.shape)} {out.dtype} on {out.device} with strides {out.stride()}"
        )
    place = out.data_ptr()
    end = place + out.nbytes
    for tensor in inputs:
        begin = tensor.data_ptr()
        if begin < end and place < begin + _extent(tensor):
            is_in_place = tensor is like and begin - place == own_place and tensor.is_contiguous()
            if not is_in_place:
                raise ValueError(f"{op}: out overlaps the input; give them separate memory")
    torch.autograd.graph.increment_version(out)  # kernels write behind autograd's back
    return out


def check_apart(op: str, outs: Sequence[torch.Tensor]) -> None:
    """Refuse results that share memory: of two that are written to the same place, one would be lost."""
    places = sorted((out.data_ptr(), _extent(out), number) for number, out in enumerate(outs))
    for (begin, extent, first), (later, _, second) in itertools.pairwise(places):
        if later < begin + extent:
            pair = sorted((first, second))
            raise ValueError(f"{op}: out[{pair[0]}] and out[{pair[1]}] overlap; give them separate memory")


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to behind the last one; what lies between elements counts as theirs."""
    if tensor.is_contiguous():  # also whatever has no elements
        return tensor.nbytes
    last = 0
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * step
    return (last + 1) * tensor.itemsize


def dense(x: torch.Tensor) -> torch.Tensor:
    """``x`` as bytes that mean what they say: contiguous, with nothing left to conjugate or negate."""
    x = x.resolve_conj().resolve_neg().contiguous()
    # One element is contiguous whatever its strides, and cannot be viewed as bytes if its last one is not 1.
    return x.clone(memory_format=torch.contiguous_format) if x.numel() == 1 else x


def check_sizes(op: str, name: str, sizes: Sequence[int], group: Group, total: int | None = None) -> tuple[int, ...]:
    """Row counts by rank, one per rank, none negative, together ``total``."""
    sizes = tuple(int(size) for size in sizes)
    if len(sizes) != group.world_size:
        raise ValueError(f"{op}: {name}={list(sizes)} has {len(sizes)} entries for {group.world_size} ranks")
    if not torch.compiler.is_compiling() and any(size < 0 for size in sizes):
        raise ValueError(f"{op}: {name}={list(sizes)} has a negative entry")
    if total is not None and sum(sizes) != total:
        raise ValueError(f"{op}: {name}={list(sizes)} add up to {sum(sizes)} rows, but the tensor has {total}")
    return sizes


def begin(op: str, group: Group, same: object, claims: Mapping[str, object] | None = None) -> None:
    """Raise if the group cannot be used; with checking on, compare ``same`` and ``claims`` with the other ranks'."""
    group.ensure_usable()
    if group.check_calls:
        try:
            group.agree(op, same, claims)
        except TilefluxError as error:
            # Virtual ranks find out one by one, and processes when one is missing: some may have gone on.
            group.mark_broken(error)
            raise
    group.order_stream()
    prepare(group)


def sum_in_rank_order(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """What a reduction of all ranks' ``inputs`` promises, bit for bit: fp32 sums from rank 0 on, rounded once."""
    total = torch.zeros(inputs[0].shape, dtype=torch.float32, device=inputs[0].device)
    for x in inputs:
        total += x.float()
    return total.to(inputs[0].dtype)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as flat bytes, whatever its element type."""
    return tensor.reshape(-1).view(torch.uint8)


class guarded:  # noqa: N801 - reads as a statement: ``with guarded(group):``
    """Marks the group broken when the collective inside stops half-way: a timeout, an interrupt, no memory.

    Its channels have then counted messages that peers have not, and a later call would pair wrong ones. A
    ``ValueError`` is a refusal made before the first message.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def __enter__(self) -> None:
        # Kernels go to the current device, and addresses are plain numbers: a wrong device would not be noticed.
        self._device = torch.cuda.device(self._group.device if self._group.device.type == "cuda" else -1)
        self._device.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._device.__exit__(None, None, None)
        if error is not None:
            stopped(self._group, error)


def stopped(group: Group, error: BaseException) -> None:
    """``error`` stopped a collective: as ``guarded`` says."""
    if not isinstance(error, ValueError):
        group.mark_broken(error)
