"""The ordering rules of ``lang/signal.py`` as far as PTX shows them: from text to a list of problems.

A rule is a question about paths through the control-flow graph, such as: is there a way from a store to a release
that meets no barrier? Predicates are not evaluated, so a path that no thread takes still counts, and so does a way
around a barrier through a branch or a loop: correct code may be refused, and a barrier that lies on every path
satisfies the rule.

Not seen: the address of an access, the threads that execute it, the inside of a called function (a call counts as a
load and a store). A barrier of some warps only, as warp specialisation has them, is taken to cover those that
matter. Whether a kernel loads data before it waits for them cannot be told from PTX.
"""

from __future__ import annotations

from collections.abc import Sequence

from tileflux.testing.ptx import Function, Instruction, parse, reach

__all__ = [
    "barrier_follows_acquire",
    "barrier_precedes_release",
    "bulk_stores_complete_before_release",
    "counts_with_release",
    "flags_have_system_scope",
    "lint",
    "proxy_fence_precedes_tma_load",
    "signals_with_release",
    "waits_with_acquire",
]


def lint(ptx: str, *, waits: bool, signals: bool, counts: bool = False, announces_tma: bool = True) -> list[str]:
    """Every problem of a kernel that waits for flags, raises flags, both or neither, in the order of the rules.

    ``counts``: it counts what it has done for others of its own rank, at the scope of the GPU, as no other kernel may.
    ``announces_tma=False``: what it stores by TMA is announced by its end, and by no flag of its own.

    Raises ``ValueError`` for text that is not PTX.
    """
    functions = parse(ptx)
    problems = []
    if waits:
        problems += waits_with_acquire(functions)
    if signals:
        problems += signals_with_release(functions)
    if counts:
        problems += counts_with_release(functions)
    for function in functions:
        if waits or signals or counts:
            problems += flags_have_system_scope(function, counts=counts)
        problems += barrier_follows_acquire(function)
        problems += proxy_fence_precedes_tma_load(function)
        problems += barrier_precedes_release(function)
        if announces_tma:
            problems += bulk_stores_complete_before_release(function)
    return problems


def waits_with_acquire(functions: Sequence[Function]) -> list[str]:
    """A wait polls and acquires at system scope: else it may never end, or data is read older than its flag.

    The poll is an acquiring access, or a relaxed one with a fence after it. It lies in a loop that stores nothing
    and leaves the flag's address alone: a loop that looks at one flag after another waits for none of them.
    """
    acquires = [(function, index) for function in functions for index in _acquires(function)]
    if not acquires:
        return ["waits, but nothing acquires at sys scope: the wait is missing, or the compiler dropped it"]
    if not any(_spins(function, poll) for function, index in acquires for poll in _polls(function, index)):
        return ["waits, but no acquire at sys scope is polled in a loop: the flag is looked at only once"]
    return []


def signals_with_release(functions: Sequence[Function]) -> list[str]:
    """A signal releases at system scope: else a peer never sees the flag, or sees it before the data.

    Releases behind a look at the clock or a compare-and-swap do not count. A wait that gives up warns its peers and
    writes its record there, so a kernel that waits would otherwise pass without a signal of its own.
    """
    for function in functions:
        ends = set(function.where(lambda instruction: instruction.has("cas") or "%globaltimer" in instruction.operands))
        before_end = reach([0], function.successors, ends.__contains__) | {0}
        if any(index in before_end - ends for index in _releases(function)):
            return []
    return ["signals, but nothing releases at sys scope: the signal is missing, or the compiler dropped it"]


def counts_with_release(functions: Sequence[Function]) -> list[str]:
    """A count releases within the GPU: else who waits for it may see it before the data."""
    if any(function.instructions[index].counts for function in functions for index in function.reachable):
        return []
    return ["counts, but nothing adds with a release at gpu scope: the count is missing, or the compiler dropped it"]


def flags_have_system_scope(function: Function, *, counts: bool = False) -> list[str]:
    """Flags are shared by ranks: below system scope the order holds on one GPU only, and peers read old data.

    So do counters among the programs of one GPU, unless the kernel ``counts``: then what adds to one may do with less.
    """
    return [
        f"{function.at(index)} orders at {function.instructions[index].memory_scope} scope where flags need sys"
        for index in function.reachable
        if function.instructions[index].memory_scope != "sys"
        and not (counts and function.instructions[index].counts)
        and (
            function.instructions[index].acquires
            or function.instructions[index].releases
            or _fence_releases(function, index)
            or _fence_acquires(function, index)
        )
    ]


