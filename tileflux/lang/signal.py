"""``signal`` and ``wait``: the only device functions that touch a flag, and their forms for many flags at once.

A flag is a 32-bit word that only grows; its values are epochs. Comparisons are of the wrapped difference, so a
flag may pass 2**31. A signaller is at most ``MAX_AHEAD`` ahead of who waits for it; a flag further ahead is one that
nobody has raised for half the range, or ever. Epochs are kept in memory by
whoever counts them, never passed as launch arguments: a CUDA graph would repeat an argument on every replay.

Ordering. ``signal`` is a CTA barrier, then one thread's release at system scope: without the barrier only that
thread's own stores are published, since Triton puts none between a store and a release. ``wait`` is one thread's
acquire at system scope, then a CTA barrier, which Triton emits to hand the polled value to the other threads.
Data written with TMA stores is not covered: ``settle_stores`` comes before the signal.

Deadline. A wait that outlasts the guard's timeout, or finds the group broken, writes a record of what it waited
for into its rank's guard block, sets ``broken`` in every rank's block and the host-visible alarm, and returns as
if it had been satisfied. A kernel that waits ends with ``confirm``, which tells whether anybody gave up meanwhile.
Nothing traps and nothing hangs; results of that launch are worthless, and the next host call on the group says so
(``symm/guard.py``). Every value a branch depends on is made the same in all threads, because the branches contain
CTA barriers.
"""

import triton
import triton.language as tl

from tileflux.config import GUARD, MAX_AHEAD
from tileflux.lang.hopper import num_threads, thread_numbers

__all__ = [
    "BULK_WAIT",
    "GLOBALTIMER",
    "LOAD_ACQUIRE_CHOSEN",
    "PROXY_FENCE",
    "SMID",
    "STORE_RELEASE",
    "STORE_RELEASE_CHOSEN",
    "arrive",
    "clock_ns",
    "confirm",
    "count",
    "poll",
    "poll_all",
    "reached_all",
    "settle_stores",
    "signal",
    "signal_all",
    "sm_number",
    "take",
    "taken",
    "tma_fence",
    "wait",
]

# One thread stores, the first of its partition ($3 is its number of threads less one); the others pass by. Not an
# atomic: a flag has one writer, and a peer behind PCIe may not do atomics at all.
STORE_RELEASE = tl.constexpr(
    "{ .reg .pred first; .reg .u32 tid; mov.u32 tid, %tid.x; and.b32 tid, tid, $3; setp.eq.u32 first, tid, 0; "
    "@first st.release.sys.global.s32 [$1], $2; mov.s32 $0, 0; }"
)
# Every thread stores the flag it has, if that is chosen ($3).
STORE_RELEASE_CHOSEN = tl.constexpr(
    "{ .reg .pred chosen; setp.ne.s32 chosen, $3, 0; @chosen st.release.sys.global.s32 [$1], $2; mov.s32 $0, 0; }"
)
# Every thread looks at the flag it has, if that is chosen ($2).
LOAD_ACQUIRE_CHOSEN = tl.constexpr(
    "{ .reg .pred chosen; setp.ne.s32 chosen, $2, 0; mov.s32 $0, 0; @chosen ld.acquire.sys.global.s32 $0, [$1]; }"
)
GLOBALTIMER = tl.constexpr("{ mov.u64 $0, %globaltimer; }")
SMID = tl.constexpr("{ mov.u32 $0, %smid; }")
PROXY_FENCE = tl.constexpr("{ fence.proxy.async.global; mov.s32 $0, 0; }")
# Without .read, which would wait until shared memory has been read, and not until the stores are done.
BULK_WAIT = tl.constexpr("{ cp.async.bulk.wait_group 0; mov.s32 $0, 0; }")

_POLLS_PER_CHECK = tl.constexpr(64)
_LANES = tl.constexpr(512)  # at least one per thread: no launch has more than 16 warps
_MAX_AHEAD = tl.constexpr(MAX_AHEAD)
_RANK = tl.constexpr(GUARD.rank)
_WORLD_SIZE = tl.constexpr(GUARD.world_size)
_TIMEOUT_NS = tl.constexpr(GUARD.timeout_ns)
_ALARM = tl.constexpr(GUARD.alarm)
_BLOCKS = tl.constexpr(GUARD.blocks)
_BROKEN = tl.constexpr(GUARD.broken)
_STATE = tl.constexpr(GUARD.state)
_OP = tl.constexpr(GUARD.op)
_PEER = tl.constexpr(GUARD.peer)
_FLAG = tl.constexpr(GUARD.flag)
_WANTED = tl.constexpr(GUARD.wanted)
_SEEN = tl.constexpr(GUARD.seen)
_WAITED_NS = tl.constexpr(GUARD.waited_ns)


