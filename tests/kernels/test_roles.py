"""The roles say of their policies what the loops, and who launches them, go by."""

from __future__ import annotations

import pytest

from tileflux.kernels import roles
from tileflux.kernels.operands import Role
from tileflux.lang.combine import combine_tile, send_sums, stage_sums
from tileflux.lang.policy import (
    store_tile,
    wait_for_nothing,
    wait_for_rows,
    wait_for_stages,
)
from tileflux.lang.schedule import slab_order, twice_order

ROLES = {name: role for name in roles.__all__ if isinstance(role := getattr(roles, name), Role)}


@pytest.mark.parametrize("role", ROLES.values(), ids=ROLES)
def test_what_a_role_says_of_its_policies_is_so(role: Role) -> None:
    assert role.stores == (role.finish is store_tile)
    assert role.awaits_rows == (role.wait in (wait_for_rows, wait_for_stages))
    assert role.combines == (role.finish in (combine_tile, send_sums, stage_sums)) == (role.order is slab_order)
    assert (role.num_turns == 2) == (role.order is twice_order)
    assert role.gathers or not role.feeds, "who feeds is fed"
    assert not role.num_spare_sms or role.wait is wait_for_nothing, "it would hold up what it spares SMs for"


def test_no_two_roles_have_one_name() -> None:
    assert len({role.name for role in ROLES.values()}) == len(ROLES), "loaded kernels are remembered by it"
    for gathering in (roles.GATHERING, roles.GATHERING_GROUPED):
        assert [role.feeds for role in gathering] == [True, False, False]
        assert [role.awaits_rows for role in gathering] == [True, True, False]