def barrier_follows_acquire(function: Function) -> list[str]:
    """One thread acquires for all: without a CTA barrier before the loads the others read data not yet there."""
    unordered: dict[int, int] = {}  # load: acquire. One problem a load, however many polls lead to it.
    for acquire in reversed(_acquires(function)):
        met = reach([acquire], function.successors, function.is_barrier)
        unordered |= {index: acquire for index in met if function.instructions[index].loads_data}
    return [
        f"no CTA barrier between the acquire {function.at(acquire)} and the load {function.at(load)}"
        for load, acquire in sorted(unordered.items())
    ]


def proxy_fence_precedes_tma_load(function: Function) -> list[str]:
    """TMA reads through a proxy of its own, for which an acquire alone does not make peers' stores visible."""
    fences = set(function.where(_is_proxy_fence))
    unordered: dict[int, int] = {}
    for acquire in reversed(_acquires(function)):
        met = reach([acquire], function.successors, fences.__contains__)
        unordered |= {index: acquire for index in met if function.instructions[index].is_bulk_load}
    return [
        f"no fence.proxy.async between the acquire {function.at(acquire)} and the TMA load {function.at(load)}"
        for load, acquire in sorted(unordered.items())
    ]


def barrier_precedes_release(function: Function) -> list[str]:
    """One thread releases for all: without a CTA barrier before it the others' stores are not published.

    What a thread learns by waiting for its bulk stores also has to pass the barrier.
    """
    problems = []
    for release in _publishes(function):
        met = reach([release], function.predecessors, function.is_barrier)
        unordered = [
            index
            for index in met
            if function.instructions[index].stores_data or function.instructions[index].is_full_bulk_wait
        ]
        if unordered:
            problems.append(
                f"no CTA barrier between {function.at(max(unordered))} and the release {function.at(release)}"
            )
        elif release == 0 or (0 in met and not function.is_barrier(0)):
            problems.append(f"no CTA barrier on a path from the kernel's start to the release {function.at(release)}")
    return problems


def bulk_stores_complete_before_release(function: Function) -> list[str]:
    """``wait_group.read`` says that shared memory may be reused, not that a TMA store is written."""
    complete = set(function.where(lambda instruction: instruction.is_full_bulk_wait))
    problems = []
    for release in _publishes(function):
        met = reach([release], function.predecessors, complete.__contains__)
        stores = [index for index in met if function.instructions[index].is_bulk_store]
        if stores:
            problems.append(
                f"no `cp.async.bulk.wait_group 0` (without .read) between the TMA store {function.at(max(stores))} "
                f"and the release {function.at(release)}"
            )
    return problems


def _acquires(function: Function) -> list[int]:
    """What acquires at system scope."""
    return [
        index
        for index in function.reachable
        if function.instructions[index].memory_scope == "sys"
        and (function.instructions[index].acquires or _fence_acquires(function, index))
    ]


def _publishes(function: Function) -> list[int]:
    """What releases at system scope, and what counts within the GPU: either must come behind what it publishes."""
    return sorted({*_releases(function), *function.where(lambda instruction: instruction.counts)})


def _releases(function: Function) -> list[int]:
    """What releases at system scope."""
    return [
        index
        for index in function.reachable
        if function.instructions[index].memory_scope == "sys"
        and (function.instructions[index].releases or _fence_releases(function, index))
    ]


def _polls(function: Function, acquire: int) -> list[int]:
    """The accesses that an acquire gives an order to: itself, or the relaxed ones before a fence."""
    if not function.instructions[acquire].is_fence:
        return [acquire]
    met = reach([acquire], function.predecessors, function.is_barrier)
    return [index for index in met if function.instructions[index].polls_without_order]


def _fence_acquires(function: Function, index: int) -> bool:
    return function.instructions[index].is_fence and bool(_polls(function, index))


def _fence_releases(function: Function, index: int) -> bool:
    """A fence and then a store is how a release is written without one; a barrier between parts the two."""
    met = reach([index], function.successors, function.is_barrier)
    return function.instructions[index].is_fence and any(function.instructions[after].stores_data for after in met)


def _spins(function: Function, poll: int) -> bool:
    address = function.instructions[poll].address

    def moves_on(index: int) -> bool:
        return function.instructions[index].stores_data or function.instructions[index].writes_register(address)

    return poll in reach([poll], function.successors, moves_on)


def _is_proxy_fence(instruction: Instruction) -> bool:
    """A fence towards TMA for global memory; one for shared memory alone has that space in its name."""
    return instruction.words[:3] == ("fence", "proxy", "async") and not instruction.has("shared")
