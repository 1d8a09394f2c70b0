"""Bandwidths and times as people write them."""

from __future__ import annotations

import pytest

from bagua_simulator.cluster import (
    describe_bandwidth,
    describe_duration,
    parse_bandwidth,
    parse_duration,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [
        ("25Gbit", 25e9 / 8),
        ("100 Gbit/s", 100e9 / 8),
        ("200Mbit", 200e6 / 8),
        ("10Gbps", 10e9 / 8),
        ("1GB", 1e9),
        ("1.5GB/s", 1.5e9),
        ("800bit", 100.0),
    ],
)
def test_bandwidths(text: str, bytes_per_second: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(bytes_per_second)


@pytest.mark.parametrize(
    ("text", "seconds"), [("100us", 1e-4), ("2ms", 2e-3), ("0.5 s", 0.5), ("800ns", 8e-7)]
)
def test_latencies(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "25", "25Gb", "fast", "-1GB", "0Gbit", "1.2.3GB", "1GBit ms"])
def test_what_is_no_bandwidth_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="write it like 25Gbit"):
        parse_bandwidth(text)


@pytest.mark.parametrize("text", ["", "100", "100m", "-1ms", "0us", "1e999s"])
def test_what_is_no_latency_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="write it like 100us"):
        parse_duration(text)


def test_they_are_described_as_they_are_written() -> None:
    assert describe_bandwidth(parse_bandwidth("25Gbit")) == "25 Gbit/s"
    assert describe_bandwidth(parse_bandwidth("200Mbit")) == "200 Mbit/s"
    assert describe_duration(parse_duration("100us")) == "100 us"
    assert describe_duration(parse_duration("2ms")) == "2 ms"
