"""``tests/hazards.py``, given what racecheck says."""

from __future__ import annotations

import inspect

import pytest

from tests import hazards
from tests.hazards import Access, Report
from tileflux.kernels import gemm_hopper

SOURCE = inspect.getsource(gemm_hopper).splitlines()
BEGIN = next(at for at, line in enumerate(SOURCE, 1) if line.startswith("def _gemm_hopper_kernel"))
DIVIDE = next(at for at, line in enumerate(SOURCE, 1) if "gl.warp_specialize(" in line)
MULTIPLY = next(at for at, line in enumerate(SOURCE, 1) if "warpgroup_mma(left, right, total" in line)


def log(*lines: tuple[int, ...], displayed: int | None = None) -> str:
    """Of racecheck, with a report for each of ``lines``."""
    text = "========= COMPUTE-SANITIZER\n."
    for first, *others in lines:
        text += f"========= Error: Race reported between Read access at _k+0x1e0 in gemm_hopper.py:{first}\n"
        for line in others:
            text += f"=========     and Write access at _k+0x33d0 in /a/b/gemm_hopper.py:{line} [13 hazards]\n"
        text += "========= \n"
    count = len(lines) if displayed is None else displayed
    return f"{text}24 passed\n========= RACECHECK SUMMARY: {count} hazards displayed (83 errors, 0 warnings)\n"


def test_reports_are_read() -> None:
    assert hazards.reports(log((41, 41, 80))) == [
        Report(
            (
                Access("Read", "_k", "gemm_hopper.py", 41),
                *(Access("Write", "_k", "gemm_hopper.py", at) for at in (41, 80)),
            )
        )
    ]
    assert hazards.reports(log()) == []


def test_words_that_divide_a_kernel_are_told_from_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert hazards.main(log((BEGIN, BEGIN, DIVIDE), (BEGIN, DIVIDE))) == 0
    assert "0 hazards; 2 reports" in capsys.readouterr().out
    assert hazards.main(log((BEGIN, DIVIDE), (MULTIPLY, DIVIDE), (BEGIN, MULTIPLY))) == 1
    said = capsys.readouterr().out
    assert "2 hazards; 1 reports" in said
    assert f"gemm_hopper.py:{MULTIPLY}" in said


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("24 passed", "did not end"),
        (log((41, 41), displayed=7), "raise --print-limit"),
        (log((41, 41)).replace("Read access at _k+0x1e0 in gemm_hopper.py:41", "something"), "not understood"),
    ],
    ids=["not ended", "cut short", "unknown"],
)
def test_what_cannot_be_told_is_a_failure(text: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert hazards.main(text) == 1
    assert why in capsys.readouterr().out


def test_a_file_that_is_not_ours_divides_nothing() -> None:
    assert not hazards.is_dividing(Access("Read", "_k", "nowhere.py", 1))
    assert not hazards.is_dividing(Access("Read", "_k", "gemm_hopper.py", len(SOURCE) + 1))
