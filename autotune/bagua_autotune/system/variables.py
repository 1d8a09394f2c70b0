"""The environment variables that may be searched, and the values worth trying."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pydantic import ValidationError

from bagua_autotune.model.knobs import Categorical, Value

MIB = 2**20
CHANNELS = "BAGUA_DEFAULT_CHANNELS"
THREADS = "NCCL_SOCKET_NTHREADS"
SOCKETS = "NCCL_NSOCKS_PERTHREAD"
MIN_CHANNELS = "NCCL_MIN_NCHANNELS"
BUFFER_BYTES = "NCCL_BUFFSIZE"
INTERFACES = {"nccl": "NCCL_SOCKET_IFNAME", "gloo": "GLOO_SOCKET_IFNAME"}
BACKENDS = tuple(INTERFACES)

CONNECTED = (THREADS, SOCKETS, CHANNELS)
"""Variables that each multiply the connections between two ranks."""
NCCL_VALUES = {
    THREADS: (1, 2, 4, 8),
    SOCKETS: (1, 2, 4, 8),
    MIN_CHANNELS: (2, 4, 8, 16),
    BUFFER_BYTES: tuple(n * MIB for n in (1, 2, 4, 8, 16)),
}
CHANNELS_VALUES = (1, 2, 4, 8, 16)
# The value in force on most machines if a variable is not set.
ASSUMED = {THREADS: 1, SOCKETS: 1, MIN_CHANNELS: 1, BUFFER_BYTES: 4 * MIB, CHANNELS: 1}
NOT_SET = "not set"


@dataclass(frozen=True)
class Variable:
    """One variable that is searched.

    Attributes:
        name: of the variable.
        values: to try.
        own: its value in the user's environment; None: it is not set there.
    """

    name: str
    values: tuple[str, ...]
    own: str | None = None

    def __post_init__(self) -> None:
        try:
            self.domain  # noqa: B018
        except ValidationError as error:
            what = error.errors(include_url=False)[0]["msg"]
            raise ValueError(f"{self.name}: {what} (at most 16 values, each short)") from error

    @cached_property
    def levels(self) -> Mapping[Value, str | None]:
        """The name of each value in the search, and the value that the job gets: the user's own
        first, for which the job gets none.

        Numbers stay numbers, so that a result also informs about neighbouring values; an unset
        variable counts as the number in force, if that is known.
        """
        own = self.own
        assumed = ASSUMED.get(self.name) if own is None else _number(own)
        numbers = {value: _number(value) for value in self.values}
        if assumed and all(numbers.values()):
            given = {number: text for text, number in numbers.items() if number is not None}
            return {assumed: None, **{n: text for n, text in given.items() if n != assumed}}
        return {
            own or NOT_SET: None,
            **{value: value for value in self.values if value != own},
        }

    @property
    def own_level(self) -> Value:
        return next(iter(self.levels))

    @cached_property
    def domain(self) -> Categorical:
        return Categorical(values=tuple(v for v in self.levels if not isinstance(v, tuple)))


def _number(text: str) -> int | None:
    """The number that a text means, if it is a whole number above 0."""
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else None


def find_variables(
    backend: str,
    has_channels: bool,
    environment: Mapping[str, str],
    chosen: Mapping[str, Sequence[str]],
    interfaces: Sequence[str] = (),
    only: Sequence[str] = (),
) -> list[Variable]:
    """The variables that are searched for a job.

    Args:
        backend: of its gradients: one of ``BACKENDS``.
        has_channels: whether our client sends its buckets.
        environment: the user's.
        chosen: values of variables that the user named, known or not.
        interfaces: network interfaces that the user named.
        only: names to search; empty: all.

    Raises:
        ValueError: a name in ``only`` is none of those, or a variable has too many values.
    """
    values: dict[str, Sequence[str]] = {}
    if backend == "nccl":
        values |= {name: [str(value) for value in known] for name, known in NCCL_VALUES.items()}
    if has_channels or CHANNELS in only:
        values[CHANNELS] = [str(value) for value in CHANNELS_VALUES]
    if len(interfaces) > 1:
        values[INTERFACES[backend]] = [*interfaces, ",".join(interfaces)]
    values |= chosen
    for name in only:
        if name not in values:
            raise ValueError(
                f"{name} is not searched here; searched are {', '.join(values) or 'none'}"
            )
    return [
        Variable(name, tuple(dict.fromkeys(tried)), environment.get(name) or None)
        for name, tried in values.items()
        if not only or name in only
    ]
