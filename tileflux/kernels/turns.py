"""Buffers and flags of a fused op: the regions that shards and chunks go through.

A ``Turn`` is a plan (``shards.py``) with its symmetric memory, ready to be used by call after call: the device table
for kernels, and for the CPU the protocol of ``lang/turn.py`` in Python. Layers share one set of regions per op, which
grow to the largest plan.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from tileflux.config import CONTROL, MAX_CHUNKS, TABLE
from tileflux.kernels.launch import DeviceTables
from tileflux.kernels.prepared import Kept
from tileflux.kernels.shards import ALIGNMENT, ShardPlan
from tileflux.symm.group import Group
from tileflux.symm.host_signal import HostWords, wrap
from tileflux.symm.stream_copy import write_flag

__all__ = ["Turn", "is_in_place", "turn"]

_MAX_TURNS = 1024
_NO_SLABS = 2**30  # columns, and more than there are
_own: weakref.WeakKeyDictionary[Group, list[torch.Tensor]] = weakref.WeakKeyDictionary()
_turns: weakref.WeakKeyDictionary[Group, dict[ShardPlan, Turn]] = weakref.WeakKeyDictionary()
_tables: weakref.WeakKeyDictionary[Group, DeviceTables] = weakref.WeakKeyDictionary()
_counts: weakref.WeakKeyDictionary[Group, dict[str, int | None]] = weakref.WeakKeyDictionary()

Method = TypeVar("Method", bound=Callable[..., torch.Tensor])


def _made_once(make: Method) -> Method:
    """Keep the views a turn makes: each is several microseconds of a call."""
    name = make.__name__

    @functools.wraps(make)
    def find(self: Turn, *arguments: Any, **named: Any) -> torch.Tensor:
        key = (name, *arguments, *named.items())
        found = self._views.get(key)
        if found is None:
            found = make(self, *arguments, **named)
            self._views.keep(key, found)
        return found

    return cast(Method, find)


def turn(group: Group, plan: ShardPlan) -> Turn:
    """The plan's memory in this group. Collective when new: all ranks come to the same plans in the same order."""
    known = _turns.setdefault(group, {})
    found = known.get(plan)
    if found is None:
        if group.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"{plan.op}: these sizes are new to the group: make the call once before capturing it in a CUDA graph"
            )
        if len(known) >= _MAX_TURNS:
            for forgotten in known.values():
                forgotten.is_known = False
            known.clear()
        found = known[plan] = Turn(group, plan)
    # On the caller's stream: whatever the call launches, on whichever stream, comes after the upload.
    found.table = _find_table(group, found)
    return found


def is_in_place(turn: Turn) -> bool:
    """Whether asking for the turn again would find it, with its table as it is, and no graph would need to hold it."""
    if not turn.is_known or turn.tables.num_evictions != turn.num_evictions:
        return False
    return not (turn.tables.on_gpu and torch.cuda.is_current_stream_capturing())


def _own_memory(group: Group, nbytes: int) -> torch.Tensor:
    """Bytes that all turns of a group share, whose calls come one after the other.

    What has become too small is kept: a CUDA graph may hold its address.
    """
    kept = _own.setdefault(group, [])
    if not kept or kept[-1].numel() < nbytes:
        grown = max(nbytes, 2 * kept[-1].numel() if kept else 0)
        with torch.inference_mode(False):  # kept for calls outside of it, too
            kept.append(torch.empty(grown, dtype=torch.uint8, device=group.device))
    return kept[-1]


def _find_table(group: Group, turn: Turn) -> torch.Tensor:
    tables = _tables.get(group)
    if tables is None:
        tables = _tables[group] = DeviceTables(group.device, TABLE.num_words(group.world_size))
    found = tables.find(turn.key, turn.words)
    turn.tables, turn.num_evictions = tables, tables.num_evictions
    return found


