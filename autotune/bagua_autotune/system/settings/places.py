"""Where the value of a setting goes: a variable, an argument, or a key of a file.

How a job is started is a ``Start``; putting a value in its place gives another one. A further kind
of place is one more class here, and its option in ``asked``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from bagua_autotune.system.settings.files import ConfigFile, value_at, with_value

ON, OFF = "on", "off"


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
