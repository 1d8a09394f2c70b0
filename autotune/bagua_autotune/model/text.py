"""Configurations and sizes in the words that people read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from bagua_wire.knob_kinds import Knob, OneOf, describe_bytes
from bagua_wire.knobs import KNOBS

if TYPE_CHECKING:
    from bagua_autotune.model.knobs import Value


class KnobWords(NamedTuple):
    """How a knob reads.

    Attributes:
        name: what people call it.
        phrase: what a configuration says of it, with ``{}`` for the value.
        unused: with these values a configuration says nothing of it.
        values: the words of values that are not their own.
    """

    name: str
    phrase: str
    unused: tuple[Value, ...] = ()
    values: Mapping[str, str] = {}


def _words(knob: Knob) -> KnobWords:
    """Those of one that the client has."""
    unused = () if knob.name in ALWAYS_TOLD else (OF_THE_JOB.get(knob.name, knob.default),)
    named = knob.kind.in_words if isinstance(knob.kind, OneOf) else {}
    values = {str(value): words for value, words in named.items()}
    return KnobWords(knob.title, knob.sentence, unused, values)


ALWAYS_TOLD = ("bucket_bytes", "hierarchical")
OF_THE_JOB = {"algorithm": "gradient_allreduce"}
"""What the service takes for the default where the client says that the job has one of its own."""
KNOB_WORDS: Mapping[str, KnobWords] = {name: _words(knob) for name, knob in KNOBS.items()}
NOT_SET = "not set"
"""Of a setting of a command."""
# With these values a knob that no words are known for is taken not to be in use.
UNUSED: tuple[Value, ...] = ("off", "as_is", 0, NOT_SET)
KNOB_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
"""All others are settings, and read as on a command line."""
# An explicit list of buckets makes these meaningless.
SIZES = ("bucket_bytes", "first_bucket_bytes", "last_bucket_bytes")


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


def words_of(knob: str) -> KnobWords:
    """The knob's words; where none are known, those that its name has."""
    if not KNOB_NAME.fullmatch(knob):
        return KnobWords(knob, f"{knob}={{}}", (NOT_SET,))
    name = knob.replace("_", " ")
    return KNOB_WORDS.get(knob) or KnobWords(name, f"{name} {{}}", UNUSED)


def is_unused(knob: str, value: Value) -> bool:
    """Whether a configuration with this value says nothing of the knob."""
    return value in words_of(knob).unused


def describe_knob(knob: str, value: Value) -> str:
    """The value in words, as a configuration says it: ``bucket 4 MiB``, ``2 channels``."""
    known = words_of(knob)
    if isinstance(value, tuple):
        words = describe_count(len(value), "explicit bucket")
    elif isinstance(value, int) and knob.endswith("_bytes"):
        words = describe_bytes(value)
    else:
        words = known.values.get(str(value), str(value))
        if known.values and str(value) not in known.values:
            return f"{knob} {value}"
    return known.phrase.replace("{}", words)


def describe(configuration: Mapping[str, Value]) -> str:
    """Describe a configuration, such as ``bucket 4 MiB, hierarchical``; refinements only where they
    are in use. There are words for one that sets nothing, as a search with whole runs may have.
    """
    return describe_part(configuration) or "nothing set"


def describe_part(configuration: Mapping[str, Value]) -> str:
    """The same of some knobs; empty if none is in use."""
    hidden = SIZES if configuration.get("buckets") else ()
    # From JSON a list of buckets comes as a list.
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in configuration.items()}
    return ", ".join(
        describe_knob(knob, value)
        for knob, value in values.items()
        if knob not in hidden and not is_unused(knob, value)
    )


def _short(number: float) -> str:
    # %.3g would write 1000 and above as 1e+03.
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"
