"""What the tests of single ops share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tileflux
from tileflux.symm.group import Group

SUMMED = (torch.float32, torch.float16, torch.bfloat16)
MOVED = (*SUMMED, torch.float8_e5m2, torch.uint8, torch.complex64)


def check_registration(group: Group, op: Any, *arguments: object) -> None:
    """Schema, fake, autograd registration and compiled tracing of a registered op."""
    torch.library.opcheck(op, arguments)


def check_compiled(
    group: Group, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, any_gradient: bool = True
) -> None:
    """A compiled function gives the eager values and gradients; a zero gradient would show here."""
    weight = torch.linspace(0.5, 2.0, x.shape[-1])

    def loss(x: torch.Tensor) -> torch.Tensor:
        y = call(x * weight)
        return (y.float() * y.float()).sum()

    eager = x.clone().requires_grad_()
    loss(eager).backward()
    compiled = x.clone().requires_grad_()
    torch.compile(loss, backend="aot_eager", fullgraph=True)(compiled).backward()
    assert eager.grad is not None and compiled.grad is not None
    assert eager.grad.abs().sum() > 0 or not any_gradient
    assert torch.equal(eager.grad, compiled.grad)


def check_common_refusals(call: Callable[..., torch.Tensor], group: Group) -> None:
    """Mistakes that every collective refuses alike."""
    name = call.__name__
    with pytest.raises(ValueError, match=f"{name}: group should be a tileflux.Group, not str"):
        call(torch.ones(4), group="world")
    with pytest.raises(ValueError, match=f"{name}: x should be a tensor, not list"):
        call([1.0], group=group)
    with pytest.raises(ValueError, match=f"{name}: x is on meta but the group is on cpu; move it there"):
        call(torch.ones(4, device="meta"), group=group)
    with pytest.raises(ValueError, match=f"{name}: x has layout torch.sparse_coo"):
        call(torch.eye(4).to_sparse(), group=group)
    with pytest.raises(ValueError, match=f"{name}: out should be contiguous"):
        call(torch.ones(4), group=group, out=torch.ones(100))
    with pytest.raises(ValueError, match="records no gradient"):
        call(torch.ones(4, requires_grad=True), group=group, out=torch.ones(4))
    with pytest.raises(ValueError, match=f"{name}: out overlaps the input"):
        buffer = torch.ones(12)
        call(buffer[:4], group=group, out=buffer[2:6])
    if name not in ("reduce_scatter", "all_reduce"):
        z = torch.randn(4, dtype=torch.complex64)
        assert torch.equal(call(z.conj(), group=group, out=torch.empty_like(z)), z.conj().resolve_conj())
    (other,) = tileflux.local_groups(1)
    other.close()
    with pytest.raises(tileflux.GroupClosed, match="was closed"):
        call(torch.ones(4), group=other)
