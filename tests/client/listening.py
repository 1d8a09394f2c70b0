"""Listeners to a model, in the place of an agent."""

from __future__ import annotations

from collections.abc import Callable

from bagua_client.tunable.tunable import Nobody


class EachStep(Nobody):
    """Calls a function at the end of each step's communication."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def reduced(self) -> None:
        self._call()
