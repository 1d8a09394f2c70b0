"""Configurations in the words that people read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from bagua_wire.configuration import Value
from bagua_wire.knob_kinds import Counts, Knob, OneOf, describe_bytes
from bagua_wire.knobs import KNOBS, USUAL_ALGORITHM


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
OF_THE_JOB = {"algorithm": USUAL_ALGORITHM}
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
        words = Counts().words(value)
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
    """Describe some knobs of a configuration; empty if none is in use."""
    hidden = SIZES if configuration.get("buckets") else ()
    # From JSON a list of buckets comes as a list.
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in configuration.items()}
    return ", ".join(
        describe_knob(knob, value)
        for knob, value in values.items()
        if knob not in hidden and not is_unused(knob, value)
    )