class Turn:
    """A plan with its memory."""

    def __init__(self, group: Group, plan: ShardPlan) -> None:
        self.plan = plan
        self._group = weakref.ref(group)
        self.rank, self._world_size = group.rank, group.world_size
        name = plan.op
        size = CONTROL.nbytes(group.world_size)
        describe_control = functools.partial(_describe_control, group.world_size)
        self._control = group.region(f"{name}.control", size, describe=describe_control)
        flags_bytes = 4 * group.world_size * plan.num_flags
        describe = functools.partial(_describe_flag, group.world_size)
        self._flags = group.region(f"{name}.flags", flags_bytes, grow=True, describe=describe)
        self._data = group.region(f"{name}.data", plan.data_bytes, grow=True)
        # Of the region, not of the plan: a rank that is a call ahead, with a smaller plan, must not reach into the
        # half that its peer still reads.
        self._half_bytes = self._data.nbytes // 2 // ALIGNMENT * ALIGNMENT

        self.own = _own_memory(group, plan.staging_bytes)
        """Bytes of this rank's alone, ``plan.staging_bytes`` of them."""
        # By address: offsets are those of a segment, and repeat when a region grows into another one.
        addresses = (self._flags.address(group.rank), self._data.address(group.rank), self.own.data_ptr())
        self.key = (plan, *addresses)
        self.table: torch.Tensor
        """The plan as kernels read it; set by ``turn``."""
        self.tables: DeviceTables
        """Whose row that is, and had been given to nobody else when they had evicted so many times."""
        self.num_evictions: int
        self.is_known = True
        """Whether ``turn`` still finds it; it may have been forgotten for others."""
        self.launches: Kept[Any] = Kept()
        """What ``launch_gemm`` keeps for the next call."""
        self._views: Kept[torch.Tensor] = Kept()
        self._number: int | None = None
        self.opened: torch.cuda.Event
        """When the running call was opened, where copies send its products as they are counted."""
        self.leaving: list[torch.cuda.Event] | None = None
        """If a list, when each piece that copies send begins to leave is noted here, for who plays the peers."""

    @property
    def group(self) -> Group:
        """Whose turn it is."""
        group = self._group()
        assert group is not None, "a turn does not outlive its group"
        return group

    def words(self) -> list[int]:
        """What the table holds; see ``config.TableLayout``."""
        group, plan = self.group, self.plan
        ranks = range(self._world_size)
        words = [0] * TABLE.arrays
        words[TABLE.guard] = group.guard.table.data_ptr()
        words[TABLE.op] = group.guard.op_number(plan.op)
        words[TABLE.rank] = self.rank
        words[TABLE.num_chunks], words[TABLE.chunk_rows] = plan.num_chunks, plan.chunk_rows
        words[TABLE.half_bytes] = 0 if plan.by_copies else self._half_bytes
        words[TABLE.staging], words[TABLE.slot_bytes] = self._half_bytes, plan.slot_bytes
        if plan.staging_bytes:
            words[TABLE.staging] = self.own.data_ptr() - self._data.address(self.rank)
        words[TABLE.scales] = plan.scales
        words[TABLE.slab_columns] = plan.slab_columns or _NO_SLABS
        addresses = (region.address(rank) for region in (self._control, self._flags, self._data) for rank in ranks)
        return [*words, *plan.rows, *plan.first_rows, *addresses]

    def gathered(self, dtype: torch.dtype, num_columns: int) -> torch.Tensor:
        """This rank's buffer of gathered rows; its own rows are not among them."""
        return self.rows_at(self.rank, dtype, num_columns)

    def gathered_scales(self) -> torch.Tensor:
        """The scales of the gathered rows; one's own are not among them."""
        return self.scales_at(self.rank)

    # What the CPU does where a GPU's kernels do it (lang/turn.py, lang/policy.py).

    @functools.cached_property
    def _words_of(self) -> tuple[list[HostWords], list[HostWords]]:
        ranks = range(self._world_size)
        return [HostWords(self._control.view(r)) for r in ranks], [HostWords(self._flags.view(r)) for r in ranks]

    def epoch(self) -> int:
        """Calls of this op that this rank has finished."""
        return self._words_of[0][self.rank].load(CONTROL.epoch)

    @_made_once
    def rows_at(self, owner: int, dtype: torch.dtype, num_columns: int) -> torch.Tensor:
        """``owner``'s buffer for gathered rows."""
        return self._data.view(owner, dtype, (sum(self.plan.rows), num_columns))

    @_made_once
    def own_rows(self, dtype: torch.dtype, num_columns: int) -> torch.Tensor:
        """The memory that is this rank's alone, as rows."""
        return self.own[: self.plan.staging_bytes].view(dtype).view(-1, num_columns)

    @_made_once
    def chunk_at(self, owner: int, index: int, dtype: torch.dtype, num_columns: int) -> torch.Tensor:
        """Where a chunk of this rank's rows goes in ``owner``'s buffer."""
        first, rows = self.plan.first_rows[self.rank], self.plan.chunk(self.rank, index)
        return self.rows_at(owner, dtype, num_columns)[first + rows.start : first + rows.stop]

    @_made_once
    def scales_at(self, owner: int) -> torch.Tensor:
        """``owner``'s buffer for gathered scales."""
        begin = self.plan.scales
        return self._data.view(owner)[begin : begin + 4 * sum(self.plan.rows)].view(torch.float32)

    def slot(
        self, owner: int, source: int, dtype: torch.dtype, num_columns: int, epoch: int | None = None
    ) -> torch.Tensor:
        """``source``'s slot at ``owner`` in the half that call number ``epoch``, by default this one, uses."""
        half = 0 if self.plan.by_copies else (self.epoch() if epoch is None else epoch) & 1
        return self._slot(owner, source, dtype, num_columns, half)

    @_made_once
    def _slot(self, owner: int, source: int, dtype: torch.dtype, num_columns: int, half: int) -> torch.Tensor:
        plan = self.plan
        begin = half * self._half_bytes + source * plan.slot_bytes
        num_rows = max(1, *plan.rows)
        size = num_rows * num_columns * dtype.itemsize
        return self._data.view(owner)[begin : begin + size].view(dtype).view(num_rows, num_columns)

    @_made_once
    def staging(self, dtype: torch.dtype, num_columns: int) -> torch.Tensor:
        """This rank's products of all rows, on their way to their owners. Its own rows are not among them."""
        shape = (sum(self.plan.rows), num_columns)
        size = shape[0] * num_columns * dtype.itemsize
        return self._data.view()[self._half_bytes : self._half_bytes + size].view(dtype).view(shape)

    @_made_once
    def shard_to_send(self, owner: int, dtype: torch.dtype, num_columns: int) -> torch.Tensor:
        """The rows of ``staging`` that ``owner`` will sum."""
        first = self.plan.first_rows[owner]
        return self.staging(dtype, num_columns)[first : first + self.plan.rows[owner]]

    @_made_once
    def staged_slabs(self, owner: int, slabs: range, dtype: torch.dtype, num_columns: int) -> torch.Tensor:
        """Some slabs of them, which lie one behind the other; ``slabs_at`` is where they go. None are cut: number 0."""
        shard = self.shard_to_send(owner, dtype, num_columns).view(-1).view(torch.uint8)
        return self._slabs(shard, owner, slabs, dtype, num_columns)

    @_made_once
    def slabs_to_send(self, owner: int, slabs: range, dtype: torch.dtype, num_columns: int) -> torch.Tensor:
        """Slabs of this rank's sums that ``owner`` will add to others': its rows, without gaps."""
        begin = owner * self.plan.slot_bytes
        return self._slabs(self.own[begin : begin + self.plan.slot_bytes], owner, slabs, dtype, num_columns)

    @_made_once
    def slabs_at(self, owner: int, source: int, slabs: range, dtype: torch.dtype, num_columns: int) -> torch.Tensor:
        """Where ``source``'s go."""
        begin = source * self.plan.slot_bytes
        slot = self._data.view(owner)[begin : begin + self.plan.slot_bytes]
        return self._slabs(slot, owner, slabs, dtype, num_columns)

    def _slabs(
        self, slot: torch.Tensor, owner: int, slabs: range, dtype: torch.dtype, num_columns: int
    ) -> torch.Tensor:
        """Of several the shape says only how many bytes there are: each slab's rows are together."""
        num_rows, columns = self.plan.rows[owner], self.plan.columns(slabs, num_columns)
        begin, size = (num_rows * count * dtype.itemsize for count in (columns.start, len(columns)))
        return slot[begin : begin + size].view(dtype).view(num_rows, len(columns))

    @_made_once
    def slab_rows(self, num_rows: int, dtype: torch.dtype, num_columns: int) -> torch.Tensor:
        """This rank's products of one slab, all of which are equally wide; they are added up into what is sent."""
        begin, shape = self._world_size * self.plan.slot_bytes, (num_rows, min(self.plan.slab_columns, num_columns))
        return self.own[begin : begin + shape[0] * shape[1] * dtype.itemsize].view(dtype).view(shape)

    @_made_once
    def staged(self, owner: int, chunk: int = 0) -> torch.Tensor:
        """The word that says of which call ``owner``'s chunk, or slab, was the last that copies could send."""
        place = CONTROL.staged(self._world_size) + owner * MAX_CHUNKS + chunk
        return self._control.view(dtype=torch.int32)[place : place + 1]

    @_made_once
    def flag(self, owner: int, index: int, source: int | None = None) -> torch.Tensor:
        """The word at ``owner`` by which ``source``, by default this rank, announces chunk or tile ``index``."""
        place = self._place(self.rank if source is None else source, index)
        return self.flags(owner)[place : place + 1]

    @_made_once
    def flags(self, owner: int) -> torch.Tensor:
        """All flags in ``owner``'s memory: those of all sources for chunk or tile 0, then for 1, and so on."""
        return self._flags.view(owner, torch.int32)

    @functools.cached_property
    def next(self) -> torch.Tensor:
        """The word that holds what flags of the running call are set to, once the call has been opened."""
        return self._control.view(dtype=torch.int32)[CONTROL.next : CONTROL.next + 1]

    def count_call(self) -> None:
        """A call begins whose flags are raised by ``announce``: all such calls of an op are counted, on the host.

        A CUDA graph repeats calls that nobody counts. From the first capture on the numbers are in memory alone.
        """
        counts = _counts.setdefault(self.group, {})
        number = counts.get(self.plan.op, 0)
        if number is not None:
            number = None if torch.cuda.is_current_stream_capturing() else number + 1
        counts[self.plan.op] = self._number = number

    def announce(self, owner: int, index: int) -> None:
        """Raise this rank's flag at ``owner`` for chunk ``index``, behind what the current stream has copied there.

        By a number where it is known: a copy of 4 bytes takes a turn of the copy engine, some 6 us in which the next
        chunk does not leave.
        """
        word = self.flag(owner, index)
        if self._number is None:
            word.copy_(self.next, non_blocking=True)
        else:
            write_flag(word, self._number)

    @_made_once
    def ack(self, owner: int, peer: int) -> torch.Tensor:
        """The word in ``owner``'s memory that says how many calls ``peer`` has finished."""
        place = CONTROL.ack + peer
        return self._control.view(owner, torch.int32)[place : place + 1]

    def raise_flag(self, owner: int, index: int) -> None:
        """Announce chunk or tile ``index`` to ``owner``."""
        self._words_of[1][owner].store(self._place(self.rank, index), self.epoch() + 1)

    def wait_for_flag(self, source: int, index: int) -> None:
        """Wait until ``source`` has announced chunk or tile ``index`` here."""
        words = self._words_of[1][self.rank]
        self._wait(words, self._place(source, index), self.epoch() + 1, source)

    def wait_for_buffer(self, peer: int, calls_ago: int) -> None:
        """Wait until ``peer`` has finished the call so many before this one."""
        wanted = wrap(self.epoch() + 1 - calls_ago)
        self._wait(self._words_of[0][self.rank], CONTROL.ack + peer, wanted, peer)

    def release(self) -> None:
        """This rank has finished the call."""
        control, finished = self._words_of[0], wrap(self.epoch() + 1)
        for peer in range(self._world_size):
            if peer != self.rank:
                control[peer].store(CONTROL.ack + self.rank, finished)
        control[self.rank].store(CONTROL.epoch, finished)

    def _place(self, source: int, index: int) -> int:
        # By source first: a rank that is a call ahead, with another plan, must not raise another one's flag.
        return index * self._world_size + source

    def _wait(self, words: HostWords, index: int, wanted: int, peer: int) -> None:
        self.group.guard.wait(words, index, wrap(wanted), peer, self.plan.op)


def _describe_control(world_size: int, offset: int) -> str:
    index = offset // 4
    if index < CONTROL.ack:
        names = {CONTROL.epoch: "epoch", CONTROL.done: "done", CONTROL.next: "next", CONTROL.fetched: "fetched"}
        return names[index]
    if index < CONTROL.counters(world_size):
        return f"ack[rank {index - CONTROL.ack}]"
    return "counter" if index < CONTROL.staged(world_size) else "staged"


def _describe_flag(world_size: int, offset: int) -> str:
    index, source = divmod(offset // 4, world_size)
    return f"{index} of rank {source}"
