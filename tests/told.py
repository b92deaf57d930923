"""A pytest plugin (``-p tests.told``): why a test failed is told at once, and not at the end, which may never come."""

from __future__ import annotations

import sys

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\n{report.nodeid}, {report.when}:\n{report.longreprtext}", file=sys.__stderr__, flush=True)
