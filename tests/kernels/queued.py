"""What an op by the copy engine queues on which stream, noted instead of done."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tileflux.config import GemmConfig
from tileflux.kernels import dense, scatter, steps
from tileflux.kernels.operands import Operands, Role
from tileflux.kernels.shards import ShardPlan


class Queued:
    """In the place of launches, streams and copies: notes what is queued on which."""

    def __init__(
        self, patch: pytest.MonkeyPatch, module: Any, role: Role, config: GemmConfig, rank: int, rows: tuple[int, ...],
        *, by_copies: bool = True,
    ) -> None:  # fmt: skip
        self.seen: list[tuple] = []
        self.plans: list[ShardPlan] = []
        self.products: list[Operands] = []
        self._role, self._config = role, config
        self._stream, self._num_events = "main", 0
        self.group = SimpleNamespace(
            device=torch.device("cuda"), rank=rank, world_size=len(rows), stream=None,
            traits=SimpleNamespace(copies_need_sms=not by_copies, num_sms=3),
        )  # fmt: skip
        patch.setattr(module, "turn", self._turn)
        for place in (module, dense):
            patch.setattr(place, "load_once", lambda *arguments: self.seen.append(("load",)), raising=False)
        patch.setattr(module, "launch_gemm", self._launch)
        patch.setattr(scatter, "num_summers", lambda group: 6)
        for place in (module, scatter, dense):
            patch.setattr(place, "beside", self._beside, raising=False)
            patch.setattr(place, "join", self._join)
        stream = SimpleNamespace(record_event=self._record, wait_event=self._wait)
        patch.setattr(torch.cuda, "current_stream", lambda device: stream)
        names = ("launch_open", "launch_close", "launch_await_everyone")
        for name in (*names, "launch_sum", "launch_sum_slabs", "launch_release"):
            patch.setattr(steps, name, self._step(name))

    def _join(self, group: object, *, on: str = "sending") -> None:
        self.seen.append((self._stream, "join", on))

    def _record(self) -> str:
        self._num_events += 1
        self.seen.append((self._stream, "event", self._num_events))
        return str(self._num_events)

    def _wait(self, event: str) -> None:
        self.seen.append((self._stream, "after", int(event)))

    def sent(self, leaving: list[tuple[int, range, tuple[int, ...]]], opened: int = 1) -> list[tuple]:
        """What is queued where each (owner, slabs) is sent behind its counts: of four at a time, counts first."""
        expected: list[tuple] = []
        for first in range(0, len(leaving), 4):
            some, number = leaving[first : first + 4], opened + 1 + 2 * first
            expected.append(("closing", "after", opened))
            for place, (owner, slabs, num_tiles) in enumerate(some):
                expected += [
                    ("closing", "launch_close", owner, num_tiles, slabs[0]), ("closing", "event", number + place)
                ]  # fmt: skip
            expected.append(("sending", "after", opened))
            for place, (owner, slabs, _) in enumerate(some):
                expected += [
                    ("sending", "after", number + place),
                    ("sending", "copy", owner, self.group.rank, slabs, ("staged", owner, slabs)),
                    ("sending", "event", number + len(some) + place),
                    ("announcing", "after", number + len(some) + place),
                    ("announcing", "flag", owner, slabs[0]),
                ]
        return expected

    def _step(self, name: str) -> Any:
        def launch(here: Any, *arguments: Any, chunk: int = 0, mostly_whole: bool | None = None) -> None:
            given = arguments[:2] if name == "launch_close" else ()
            told = (chunk,) if given or name == "launch_await_everyone" else ()
            if name == "launch_sum_slabs":
                told = ("mostly whole",) if mostly_whole else ()
            self.seen.append((self._stream, name, *given, *told))

        return launch

    def _launch(self, operands: Operands, role: object, config: object, **named: Any) -> None:
        assert role is self._role and config == self._config and not named.get("releases")
        self.products.append(operands)
        self.seen.append((self._stream, "load gemm" if named.get("load_only") else "gemm"))

    @contextlib.contextmanager
    def _beside(self, group: object, *used: object, after: str | None = None, on: str = "sending") -> Iterator[None]:
        before, self._stream = self._stream, on
        self.seen.append((self._stream, "after", "all" if after is None else int(after)))
        yield
        self._stream = before

    def _turn(self, group: object, plan: ShardPlan) -> Any:
        self.plans.append(plan)

        def place(*what: object) -> Any:
            return SimpleNamespace(
                copy_=lambda source, non_blocking: self.seen.append((self._stream, "copy", *what, source))
            )

        return SimpleNamespace(
            plan=plan,
            rank=self.group.rank,
            leaving=None,
            count_call=lambda: self.seen.append((self._stream, "counted")),
            announce=lambda owner, index: self.seen.append((self._stream, "flag", owner, index)),
            staging=lambda dtype, n: torch.empty(sum(plan.rows), n, dtype=dtype),
            slot=lambda owner, source, dtype, n, epoch: torch.empty(max(plan.rows), n, dtype=dtype),
            slab_rows=lambda num_rows, dtype, n: torch.empty(num_rows, min(n, plan.slab_columns), dtype=dtype),
            slabs_at=lambda owner, source, slabs, dtype, n: place(owner, source, slabs),
            slabs_to_send=lambda owner, slabs, dtype, n: ("staged", owner, slabs),
            staged_slabs=lambda owner, slabs, dtype, n: ("staged", owner, slabs),
        )
