"""Frozen descriptions of how work is cut up, with the rules that make them valid.

A leaf: kernels, symmetric memory and tuning all read it, and it reads nothing of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = [
    "CONTROL",
    "GROUPS",
    "GUARD",
    "MAX_AHEAD",
    "MAX_CHUNKS",
    "NUM_SLOTS",
    "ROWS",
    "SWAPPED_BYTES",
    "TABLE",
    "TRACE",
    "CommConfig",
    "ControlLayout",
    "GemmConfig",
    "GemmProblem",
    "GroupsLayout",
    "GuardLayout",
    "MailboxLayout",
    "RowsLayout",
    "TableLayout",
    "TraceLayout",
    "hashed_once",
]

Frozen = TypeVar("Frozen")


def hashed_once(kind: type[Frozen]) -> type[Frozen]:
    """Make a frozen dataclass remember its hash: every call of an op looks several things up by the same object."""
    compute = kind.__hash__

    def remembered(self: Any) -> int:
        try:
            return self._hash  # type: ignore[no-any-return]
        except AttributeError:
            object.__setattr__(self, "_hash", compute(self))
            return self._hash  # type: ignore[no-any-return]

    def state(self: Any) -> dict[str, Any]:
        # Texts hash differently in every process, so another one must not believe this one's.
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    kind.__hash__ = remembered  # type: ignore[method-assign]
    kind.__getstate__ = state  # type: ignore[method-assign]
    return kind


NUM_SLOTS = 2
"""Messages in flight on one channel of a mailbox: one being read while the next is written."""

MAX_AHEAD = 1024
"""How far a flag may be past the epoch waited for: acks keep ranks within two calls of each other. A flag that reads
further ahead was last raised half the range of 32 bits ago, or never, and has not been reached."""

SWAPPED_BYTES = 2 * 1024 * 1024
"""Of sums that a sequential ``gemm_ar`` in one shot swaps where SMs copy (``kernels/direct.py``); more are pulled."""

MAX_CHUNKS = 16
"""Chunks a rank's rows may be cut into, each announced by a flag of its own."""


@dataclass(frozen=True)
class GuardLayout:
    """Where the words of the guard lie (see ``lang/signal.py``), in 8-byte words.

    The *guard table* is private to a rank and handed to every kernel that waits. The *guard block* is symmetric:
    peers set ``broken`` in it, and read from it whom its owner waited for.
    """

    # guard table
    rank: int = 0
    world_size: int = 1
    timeout_ns: int = 2
    alarm: int = 3  # address of a host-visible word, set when the record below is complete
    blocks: int = 8  # addresses of every rank's guard block, one word each
    # guard block
    broken: int = 0  # a wait somewhere in the group gave up: stop waiting
    state: int = 1  # of the record: 0 free, 1 being written, 2 complete
    op: int = 2
    peer: int = 3
    flag: int = 4  # address of the flag waited for
    wanted: int = 5
    seen: int = 6
    waited_ns: int = 7
    block_words: int = 8


GUARD = GuardLayout()


