"""The client's settings from environment variables: Bagua's names, and a few new ones."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, TypeVar

import torch.distributed as dist

from bagua_client.algorithms import GlobalAlgorithmRegistry
from bagua_wire import limits
from bagua_wire.knob_kinds import Value
from bagua_wire.knobs import ALLOWED_WORDS, CHANNELS_VALUES, KNOBS

logger = logging.getLogger(__name__)

T = TypeVar("T", int, float)

LEAST_MINUTES = 0.01
LEAST_MEMORY = 0.01
ON = ("true", "yes", "on")
OFF = ("false", "no", "off")
"""Words that turn a variable off, instead of a number, in any case."""

SWITCH, PREFIX = "BAGUA_AUTOTUNE", "BAGUA_"
OF_A_TUNING = frozenset(
    f"BAGUA_AUTOTUNE_{name}"
    for name in (
        "URL", "JOB", "MAX_SAMPLES", "MAX_MINUTES", "MEMORY", "FRESH", "WARMUP_TIME_S", "ALLOW",
        "SAMPLING_CONFIDENCE_TIME_S", "REMAINING_STEPS", "SERVER_WAIT_TIME", "KNOBS", "RESULT",
        "MAX_ROUNDS",
    )
)  # fmt: skip
"""Variables that say how a training is tuned, and nothing where it is not."""
OF_THE_SERVICE = frozenset(
    f"BAGUA_AUTOTUNE_{name}"
    for name in (
        "TOKEN", "PREVIOUS_TOKEN", "TEAMS", "DATABASE", "ALLOWED_HOSTS", "THIN_DAYS", "KEEP_DAYS",
        "UPKEEP_MINUTES",
    )
)  # fmt: skip
OTHERS = frozenset(
    {
        "BAGUA_SERVICE_PORT", "BAGUA_DEFAULT_BUCKET_SIZE", "BAGUA_DEFAULT_CHANNELS",
        "BAGUA_CONFIGURATION", "BAGUA_REPLACES_DDP", "BAGUA_AUTOTUNE_CHECK", "BAGUA_AUTOTUNE_PROBE",
        # Bagua's own, of which the service reads the first.
        "BAGUA_IS_OUTPUT_AUTOTUNE_LOG", "BAGUA_REPORT_METRICS",
    }
)  # fmt: skip
KNOWN = OF_A_TUNING | OF_THE_SERVICE | OTHERS | {SWITCH}
LEAST_LIKENESS = 0.8
"""From 0 to 1: a name that is as like a known one may be meant as that."""


class SettingError(SystemExit, ValueError):
    """Raised where a variable has a value that it cannot have.

    To a program that catches it, it is a ValueError. If none does, the process ends with the
    sentence alone: a traceback on each rank would bury it.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.code = f"bagua_client: {sentence}"


