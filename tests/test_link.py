"""Links as they are written, and what is wrong with others."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tileflux.link import Link


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("1GB/s,50us", Link(1e9, 50e-6)),
        ("2GB/s", Link(2e9, 0.0)),
        ("800B/s,3s", Link(800.0, 3.0)),
        ("1.5KB/s,2.5ms", Link(1500.0, 2.5e-3)),
        ("1.5kB/s,100ns", Link(1500.0, 100e-9)),
        ("20MB/s,0us", Link(2e7, 0.0)),
        ("1KiB/s", Link(1024.0)),
        ("1MiB/s", Link(2.0**20)),
        (" 0.5 GiB/s , 1e3 ns ", Link(2.0**29, 1e-6)),
    ],
)
def test_links_are_written_as_bandwidth_and_latency(text: str, link: Link) -> None:
    assert Link.parse(text) == link


def test_a_link_prints_as_it_is_written() -> None:
    texts = ["1GB/s,50us", "2.5GB/s", "536.870912MB/s,1ms", "1KB/s,1.5s", "0.25B/s,20ns"]
    assert [str(Link.parse(text)) for text in texts] == texts


positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


@given(st.builds(Link, positive, st.just(0.0) | positive))
def test_a_printed_link_reads_back_as_the_same(link: Link) -> None:
    assert Link.parse(str(link)) == link


@pytest.mark.parametrize(
    ("text", "named", "kind"),
    [
        ("", "", "bandwidth"),
        ("fast", "fast", "bandwidth"),
        ("1GB", "1GB", "bandwidth"),
        ("1Gb/s,50us", "1Gb/s", "bandwidth"),
        ("-1GB/s", "-1GB/s", "bandwidth"),
        ("0GB/s", "0GB/s", "bandwidth"),
        ("1e999GB/s", "1e999GB/s", "bandwidth"),
        ("1e9999999GB/s", "1e9999999GB/s", "bandwidth"),
        ("50us,1GB/s", "50us", "bandwidth"),
        ("1GB/s,", "", "latency"),
        ("1GB/s,50", "50", "latency"),
        ("1GB/s,-1us", "-1us", "latency"),
        ("1GB/s,1us,1us", "1us,1us", "latency"),
        ("1GB/s,1e999s", "1e999s", "latency"),
    ],
)
def test_what_is_wrong_with_a_link_is_named(text: str, named: str, kind: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(repr(named))} should be a {kind}.* a right link is 1GB/s,50us"):
        Link.parse(text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((0.0, 0.0), "bytes_per_s=0.0 should be positive"),
        ((math.inf, 0.0), "bytes_per_s=inf should be positive and finite"),
        ((math.nan, 0.0), "bytes_per_s=nan"),
        ((1.0, -1.0), "latency_s=-1.0 should be finite, and not negative"),
        ((1.0, math.inf), "latency_s=inf should be"),
        ((1.0, math.nan), "latency_s=nan"),
    ],
)
def test_invalid_links_are_refused(settings: tuple[float, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Link(*settings)
