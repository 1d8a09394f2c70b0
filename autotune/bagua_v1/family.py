"""What is remembered of a family: models that Bagua's protocol cannot tell apart.

By default Bagua names a model after its address, so a model has another name in every process
and every run, and a registration carries no rank.  Only the family is known: models of the same
class and tensors.  Three rules make one job of each model, and ensure that no two of its ranks
ever run different buckets, whatever processes died before:

1. A life of a family begins at the default.  A rank enters when it asks under a name that it
   has not reported under in this life, or goes back to where it entered; it is told the
   default.  If any rank has reported since the life began, an entry begins a new life: names
   and places are forgotten, jobs and trials stay.  No rank reports before all have entered, so
   this never happens in the middle of a run, unless the run makes a further such model.
2. A name is bound by its first report: a rank's k-th name to report is the family's k-th model.
   Ranks train their models in the same order, and names of processes that died do not report.
3. A model's configuration changes only at an iteration that all ranks reach from the same earlier
   one (Bagua calls the list of their iterations the check board), and only while this holds for all
   models of the family.  If a rank is missing or a name is bound to the wrong model, some model
   lacks a rank or has ranks at different iterations: then all models go on unchanged and nothing
   is tuned.

Two runs at once with the same names cannot be told apart: each needs a service of its own.

Pure: every method returns a new state, which the store writes in one transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field

from bagua_wire.configuration import Value

# A worker reports the mean speed of 100 iterations; two reports this close together have settled.
SETTLED_RATIO = 0.1


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Grant(_Record):
    """What the ranks are told to run from an iteration on, since ``at`` (seconds since the epoch).

    ``trial`` is the index of the trial that it measures: None while the job warms up, and for
    the final choice (``is_final``).  ``ordered`` is how many names of the execution order were
    known then: names that come later must not move tensors to other buckets.
    """

    from_iteration: int
    configuration: dict[str, Value]
    trial: int | None = None
    ordered: int = 0
    is_final: bool = False
    at: float


class Window(_Record):
    """One rank's mean speed over the iterations up to ``iteration``."""

    iteration: int
    speed: float


class Model(_Record):
    """One model of a family, in this life.

    ``reported`` and ``board``: by rank, the iteration of its last report, and of the last ask
    that followed a report.  ``apart_count``: for how many iterations in a row a rank went on
    while others were at another iteration.  ``grants``: the current one and the previous one,
    for a rank that asks again because an answer was lost.  ``warm_up``: the last two windows
    before the first measured one.  ``steps_before``: how many iterations the earlier lives had,
    so that this life's iterations count as later steps of the job.
    """

    job_id: str
    grants: list[Grant]
    reported: dict[int, int] = {}
    board: dict[int, int] = {}
    apart_count: int = 0
    warm_up: list[Window] = []
    steps_before: int = 0

    @property
    def grant(self) -> Grant:
        """The current grant."""
        return self.grants[-1]

    @property
    def is_warming_up(self) -> bool:
        return self.grant.trial is None and not self.grant.is_final

    def grant_at(self, iteration: int) -> Grant:
        """Return what all ranks are told at this iteration."""
        begun = [grant for grant in self.grants if grant.from_iteration <= iteration]
        return begun[-1] if begun else self.grants[0]

    def is_warm(self) -> bool:
        """Whether the speed has settled: at least one window is always dropped."""
        if len(self.warm_up) < 2:
            return False
        first, second = (window.speed for window in self.warm_up)
        return abs(first - second) <= SETTLED_RATIO * max(abs(first), abs(second))

    def stands_together(self, ranks: set[int]) -> bool:
        """Whether all the ranks are at one iteration."""
        return ranks <= self.board.keys() and len({self.board[rank] for rank in ranks}) == 1

    def is_first(self, iteration: int) -> bool:
        """Whether no rank has asked at this iteration or a later one yet."""
        return iteration > max(self.board.values(), default=-1)

    def _warmed(self, window: Window) -> list[Window]:
        """Note a report, the first one of each window, and return the windows."""
        is_known = bool(self.warm_up) and window.iteration <= self.warm_up[-1].iteration
        if is_known or not self.is_warming_up:
            return self.warm_up
        return [*self.warm_up[-1:], window]