@dataclass(frozen=True)
class CommConfig:
    """How collectives cut a message up.

    ``num_lanes`` programs work side by side, each on its own part of the message through its own slots and flags,
    so that no program ever waits for another of its own rank. A part larger than ``slot_bytes`` goes in several
    messages. Symmetric memory held: ``num_lanes * world_size * NUM_SLOTS * slot_bytes`` per rank.
    """

    num_lanes: int = 1
    slot_bytes: int = 64 * 1024
    min_lane_bytes: int = 4 * 1024  # below this a further lane costs more in flags than it moves

    def __post_init__(self) -> None:
        if not 1 <= self.num_lanes <= 1024:
            raise ValueError(f"num_lanes={self.num_lanes} should be between 1 and 1024")
        if not 256 <= self.slot_bytes < 2**31 or self.slot_bytes % 256:
            raise ValueError(f"slot_bytes={self.slot_bytes} should be a positive multiple of 256, under 2 GiB")
        if self.min_lane_bytes < 1:
            raise ValueError(f"min_lane_bytes={self.min_lane_bytes} should be at least 1")

    def lanes_for(self, nbytes: int) -> int:
        """Lanes worth using for the largest message of a call; every rank must come to the same number."""
        return max(1, min(self.num_lanes, -(-nbytes // self.min_lane_bytes)))


@dataclass(frozen=True)
class MailboxLayout:
    """Where the parts of one rank's mailbox lie (see ``lang/mailbox.py``).

    First four arrays of 32-bit words ``[num_lanes, world_size]``: ``data`` (messages a peer has put here), ``ack``
    (messages a peer has taken out of its own mailbox), ``sent`` and ``taken`` (this rank's own counts, private).
    Then the slots: ``[num_lanes, world_size, NUM_SLOTS, slot_bytes]`` by source rank.
    """

    world_size: int
    num_lanes: int
    slot_bytes: int

    data: int = 0
    ack: int = 1
    sent: int = 2
    taken: int = 3

    @property
    def header_bytes(self) -> int:
        """Bytes before the first slot."""
        return -(-4 * 4 * self.num_lanes * self.world_size // 256) * 256

    @property
    def nbytes(self) -> int:
        """Bytes of the whole mailbox."""
        return self.header_bytes + self.num_lanes * self.world_size * NUM_SLOTS * self.slot_bytes

    def word(self, kind: int, lane: int, peer: int) -> int:
        """Index of a 32-bit word."""
        return (kind * self.num_lanes + lane) * self.world_size + peer

    def slot(self, lane: int, source: int, sequence: int) -> int:
        """Byte offset of the slot that message number ``sequence`` from ``source`` goes through."""
        index = (lane * self.world_size + source) * NUM_SLOTS + sequence % NUM_SLOTS
        return self.header_bytes + index * self.slot_bytes

    def describe(self, offset: int) -> str:
        """The flag at a byte offset, in words."""
        kind, rest = divmod(offset // 4, self.num_lanes * self.world_size)
        lane, peer = divmod(rest, self.world_size)
        names = {self.data: "data", self.ack: "ack", self.sent: "sent", self.taken: "taken"}
        return f"{names.get(kind, 'slot')}[lane {lane}, rank {peer}]"


@dataclass(frozen=True)
class ControlLayout:
    """The words by which the ranks of a fused op take turns with its buffers (see ``lang/turn.py``), 32 bits each.

    ``epoch`` (calls this rank has finished), ``done`` (programs of the running launch that have ended), ``next`` (what
    the flags of the running call are set to, for copies to carry) and ``fetched`` (how many steps of the tile order the
    programs of the running launch have asked for) are private.
    ``ack`` has a word per peer: the calls that peer has finished. ``counters`` and ``staged`` are private, of
    ``[world_size, MAX_CHUNKS]``: feeders that have moved their part of a chunk, or tiles of it that are finished; and
    of which call a chunk was the last to be complete, so that copies may send it.
    """

    epoch: int = 0
    done: int = 1
    next: int = 2
    fetched: int = 3
    ack: int = 4

    def counters(self, world_size: int) -> int:
        """Index of the first counter."""
        return self.ack + world_size

    def staged(self, world_size: int) -> int:
        """Index of the first word that says what is complete."""
        return self.counters(world_size) + world_size * MAX_CHUNKS

    def nbytes(self, world_size: int) -> int:
        """Bytes of all words."""
        return 4 * (self.staged(world_size) + world_size * MAX_CHUNKS)


CONTROL = ControlLayout()


@dataclass(frozen=True)
class TableLayout:
    """A fused op's plan as its kernel reads it: 64-bit words, uploaded once per plan and kept on the device.

    After the single words come arrays with one word per rank: ``rows`` and ``first_row`` (of the rank's shard of the
    M rows), then the addresses of every rank's ``control`` words, ``flags`` and ``data``.
    """

    guard: int = 0  # address of the rank's guard table
    op: int = 1
    rank: int = 2
    num_chunks: int = 3  # a shard is cut into as many
    chunk_rows: int = 4
    half_bytes: int = 5  # of a buffer that is used in turn with another one
    slot_bytes: int = 6  # of one source's part of such a buffer
    scales: int = 7  # where the gathered scales begin, behind the gathered rows
    staging: int = 8  # where this rank's products wait to be copied, behind the slots
    slab_columns: int = 9  # of products that are staged slab by slab; more than there are where they are not
    arrays: int = 10

    def num_words(self, world_size: int) -> int:
        """Words of one table."""
        return self.arrays + 5 * world_size


TABLE = TableLayout()


@dataclass(frozen=True)
class GroupsLayout:
    """Rows by expert as a kernel reads them (see ``kernels/groups.py``), 32-bit words.

    A header: ``num_tiles``, ``top_k``, and where these begin, 0 if they are not there: ``rows``, the numbers of picked
    rows; ``positions``, the sorted row of each choice of each token or -1; ``weights``, what it is multiplied with, in
    fp32. Then from word ``tiles`` on ``tile_words`` for every tile: its ``expert``, its ``first`` row, the ``end`` of
    the expert's rows, and its ``stage``: of the ranks whose tokens it needs, the last to arrive.
    """

    num_tiles: int = 0
    top_k: int = 1
    rows: int = 2
    positions: int = 3
    weights: int = 4
    tiles: int = 8
    tile_words: int = 4
    expert: int = 0
    first: int = 1
    end: int = 2
    stage: int = 3


GROUPS = GroupsLayout()


@dataclass(frozen=True)
class RowsLayout:
    """How tokens are cut into messages, as a kernel reads it (see ``kernels/rows_plan.py``): 64-bit words.

    After the single words come arrays with one word per rank: its tokens, and those of the ranks before it.
    """

    rows_per_piece: int = 0
    num_slabs: int = 1
    slab_bytes: int = 2
    row_bytes: int = 3
    places: int = 4  # where in a slot the numbers of the tokens begin
    rows: int = 5  # where in a slot the rows begin
    note_words: int = 6
    min_pieces: int = 7
    arrays: int = 8

    def num_words(self, world_size: int) -> int:
        """Words of one table."""
        return self.arrays + 2 * world_size


ROWS = RowsLayout()


@dataclass(frozen=True)
class TraceLayout:
    """What a recorded launch writes down (``lang/trace.py``), in 64-bit words.

    First, for every peer and chunk, when sending it began and when it was announced: ``[world_size, MAX_CHUNKS, 2]``.
    Then ``tile_words`` per step of the tile order: when the tile was finished (0: there was none), when it asked for
    what it waits for, when that was there, when its product was, and four pairs of 32-bit numbers: SM and program,
    owner and chunk, row and column of the tile, its turn twice.
    """

    tile_words: int = 8

    def first_tile(self, world_size: int) -> int:
        """Index of the first tile's words."""
        return world_size * MAX_CHUNKS * 2

    def num_words(self, world_size: int, num_steps: int) -> int:
        """Words of one recording."""
        return self.first_tile(world_size) + num_steps * self.tile_words


TRACE = TraceLayout()


@hashed_once
@dataclass(frozen=True)
class GemmConfig:
    """How a GEMM is cut into tiles and given to programs.

    ``num_feeders`` programs of an all-gather GEMM send rows while the others multiply, and ``num_chunks`` is how many
    flags announce one rank's rows; tiles of ``span`` such chunks go through the weight together, so that reading it
    once serves them all, but as many as ``alone`` of the first to arrive, or the last to depart, go one by one; with -1
    one's own go with the first that arrive (``lang/schedule.py``). Where copies send the sums of a reduce-scatter,
    ``num_chunks`` is the number of slabs, of some columns each, in which the last shard leaves. ``num_sms`` bounds the
    programs of a launch; None takes what the GPU, or the group's share of it, has; under Triton's interpreter it is for
    the simulator, which runs programs side by side. All ranks of a call use the same numbers, but for ``span`` and
    ``alone``, which are each one's own affair.

    ``fetches``: where ranks share a GPU, programs take tiles as they come, so that one that starts late, because
    another rank holds its SM, holds nobody up.

    ``sums_apart``: where the SMs of a reduce-scatter store tiles at their owners, a launch of its own sums them, so
    that no program of the product waits.

    ``hopper``: on a Hopper, its own loop runs what it takes.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 3
    num_feeders: int = 4
    num_chunks: int = 1
    span: int = 1
    alone: int = 0
    num_sms: int | None = None
    fetches: bool = False
    sums_apart: bool = False
    hopper: bool = False

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "block_k"):
            value = getattr(self, name)
            if not 16 <= value <= 1024 or value & (value - 1):
                raise ValueError(f"{name}={value} should be a power of two from 16 to 1024")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"num_warps={self.num_warps} should be 1, 2, 4, 8 or 16")
        if not 1 <= self.num_chunks <= MAX_CHUNKS:
            raise ValueError(f"num_chunks={self.num_chunks} should be from 1 to {MAX_CHUNKS}")
        for name in ("group_m", "num_stages", "num_feeders", "span"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} should be at least 1")
        if self.alone < -1:
            raise ValueError(f"alone={self.alone} should be at least -1, where one's own rows go with the first peer's")
        if self.num_sms is not None and self.num_sms < 2:
            raise ValueError(f"num_sms={self.num_sms} should be at least 2: one program feeds, one multiplies")


@hashed_once
@dataclass(frozen=True)
class GemmProblem:
    """What a strategy and a ``GemmConfig`` are picked for: the same on every rank where ranks must pick alike.

    ``m`` is the number of rows of the whole output, ``n`` and ``k`` are what one rank multiplies. ``arch`` is the GPU's
    compute capability as a number, 90 for 9.0, and 0 on the CPU; ``num_sms`` what a rank may fill of it. ``is_heavy``:
    the activation needs registers of its own. ``link`` is how ranks reach each other, and ``gpu`` the GPU's name: texts
    to compare, and empty where there is none.
    """

    op: str
    m: int
    n: int
    k: int
    world_size: int
    dtype: str
    is_heavy: bool = False
    arch: int = 0
    num_sms: int = 0
    link: str = ""
    gpu: str = ""

    @property
    def rows_per_rank(self) -> int:
        """Rows of the largest even shard."""
        return -(-self.m // self.world_size)
