"""How the tokens of every rank are cut into messages, when only some of their rows go to a peer.

Cuts are by token, never by what is sent: token ``t`` has the same place in the same message whoever it goes to, and a
row that does not go to a peer is a place that nobody fills. So both ends know the messages of a call beforehand, and no
count has to come first; and on the way back the rows of one token are in the same step of all ranks, and can be added
up where they have arrived.

A rank's tokens are cut into one run per lane, a run into pieces of at most ``rows_per_piece`` tokens, and rows that are
longer than a slot into slabs. A message is one slab of one piece:

    head    32-bit words, on the way out only: how many rows this rank sends to each rank, in all; then of each token
            of the piece its number among the rows for this peer, or -1; then its notes
    rows    ``slab_bytes`` for each token of the piece
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tileflux.config import ROWS, CommConfig, hashed_once

__all__ = ["Piece", "RowsPlan", "plan_rows"]

_GRAIN = 16


@dataclass(frozen=True)
class Piece:
    """One message: some tokens of a rank, and some bytes of their rows."""

    tokens: range
    begin: int
    """Where in a row its bytes begin."""
    nbytes: int


@hashed_once
@dataclass(frozen=True)
class RowsPlan:
    """The messages of one call; the same on every rank."""

    sizes: tuple[int, ...]
    """Tokens of each rank."""
    row_bytes: int
    note_words: int
    has_head: bool
    num_lanes: int
    rows_per_piece: int
    slab_bytes: int
    num_slabs: int
    places: int
    """Where in a slot the numbers of the tokens begin; the notes are behind them."""
    rows: int
    """Where in a slot the rows begin."""

    @property
    def words(self) -> list[int]:
        """What the kernels read; see ``config.RowsLayout``."""
        words = [0] * ROWS.arrays
        words[ROWS.rows_per_piece], words[ROWS.num_slabs] = self.rows_per_piece, self.num_slabs
        words[ROWS.slab_bytes], words[ROWS.row_bytes] = self.slab_bytes, self.row_bytes
        words[ROWS.places], words[ROWS.rows] = self.places, self.rows
        words[ROWS.note_words], words[ROWS.min_pieces] = self.note_words, int(self.has_head)
        return [*words, *self.sizes, *self.firsts]

    @property
    def firsts(self) -> tuple[int, ...]:
        """Tokens of the ranks before each rank."""
        return tuple(sum(self.sizes[:rank]) for rank in range(len(self.sizes)))

    def run(self, source: int, lane: int) -> range:
        """The tokens of ``source`` that a lane carries."""
        size = self.sizes[source]
        share = -(-size // self.num_lanes)
        return range(min(size, lane * share), min(size, (lane + 1) * share))

    def num_pieces(self, source: int, lane: int) -> int:
        """Messages for the tokens of ``source``. One at least where there is a head: everybody waits for it."""
        pieces = -(-len(self.run(source, lane)) // self.rows_per_piece)
        return max(pieces, int(self.has_head)) * self.num_slabs

    def num_steps(self, lane: int) -> int:
        """Messages of the rank with the most tokens."""
        return max(self.num_pieces(source, lane) for source in range(len(self.sizes)))

    def piece(self, source: int, lane: int, step: int) -> Piece | None:
        """What goes in this step, or None if there is no more to go."""
        if step >= self.num_pieces(source, lane):
            return None
        number, slab = divmod(step, self.num_slabs)
        run, begin = self.run(source, lane), slab * self.slab_bytes
        first = run.start + number * self.rows_per_piece
        tokens = range(first, min(run.stop, first + self.rows_per_piece))
        return Piece(tokens, begin, max(0, min(self.slab_bytes, self.row_bytes - begin)))


@functools.lru_cache(maxsize=4096)
def plan_rows(sizes: tuple[int, ...], row_bytes: int, note_words: int | None, config: CommConfig) -> RowsPlan:
    """Messages for rows of ``row_bytes``; on the way out each with ``note_words`` of notes, on the way back None."""
    has_head, words = note_words is not None, note_words or 0
    counts_bytes = _round_up(4 * len(sizes)) if has_head else 0
    token_bytes = 4 * (1 + words) if has_head else 0
    room = config.slot_bytes - counts_bytes
    slab_bytes = min(_round_up(row_bytes), (room - _round_up(token_bytes)) // _GRAIN * _GRAIN)
    if slab_bytes < min(_GRAIN, row_bytes) or room < token_bytes + _GRAIN:
        raise ValueError(
            f"slot_bytes={config.slot_bytes} has no room for the counts of {len(sizes)} ranks, {words} words of a "
            "token and some of its row: give the group's CommConfig larger slots"
        )
    rows_per_piece = max(1, (room - _GRAIN) // max(1, token_bytes + slab_bytes))
    num_lanes = min(config.lanes_for(max(sizes) * (row_bytes + token_bytes)), max(1, *sizes))
    num_slabs = max(1, -(-row_bytes // slab_bytes)) if slab_bytes else 1
    rows = counts_bytes + _round_up(rows_per_piece * token_bytes)
    return RowsPlan(
        sizes, row_bytes, words, has_head, num_lanes, rows_per_piece, slab_bytes, num_slabs, counts_bytes, rows
    )


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _GRAIN) * _GRAIN