class Family(_Record):
    """The models of a family, in the order in which ranks report under their names.

    ``label``: the beginning of the jobs' ids.  ``names``: by rank, the names bound in this life.
    ``present``: the ranks that have asked or reported in it.  ``entered_iteration``: the lowest
    iteration at which a rank entered.
    """

    label: str
    baseline: dict[str, Value]
    models: list[Model] = Field(min_length=1)
    names: dict[int, list[str]] = {}
    present: set[int] = set()
    entered_iteration: int | None = None

    @staticmethod
    def new(label: str, baseline: Mapping[str, Value], now: float) -> Family:
        models = [_new_model(label, baseline, now)]
        return Family(label=label, baseline=dict(baseline), models=models)

    @property
    def apart_count(self) -> int:
        """The highest of the models'."""
        return max(model.apart_count for model in self.models)

    def is_entering(self, rank: int, name: str, iteration: int) -> bool:
        """Whether a rank that asks this has just begun with the model."""
        start = -1 if self.entered_iteration is None else self.entered_iteration
        return name not in self.names.get(rank, ()) or iteration <= start

    def entered(self, rank: int, iteration: int, now: float) -> Family:
        """A rank enters: rule 1."""
        family = self._next_life(now) if self.names else self
        start = family.entered_iteration
        start = iteration if start is None else min(start, iteration)
        changes = {"entered_iteration": start, "present": family.present | {rank}}
        return family.model_copy(update=changes)

    def position(self, rank: int, name: str) -> int | None:
        """The number of the model that a rank's name is bound to."""
        names = self.names.get(rank, [])
        return names.index(name) if name in names else None

    def reported(
        self, rank: int, name: str, window: Window, is_baseline: bool, now: float
    ) -> Family:
        """A rank reports, which binds its name: rule 2.  The default's windows warm up."""
        names = self.names.get(rank, [])
        if name not in names:
            names = [*names, name]
        position, models = names.index(name), list(self.models)
        if position == len(models):
            models.append(_new_model(self.label, self.baseline, now))
        model = models[position]
        models[position] = model.model_copy(
            update={
                "reported": {**model.reported, rank: window.iteration},
                "warm_up": model._warmed(window) if is_baseline else model.warm_up,
            }
        )
        changes = {"names": {**self.names, rank: names}, "present": self.present | {rank}}
        return self.model_copy(update={**changes, "models": models})

    def is_due(self, position: int, iteration: int, world_size: int | None) -> bool:
        """Whether this ask is the first of an iteration to which all ranks may switch: rule 3.

        Without a world size, the ranks present in this life count as all.
        """
        model, ranks = self.models[position], self._ranks(world_size)
        is_in_step = all(m.apart_count == 0 and ranks <= m.board.keys() for m in self._alive)
        return model.is_first(iteration) and model.stands_together(ranks) and is_in_step

    def asked(
        self, rank: int, name: str, iteration: int, next_grant: Grant | None, world_size: int | None
    ) -> Family:
        """A rank asks; the grant counts if this ask is due (another rank's may have come first).

        Asks that do not follow a report change nothing: Bagua's workers send such asks if
        parameters are unused, perhaps on some ranks only.
        """
        position = self.position(rank, name)
        if position is None or self.models[position].reported.get(rank) != iteration:
            return self
        model, models = self.models[position], list(self.models)
        changes: dict[str, Any] = {"board": {**model.board, rank: iteration}}
        if next_grant is not None and self.is_due(position, iteration, world_size):
            changes["grants"] = [model.grant, next_grant]
        if model.board and model.is_first(iteration):
            is_together = model.stands_together(self._ranks(world_size))
            changes["apart_count"] = 0 if is_together else model.apart_count + 1
        models[position] = model.model_copy(update=changes)
        return self.model_copy(update={"models": models})

    def stragglers(self, world_size: int | None) -> dict[int, int]:
        """The ranks that are behind others in some model, and their iterations; -1: none yet."""
        ranks = self._ranks(world_size)
        found: dict[int, int] = {}
        for model in self._alive:
            places = {rank: model.board.get(rank, -1) for rank in ranks}
            foremost = max(places.values())
            found.update((rank, place) for rank, place in places.items() if place < foremost)
        return found

    @property
    def _alive(self) -> list[Model]:
        """The models bound in this life."""
        return self.models[: max(map(len, self.names.values()), default=0)]

    def _ranks(self, world_size: int | None) -> set[int]:
        return self.present if world_size is None else set(range(world_size))

    def _next_life(self, now: float) -> Family:
        models = [
            Model(
                job_id=model.job_id,
                grants=[first_grant(self.baseline, now)],
                steps_before=model.steps_before + max(model.reported.values(), default=0),
            )
            for model in self.models
        ]
        return Family(label=self.label, baseline=self.baseline, models=models)


def first_grant(baseline: Mapping[str, Value], now: float) -> Grant:
    """The default, not measured yet: the model warms up."""
    return Grant(from_iteration=-1, configuration=dict(baseline), at=now)


def _new_model(label: str, baseline: Mapping[str, Value], now: float) -> Model:
    # Nobody can guess the id, so nobody can have registered a job with it.
    job_id = f"{label}-{uuid4().hex}"
    return Model(job_id=job_id, grants=[first_grant(baseline, now)])
