"""Fixtures of kernels' tests."""

from __future__ import annotations

import pytest

from tileflux import env


@pytest.fixture
def interpreter_installed() -> None:
    """Triton's interpreter as the kernels need it, where they are interpreted."""
    if env.interpreting():
        from tileflux.testing import interpreter

        interpreter.install()
