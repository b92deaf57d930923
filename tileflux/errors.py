"""Every exception Tileflux raises, apart from ``ValueError`` for a caller's mistake.

::

    TilefluxError
     +- GroupClosed            the group was closed, and then used
     +- GroupBroken            an earlier call was cut short, by a PeerTimeout or else; make a new group
     +- PeerTimeout            a peer did not signal in time: says who waited for whom, for which flag
     +- RegionError            a named region asked for in two ways, or not by every rank
     +- MismatchError          ranks made different calls (found when checking is on)
     +- CapacityExceeded       more rows were routed to a rank than its buffers have room for
     +- TransportUnavailable   this machine cannot carry bytes that way; says what would mend it
     +- Deadlock               the simulator found every program waiting; names the flags
     +- DataRace               the simulator found two accesses to the same bytes that no signal orders
     +- RankFailed             a rank started by testing.ranks failed; carries its traceback
     +- CompileGateError       a kernel broke a rule of the compile gate
"""

from __future__ import annotations

__all__ = [
    "CapacityExceeded",
    "CompileGateError",
    "DataRace",
    "Deadlock",
    "GroupBroken",
    "GroupClosed",
    "MismatchError",
    "PeerTimeout",
    "RankFailed",
    "RegionError",
    "TilefluxError",
    "TransportUnavailable",
]


class TilefluxError(Exception):
    """Base of all errors that are not plainly the caller's."""


class GroupClosed(TilefluxError):
    """The group was closed, and then used."""


class GroupBroken(TilefluxError):
    """An earlier call stopped half-way and left the group's flags in an unknown state; only ``close()`` works."""


class PeerTimeout(TilefluxError):
    """A rank waited past the deadline for a flag that a peer should have raised.

    ``peer`` is the rank held responsible: normally the one waited for, or, where that one was itself
    stuck, the rank at the end of the chain of waits. ``waited_for`` is always the direct one.
    """

    def __init__(
        self,
        *,
        op: str,
        rank: int,
        peer: int,
        waited_for: int,
        flag: str,
        wanted: int,
        seen: int,
        seconds: float,
        detail: str = "",
    ) -> None:
        self.op, self.rank, self.peer, self.waited_for = op, rank, peer, waited_for
        self.flag, self.wanted, self.seen, self.seconds = flag, wanted, seen, seconds
        text = (
            f"{op}: rank {rank} waited {seconds:.1f} s for rank {waited_for}: "
            f"flag {flag} should have reached {wanted} but stands at {seen}"
        )
        if peer != waited_for:
            text += f"; rank {waited_for} was itself waiting, and the first rank missing is rank {peer}"
        if detail:
            text += f" ({detail})"
        super().__init__(text)

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only constructors do not survive pickling, and ranks send errors to their parent.
        return (_rebuild_timeout, (dict(self.__dict__), self.args))


def _rebuild_timeout(fields: dict[str, object], args: tuple[object, ...]) -> PeerTimeout:
    error = PeerTimeout.__new__(PeerTimeout)
    error.__dict__.update(fields)
    error.args = args
    return error


class RegionError(TilefluxError):
    """A region was asked for in two different ways, or by fewer ranks than the group has."""


class MismatchError(TilefluxError):
    """Ranks of one group made different calls."""


class CapacityExceeded(TilefluxError):
    """More rows were routed to a rank than its buffers have room for: the results of such a call are not complete."""


class TransportUnavailable(TilefluxError):
    """This machine cannot carry bytes that way. ``fix`` says what would mend it."""

    def __init__(self, message: str, fix: str = "") -> None:
        self.fix = fix
        super().__init__(f"{message}. To fix: {fix}" if fix else message)


class Deadlock(TilefluxError):
    """Every program of a simulated launch waits. The message names each flag waited for."""


class DataRace(TilefluxError):
    """Two programs of a simulation touch the same bytes, one of them writes, and no signal orders the two."""


class RankFailed(TilefluxError):
    """A rank started by ``testing.ranks`` failed. ``rank`` is the first to fail; its traceback comes first."""

    def __init__(self, message: str, rank: int, cause: BaseException | None = None) -> None:
        self.rank, self.cause = rank, cause
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return (RankFailed, (self.args[0], self.rank, self.cause))


class CompileGateError(TilefluxError):
    """A kernel spills, asks for more shared memory than the chip has, or breaks a signal rule."""
