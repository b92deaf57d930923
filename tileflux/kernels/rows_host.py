"""``kernels/spread.py`` and ``kernels/gather.py`` on the CPU: the same messages, over the same mailboxes and flags.

Lanes run one after the other, as in ``kernels/copy_host.py``. Where a link is emulated, messages go through it on the
group's copying thread; places that no row goes to are then sent too.
"""

from __future__ import annotations

import torch

from tileflux.kernels.copy_host import wait_for_copies
from tileflux.kernels.groups import sum_choices
from tileflux.kernels.rows_plan import Piece, RowsPlan
from tileflux.symm.base import Copy
from tileflux.symm.group import Group

__all__ = ["gather_rows", "spread_rows"]


class _Lane:
    """One lane of one call."""

    def __init__(self, group: Group, op: str, plan: RowsPlan, lane: int) -> None:
        self.group, self.op, self.plan, self.lane = group, op, plan, lane
        self.targets = [(group.rank + hop) % group.world_size for hop in range(1, group.world_size)]
        self.sources = self.targets[::-1]
        self._sending: list[tuple[Copy, torch.Tensor]] = []

    def send(self, peer: int, head: torch.Tensor, rows: torch.Tensor, goes: torch.Tensor, piece: Piece) -> None:
        """Put a message into ``peer``'s mailbox: ``head``, and those of the ``rows``, as bytes, that go there."""
        channels = self.group.channels
        slot = channels.acquire(self.lane, peer, self.op)
        is_linked = self.group.traits.link is not None
        filled = torch.zeros_like(slot) if is_linked else slot
        filled[: head.numel()] = head
        self.rows_in(filled, piece)[goes] = rows[goes]
        if is_linked:
            used = filled[: self.plan.rows + len(piece.tokens) * self.plan.slab_bytes]
            flag = channels.announcement(self.lane, peer)
            self._sending.append((self.group.copy_async(slot[: used.numel()], used, signal=flag), used))
        else:
            channels.publish(self.lane, peer)

    def rows_in(self, slot: torch.Tensor, piece: Piece) -> torch.Tensor:
        """``[tokens, bytes]``: where a message has the rows of its tokens."""
        begin, count = self.plan.rows, len(piece.tokens)
        whole = slot[begin : begin + count * self.plan.slab_bytes].view(count, self.plan.slab_bytes)
        return whole[:, : piece.nbytes]

    def take(self, peer: int) -> torch.Tensor:
        """The slot with the next message of ``peer``."""
        return self.group.channels.receive(self.lane, peer, self.op)

    def release(self, peer: int) -> None:
        """It has been read."""
        self.group.channels.release(self.lane, peer)

    def end(self) -> None:
        """Return when everything sent has landed."""
        wait_for_copies(self.group, self.op, [copy for copy, _ in self._sending])


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """``[rows, bytes of a row]``."""
    return tensor.view(-1).view(torch.uint8).view(len(tensor), tensor.shape[1] * tensor.element_size())


def _numbers(sent: torch.Tensor) -> torch.Tensor:
    """``[W, T_r]``: the number of each token among those for each rank, or -1."""
    return torch.where(sent[:, 1:] > sent[:, :-1], sent[:, :-1], -1)


def spread_rows(
    group: Group,
    op: str,
    plan: RowsPlan,
    x: torch.Tensor,
    notes: torch.Tensor,
    sent: torch.Tensor,
    out: torch.Tensor,
    out_notes: torch.Tensor,
    arrived: torch.Tensor,
    received: torch.Tensor,
) -> None:
    """See ``kernels/spread.py``."""
    x_rows, out_rows, numbers = _as_rows(x), _as_rows(out), _numbers(sent)
    words = 1 + plan.note_words
    for index in range(plan.num_lanes):
        lane, bases = _Lane(group, op, plan, index), list[int]()
        for step in range(plan.num_steps(index)):
            _send_tokens(lane, step, x_rows, notes, sent, numbers)
            slots: dict[int, torch.Tensor] = {}
            for source in lane.sources:
                if plan.piece(source, index, step) is not None:
                    slots[source] = lane.take(source)
            if step == 0:
                received[group.rank] = sent[:, -1]
                for source, slot in slots.items():
                    received[source] = slot[: 4 * group.world_size].view(torch.int32)
                counts = received[:, group.rank].tolist()
                bases = [sum(counts[:source]) for source in range(group.world_size)]
            for source in (group.rank, *slots):
                piece = plan.piece(source, index, step)
                if piece is None:
                    continue
                tokens = slice(piece.tokens.start, piece.tokens.stop)
                if source == group.rank:
                    places, told = numbers[group.rank, tokens], notes[tokens]
                    rows = x_rows[tokens, piece.begin : piece.begin + piece.nbytes]
                else:
                    count = len(piece.tokens)
                    head = slots[source][plan.places : plan.places + 4 * words * count].view(torch.int32)
                    places, told = head[:count], head[count:].view(count, plan.note_words)
                    rows = lane.rows_in(slots[source], piece)
                to = torch.where((places >= 0) & (places + bases[source] < len(out)), places + bases[source], -1)
                first = plan.firsts[source]
                arrived[first + tokens.start : first + tokens.stop] = to
                here = to >= 0
                out_notes[to[here].long()] = told[here]
                out_rows[to[here].long(), piece.begin : piece.begin + piece.nbytes] = rows[here]
                if source != group.rank:
                    lane.release(source)
        lane.end()


