"""Knobs and their kinds: which values one can have, and how people write and read them. The knobs
themselves are in knobs.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Value = int | str
T = TypeVar("T")

UNITS = {"": 1, "b": 1, "kib": 1024, "mib": 1024**2, "gib": 1024**3}
SIZE = re.compile(r"(\d+)\s*([a-z]*)", re.IGNORECASE)


class Kind:
    """A kind of knobs. One that defines only ``checked`` leaves it to others which values are
    tried, and a user may choose none.

    Attributes:
        tried: the values that a tuning tries, if they are few; those of a job may be fewer.
        is_open: whether a user may have other values tried.
    """

    tried: tuple[Value, ...]
    is_open = False

    @property
    def may_say(self) -> str:
        """What a user may choose, in words; empty: nothing."""
        return ""

    def checked(self, name: str, value: Any) -> Any:
        """The value, as a configuration holds it.

        Raises:
            ValueError: the knob of this name cannot have it.
        """
        raise NotImplementedError

    def words(self, value: Any) -> str:
        """The value, for people."""
        return str(value)

    def read(self, said: str) -> tuple[Value, ...]:
        """The values that a user chose; empty if one of them cannot be read."""
        return ()


@dataclass(frozen=True)
class Knob:
    """What is known of a knob.

    Attributes:
        name: in configurations, in files, and on the wire.
        default: the value with which it does nothing.
        kind: the values that it can have.
        title: what people call it; empty: its name.
        phrase: how a configuration tells it, with ``{}`` for the value; empty: its name and value.
        cuts: it says how buckets are cut; the others say how they travel.
        computes: it says what each rank computes, and nothing of what travels.
        changes_numbers: it changes what the model learns by more than the order in which sums are
            rounded, so it is only tried if the user allows its values.
        models: which kinds of models have it: ``replicated`` ones (DistributedDataParallel),
            ``sharded`` ones (``fully_shard``), ``zero`` ones (an engine of DeepSpeed), ``single``
            ones (trained by one process without any process group).
    """

    name: str
    default: Any
    kind: Kind
    phrase: str = ""
    cuts: bool = False
    computes: bool = False
    changes_numbers: bool = False
    models: tuple[str, ...] = ("replicated",)
    title: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", self.title or self.name.replace("_", " "))

    @property
    def may_say(self) -> str:
        """Say what BAGUA_AUTOTUNE_KNOBS may choose for it; empty: it can only be left out."""
        return "" if self.changes_numbers else self.kind.may_say

    def read(self, said: str) -> tuple[Value, ...]:
        """The values that BAGUA_AUTOTUNE_KNOBS chose; empty if it may not say that."""
        return self.kind.read(said) if self.may_say else ()

    @property
    def sentence(self) -> str:
        """What a configuration says of it, with ``{}`` for the value."""
        note = " (changes the numbers)" * self.changes_numbers
        return (self.phrase or f"{self.title} {{}}") + note

    def told(self, value: Any) -> str:
        """The value in words, as a part of a configuration."""
        return self.sentence.format(self.kind.words(value))


def knob(default: T, kind: Kind, phrase: str = "", **more: Any) -> T:
    """An entry; its arguments are the attributes of :class:`Knob`."""
    return field(default=default, metadata={"kind": kind, "phrase": phrase, **more})


@dataclass(frozen=True)
class OneOf(Kind):
    """One of a few names or numbers.

    Attributes:
        tried: all of its values.
        in_words: the words of those that are not their own.
        aliases: other names of values, where a user allows them.
    """

    tried: tuple[Value, ...]
    in_words: Mapping[Value, str] = field(default_factory=dict)
    aliases: Mapping[str, Value] = field(default_factory=dict)

    @property
    def may_say(self) -> str:
        return f"one or some of {'/'.join(map(str, self.tried))}"

    def checked(self, name: str, value: Any) -> Any:
        # Compare the types too, because True == 1.
        if not any(type(value) is type(choice) and value == choice for choice in self.tried):
            values = ", ".join(map(str, self.tried))
            raise ValueError(f"{name} must be one of {values}, not {value!r}")
        return value

    def words(self, value: Any) -> str:
        return self.in_words.get(value, str(value))

    def read(self, said: str) -> tuple[Value, ...]:
        known = {str(value): value for value in self.tried}
        return _all_known([known.get(word.strip().lower()) for word in said.split("/")])


@dataclass(frozen=True)
class Size(Kind):
    """A number of bytes, of which a few are tried."""

    tried: tuple[Value, ...]
    is_open = True
    may_say = "one or some sizes such as 0/1MiB/4MiB"

    def checked(self, name: str, value: Any) -> Any:
        return check_number(name, value, at_least=0)

    def words(self, value: Any) -> str:
        return describe_bytes(value)

    def read(self, said: str) -> tuple[Value, ...]:
        return _all_known([_size(word) for word in said.split("/")])


@dataclass(frozen=True)
class SizeRange(Kind):
    """A number of bytes, of which a tuning tries any from ``low_bytes`` to ``high_bytes``."""

    low_bytes: int
    high_bytes: int
    tried = ()
    is_open = True
    may_say = "a size such as 4MiB, or a range such as 1MiB..64MiB"

    def checked(self, name: str, value: Any) -> Any:
        return check_number(name, value, at_least=1)

    def words(self, value: Any) -> str:
        return describe_bytes(value)

    def read(self, said: str) -> tuple[Value, ...]:
        return _all_known([_size(word) or None for word in said.split("..", 1)])


@dataclass(frozen=True)
class Number(Kind):
    """A whole number from 0 on; the model decides which are tried.

    Attributes:
        in_words: other numbers that stand for something, and what that is.
    """

    in_words: Mapping[int, str] = field(default_factory=dict)
    tried = ()
    is_open = True
    may_say = "one or some whole numbers such as 0/4/12"

    def checked(self, name: str, value: Any) -> Any:
        is_word = type(value) is int and value in self.in_words
        return value if is_word else check_number(name, value, at_least=0)

    def words(self, value: Any) -> str:
        return self.in_words.get(value, str(value))

    def read(self, said: str) -> tuple[Value, ...]:
        words = [word.strip() for word in said.split("/")]
        return _all_known([int(word) if word.isdigit() else None for word in words])


class Counts(Kind):
    """A list: how many tensors each bucket holds. The search finds those that are tried."""

    tried = ()

    def checked(self, name: str, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name} must be a list of tensor counts, not {value!r}")
        for count in value:
            check_number("a bucket's number of tensors", count, at_least=1)
        # JSON gives a list; a configuration must be hashable.
        return tuple(value)

    def words(self, value: Any) -> str:
        return f"{len(value)} explicit bucket{'s' * (len(value) != 1)}"


class Name(Kind):
    """The name of something that is looked up elsewhere."""

    tried = ()

    def checked(self, name: str, value: Any) -> Any:
        if not isinstance(value, str):
            raise ValueError(f"{name} must be a name, not {value!r}")
        return value


def check_number(name: str, value: Any, at_least: int) -> int:
    """The value. Raises ValueError unless it is a whole number of at least that."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, not {value!r}")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, not {value}")
    return value


def describe_bytes(size_bytes: float) -> str:
    """Write a size with three significant digits: ``4 MiB``, ``90.5 KiB``, ``512 B``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if unit == "GiB" or round(size_bytes) < 1024:
            break
        size_bytes /= 1024
    return f"{size_bytes:.0f} {unit}" if size_bytes >= 100 else f"{size_bytes:.3g} {unit}"


def size_of(text: str) -> int:
    """The bytes of ``4MiB``, or ``512``. Raises ValueError where that is no size."""
    found = _size(text)
    if found is None:
        raise ValueError(f"{text!r} is no size such as 4MiB")
    return found


def _size(word: str) -> int | None:
    found = SIZE.fullmatch(word.strip())
    if found is None or found[2].lower() not in UNITS:
        return None
    return int(found[1]) * UNITS[found[2].lower()]


def _all_known(values: list[Value | None]) -> tuple[Value, ...]:
    """The values, each once; none if one of them is not known."""
    known = [value for value in values if value is not None]
    return tuple(dict.fromkeys(known)) if len(known) == len(values) else ()
