"""What the text after the = of an option says: which values of a setting to try."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
LARGEST = 2**53
MOST_VALUES = 15
"""Of a range: with the user's own value they are 16, the most that a setting may have."""
SPREAD_VALUES = 9
"""Of a range of whole numbers that has too many to try each."""

_NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:[eE]\+?\d{1,2})?)(KiB|MiB|GiB)?")
_RANGE = re.compile(r"(\d[^,]*?)\.\.([^,:]+)(:[^,]*)?")


def whole_number(text: str) -> int | None:
    """Return the whole number that a text means, such as 4096, 4KiB or 5e8; None: it means none.

    >>> whole_number("1.5MiB"), whole_number("0.5")
    (1572864, None)
    """
    match = _NUMBER.fullmatch(text) if text.isascii() else None
    if match is None:
        return None
    try:
        found = Decimal(match[1]) * UNITS[match[2] or ""]
    except InvalidOperation:
        return None
    return int(found) if found <= LARGEST and found == int(found) else None


def plain(text: str) -> str:
    """Return a value as a job gets it: numbers such as 4KiB or 5e8 as their digits, all else as it
    is. Programs seldom take those forms."""
    number = whole_number(text)
    is_plain = number is None or re.fullmatch(r"[\d.]+", text)
    return text if is_plain else str(number)


def values_of(text: str) -> tuple[str, ...]:
    """Return the values of a list ``a,b,c`` or of a range ``LOW..HIGH`` or ``LOW..HIGH:log``.

    Of ``LOW..HIGH`` these are all whole numbers, or nine at equal distances if they are more than
    15. Of ``LOW..HIGH:log`` they are LOW, twice LOW, four times LOW and so on, and HIGH; with
    steps of four, eight and so on if they were more than 15 else.

    Raises:
        ValueError: there is no value, or a range is not one.
    """
    match = _RANGE.fullmatch(text.strip())
    if match is not None:
        low, high = whole_number(match[1].strip()), whole_number(match[2].strip())
        if low is None or high is None or match[3] not in (None, ":log"):
            raise ValueError(f"{text!r} is no range: write LOW..HIGH or LOW..HIGH:log")
        return tuple(map(str, _range(text, low, high, is_logarithmic=match[3] is not None)))
    values = [value.strip() for value in text.split(",") if value.strip()]
    if not values:
        raise ValueError(f"{text!r} has no value")
    if any(map(_RANGE.fullmatch, values)):
        raise ValueError(f"{text!r} has a range in a list; a range stands alone")
    return tuple(dict.fromkeys(map(plain, values)))


def _range(text: str, low: int, high: int, is_logarithmic: bool) -> list[int]:
    if low >= high:
        raise ValueError(f"{text!r} is no range: {low} is not below {high}")
    if is_logarithmic:
        if low == 0:
            raise ValueError(f"{text!r} is no range: a logarithmic one begins above 0")
        return _doubled(low, high)
    if high - low < MOST_VALUES:
        return list(range(low, high + 1))
    parts = SPREAD_VALUES - 1
    return [low + (high - low) * part // parts for part in range(parts + 1)]


def _doubled(low: int, high: int) -> list[int]:
    factor = 2
    while True:
        found = [low]
        # A value close below HIGH would tell little that HIGH does not tell.
        while found[-1] * factor * 3 <= high * 2:
            found.append(found[-1] * factor)
        if len(found) < MOST_VALUES:
            return [*found, high]
        factor *= 2
