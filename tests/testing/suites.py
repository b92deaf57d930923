"""What tests of contenders share: running all of a suite, none of which may pass unless it has run."""

from __future__ import annotations

from tileflux.symm.group import Group
from tileflux.testing.contenders import Suite


def passes(suite: Suite, name: str) -> bool:
    """Whether the check of one of them is content."""
    (contender,) = (each for each in suite.contenders if each.name == name)
    try:
        contender.check()
    except AssertionError:
        return False
    return True


def try_all(group: Group, suite: Suite, *, skips: tuple[str, ...] = ()) -> None:
    """Run everything but ``skips``; nothing but a run turns a poisoned result into a right one."""
    for contender in suite.contenders:
        if contender.name in skips:
            continue
        suite.poison()
        group.synchronize()
        assert not passes(suite, contender.name), f"{contender.name}: poison passes"
        group.barrier()
        contender.run()
        group.synchronize()
        contender.check()
        group.barrier()
    for part in suite.parts.values():
        part()
        group.synchronize()
        group.barrier()