@triton.jit
def signal(flag, value):
    """Publish everything this program has stored so far, then set ``flag`` to ``value``."""
    tl.debug_barrier()
    mask: tl.constexpr = num_threads() - 1
    tl.inline_asm_elementwise(STORE_RELEASE, "=r,l,r,n", [flag, value, mask], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def signal_all(flags, chosen, value):
    """``signal`` for a block of flags, those of which are ``chosen``.

    With a thread for each they go out at once; one after the other, each release would wait for the one before it.
    """
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        STORE_RELEASE_CHOSEN, "=r,l,r,r", [flags, value, chosen.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait(flag, wanted, peer, guard, op):
    """Return once ``flag`` has reached ``wanted``, which ``peer`` will set; what it published is then visible.

    ``guard`` is the rank's guard table, ``op`` the number the host knows the calling op by.
    """
    seen = poll(flag, wanted)
    if _is_short(seen, wanted):
        _wait_long(flag, wanted, peer, guard, op)


@triton.jit
def poll(flag, wanted):
    """Read ``flag`` with acquire. ``wanted`` is for the simulator, which lets others run until it is reached."""
    return tl.atomic_add(flag, 0, sem="acquire", scope="sys")


@triton.jit
def reached_all(flags, chosen, wanted):
    """Look at a block of flags together until all that are ``chosen`` have reached ``wanted``: then 1.

    0 if they have not after a while. There is no deadline: who gets that waits for one after the other.
    """
    is_short = 1
    num_polls = 0
    while (is_short != 0) & (num_polls < _POLLS_PER_CHECK):
        seen = poll_all(flags, chosen, wanted)
        is_short = tl.max((_is_short(seen, wanted) & chosen).to(tl.int32), axis=0)
        num_polls += 1
    # What the threads that looked have acquired is there for all.
    tl.debug_barrier()
    return is_short == 0


@triton.jit
def poll_all(flags, chosen, wanted):
    """``poll`` for a block of flags; 0 for those that are not ``chosen``."""
    # A load, which is what the compiler makes of the single one's addition of 0: peers are about to write there.
    return tl.inline_asm_elementwise(
        LOAD_ACQUIRE_CHOSEN, "=r,l,r", [flags, chosen.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _is_short(seen, wanted):
    """Whether a flag has not reached ``wanted``: it is behind, or so far ahead that it must be of another round."""
    ahead = seen - wanted
    return (ahead < 0) | (ahead >= _MAX_AHEAD)


@triton.jit
def arrive(counter, num_expected):
    """Publish what this program has stored and count it; 1 for the last of ``num_expected`` to come, else 0.

    The last one has seen what all others published, may publish it in turn, and sets the counter back. For programs
    of one rank: a counter has many writers, and a peer behind PCIe may not do atomics.
    """
    tl.debug_barrier()
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="sys")
    last = before == num_expected - 1
    if last:
        # A plain store: whoever counts here next is in a later launch.
        tl.store(counter, 0)
    return last


@triton.jit
def count(counter):
    """Publish what this program has stored and count it. Whoever waits for the count sets it back.

    For who waits on the same GPU, and lets copies go when it ends. To publish beyond takes some 3 us of every tile.
    """
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def take(counter):
    """Ask for the counter's next number, which nobody else gets; ``taken`` says which. For programs of one rank.

    Not a number yet: one thread asks, and nobody waits for its answer before ``taken``, so what is done between the two
    hides the way to memory and back. Relaxed: the number itself is all that is handed over. Who takes n need not see
    what the takers of smaller numbers have stored, and the counter is set back behind an ``arrive`` of all takers.
    """
    lanes = tl.arange(0, _LANES)
    return tl.atomic_add(counter + lanes * 0, 1, mask=lanes == 0, sem="relaxed", scope="gpu")


@triton.jit
def taken(ticket):
    """The number that ``take`` asked for, the same in every thread."""
    return tl.max(tl.where(tl.arange(0, _LANES) == 0, ticket, 0), axis=0)


@triton.jit
def tma_fence():
    """After a wait: let TMA loads, which go another way through the memory system, see what was waited for."""
    tl.inline_asm_elementwise(PROXY_FENCE, "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def settle_stores():
    """Wait until what this program has stored by TMA is written: what signals next may publish it.

    Every thread waits for its own, so that it need not be known which of them has stored.
    """
    tl.inline_asm_elementwise(BULK_WAIT, "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _wait_long(flag, wanted, peer, guard, op):
    block = tl.load(guard + _BLOCKS + tl.load(guard + _RANK)).to(tl.pointer_type(tl.int64))
    broken_flag = (block + _BROKEN).to(tl.pointer_type(tl.int32))
    timeout_ns = tl.load(guard + _TIMEOUT_NS)
    start = _now_ns()
    waiting = 1
    while waiting != 0:
        seen = poll(flag, wanted)
        num_polls = 1
        while _is_short(seen, wanted) & (num_polls < _POLLS_PER_CHECK):
            seen = poll(flag, wanted)
            num_polls += 1
        if _is_short(seen, wanted) == 0:
            waiting = 0
        else:
            # A relaxed look at our own memory; an acquire is not needed to stop waiting.
            broken = tl.atomic_add(broken_flag, 0, sem="relaxed", scope="sys")
            waited_ns = _now_ns() - start
            if (broken != 0) | (waited_ns > timeout_ns):
                _give_up(block, guard, op, peer, flag, wanted, seen, waited_ns)
                waiting = 0


@triton.jit
def confirm(guard, op):
    """At the end of a kernel that waited: raise the alarm if the group broke meanwhile.

    Whoever gives up goes on without having been satisfied, and what it then publishes is worthless; but it has set
    ``broken`` everywhere before. So whoever took such a message, and never had to wait itself, finds out here.
    """
    rank = tl.load(guard + _RANK)
    block = tl.load(guard + _BLOCKS + rank).to(tl.pointer_type(tl.int64))
    broken_flag = (block + _BROKEN).to(tl.pointer_type(tl.int32))
    if tl.atomic_add(broken_flag, 0, sem="acquire", scope="sys") != 0:
        _record(block, guard, op, rank, broken_flag, 0, 1, rank * 0)


@triton.jit
def _give_up(block, guard, op, peer, flag, wanted, seen, waited_ns):
    # Before anything else: what this program publishes from now on must find its readers warned.
    for rank in range(tl.load(guard + _WORLD_SIZE).to(tl.int32)):
        peer_block = tl.load(guard + _BLOCKS + rank).to(tl.pointer_type(tl.int64))
        signal((peer_block + _BROKEN).to(tl.pointer_type(tl.int32)), 1)
    _record(block, guard, op, peer, flag, wanted, seen, waited_ns)


@triton.jit
def _record(block, guard, op, peer, flag, wanted, seen, waited_ns):
    """Write down what was waited for, once per rank, and raise the alarm. ``peer`` is one's own rank in ``confirm``."""
    state = (block + _STATE).to(tl.pointer_type(tl.int32))
    if tl.atomic_cas(state, 0, 1, sem="acq_rel", scope="sys") == 0:
        tl.store(block + _OP, op)
        tl.store(block + _PEER, peer)
        tl.store(block + _FLAG, flag.to(tl.int64))
        tl.store(block + _WANTED, wanted)
        tl.store(block + _SEEN, seen)
        tl.store(block + _WAITED_NS, waited_ns)
        signal(state, 2)
        alarm = tl.load(guard + _ALARM).to(tl.pointer_type(tl.int32))
        signal(alarm, 1)


@triton.jit
def _now_ns():
    """The GPU's clock, the same number in every thread: the maximum over a block that spans all warps."""
    times = tl.inline_asm_elementwise(GLOBALTIMER, "=l,r", [thread_numbers()], dtype=tl.int64, is_pure=False, pack=1)
    return tl.max(times, axis=0)


@triton.jit
def clock_ns():
    """The GPU's clock as one thread reads it: to be written down, not to be branched on."""
    return tl.inline_asm_elementwise(GLOBALTIMER, "=l,r", [0], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def sm_number():
    """The SM this program runs on."""
    return tl.inline_asm_elementwise(SMID, "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)
