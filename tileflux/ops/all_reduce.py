"""All-reduce: the sum over ranks, on every rank.

    x    any shape, the same on every rank
    out  = sum over s of x_s      in fp32, s = 0, 1, 2, ..., rounded once

The bits are the same on every rank and in both algorithms.

``one_shot``: every rank stores all of x into every peer's mailbox and sums what arrives: one step, W times the bytes.
``two_shot``: reduce-scatter, then all-gather of the sums: two steps, twice the bytes. ``auto``: one_shot for small x.
fp32, fp16, bf16. The gradient is ``all_reduce``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tileflux.kernels.copy import move
from tileflux.kernels.plan import Extent, gather_plan, part, reduce_plan
from tileflux.kernels.reduce import reduce
from tileflux.ops._call import begin, check_out, check_reducible, check_tensor, dense, guarded, sum_in_rank_order
from tileflux.ops._library import eager_only, register
from tileflux.symm.group import Group, group_by_name

__all__ = ["ALGORITHMS", "all_reduce", "all_reduce_reference", "pick_algorithm", "sum_everywhere"]

ALGORITHMS = ("auto", "one_shot", "two_shot")
_ONE_SHOT_BYTES = 512 * 1024  # one_shot moves (W - 1) * nbytes into each rank; up to here latency costs more


def all_reduce(
    x: torch.Tensor, *, group: Group, algorithm: str = "auto", out: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum of all ranks' ``x``. ``algorithm``: auto, one_shot or two_shot; ``out`` may be ``x`` itself."""
    check_tensor("all_reduce", "x", x, group)
    if algorithm not in ALGORITHMS:
        raise ValueError(f"all_reduce: algorithm={algorithm!r} is not one of {', '.join(ALGORITHMS)}")
    if out is None:
        return torch.ops.tileflux.all_reduce(x, group.name, algorithm)  # type: ignore[no-any-return]
    return _run(x, group, algorithm, out)


def pick_algorithm(nbytes: int, world_size: int) -> str:
    """What ``auto`` takes."""
    return "one_shot" if world_size <= 2 or nbytes * (world_size - 1) <= _ONE_SHOT_BYTES else "two_shot"


@eager_only
def _run(x: torch.Tensor, group: Group, algorithm: str, out: torch.Tensor | None) -> torch.Tensor:
    check_reducible("all_reduce", x)
    out = check_out("all_reduce", out, tuple(x.shape), x, own_place=0)
    begin("all_reduce", group, (tuple(x.shape), x.dtype, algorithm, x.requires_grad))
    with guarded(group):
        sum_everywhere(group, "all_reduce", dense(x), out, algorithm)
    return out


def sum_everywhere(group: Group, op: str, x: torch.Tensor, out: torch.Tensor, algorithm: str) -> None:
    """The sum itself, for ``op``; ``x`` and ``out`` are contiguous."""
    if algorithm == "auto":
        algorithm = pick_algorithm(x.nbytes, group.world_size)
    if algorithm == "one_shot":
        reduce(group, op, x, out, reduce_plan(group.rank, (x.nbytes,) * group.world_size, scatter=False))
    else:
        _two_shot(group, op, x, out.view(-1))


def _two_shot(group: Group, op: str, x: torch.Tensor, out: torch.Tensor) -> None:
    # Shards are cut on 16 bytes, so that every access of every rank can be 16 bytes wide.
    shards = [part(x.nbytes, rank, group.world_size) for rank in range(group.world_size)]
    sizes = tuple(shard.nbytes for shard in shards)
    mine = _elements(out, shards[group.rank])
    reduce(group, op, x, mine, reduce_plan(group.rank, sizes, scatter=True))
    move(group, op, mine, out, gather_plan(group.rank, sizes))


def _elements(flat: torch.Tensor, extent: Extent) -> torch.Tensor:
    size = flat.element_size()
    return flat[extent.offset // size : (extent.offset + extent.nbytes) // size]


def _implementation(x: torch.Tensor, group: str, algorithm: str) -> torch.Tensor:
    return _run(x, group_by_name(group), algorithm, None)


def _fake(x: torch.Tensor, group: str, algorithm: str) -> torch.Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.group, ctx.algorithm = inputs


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return torch.ops.tileflux.all_reduce(grad, ctx.group, ctx.algorithm), None, None


register("all_reduce(Tensor x, str group, str algorithm) -> Tensor", _implementation, _fake, _setup_context, _backward)


def all_reduce_reference(x: torch.Tensor, process_group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The same over ``torch.distributed``: gather all inputs, sum in fp32 in rank order."""
    inputs = [torch.empty_like(x) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(inputs, x.contiguous(), group=process_group)
    return sum_in_rank_order(inputs)
