"""Characters that may be stored, and those that may be shown."""

from __future__ import annotations

import re

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
