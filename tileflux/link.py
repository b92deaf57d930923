"""An emulated link between ranks on the CPU: what it is, and how it is written. A leaf: it reads nothing of ours."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal

__all__ = ["Link"]

_DECIMAL_RATES = {"GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1}
_RATES = {**_DECIMAL_RATES, "kB": 10**3, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_TIMES = {"s": Decimal(1), "ms": Decimal("1e-3"), "us": Decimal("1e-6"), "ns": Decimal("1e-9")}
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]+)\s*")


@dataclass(frozen=True)
class Link:
    """What a rank sends through: a copy takes the link for ``nbytes / bytes_per_s`` and lands ``latency_s`` later.

    Written ``1GB/s,50us``: B, KB, MB or GB a second (KiB, MiB and GiB are powers of two), then ns, us, ms or s. ``str``
    gives a text that reads back as the very same link.
    """

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_s < math.inf:  # false for NaN too
            raise ValueError(f"bytes_per_s={self.bytes_per_s} should be positive and finite")
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(f"latency_s={self.latency_s} should be finite, and not negative")

    @classmethod
    def parse(cls, text: str) -> Link:
        """The link that ``text`` describes; without a latency it has none."""
        rate, comma, latency = text.partition(",")
        bytes_per_s = _parse(rate, {f"{unit}/s": Decimal(size) for unit, size in _RATES.items()})
        if bytes_per_s is None or not 0 < bytes_per_s < math.inf:
            raise ValueError(
                f"{rate!r} should be a bandwidth in bytes, such as 500MB/s; units are {', '.join(_RATES)}; "
                "a right link is 1GB/s,50us"
            )
        latency_s = _parse(latency, _TIMES) if comma else 0.0
        if latency_s is None or latency_s == math.inf:
            raise ValueError(
                f"{latency!r} should be a latency, such as 20us; units are {', '.join(_TIMES)}; "
                "a right link is 1GB/s,50us"
            )
        return cls(bytes_per_s, latency_s)

    def __str__(self) -> str:
        rate = _write(self.bytes_per_s, {f"{unit}/s": Decimal(size) for unit, size in _DECIMAL_RATES.items()})
        return f"{rate},{_write(self.latency_s, _TIMES)}" if self.latency_s else rate


def _parse(text: str, units: dict[str, Decimal]) -> float | None:
    found = _QUANTITY.fullmatch(text)
    if found is None or found[2] not in units:
        return None
    try:
        return float(Decimal(found[1]) * units[found[2]])  # rounded once: 50us is the float nearest to 0.00005
    except ArithmeticError:  # an exponent of seven digits
        return None


def _write(value: float, units: dict[str, Decimal]) -> str:
    """In the largest unit of which it is at least one. Exact: a unit is a power of ten."""
    exact = Decimal(repr(float(value)))
    unit = next((name for name, size in units.items() if exact >= size), list(units)[-1])
    return f"{(exact / units[unit]).normalize():f}{unit}"
