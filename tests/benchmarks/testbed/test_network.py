"""How a network is written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.testbed import Network

pytestmark = pytest.mark.slow

RATES = st.none() | st.integers(1, 400_000).map(lambda mbit: mbit * 1e6)
ROUND_TRIPS = st.integers(0, 10_000).map(lambda tenths: tenths / 10_000)


@given(RATES, ROUND_TRIPS, RATES)
def test_what_is_written_is_read_as_the_same(
    rate: float | None, round_trip: float, flow: float | None
) -> None:
    network = Network(rate, round_trip, flow if rate else None)
    read = Network.parse(str(network))
    assert (read.rate_bits_per_second or 0) == pytest.approx(rate or 0)
    assert read.round_trip_seconds == pytest.approx(round_trip)
    assert (read.flow_bits_per_second or 0) == pytest.approx(network.flow_bits_per_second or 0)


def test_names_of_the_documentation() -> None:
    assert Network.parse("300mbit") == Network(300e6)
    assert Network.parse("1gbit-2ms") == Network(1e9, 0.002)
    assert Network.parse("unshaped") == Network()
    assert Network.parse("1gbit-flow200mbit") == Network(1e9, flow_bits_per_second=200e6)
    assert str(Network(1e9, 0.002, 200e6)) == "1gbit-flow200mbit-2ms"
    assert str(Network(1e9, 0.002)) == "1gbit-2ms"
    assert str(Network(2.5e9)) == "2.5gbit"


@pytest.mark.parametrize(
    "text", ["", "gbit", "1gbit-2", "0mbit", "fast", "unshaped-flow1mbit", "1gbit-flow0mbit"]
)
def test_what_is_no_network_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="written like 300mbit"):
        Network.parse(text)


@pytest.mark.parametrize(("rate", "burst_bytes"), [("10gbit", 1_250_000), ("25gbit", 3_125_000)])
def test_a_fast_link_lets_a_millisecond_through_at_once_and_holds_what_a_burst_leaves(
    rate: str, burst_bytes: int
) -> None:
    (words,) = Network.parse(rate).queues
    assert int(words[words.index("burst") + 1]) == burst_bytes
    assert words[words.index("latency") + 1] == "0.1s"


def test_a_slow_link_still_passes_a_whole_frame() -> None:
    for network in (Network(1e6), Network(1e9, flow_bits_per_second=1e6)):
        shaped = [words for words in network.queues if "burst" in words]
        assert shaped
        for words in shaped:
            assert int(words[words.index("burst") + 1]) > 1514
