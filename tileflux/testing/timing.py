"""A stopwatch for calls that only queue work, and rounds in which everything compared takes its turn.

Clocks drift with heat and power, so nothing is timed alone: each round times everything once, in turn, and ratios are
taken between medians over the same rounds.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from tileflux import ops
from tileflux.symm.group import Group

__all__ = [
    "HEAD_START_S",
    "MAX_ROUNDS",
    "MIN_ROUNDS",
    "STEADY",
    "WARM_UP_S",
    "Stopwatch",
    "agree_max",
    "head_start",
    "median_error",
    "meet",
    "time_rounds",
]

MIN_ROUNDS, MAX_ROUNDS, STEADY = 20, 100, 0.01
"""How many rounds there are where nobody says: until every median is known to ``STEADY``, within these bounds."""

WARM_UP_S = 1.0
"""For how long a GPU is kept busy before rounds count: its clocks, and a link that was idle, take that to wake up."""

HEAD_START_S = 2e-3
_LONGEST_S = 0.05  # whoever needs longer is compiling, and will not the next time
_CYCLES_PER_S = 2e9


def head_start(seconds: float = HEAD_START_S) -> None:
    """Let the current stream stand still, so that the host has queued what follows before the GPU comes to it."""
    torch.cuda._sleep(int(seconds * _CYCLES_PER_S))


def median_error(spread: float, num_rounds: int) -> float:
    """The standard error of a median, over the median; ``spread`` is half the distance of the quartiles, likewise.

    As of normal errors: 0.7413 of that distance is their deviation, and a median is 1.2533 times as vague as a mean.
    """
    return float(1.2533 * 0.7413 * 2 * spread / math.sqrt(num_rounds))


def meet(group: Group) -> None:
    """Let this rank's stream, or thread, wait for the others', as far as they are real."""
    if _has_peers(group):
        ops.barrier(group=group)


def agree_max(group: Group, values: Sequence[float]) -> list[float]:
    """The greatest of each over ranks, the same on all of them."""
    if not _has_peers(group):
        return list(values)
    mine = torch.tensor([list(values)], dtype=torch.float64, device=group.device)
    gathered = ops.all_gather(mine, group=group)
    # Before it is copied: while one thread's copy waits, no other of the process gets to make one, and what this waits
    # for may be a virtual rank that has not yet copied its values to the GPU.
    group.synchronize()
    # On the host: a kernel of torch's that has to be loaded is not loaded while a peer on the same GPU waits.
    everyone: list[list[float]] = gathered.tolist()
    return [max(column) for column in zip(*everyone, strict=True)]


def _has_peers(group: Group) -> bool:
    return group.world_size > 1 and group.transport != "ghost"


class Stopwatch:
    """Seconds of one call, from when ``together`` lets this rank's stream, or thread, go.

    What the host needs to queue a call is not timed on a GPU: the stream stands still for as long, and half as long
    again, as the host needed the last time.
    """

    def __init__(self, device: torch.device, together: Callable[[], object]) -> None:
        self._on_gpu = device.type == "cuda"
        self._together = together
        self._host_s: dict[Callable[[], object], float] = {}

    def seconds(self, call: Callable[[], object]) -> float:
        """Run ``call`` once and wait for it."""
        if not self._on_gpu:
            self._together()
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        head_start(min(max(HEAD_START_S, 1.5 * self._host_s.get(call, 0.0)), _LONGEST_S))
        start = time.perf_counter()
        self._together()
        begin.record()
        call()
        end.record()
        self._host_s[call] = time.perf_counter() - start
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def time_rounds(
    watch: Stopwatch,
    calls: Mapping[str, Callable[[], object]],
    num_rounds: int,
    *,
    num_warmups: int = 2,
    is_warm: Callable[[], bool] = lambda: True,
    after_round: Callable[[], object] = lambda: None,
    is_enough: Callable[[Mapping[str, list[float]]], bool] = lambda seconds: False,
) -> dict[str, list[float]]:
    """Seconds of each call in each round, by name. Rounds go through the calls forwards and backwards in turn.

    Before them come ``num_warmups`` that do not count, and more until ``is_warm``. ``is_enough`` looks at all rounds so
    far and may end it before ``num_rounds``. Both say the same on all ranks.
    """
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}

    def run_round(number: int) -> Iterator[tuple[str, float]]:
        # Turned round every time, so that nobody always follows the same neighbour's heat and caches.
        for name in names if number % 2 == 0 else reversed(names):
            yield name, watch.seconds(calls[name])

    for number in itertools.count(-num_warmups):
        if number >= 0 and is_warm():
            break
        for _ in run_round(number):
            pass
    for number in range(num_rounds):
        for name, took in run_round(number):
            seconds[name].append(took)
        after_round()
        if is_enough(seconds):
            break
    return seconds
