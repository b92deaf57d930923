"""How an op becomes known to torch: schema, implementation, fake and gradient, registered in one call.

An op takes its group by name, because only tensors, numbers and strings pass through torch's dispatcher. Every op has a
gradient: one without trains in eager mode and silently gets zeros under ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

__all__ = ["eager_only", "register"]

Function = TypeVar("Function", bound=Callable[..., Any])

_library = torch.library.Library("tileflux", "DEF")


def eager_only(function: Function) -> Function:
    """Keep the compiler out: it would trace into flags and launches. A compiled graph breaks at the call."""
    return cast(Function, torch.compiler.disable(function))


def register(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
) -> Any:
    """Register ``tileflux::<name>`` and return the callable op."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
    for device in ("CPU", "CUDA"):
        _library.impl(name, implementation, device)
    torch.library.register_fake(f"tileflux::{name}", fake, lib=_library)
    torch.library.register_autograd(f"tileflux::{name}", backward, setup_context=setup_context, lib=_library)
    op = getattr(torch.ops.tileflux, name).default
    # A rank that does not use the result must still make the call: to the compiler it would be dead code.
    torch.fx.node.has_side_effect(op)
    return op
