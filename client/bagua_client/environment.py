"""What the environment variables say: Bagua's names with their meaning, and a few new ones."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from bagua_client.algorithms import GlobalAlgorithmRegistry
from bagua_client.configuration import CHANNELS_VALUES
from bagua_client.knob_choices import Choice, read_choices

T = TypeVar("T", int, float)

MOST_STEPS = 10**9
LEAST_MINUTES = 0.01
MOST_SAMPLES = 500
"""The service takes no more: its decisions take as long as the cube of the trials."""
SWITCH_WORDS = {"true": 1, "yes": 1, "on": 1, "false": 0, "no": 0, "off": 0}
"""What a switch may say, in any case, instead of a number (Bagua's are levels)."""


ALLOWED_WORDS = {"bfloat16": "bf16", "float16": "fp16", "bf16": "bf16", "fp16": "fp16"}
"""What BAGUA_AUTOTUNE_ALLOW may list besides the names of algorithms, and which value of a knob it
allows."""


@dataclass(frozen=True)
class Environment:
    """Settings of the client.

    Attributes:
        autotune: whether the job is tuned at all.
        url: an existing service; None: rank 0 starts one beside itself.
        token: what the service wants to be shown; None: nothing.
        job: the job's name; None: one is made from the program and the model.
        max_samples: at most so many configurations are tried.
        fresh: the tuning takes over nothing from earlier runs.
        max_minutes: of the search; None: as long as it takes.
        trial_seconds: upper bound for one of them.
        warmup_seconds: upper bound for the steps that are not measured at the start.
        remaining_steps: so many steps the training is expected to run on; what a search may cost
            depends on it.
        server_wait_seconds: how long an absent service is looked for eagerly.
        service_port: for a service that rank 0 starts; 0: any free one.
        default_bucket_bytes: the baseline's bucket size; None: torch's.
        default_channels: the baseline's channels.
        allowed: what may be tried though it changes the numbers: precisions on the wire, and names
            of algorithms.
        knobs: what may be tried of those that it names; of the others everything.
        result: a file that a line is written to when a round of tuning ends; ``-``: the standard
            output; None: nowhere.
        configuration: a file with what to train with, or to begin the tuning with; None: none.
    """

    autotune: bool = False
    url: str | None = None
    token: str | None = None
    job: str | None = None
    max_samples: int = 60
    max_minutes: float | None = None
    fresh: bool = False
    trial_seconds: float = 5.0
    warmup_seconds: float = 30.0
    remaining_steps: int = 10_000
    server_wait_seconds: float = 300.0
    service_port: int = 0
    default_bucket_bytes: int | None = None
    default_channels: int = 1
    allowed: frozenset[str] = frozenset()
    knobs: Mapping[str, Choice] = field(default_factory=dict)
    result: str | None = None
    configuration: str | None = None

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> Environment:
        """Read the variables that are set and not empty.

        Raises:
            ValueError: one is not a number of the kind it must be, or a word that it may be.
        """

        def number(
            name: str,
            kind: Callable[[str], T],
            default: T,
            low: T,
            high: float = math.inf,
            words: Mapping[str, T] = {},
        ) -> T:
            text = variables.get(name, "").strip()
            if not text:
                return default
            if text.lower() in words:
                return words[text.lower()]
            try:
                value = kind(text)
            except ValueError:
                value = None
            if value is None or not low <= value <= high or value == math.inf:
                what = "a whole number" if kind is int else "a number"
                limits = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
                others = f", or one of {', '.join(words)}" if words else ""
                raise ValueError(f"{name} must be {what} {limits}{others}, not {text!r}")
            return value

        return cls(
            autotune=number("BAGUA_AUTOTUNE", int, 0, 0, words=SWITCH_WORDS) >= 1,
            url=variables.get("BAGUA_AUTOTUNE_URL", "").strip() or None,
            # Read from a file, it may end with the line's end.
            token=variables.get("BAGUA_AUTOTUNE_TOKEN", "").strip() or None,
            job=variables.get("BAGUA_AUTOTUNE_JOB") or None,
            max_samples=number("BAGUA_AUTOTUNE_MAX_SAMPLES", int, cls.max_samples, 1, MOST_SAMPLES),
            max_minutes=number("BAGUA_AUTOTUNE_MAX_MINUTES", float, 0.0, LEAST_MINUTES) or None,
            fresh=number("BAGUA_AUTOTUNE_FRESH", int, 0, 0, 1, SWITCH_WORDS) >= 1,
            trial_seconds=number(
                "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S", float, cls.trial_seconds, 0.0
            ),
            warmup_seconds=number("BAGUA_AUTOTUNE_WARMUP_TIME_S", float, cls.warmup_seconds, 0.0),
            remaining_steps=number(
                "BAGUA_AUTOTUNE_REMAINING_STEPS", int, cls.remaining_steps, 1, MOST_STEPS
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
        )


def _channels(text: str) -> int:
    words = {str(value): value for value in CHANNELS_VALUES}
    if text.strip() not in ("", *words):
        raise ValueError(
            f"BAGUA_DEFAULT_CHANNELS must be one of {', '.join(words)}, not {text.strip()!r}"
        )
    return words.get(text.strip(), 1)


def _allowed(text: str) -> frozenset[str]:
    algorithms = {name: name for name in GlobalAlgorithmRegistry.available_algorithms()}
    known = ALLOWED_WORDS | algorithms
    given = [word.strip() for word in text.split(",") if word.strip()]
    words = [word if word in known else word.lower() for word in given]
    for word in words:
        if word not in known:
            raise ValueError(f"BAGUA_AUTOTUNE_ALLOW lists {word!r}; it may list {', '.join(known)}")
    return frozenset(known[word] for word in words)
