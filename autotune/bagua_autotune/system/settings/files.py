"""Configuration files of the user: read once, never written; what changes is a copy of one."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from bagua_autotune.system.settings.domains import whole_number

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
