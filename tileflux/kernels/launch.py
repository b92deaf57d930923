"""What the movers' launchers share: which backend runs, and a plan as a kernel takes it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence

import torch

from tileflux import env
from tileflux.kernels.fill import launch_fill
from tileflux.kernels.plan import MovePlan
from tileflux.symm.group import Group

__all__ = [
    "BLOCK",
    "DeviceTables",
    "MAX_REGISTERS",
    "NUMBERS",
    "NUM_WARPS",
    "allow_interpreter",
    "extents_table",
    "launch_arguments",
    "launch_settings",
    "on_host",
]

NUM_WARPS = 8
MAX_REGISTERS = 224
"""Said to the assembler, which else spills at 128 registers to fit two programs on an SM; ours is alone on its own."""
BLOCK = 2048
"""Elements a program copies at a time: 16 KiB in accesses of 16 bytes, four a thread."""

NUMBERS = ("x", "out", "op", "ragged", "send_bytes", "send_stride", "recv_bytes", "recv_stride")
"""Arguments of every mover that must not make a variant of it by their value."""

_NUM_ROWS = 1024
_tables: weakref.WeakKeyDictionary[Group, DeviceTables] = weakref.WeakKeyDictionary()


_interpreter_repaired = False


def allow_interpreter() -> None:
    """Said by ``testing.interpreter.install`` once kernels can run interpreted."""
    global _interpreter_repaired
    _interpreter_repaired = True


def on_host(where: Group | torch.Tensor) -> bool:
    """Whether the host twin of a kernel is to run, rather than the kernel."""
    if where.device.type != "cpu":
        return False
    if env.cpu_backend() == "host":
        return True
    if not _interpreter_repaired:
        raise ValueError(
            "TILEFLUX_CPU_BACKEND=interpret needs TRITON_INTERPRET=1 before tileflux is imported, "
            "and a call of tileflux.testing.interpreter.install()"
        )
    return False


def launch_arguments(
    group: Group, op: str, x: torch.Tensor, out: torch.Tensor, plan: MovePlan
) -> tuple[int | torch.Tensor, ...]:
    """What every mover takes first: addresses, tables, the op's number, and the plan."""
    ragged, extents = extents_table(group, plan)
    tables = (extents, group.mailbox.table, group.guard.table)
    return (x.data_ptr(), out.data_ptr(), *tables, group.guard.op_number(op), ragged, *(plan.even or (0, 0, 0, 0)))


def launch_settings(group: Group) -> dict[str, int]:
    """What every mover is compiled for."""
    return {
        "WORLD": group.world_size,
        "LANES": group.config.num_lanes,
        "SLOT_BYTES": group.config.slot_bytes,
        "BLOCK": BLOCK,
        "num_warps": NUM_WARPS,
        "maxnreg": MAX_REGISTERS,
    }


def extents_table(group: Group, plan: MovePlan) -> tuple[int, torch.Tensor]:
    """(1, the plan as a device table) if the plan is ragged, kept for the next call with the same sizes.

    For an even plan (0, any tensor): the kernel gets lengths and strides as arguments and reads no table.
    """
    tables = _tables.get(group)
    if tables is None:
        tables = _tables[group] = DeviceTables(group.device, 4 * group.world_size)
    if plan.even is not None:
        return 0, group.guard.table
    return 1, tables.find(plan, lambda: plan.table)


class DeviceTables:
    """Rows of numbers that kernels read, in memory allocated once: the hot path must not allocate."""

    def __init__(self, device: torch.device, num_words: int) -> None:
        self.on_gpu = device.type == "cuda"
        self._device = torch.empty((_NUM_ROWS, num_words), dtype=torch.int64, device=device)
        self._views = self._device.unbind()
        self._free = list(range(_NUM_ROWS))
        self._rows: dict[Hashable, int] = {}
        self._captured: set[Hashable] = set()
        self.num_evictions = 0
        """How often rows were taken from those that had them: until the next time, what was found stays."""

    def find(self, key: Hashable, words: Callable[[], Sequence[int]]) -> torch.Tensor:
        """The row of ``key``, filled with ``words()`` if it is new."""
        capturing = self.on_gpu and torch.cuda.is_current_stream_capturing()
        row = self._rows.get(key)
        if row is None:
            if capturing:
                raise ValueError("these per-rank sizes are new: make the call once before capturing it in a CUDA graph")
            row = self._rows[key] = self._upload(words())
        if capturing:
            self._captured.add(key)  # replays read the row for as long as the group lives
        return self._views[row]

    def _upload(self, words: Sequence[int]) -> int:
        if not self._free:
            self._make_room()
        row = self._free.pop()
        if self.on_gpu:
            launch_fill(self._views[row], words)
        else:
            self._views[row].copy_(torch.tensor(words, dtype=torch.int64))
        return row

    def _make_room(self) -> None:
        old = [key for key in self._rows if key not in self._captured]
        if not old:
            raise ValueError(f"CUDA graphs of this group hold {_NUM_ROWS} different lists of per-rank sizes; close it")
        self._free = [self._rows.pop(key) for key in old]
        self.num_evictions += 1
