"""No measurement of whoever runs the tests gets into them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tileflux import env


@pytest.fixture(scope="package", autouse=True)
def nothing_measured() -> Iterator[None]:
    with env.scoped({"TILEFLUX_TUNE_DIR": ""}):
        yield