@dataclass(frozen=True)
class Environment:
    """Settings of the client.

    Attributes:
        autotune: whether the job is tuned at all.
        url: an existing service; None: rank 0 starts one beside itself.
        token: of the service; None: it has none.
        job: the job's name; None: one is made from the program and the model.
        max_samples: upper bound for the number of trials.
        fresh: the tuning takes over nothing from earlier runs.
        max_minutes: upper bound for the time of the search; None: as long as it takes.
        max_rounds: upper bound for the number of tunings: the first, and those after lasting
            changes of the step times.
        memory_share: of a GPU's memory, that what is tried may use.
        trial_seconds: upper bound for the length of a trial.
        warmup_seconds: upper bound for the time at the start that is not measured.
        remaining_steps: how many steps the training is expected to go on; limits the cost of a
            search.
        server_wait_seconds: seconds of fast retries while the service is absent; then every 30 s.
            A trial is left after these, too, if they are fewer than those of ``absence``.
        service_port: of a service that rank 0 starts; 0: any free port.
        default_bucket_bytes: the default's bucket size; None: torch's.
        default_channels: the default's channels.
        allowed: precisions on the wire and algorithms that may be tried although they change the
            numbers.
        knobs: the values that may be tried of the knobs listed here; of other knobs all.
        result: a file to which a line is appended when a round of tuning ends; ``-``: the standard
            output; None: nowhere.
        configuration: a file with the configuration to train with, or to begin the tuning with.
        check: a file for what ``bagua-autotune check`` measures; None: it did not start this job.
    """

    autotune: bool = False
    url: str | None = None
    token: str | None = None
    job: str | None = None
    max_samples: int = limits.SAMPLES
    max_minutes: float | None = None
    max_rounds: int = limits.ROUNDS
    memory_share: float = 0.9
    fresh: bool = False
    trial_seconds: float = limits.TRIAL_SECONDS
    warmup_seconds: float = limits.WARMUP_SECONDS
    remaining_steps: int = limits.REMAINING_STEPS
    server_wait_seconds: float = 300.0
    service_port: int = 0
    default_bucket_bytes: int | None = None
    default_channels: int = 1
    allowed: frozenset[str] = frozenset()
    knobs: Mapping[str, Choice] = field(default_factory=dict)
    result: str | None = None
    configuration: str | None = None
    check: str | None = None

    @property
    def asks(self) -> bool:
        """Whether anything is set that the ranks have to agree on where a model is wrapped."""
        named = self.configuration, self.check, self.default_bucket_bytes
        return self.autotune or self.default_channels > 1 or any(each is not None for each in named)

    @classmethod
    def read(cls, variables: Mapping[str, str] | None = None) -> Environment:
        """Read the variables that are set and not empty.

        Args:
            variables: None: those of this process; then rank 0 warns once of each that has no
                effect.

        Raises:
            SettingError: a variable has a value that it cannot have. A switch never raises.
        """
        if variables is None:
            _warn_of_ineffective(os.environ)
            variables = os.environ
        try:
            return cls._read(variables)
        except ValueError as error:
            raise SettingError(str(error)) from None

    @classmethod
    def _read(cls, variables: Mapping[str, str]) -> Environment:
        """Raises ValueError, with the sentence of a SettingError."""

        def number(
            name: str, kind: Callable[[str], T], default: T, low: T, high: float = math.inf
        ) -> T:
            text = variables.get(name, "").strip()
            if not text:
                return default
            try:
                value = kind(text)
            except ValueError:
                value = None
            if value is None or not low <= value <= high or value == math.inf:
                what = "a whole number" if kind is int else "a number"
                limits = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
                raise ValueError(f"{name} must be {what} {limits}, not {text!r}")
            return value

        return cls(
            autotune=_is_on(variables, "BAGUA_AUTOTUNE", "the training is not tuned"),
            url=_url(variables.get("BAGUA_AUTOTUNE_URL", "").strip()),
            # Read from a file, it may end with a newline.
            token=variables.get("BAGUA_AUTOTUNE_TOKEN", "").strip() or None,
            job=variables.get("BAGUA_AUTOTUNE_JOB", "").strip() or None,
            max_samples=number(
                "BAGUA_AUTOTUNE_MAX_SAMPLES", int, cls.max_samples, 1, limits.MOST_SAMPLES
            ),
            max_minutes=number("BAGUA_AUTOTUNE_MAX_MINUTES", float, 0.0, LEAST_MINUTES) or None,
            max_rounds=number(
                "BAGUA_AUTOTUNE_MAX_ROUNDS", int, cls.max_rounds, 1, limits.MOST_ROUNDS
            ),
            memory_share=number(
                "BAGUA_AUTOTUNE_MEMORY", float, cls.memory_share, LEAST_MEMORY, 1.0
            ),
            fresh=_is_on(variables, "BAGUA_AUTOTUNE_FRESH", "earlier runs are used"),
            trial_seconds=number(
                "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S", float, cls.trial_seconds, 0.0
            ),
            warmup_seconds=number("BAGUA_AUTOTUNE_WARMUP_TIME_S", float, cls.warmup_seconds, 0.0),
            remaining_steps=number(
                "BAGUA_AUTOTUNE_REMAINING_STEPS", int, cls.remaining_steps, 1, limits.MOST_STEPS
            ),
            server_wait_seconds=number(
                "BAGUA_AUTOTUNE_SERVER_WAIT_TIME", float, cls.server_wait_seconds, 0.0
            ),
            # Bagua's own default is -1, which means any.
            service_port=max(number("BAGUA_SERVICE_PORT", int, 0, -1), 0),
            default_bucket_bytes=number("BAGUA_DEFAULT_BUCKET_SIZE", int, 0, 1) or None,
            default_channels=_channels(variables.get("BAGUA_DEFAULT_CHANNELS", "")),
            allowed=_allowed(variables.get("BAGUA_AUTOTUNE_ALLOW", "")),
            knobs=read_choices(variables.get("BAGUA_AUTOTUNE_KNOBS", "")),
            result=variables.get("BAGUA_AUTOTUNE_RESULT", "").strip() or None,
            configuration=variables.get("BAGUA_CONFIGURATION", "").strip() or None,
            check=variables.get("BAGUA_AUTOTUNE_CHECK", "").strip() or None,
        )


