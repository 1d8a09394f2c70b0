"""What the options of ``bagua-autotune system`` ask to vary, for a command."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from bagua_runs.places import (
    Argument,
    ConfigFile,
    EnvironmentVariable,
    FileKey,
    Format,
    Place,
    Switch,
    plain,
    whole_number,
)
from bagua_runs.presets import PRESETS, SEARCHED, Kind
from bagua_runs.space import SWITCH_VALUES, Condition, Setting, level_of
from bagua_wire.words import NOT_SET

MOST_VALUES = 15
"""Of a range: with the user's own value they are 16, the most that a setting may have."""
SPREAD_VALUES = 9
"""Of a range of whole numbers that has too many to try each."""
_RANGE = re.compile(r"(\d[^,]*?)\.\.([^,:]+)(:[^,]*)?")


@dataclass(frozen=True)
class Options:
    """The texts of the options, as they were given; see docs/system.md."""

    variables: Sequence[str] = ()
    arguments: Sequence[str] = ()
    json_keys: Sequence[str] = ()
    yaml_keys: Sequence[str] = ()
    only_with: Sequence[tuple[str, str]] = ()
    takes_memory: Collection[str] = ()
    presets: Sequence[str] = ()
    allowed: Collection[str] = ()


@dataclass
class Asked:
    """What is asked for.

    Attributes:
        settings: by name, those of options after those of presets, whose place they take.
        left_out: a phrase on each part of a preset that is not varied.
    """

    settings: dict[str, Setting] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def asked_settings(
    options: Options, command: Sequence[str], environment: Mapping[str, str]
) -> Asked:
    """Read the options.

    Args:
        environment: the user's.

    Raises:
        ValueError: one of them cannot be understood, or is none for this command.
    """
    files: dict[str, ConfigFile] = {}

    def read_file(path: str, format: Format) -> ConfigFile:
        place = os.path.abspath(path)
        if place not in files:
            files[place] = ConfigFile.read(path, format, command)
        return files[place]

    asked = Asked()
    for preset in options.presets:
        _add_preset(asked, preset, command, environment, options.allowed, read_file)

    def add(place: Place, values: tuple[str, ...]) -> None:
        own = place.own(command, environment)
        entry = SEARCHED.get(place.name)
        new = Setting(place, values, own, *((entry.assumed, entry.takes_memory) if entry else ()))
        known = asked.settings.get(place.name, new)
        asked.settings[place.name] = replace(known, place=place, values=values)

    for text in options.variables:
        add(*_variable(text))
    for text in options.arguments:
        add(*_argument(text))
    keys_of: dict[Format, Sequence[str]] = {"JSON": options.json_keys, "YAML": options.yaml_keys}
    for format, texts in keys_of.items():
        for text in texts:
            path, keys, values = _key(text, format)
            add(FileKey(read_file(path, format), keys), values)
    _mark(asked.settings, options)
    return asked


def _mark(settings: dict[str, Setting], options: Options) -> None:
    """What takes memory, and what has an effect only sometimes."""
    for name in options.takes_memory:
        settings[name] = replace(_named(name, settings, "--takes-memory"), takes_memory=True)
    for name, text in options.only_with:
        other, _, values = text.rpartition("=")
        setting = _named(name, settings, "--only-with")
        if not other:
            raise ValueError(f"--only-with {name} {text}: {text!r} is not OTHER=V1,V2,...")
        levels = _named(other, settings, "--only-with").levels
        condition = Condition(other, values_of(values))
        for value in condition.values:
            if level_of(value) not in levels:
                known = ", ".join(map(str, levels))
                raise ValueError(f"--only-with {other}={value}: its values are {known}")
        settings[name] = replace(setting, condition=condition)


def searched(settings: Mapping[str, Setting], only: Collection[str] = ()) -> list[Setting]:
    """Those that are varied, each after the one that its condition names.

    A setting whose condition names one that is not varied is varied if the user's own value of
    that meets the condition.

    Args:
        settings: by name.
        only: names of those to vary; empty: all.

    Raises:
        ValueError: a name in ``only`` is none of them, or conditions go round in a circle.
    """
    for name in only:
        _named(name, settings, "--only")
    varied = [n for n, s in settings.items() if len(s.levels) > 1 and (not only or n in only)]
    found: dict[str, Setting] = {}

    def add(name: str, through: tuple[str, ...]) -> None:
        setting, condition = settings[name], settings[name].condition
        if name in through:
            raise ValueError(f"--only-with goes round in a circle: {', '.join(through)}")
        if condition is not None:
            other = settings[condition.name]
            if other.name in varied:
                add(other.name, (*through, name))
            if other.name not in found:
                if other.name in varied or not condition.is_met({other.name: other.own_level}):
                    return
                setting = replace(setting, condition=None)
        found[name] = setting

    for name in varied:
        add(name, ())
    return list(found.values())


