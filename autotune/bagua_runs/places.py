"""Where the value of a setting goes: a variable, an argument, or a key of a file.

How a job is started is a ``Start``; putting a value in its place gives another one. A further kind
of place is one more class here, and its option in ``asked``.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Literal, Protocol

import yaml

ON, OFF = "on", "off"
UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
LARGEST = 2**53
_NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:[eE]\+?\d{1,2})?)(KiB|MiB|GiB)?")


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


@dataclass(frozen=True)
class Start:
    """How a job is started.

    Attributes:
        command: with its arguments.
        environment: variables that are set beside the user's own.
        copies: by the path of a file of the user: its changed copy, and what that holds.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, tuple[Path, Mapping[str, Any]]] = field(default_factory=dict)


class Place(Protocol):
    """Where the value of one setting goes; two are equal if that is the same place."""

    @property
    def name(self) -> str:
        """Which the setting has in options and results."""

    def own(self, command: Sequence[str], environment: Mapping[str, str]) -> str | None:
        """The user's own value; None: there is none. Raises ValueError if that cannot be told."""

    def put(self, start: Start, text: str, folder: Path) -> Start:
        """The start with another value; ``folder`` is for files that it needs."""


@dataclass(frozen=True)
class EnvironmentVariable:
    """See Place."""

    name: str

    def own(self, command: Sequence[str], environment: Mapping[str, str]) -> str | None:
        return environment.get(self.name) or None

    def put(self, start: Start, text: str, folder: Path) -> Start:
        return replace(start, environment={**start.environment, self.name: text})


@dataclass(frozen=True)
class Argument:
    """``--x V`` or ``--x=V`` of the command; where it stands more than once the last one counts,
    as in argparse. If it does not stand there, ``--x V`` is appended. See Place.
    """

    name: str

    def own(self, command: Sequence[str], environment: Mapping[str, str]) -> str | None:
        place = self._last(command)
        if place is None:
            return None
        _, has_value, value = command[place].partition("=")
        if has_value:
            return value
        if place + 1 == len(command) or re.match("--[a-zA-Z]", command[place + 1]):
            raise ValueError(
                f"{self.name} has no value in the command; without values, as --arg {self.name}, "
                "it is given or not given"
            )
        return command[place + 1]

    def put(self, start: Start, text: str, folder: Path) -> Start:
        command = list(start.command)
        place = self._last(command)
        if place is None:
            command += [self.name, text]
        elif "=" in command[place]:
            command[place] = f"{self.name}={text}"
        else:
            command[place + 1] = text
        return replace(start, command=tuple(command))

    def _last(self, command: Sequence[str]) -> int | None:
        places = [i for i, word in enumerate(command) if word.partition("=")[0] == self.name]
        return places[-1] if places else None


@dataclass(frozen=True)
class Switch:
    """An argument without a value, which is given or not given. See Place."""

    name: str

    def own(self, command: Sequence[str], environment: Mapping[str, str]) -> str | None:
        return ON if self.name in command else OFF

    def put(self, start: Start, text: str, folder: Path) -> Start:
        others = tuple(word for word in start.command if word != self.name)
        return replace(start, command=(*others, self.name) if text == ON else others)


@dataclass(frozen=True)
class FileKey:
    """A key of a file that the command names; the job is given a copy. See Place.

    Attributes:
        keys: each inside the one before.
    """

    file: ConfigFile
    keys: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.file.path}:{'.'.join(self.keys)}"

    def own(self, command: Sequence[str], environment: Mapping[str, str]) -> str | None:
        try:
            return value_at(self.file.content, self.keys)
        except ValueError as error:
            raise ValueError(f"{self.file.path}: {error}") from error

    def put(self, start: Start, text: str, folder: Path) -> Start:
        default = (_unused(folder, Path(self.file.path).name), self.file.content)
        path, content = start.copies.get(self.file.path, default)
        content = with_value(content, self.keys, text)
        self.file.write(path, content)
        return replace(
            start,
            command=self.file.replaced(start.command, path),
            copies={**start.copies, self.file.path: (path, content)},
        )