def without_effect(variables: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable of ours that is set in vain."""
    given = sorted(name for name, text in variables.items() if text.strip())
    known = sorted(name.removeprefix(PREFIX) for name in KNOWN)
    found = []
    for name in given:
        if not name.startswith(PREFIX) or name in KNOWN:
            continue
        meant = get_close_matches(name.removeprefix(PREFIX), known, 1, LEAST_LIKENESS)
        # Others may have variables that begin like Bagua's.
        if meant or name.startswith(SWITCH):
            perhaps = f"; perhaps {PREFIX}{meant[0]} is meant" if meant else ""
            found.append(f"{name} has no effect: there is no such variable{perhaps}")
    idle = [name for name in given if name in OF_A_TUNING]
    if idle and SWITCH not in given:
        found.append(
            "BAGUA_AUTOTUNE is not set, so the training is not tuned; without effect: "
            f"{', '.join(idle)}"
        )
    return found


_warned: set[str] = set()


def _warn_of_ineffective(variables: Mapping[str, str]) -> None:
    """On rank 0 only, which may not be known yet; each sentence once."""
    rank = variables.get("RANK", "")
    if dist.is_available() and dist.is_initialized():
        rank = str(dist.get_rank())
    if rank == "0":
        for sentence in without_effect(variables):
            if sentence not in _warned:
                _warned.add(sentence)
                logger.warning("%s", sentence)


def _is_on(variables: Mapping[str, str], name: str, otherwise: str) -> bool:
    """Whether a variable switches something on. A word that is not understood is a warning, and
    counts as off; ``otherwise`` says what that means."""
    text = variables.get(name, "").strip()
    word = text.lower()
    if word.isdecimal():
        return int(word) >= 1  # Bagua's BAGUA_AUTOTUNE is a level: 2 is on, too.
    if word in ("", *OFF):
        return False
    if word in ON:
        return True
    logger.warning(
        "rank %s: %s is %r, so %s; it may be 1 (or %s), or 0 (or %s)",
        *(variables.get("RANK", "0"), name, text, otherwise, ", ".join(ON), ", ".join(OFF)),
    )
    return False


def _url(text: str) -> str | None:
    """Read a URL; one without a scheme, such as ``127.0.0.1:8123``, is taken as http."""
    return f"http://{text}" if text and "://" not in text else text or None


def _channels(text: str) -> int:
    words = {str(value): value for value in CHANNELS_VALUES}
    if text.strip() not in ("", *words):
        raise ValueError(
            f"BAGUA_DEFAULT_CHANNELS must be one of {', '.join(words)}, not {text.strip()!r}"
        )
    return words.get(text.strip(), 1)


def _allowed(text: str) -> frozenset[str]:
    given = [word.strip() for word in text.split(",") if word.strip()]
    algorithms = GlobalAlgorithmRegistry.available_algorithms() if given else ()
    known = ALLOWED_WORDS | {name: name for name in algorithms}
    words = [word if word in known else word.lower() for word in given]
    for word in words:
        if word not in known:
            raise ValueError(f"BAGUA_AUTOTUNE_ALLOW lists {word!r}; it may list {', '.join(known)}")
    return frozenset(known[word] for word in words)


MOST_VALUES = 8
"""Limit for one knob: the search looks at each value with all values of the other knobs."""


@dataclass(frozen=True)
class Choice:
    """What the user chose for one knob.

    Attributes:
        values: the values to try. A single value is pinned, also in the default configuration.
            Two values of ``bucket_bytes`` are the ends of a range. Empty: the knob keeps its
            default.
    """

    values: tuple[Value, ...] = ()

    @property
    def pinned(self) -> Value | None:
        """The value, if there is exactly one; else None."""
        return self.values[0] if len(self.values) == 1 else None

    def within(self, knob: str, domain: Mapping[str, Any], default: Value) -> dict[str, Any] | None:
        """The part of the knob's domain (API v2) that remains; None: the knob is left out.

        It always contains ``default``, because every trial is compared with the default
        configuration.
        """
        if domain["type"] == "partition":
            return None
        if domain["type"] == "log_integer":
            sizes = [int(size) for size in (default, *self.values)]
            return {**domain, "low": min(sizes), "high": max(sizes)}
        # Any size may be tried; of the other knobs only the values that are possible here.
        offered = self.values if KNOBS[knob].kind.is_open else domain["values"]
        kept = [v for v in offered if v in self.values and v != default]
        return {**domain, "values": [default, *kept]}


def read_choices(text: str) -> dict[str, Choice]:
    """Read a text such as ``-channels,hierarchical=off/leaders,bucket_bytes=1MiB..64MiB``.

    Returns:
        The user's choices, by knob.

    Raises:
        ValueError: the text is not valid; the message names the knob and what it may be set to.
    """
    found: dict[str, Choice] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        knob, equals, said = (word.strip() for word in part.removeprefix("-").partition("="))
        if knob not in KNOBS:
            raise ValueError(
                f"BAGUA_AUTOTUNE_KNOBS names {knob!r}, which is not a knob; the knobs are "
                f"{', '.join(KNOBS)}"
            )
        if knob in found:
            raise ValueError(f"BAGUA_AUTOTUNE_KNOBS names {knob} twice")
        is_off = part.startswith("-")
        values = () if is_off else KNOBS[knob].read(said)
        if is_off == bool(equals) or not (is_off or 0 < len(values) <= MOST_VALUES):
            may_say = KNOBS[knob].may_say
            others = f", or {knob}= and {may_say}" if may_say else ""
            raise ValueError(
                f"BAGUA_AUTOTUNE_KNOBS says {part!r}; it may say -{knob}, which leaves it at its "
                f"default{others}"
            )
        found[knob] = Choice(values)
    return found
