"""Makes the settings of a preset for a job."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from bagua_autotune.system.settings.files import ConfigFile, Format
from bagua_autotune.system.settings.places import (
    Argument,
    EnvironmentVariable,
    FileKey,
    Place,
    Switch,
)
from bagua_autotune.system.settings.presets import PRESETS, Entry, Kind, Preset
from bagua_autotune.system.settings.setting import Setting, level_of
from bagua_wire.words import NOT_SET

NUMBERS, MEMORY = "numbers", "memory"
ALLOWANCES = (NUMBERS, MEMORY)

ReadFile = Callable[[str, Format], ConfigFile]


class Found(NamedTuple):
    """The settings of a preset, and a phrase on each that is left out, whole or in part."""

    settings: list[Setting]
    left_out: list[str]


def settings_of(
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    allowed: Collection[str],
    read_file: ReadFile,
) -> Found:
    """The settings of the preset ``name``.

    Args:
        environment: the user's.
        allowed: some of ``ALLOWANCES``.
        read_file: reads a file of this format.

    Raises:
        ValueError: the job is none for this preset, or its file is not found.
    """
    preset = PRESETS[name]
    found = Found([], [])
    places = _Places(name, preset, command, read_file)
    for need in preset.needs:
        place = places.of(need.kind, need.name)
        own = place.own(command, environment) or NOT_SET
        if own not in need.values:
            raise ValueError(
                f"--preset {name} is for jobs whose {place.name} is {' or '.join(need.values)}; "
                f"here it is {own}"
            )
    for entry in preset.entries:
        place = places.of(entry.kind, entry.name)
        if entry.changes_numbers and NUMBERS not in allowed:
            found.left_out.append(f"{place.name}: changes the numbers (--allow {NUMBERS})")
            continue
        setting = _setting(entry, place, places, place.own(command, environment))
        if entry.takes_memory and MEMORY not in allowed:
            setting, others = _within_memory(setting)
            if others:
                what = f"{setting.name}={','.join(others)}"
                found.left_out.append(f"{what}: may take more memory (--allow {MEMORY})")
        found.settings.append(setting)
    return found


class _Places:
    """The places of a preset's entries. The file is looked for when one of them is in it."""

    def __init__(
        self, name: str, preset: Preset, command: Sequence[str], read_file: ReadFile
    ) -> None:
        self._name = name
        self._preset = preset
        self._command = command
        self._read_file = read_file

    def of(self, kind: Kind, name: str) -> Place:
        if kind == "variable":
            return EnvironmentVariable(name)
        if kind == "argument":
            return Argument(name)
        if kind == "switch":
            return Switch(name)
        return FileKey(self._read_file(self._file(), kind), tuple(name.split(".")))

    def _file(self) -> str:
        for option in self._preset.file_options:
            # DeepSpeed's launcher also has --deepspeed without a file.
            with suppress(ValueError):
                path = Argument(option).own(self._command, {})
                if path is not None:
                    return path
        options = " FILE, ".join(self._preset.file_options)
        raise ValueError(
            f"--preset {self._name} needs the program's file: give it to the command as "
            f"{options} FILE"
        )


def _setting(entry: Entry, place: Place, places: _Places, own: str | None) -> Setting:
    condition = entry.only_with
    if condition is not None:
        condition = replace(condition, name=places.of(entry.kind, condition.name).name)
    return Setting(place, entry.values, own, entry.assumed, entry.takes_memory, condition)


def _within_memory(setting: Setting) -> tuple[Setting, list[str]]:
    """Only the values that take no more memory than the user's own, as far as is known; and the
    others."""
    most = setting.memory_rank(setting.own_level)
    kept = [v for v in setting.values if setting.memory_rank(level_of(v)) <= most]
    others = [value for value in setting.values if value not in kept]
    return replace(setting, values=tuple(kept)), others
