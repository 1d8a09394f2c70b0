"""Texts: which characters may be stored and shown, and times, sizes and counts in words."""

from __future__ import annotations

import re

from bagua_wire.knob_kinds import describe_bytes

JOB_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def without_nul(text: str) -> str:
    """Raise ValueError if the text holds a NUL, which PostgreSQL cannot store."""
    if "\x00" in text:
        raise ValueError("holds a NUL character")
    return text


def printable(text: str) -> str:
    """Raise ValueError if the text holds a character that cannot be printed."""
    if not text.isprintable():
        raise ValueError("holds characters that cannot be printed")
    return text


def visible(text: str) -> str:
    """Raise ValueError if there is nothing to see of the text."""
    if not text.strip():
        raise ValueError("holds nothing but blanks")
    return text


def clean(text: str) -> str:
    r"""Text of others for a terminal or a log: what cannot be printed is escaped (``\x1b``)."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def describe_memory(size_bytes: float, device_bytes: float) -> str:
    """``12.1 GiB (15 %)``: what it takes, and how much of a device that is."""
    return f"{describe_bytes(size_bytes)} ({100 * size_bytes / device_bytes:.0f} %)"


def describe_seconds(seconds: float) -> str:
    """A time for people, at most 2.5 % off: ``12.3 ms``, ``80 s``, ``2.1 min``, ``3.5 h``."""
    # Units change where the rounded number would: 0.9996 s are no 1000 ms.
    if float(_short(seconds * 1e3)) < 1000:
        return f"{_short(seconds * 1e3)} ms"
    if float(_short(seconds)) < 120:
        return f"{_short(seconds)} s"
    minutes = seconds / 60
    if round(minutes) < 120:
        return f"{minutes:.1f} min" if minutes < 20 else f"{minutes:.0f} min"
    return f"{seconds / 3600:.1f} h"


def describe_count(number: int, noun: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def describe_left(seconds: float) -> str:
    """``at most 80 s left``, ``under 1 s left``."""
    whole = round(seconds)
    return f"at most {describe_seconds(whole)} left" if whole else "under 1 s left"


def describe_speedup(speedup: float, low: float | None = None, high: float | None = None) -> str:
    """``1.31x (1.24 to 1.38)``, without the interval where it is not known.

    Nor where it has no width: then nothing is known of the spread, such as of values that are alike
    because they are rounded.
    """
    is_known = low is not None and high is not None and low < high
    return f"{speedup:.2f}x ({low:.2f} to {high:.2f})" if is_known else f"{speedup:.2f}x"


def _short(number: float) -> str:
    # %.3g would write 1000 and above as 1e+03.
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"