def _unused(folder: Path, name: str) -> Path:
    """A file of this name, or with a number before it if there is one already."""
    paths = [folder / name, *(folder / f"{number}-{name}" for number in range(2, 100))]
    return next(path for path in paths if not path.exists())


# Configuration files of the user: read once, never written; what changes is a copy of one.

Format = Literal["JSON", "YAML"]
WORDS = {"true": True, "false": False}


@dataclass(frozen=True, eq=False)
class ConfigFile:
    """A file that the command names.

    Attributes:
        path: as the user wrote it.
        content: when it was read. Each run is given this with its own changes, even if the file
            has been edited since.
    """

    path: str
    format: Format
    content: Mapping[str, Any]

    @classmethod
    def read(cls, path: str, format: Format, command: Sequence[str]) -> ConfigFile:
        """Raises ValueError, in words, if it cannot be read or the command does not name it."""
        if not any(_names(word, path) for word in command):
            raise ValueError(
                f"the command does not name {path}; each run needs its own copy of the file, so "
                "the file has to be an argument of the command"
            )
        try:
            text = Path(path).read_text()
            content = json.loads(text) if format == "JSON" else yaml.safe_load(text)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, yaml.YAMLError) as error:
            what = " ".join(str(error).split())
            raise ValueError(f"{path} is not {format}: {what}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{path} holds no object with keys")
        return cls(path, format, content)

    def write(self, path: Path, content: Mapping[str, Any]) -> None:
        """Write a changed copy."""
        if self.format == "JSON":
            path.write_text(json.dumps(content, indent=2) + "\n")
        else:
            path.write_text(yaml.safe_dump(content, sort_keys=False))

    def replaced(self, command: Sequence[str], path: Path) -> tuple[str, ...]:
        """The command with another file in the place of this one."""
        return tuple(
            word[: len(word) - len(_path_in(word))] + str(path) if _names(word, self.path) else word
            for word in command
        )


def value_at(content: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    """The value at some keys, each inside the one before, as text; None: it is missing.

    Raises:
        ValueError: there is an object or a list.
    """
    found: Any = content
    for depth, key in enumerate(keys):
        if not isinstance(found, dict):
            raise ValueError(f"{'.'.join(keys[:depth])} holds no keys")
        if key not in found:
            return None
        found = found[key]
    if isinstance(found, dict | list):
        raise ValueError(f"{'.'.join(keys)} is no single value")
    if isinstance(found, bool) or found is None:
        return json.dumps(found)
    is_whole = isinstance(found, float) and found.is_integer()
    return str(int(found) if is_whole else found)


def with_value(content: Mapping[str, Any], keys: Sequence[str], text: str) -> dict[str, Any]:
    """A copy with a value at some keys; objects on the way that are missing are added."""
    changed = copy.deepcopy(dict(content))
    inner = changed
    for key in keys[:-1]:
        inner = inner.setdefault(key, {})
    inner[keys[-1]] = _typed(text, inner.get(keys[-1]))
    return changed


def _typed(text: str, own: Any) -> str | int | float | bool:
    """A value of the type that a text looks like; a string where the user's own value is a string
    that looks like another type."""
    found = _looks_like(text)
    if isinstance(own, str) and not isinstance(_looks_like(own), str):
        return text
    return found


def _looks_like(text: str) -> str | int | float | bool:
    if text in WORDS:
        return WORDS[text]
    number = whole_number(text)
    if number is not None:
        return number
    try:
        return float(text)
    except ValueError:
        return text


def _path_in(word: str) -> str:
    """The path in an argument: all of it, or what is behind the =."""
    return word.partition("=")[2] if word.startswith("-") and "=" in word else word


def _names(word: str, path: str) -> bool:
    return os.path.abspath(_path_in(word)) == os.path.abspath(path)
