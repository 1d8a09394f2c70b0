"""What a search tells of its runs while it makes them, and asks of those that were made before."""

from __future__ import annotations

from typing import Protocol

from bagua_autotune.model.knobs import Configuration
from bagua_autotune.system.running.runs import Outcome


class Log(Protocol):
    """Where runs are kept, so that a search that was interrupted goes on.

    Configurations are those of the settings alone; runs are numbered from 1.
    """

    def recalled(self, number: int, purpose: str, configuration: Configuration) -> Outcome | None:
        """The outcome of a run that was made before; None: it is to be made."""

    def begins(self, number: int, purpose: str, configuration: Configuration) -> None:
        """Note that a run is made."""

    def ends(self, number: int, outcome: Outcome) -> None:
        """Keep a run that is over."""

    def spent_seconds(self, number: int | None = None) -> float:
        """How long the search has taken until it decided on this run, or until now."""


class NoLog:
    """Keeps nothing, and takes no time."""

    def recalled(self, number: int, purpose: str, configuration: Configuration) -> Outcome | None:
        """See Log."""
        return None

    def begins(self, number: int, purpose: str, configuration: Configuration) -> None:
        """See Log."""

    def ends(self, number: int, outcome: Outcome) -> None:
        """See Log."""

    def spent_seconds(self, number: int | None = None) -> float:
        """See Log."""
        return 0.0
