"""Bandwidths and times as people write them: ``25Gbit``, ``1GB``, ``100us``."""

from __future__ import annotations

import math
import re

_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BANDWIDTH = re.compile(r"([0-9.]+(?:e[0-9]+)?)\s*([kKMGT]?)(bit|bps|B)(?:/s)?")
_DURATIONS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_DURATION = re.compile(r"([0-9.]+(?:e-?[0-9]+)?)\s*(ns|us|µs|ms|s)")


def parse_bandwidth(text: str) -> float:
    """Return the bytes per second of ``25Gbit``, ``200Mbit/s``, ``100Gbps``, ``1GB`` or ``1GB/s``.

    Prefixes are powers of 1000, as usual in networking.

    Raises:
        ValueError: it says something else.
    """
    found = _BANDWIDTH.fullmatch(text.strip())
    value = _positive(found.group(1)) if found else None
    if not found or value is None:
        raise ValueError(f"{text!r} is no bandwidth; write it like 25Gbit, 200Mbit or 1GB")
    bits = 1 if found.group(3) == "B" else 8
    return value * _PREFIXES[found.group(2)] / bits


def parse_duration(text: str) -> float:
    """Seconds of ``100us``, ``2ms`` or ``0.5s``.

    Raises:
        ValueError: it says something else.
    """
    found = _DURATION.fullmatch(text.strip())
    value = _positive(found.group(1)) if found else None
    if not found or value is None:
        raise ValueError(f"{text!r} is no latency; write it like 100us or 2ms")
    return value * _DURATIONS[found.group(2)]


def describe_bandwidth(bytes_per_second: float) -> str:
    """Return a bandwidth in words, such as ``25 Gbit/s``."""
    bits = bytes_per_second * 8
    for prefix in ("T", "G", "M", "k"):
        if bits >= _PREFIXES[prefix]:
            return f"{bits / _PREFIXES[prefix]:.3g} {prefix}bit/s"
    return f"{bits:.3g} bit/s"


def describe_duration(seconds: float) -> str:
    """Return a duration in words, such as ``100 us``."""
    for unit in ("s", "ms"):
        if seconds >= _DURATIONS[unit]:
            return f"{seconds / _DURATIONS[unit]:.3g} {unit}"
    return f"{seconds / _DURATIONS['us']:.3g} us"


def _positive(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None