def _send_tokens(
    lane: _Lane, step: int, x_rows: torch.Tensor, notes: torch.Tensor, sent: torch.Tensor, numbers: torch.Tensor
) -> None:
    plan = lane.plan
    piece = plan.piece(lane.group.rank, lane.lane, step)
    if piece is None:
        return
    tokens = slice(piece.tokens.start, piece.tokens.stop)
    rows = x_rows[tokens, piece.begin : piece.begin + piece.nbytes]
    for peer in lane.targets:
        places = numbers[peer, tokens]
        counts = torch.zeros(plan.places // 4, dtype=torch.int32)
        counts[: len(sent)] = sent[:, -1]
        head = torch.cat((counts, places, notes[tokens].reshape(-1))).view(torch.uint8)
        lane.send(peer, head, rows, places >= 0, piece)


def gather_rows(
    group: Group,
    op: str,
    plan: RowsPlan,
    rows: torch.Tensor,
    positions: torch.Tensor,
    weights: torch.Tensor,
    sent: torch.Tensor,
    arrived: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See ``kernels/gather.py``."""
    numbers, head = _numbers(sent), torch.empty(0, dtype=torch.uint8)
    for index in range(plan.num_lanes):
        lane = _Lane(group, op, plan, index)
        for step in range(plan.num_steps(index)):
            for owner in lane.targets:
                piece = plan.piece(owner, index, step)
                if piece is not None:
                    sums, is_here = _sums(plan, piece, owner, rows, positions, weights, arrived)
                    lane.send(owner, head, sums.view(torch.uint8), is_here, piece)
            piece = plan.piece(group.rank, index, step)
            if piece is None:
                continue
            tokens, columns = slice(piece.tokens.start, piece.tokens.stop), _columns(piece, rows)
            total = torch.zeros((len(piece.tokens), columns.stop - columns.start), dtype=torch.float32)
            slots = {source: lane.take(source) for source in lane.sources}
            for source in range(group.world_size):
                if source == group.rank:
                    value, is_here = _sums(plan, piece, source, rows, positions, weights, arrived)
                else:
                    value, is_here = lane.rows_in(slots[source], piece), numbers[source, tokens] >= 0
                    value = value.contiguous().view(rows.dtype)
                total += torch.where(is_here[:, None], value, 0)
            out[tokens, columns] = total.to(out.dtype)
            for source in lane.sources:
                lane.release(source)
        lane.end()


def _columns(piece: Piece, rows: torch.Tensor) -> slice:
    return slice(piece.begin // rows.element_size(), (piece.begin + piece.nbytes) // rows.element_size())


def _sums(
    plan: RowsPlan,
    piece: Piece,
    owner: int,
    rows: torch.Tensor,
    positions: torch.Tensor,
    weights: torch.Tensor,
    arrived: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What this rank has made of some tokens of ``owner``, and which of them are here."""
    first = plan.firsts[owner]
    row = arrived[first + piece.tokens.start : first + piece.tokens.stop].long()
    places, is_here = row.clamp(min=0), row >= 0
    if not len(positions):
        return rows.new_zeros((len(row), _columns(piece, rows).stop - _columns(piece, rows).start)), is_here
    picked = torch.where(is_here[:, None], positions[places], -1)
    return sum_choices(rows[:, _columns(piece, rows)], picked, weights[places], rows.dtype), is_here
