"""The link of every host: its rate and its delay."""

from __future__ import annotations

import re
from dataclasses import dataclass

RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
TIME_UNITS = {"us": 1e-6, "ms": 1e-3}
FORM = re.compile(r"(?:unshaped|([\d.]+)(kbit|mbit|gbit))(?:-([\d.]+)(us|ms))?")

# What a link may send at once after a pause. At 1 ms of the rate a message of a few KB takes the
# time that the rate gives it, and the kernel's timer still keeps up with the rate.
BURST_SECONDS = 0.001
# A frame must fit in whole, also with headers, or nothing is ever sent.
LEAST_BURST_BYTES = 8192
# What may wait behind it; much, so that no frame is lost and no retransmission timer runs.
QUEUE_SECONDS = 0.1


@dataclass(frozen=True)
class Network:
    """What lies between two hosts.

    Attributes:
        rate_bits_per_second: at which a host sends, Ethernet headers counted, so that TCP carries
            about 4 % less, as on a real link; None: as fast as the kernel can.
        round_trip_seconds: added to what the kernel needs (some 50 microseconds).
    """

    rate_bits_per_second: float | None = None
    round_trip_seconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Network:
        """``1gbit``, ``300mbit``, ``1gbit-2ms`` (round trip), ``unshaped``.

        Raises:
            ValueError: it is none of these.
        """
        match = FORM.fullmatch(text.strip().lower())
        try:
            if match is None:
                raise ValueError
            rate, rate_unit, time, time_unit = match.groups()
            network = cls(
                float(rate) * RATE_UNITS[rate_unit] if rate else None,
                float(time) * TIME_UNITS[time_unit] if time else 0.0,
            )
            if network.rate_bits_per_second == 0:
                raise ValueError
        except ValueError:
            raise ValueError(
                f"a network is written like 300mbit, 1gbit, 1gbit-2ms or unshaped, not {text!r}"
            ) from None
        return network

    def __str__(self) -> str:
        if self.rate_bits_per_second is None:
            text = "unshaped"
        else:
            unit = "gbit" if self.rate_bits_per_second >= 1e9 else "mbit"
            text = f"{self.rate_bits_per_second / RATE_UNITS[unit]:.10g}{unit}"
        if self.round_trip_seconds:
            text += f"-{self.round_trip_seconds * 1e3:.10g}ms"
        return text

    @property
    def token_bucket(self) -> list[str]:
        """``tc``'s words for a queue of this rate (tc-tbf(8)); empty if there is none."""
        rate = self.rate_bits_per_second
        if rate is None:
            return []
        burst_bytes = max(rate / 8 * BURST_SECONDS, LEAST_BURST_BYTES)
        words = f"tbf rate {rate:.0f}bit burst {burst_bytes:.0f} latency {QUEUE_SECONDS:g}s"
        return words.split()
