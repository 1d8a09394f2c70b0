"""The states that a model's agent is in, one after the other.

- tuning: configurations are tried;
- settling: the last command was given, and its configuration is not in force yet;
- watching: for step times, or the loss, that change; a command leads back to tuning;
- off: for good.
"""

from __future__ import annotations

import enum


class State(enum.Enum):
    """The state of an agent; the same on all ranks in the same step."""

    TUNING = enum.auto()
    SETTLING = enum.auto()
    WATCHING = enum.auto()
    OFF = enum.auto()
