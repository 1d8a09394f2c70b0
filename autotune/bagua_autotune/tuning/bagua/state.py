"""What the v1 protocol remembers of a job beyond its trials: kept in the job's ``data``.

All ranks must get the same answer for the same iteration, and the answer may change only when
all stand at the same iteration (Bagua calls where they stand the check board).  Pure: every
method returns a new state, which the store writes in one transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from bagua_autotune.model.knobs import Configuration, Value

# A worker reports the mean speed of 100 iterations; two that agree so far have settled.
SETTLED_RATIO = 0.1


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Grant(_Record):
    """What the ranks are told from an iteration on.

    ``trial`` is the index of the trial that it measures: None while the job warms up, and in
    the final choice (``is_final``).  ``ordered`` is how many names of the execution order were
    known at that time; later ones must not move tensors between buckets half way.
    """

    from_iteration: int
    configuration: dict[str, Value]
    trial: int | None = None
    ordered: int = 0
    is_final: bool = False
    at: float = 0.0


class Window(_Record):
    """One rank's mean speed over the iterations up to ``iteration``."""

    iteration: int
    speed: float


class BaguaState(_Record):
    """``family``: see directory.  ``bound``: by rank, the model name it knows the job by.

    ``board``: by rank, the iteration of its last ask, -1 if it only reported.  ``grants``: the
    current one and the one before, for a rank that asks again because an answer was lost.
    ``warm_up``: the last two windows before the first measured one.
    """

    family: str
    bound: dict[int, str] = {}
    order: list[str] = []
    board: dict[int, int] = {}
    grants: list[Grant]
    decided_iteration: int = -1
    warm_up: list[Window] = []

    @staticmethod
    def of(data: Mapping[str, Any]) -> BaguaState:
        return BaguaState.model_validate(data)

    @property
    def grant(self) -> Grant:
        """The current one."""
        return self.grants[-1]

    def grant_at(self, iteration: int) -> Grant:
        """What all ranks are told at this iteration."""
        before = [grant for grant in self.grants if grant.from_iteration <= iteration]
        return before[-1] if before else self.grants[0]

    def is_due(self, rank: int, iteration: int, world_size: int | None) -> bool:
        """Whether this ask is the first of an iteration, with all ranks at one before.

        Without a world size the ranks seen so far are all there are.
        """
        ranks = self.board if world_size is None else range(world_size)
        places = {self.board.get(other, -1) for other in ranks}
        stood = self.board.get(rank, -1 if world_size is not None else iteration)
        return len(places) == 1 and stood < iteration and self.decided_iteration < iteration

    def arrive(
        self, rank: int, iteration: int, decision: Grant | None, decides: bool
    ) -> BaguaState:
        """A rank asks.  A decision counts unless another replica took one for this iteration."""
        if iteration < self.board.get(rank, -1):
            return self._restarted(rank, iteration)
        changes: dict[str, Any] = {"board": {**self.board, rank: iteration}}
        if decides and self.decided_iteration < iteration:
            changes["decided_iteration"] = iteration
            if decision is not None:
                changes["grants"] = [self.grant, decision]
        return self.model_copy(update=changes)

    def binding(self, rank: int, model_name: str) -> BaguaState:
        """The rank knows the job by this name, unless it knows it by another."""
        return self.model_copy(update={"bound": {rank: model_name, **self.bound}})

    def seen(self, rank: int) -> BaguaState:
        """A rank reports, perhaps before it ever asked."""
        return self.model_copy(update={"board": {rank: -1, **self.board}})

    def warmed(self, window: Window) -> BaguaState:
        """A window before the first measured one; the first rank's report of it counts."""
        if self.warm_up and self.warm_up[-1].iteration == window.iteration:
            return self
        return self.model_copy(update={"warm_up": [*self.warm_up[-1:], window]})

    def is_warm(self) -> bool:
        """Whether the speed has settled: at least one window is always dropped."""
        if len(self.warm_up) < 2:
            return False
        first, second = (window.speed for window in self.warm_up)
        return abs(first - second) <= SETTLED_RATIO * max(abs(first), abs(second))

    def ordered(self, names: Iterable[str]) -> BaguaState:
        """Tensors became ready in this order; the first sight of each counts."""
        return self.model_copy(update={"order": list(dict.fromkeys([*self.order, *names]))})

    def _restarted(self, rank: int, iteration: int) -> BaguaState:
        """The workers were started anew: iterations count from here, the configuration stays."""
        grant = self.grant.model_copy(update={"from_iteration": iteration})
        return self.model_copy(
            update={
                "board": {rank: iteration},
                "grants": [grant],
                "decided_iteration": iteration,
            }
        )


def first_grant(baseline: Configuration, at: float) -> Grant:
    """The baseline, not measured yet: the job warms up."""
    return Grant(from_iteration=-1, configuration=dict(baseline), at=at)