def _named(name: str, settings: Mapping[str, Setting], option: str) -> Setting:
    if name not in settings:
        raise ValueError(
            f"{option} {name}: that is not varied; varied are {', '.join(settings) or 'none'}"
        )
    return settings[name]


def _variable(text: str) -> tuple[Place, tuple[str, ...]]:
    name, _, values = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or not values.strip(" ,"):
        raise ValueError(f"--set: {text!r} is not NAME=V1,V2,...")
    return EnvironmentVariable(name), values_of(values)


def _argument(text: str) -> tuple[Place, tuple[str, ...]]:
    name, has_values, values = text.partition("=")
    if not re.fullmatch(r"--?[A-Za-z][^\s=]*", name):
        raise ValueError(f"--arg: {text!r} is not --NAME=V1,V2,... or --NAME")
    if not has_values:
        return Switch(name), SWITCH_VALUES
    return Argument(name), values_of(values)


def _key(text: str, format: Format) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    option = f"--{format.lower()}"
    place, has_values, values = text.partition("=")
    path, _, keys = place.rpartition(":")
    if has_values and path and all(keys.split(".")):
        return path, tuple(keys.split(".")), values_of(values)
    hint = "; --output FILE writes all runs" if option == "--json" and not has_values else ""
    raise ValueError(f"{option}: {text!r} is not FILE:KEY.KEY=V1,V2,...{hint}")


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


# The settings of a preset, for a job.

NUMBERS, MEMORY = "numbers", "memory"
ALLOWANCES = (NUMBERS, MEMORY)

ReadFile = Callable[[str, Format], ConfigFile]
PLACES: Mapping[str, Callable[[str], Place]] = {
    "variable": EnvironmentVariable,
    "argument": Argument,
    "switch": Switch,
}


def _add_preset(
    asked: Asked,
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    allowed: Collection[str],
    read_file: ReadFile,
) -> None:
    """The settings of the preset ``name``. Its file is looked for when one of them is in it.

    Args:
        environment: the user's.
        allowed: some of ``ALLOWANCES``.
        read_file: reads a file of this format.

    Raises:
        ValueError: the job is none for this preset, or its file is not found.
    """
    preset = PRESETS[name]

    def place_of(kind: Kind, key: str) -> Place:
        if kind in ("JSON", "YAML"):
            path = _file_of(name, preset.file_options, command)
            return FileKey(read_file(path, kind), tuple(key.split(".")))
        return PLACES[kind](key)

    for need in preset.needs:
        place = place_of(need.kind, need.name)
        own = place.own(command, environment) or NOT_SET
        if own not in need.values:
            raise ValueError(
                f"--preset {name} is for jobs whose {place.name} is {' or '.join(need.values)}; "
                f"here it is {own}"
            )
    for entry in preset.entries:
        place = place_of(entry.kind, entry.name)
        if entry.changes_numbers and NUMBERS not in allowed:
            asked.left_out.append(f"{place.name}: changes the numbers (--allow {NUMBERS})")
            continue
        condition = entry.only_with
        if condition is not None:
            condition = replace(condition, name=place_of(entry.kind, condition.name).name)
        setting = Setting(place, entry.values, place.own(command, environment), entry.assumed,
                          entry.takes_memory, condition)  # fmt: skip
        if entry.takes_memory and MEMORY not in allowed:
            setting, others = _within_memory(setting)
            if others:
                what = f"{setting.name}={','.join(others)}"
                asked.left_out.append(f"{what}: may take more memory (--allow {MEMORY})")
        asked.settings[setting.name] = setting


def _file_of(preset: str, file_options: Sequence[str], command: Sequence[str]) -> str:
    """The path of the program's file that the command names."""
    for option in file_options:
        # DeepSpeed's launcher also has --deepspeed without a file.
        with suppress(ValueError):
            path = Argument(option).own(command, {})
            if path is not None:
                return path
    options = " FILE, ".join(file_options)
    raise ValueError(
        f"--preset {preset} needs the program's file: give it to the command as {options} FILE"
    )


def _within_memory(setting: Setting) -> tuple[Setting, list[str]]:
    """Only the values that take no more memory than the user's own, as far as is known; and the
    others."""
    most = setting.memory_rank(setting.own_level)
    kept = [v for v in setting.values if setting.memory_rank(level_of(v)) <= most]
    others = [value for value in setting.values if value not in kept]
    return replace(setting, values=tuple(kept)), others
