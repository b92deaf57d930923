"""Every collective with its expected result, for tests, the demo and the doctor alike.

All ranks draw all ranks' inputs from one seed, so each can say by itself what it must receive: no second
communication library takes part in the check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from tileflux import ops
from tileflux.kernels.plan import split_rows
from tileflux.ops._call import sum_in_rank_order
from tileflux.symm.group import Group
from tileflux.testing.numerics import assert_close, poisoned

__all__ = ["COLLECTIVES", "Collective", "check_collectives", "random_inputs"]

Inputs = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Collective:
    """A way to call a collective. ``prepare`` cuts the common random inputs to what each rank brings."""

    name: str
    sums: bool
    """Whether values are added: then only fp32, fp16 and bf16."""
    prepare: Callable[[Inputs], list[torch.Tensor]]
    run: Callable[[Group, Inputs, torch.Tensor], torch.Tensor]
    expect: Callable[[Inputs, int], torch.Tensor]


def random_inputs(world_size: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Fresh random tensors of all ranks, the same wherever they are drawn: normal, or random bytes."""
    generator = torch.Generator().manual_seed(seed)
    if dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        return [torch.randn(shape, generator=generator).to(dtype) for _ in range(world_size)]
    nbytes = torch.empty(shape, dtype=dtype).nbytes
    high = 2 if dtype == torch.bool else 256
    drawn = [torch.randint(0, high, (nbytes,), generator=generator, dtype=torch.uint8) for _ in range(world_size)]
    return [each.view(dtype).view(shape) for each in drawn]


def _uneven(num_rows: int, world_size: int) -> list[int]:
    """Rows per rank that differ, zero among them."""
    return [(rank * (num_rows + 3) + num_rows // 2) % (num_rows + 1) for rank in range(world_size)]


def _sends(num_rows: int, world_size: int, source: int) -> list[int]:
    """Rows that ``source`` sends to each rank: a few to most, none where rows are scarce, the bulk to its neighbour."""
    sizes = [num_rows // (2 * world_size)] * world_size
    sizes[(source + 1) % world_size] += num_rows - sum(sizes)
    return sizes


def _run_all_to_all_uneven(group: Group, xs: Inputs, out: torch.Tensor) -> torch.Tensor:
    sends = [_sends(len(x), group.world_size, source) for source, x in enumerate(xs)]
    recv = [send[group.rank] for send in sends]
    return ops.all_to_all(xs[group.rank], group=group, input_sizes=sends[group.rank], output_sizes=recv, out=out)


def _expect_all_to_all_uneven(xs: Inputs, rank: int) -> torch.Tensor:
    runs = [x.split(_sends(len(x), len(xs), source))[rank] for source, x in enumerate(xs)]
    return torch.cat(runs)


def _shard(xs: Inputs, rank: int) -> torch.Tensor:
    rows = split_rows(xs[0].shape[0], len(xs))
    begin = sum(rows[:rank])
    return sum_in_rank_order(xs)[begin : begin + rows[rank]]


def _even_rows(xs: Inputs) -> list[torch.Tensor]:
    return [x[: x.shape[0] // len(xs) * len(xs)] for x in xs]


def _run_of(xs: Inputs, rank: int) -> torch.Tensor:
    each = xs[0].shape[0] // len(xs)
    return torch.cat([x[rank * each : (rank + 1) * each] for x in xs])


COLLECTIVES: tuple[Collective, ...] = (
    Collective(
        "all_gather", False, list, lambda g, xs, out: ops.all_gather(xs[g.rank], group=g, out=out),
        lambda xs, rank: torch.cat(list(xs)),
    ),
    Collective(
        "all_gather, uneven", False,
        lambda xs: [x[:rows] for x, rows in zip(xs, _uneven(xs[0].shape[0], len(xs)), strict=True)],
        lambda g, xs, out: ops.all_gather(xs[g.rank], group=g, sizes=[len(x) for x in xs], out=out),
        lambda xs, rank: torch.cat(list(xs)),
    ),
    Collective(
        "reduce_scatter", True, list,
        lambda g, xs, out: ops.reduce_scatter(xs[g.rank], group=g, out=out), _shard,
    ),
    Collective(
        "all_reduce, one shot", True, list,
        lambda g, xs, out: ops.all_reduce(xs[g.rank], group=g, algorithm="one_shot", out=out),
        lambda xs, rank: sum_in_rank_order(xs),
    ),
    Collective(
        "all_reduce, two shot", True, list,
        lambda g, xs, out: ops.all_reduce(xs[g.rank], group=g, algorithm="two_shot", out=out),
        lambda xs, rank: sum_in_rank_order(xs),
    ),
    Collective(
        "all_to_all", False, _even_rows, lambda g, xs, out: ops.all_to_all(xs[g.rank], group=g, out=out), _run_of,
    ),
    Collective(
        "all_to_all, uneven", False, list, _run_all_to_all_uneven, _expect_all_to_all_uneven,
    ),
    Collective(
        "broadcast", False, list,
        lambda g, xs, out: ops.broadcast(xs[g.rank], group=g, root=g.world_size // 2, out=out),
        lambda xs, rank: xs[len(xs) // 2],
    ),
)  # fmt: skip


def check_collectives(
    group: Group,
    shapes: Iterable[tuple[int, ...]],
    dtypes: Iterable[torch.dtype],
    seed: int = 0,
    collectives: Sequence[Collective] = COLLECTIVES,
) -> int:
    """Run everything back to back without waiting in between, then compare every result. Returns the number of calls.

    All tensors are made before the first call: where ranks share one GPU, the first use of any kernel of torch's
    may not start while another rank's collective waits for this one.
    """
    calls: list[tuple[Collective, str, Inputs, torch.Tensor, torch.Tensor]] = []
    for shape in shapes:
        for dtype in dtypes:
            for collective in collectives:
                if collective.sums and dtype not in (torch.float32, torch.float16, torch.bfloat16):
                    continue
                seed += 1
                drawn = collective.prepare(random_inputs(group.world_size, shape, dtype, seed))
                expected = collective.expect(drawn, group.rank)
                xs: Inputs = [x.to(group.device) for x in drawn]
                out = poisoned(tuple(expected.shape), dtype, group.device)
                calls.append((collective, f"{collective.name} of {shape} {dtype}", xs, out, expected))
    group.barrier()
    for collective, _, inputs, out, _ in calls:
        collective.run(group, inputs, out)
    ops.barrier(group=group)
    group.synchronize()
    for _, what, _, out, expected in calls:
        assert_close(out.cpu(), expected, reduction=0, what=f"rank {group.rank}, {what}")
    return len(calls)
