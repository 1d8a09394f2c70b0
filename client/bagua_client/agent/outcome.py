"""What the ranks know of their tuning, what it waits for, and when they tell it; see
bagua_client.tuning."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from weakref import ref

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from bagua_client.agent.job import is_warming_up
from bagua_client.announcement import ENDED_FIRST, announce, before_that
from bagua_client.configuration import Configuration
from bagua_client.environment import Environment
from bagua_client.measuring.rank_measurement import StepCount
from bagua_client.torch_private.wrapper import called_untraced
from bagua_client.tunable.tunable import Tunable
from bagua_client.tuning import State, Tuning, tell, write_result_line

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 60.0
"""A training that is not tuned by then says once what that waits for."""


def awaited(
    tunable: Tunable, reductions: int, must_wait: bool | None, environment: Environment
) -> str:
    """Return what the first trial waits for.

    Args:
        reductions: how many backward passes have ended in which gradients were synchronised.
        must_wait: whether another model of this job goes first; None: this rank does not know.
    """
    # Then there is no model to ask, or it cannot answer.
    is_left = tunable.is_left or not (tunable.communicator.group is None or dist.is_initialized())
    if not is_left and (refusal := tunable.refusal):
        return f"the end of what prevents it: {refusal}"
    if not is_left and tunable.stands_back:
        return "the end of join(): inside it the ranks may end one by one, and nothing is changed"
    if not reductions and tunable.communicator.group is None:
        return "the first backward pass of a training (not in eval mode, nor under no_grad)"
    if not reductions:
        return "the first backward pass that synchronises gradients (not under no_sync or no_grad)"
    if not tunable.order_is_agreed:
        return "the order in which gradients become ready, which the next steps show"
    if must_wait:
        return "another model of this job, which is tuned first"
    if not is_left and is_warming_up(tunable, environment):
        return f"the end of an algorithm's warm-up (the model trains with {tunable.algorithm.name})"
    if must_wait is None:
        return "rank 0, which waits for its turn among the job's models, or for the service"
    return "the service, which has not answered with a configuration to try"


class Impatience:
    """Says what a tuning waits for, where that takes long. One line in all, and one at the end.

    Args:
        awaits: what for; empty: it waits no longer.
        speaks: whether this rank says it.
    """

    def __init__(self, awaits: Callable[[], str], speaks: bool) -> None:
        self._awaits = awaits
        self._from_seconds = time.monotonic()
        self._may_speak = self._may_end = speaks

    def step(self) -> None:
        """A forward pass begins."""
        if self._may_speak and time.monotonic() - self._from_seconds >= PATIENCE_SECONDS:
            self._may_speak = False
            if what := self._awaits():
                announce(logger, "autotune: the model is not tuned yet; this waits for %s", what)

    def end(self) -> None:
        """The training is over on this rank."""
        if self._may_end and (what := self._awaits()):
            announce(logger, "autotune: the model was never tuned; this waited for %s", what)
        self.forget()

    def forget(self) -> None:
        """Say nothing more."""
        self._may_speak = self._may_end = False


class Outcome:
    """The outcome of one model's tuning, on one rank. All ranks do each of this in the same step,
    but for :meth:`close`.

    The end of a round comes to be known in a backward pass, which on a GPU is another thread's:
    who waits for it is called at the optimizer's step, or at the next forward pass.

    Args:
        job: its name.
        tunable: of the model.
        path: where rank 0 writes result lines; None: nowhere.
        count: of the training's steps.
        page: gives the job's, as soon as it is known.
        awaits: gives what the first configuration waits for.
    """

    def __init__(
        self,
        job: str,
        tunable: Tunable,
        path: str | None,
        count: StepCount,
        page: Callable[[], str],
        awaits: Callable[[], str],
    ) -> None:
        rank, default = tunable.communicator.rank, tunable.default
        self._page, self._awaits = page, awaits
        self._tunable, self._count = tunable, count
        self._first = self._known = Tuning(
            state="waiting", configuration=default, default=default, job=job, rank=rank
        )
        self._path = path if rank == 0 else None
        self._process = os.getpid()
        self._before = ""  # the result of the round before, in words
        self._untold = self._is_over = False
        self._handle: RemovableHandle | None = None
        self._impatience = Impatience(self._reason_to_wait, speaks=rank == 0)

    def begin(self) -> None:
        """The model's tuning begins: it may end with the process."""
        if self._known.rank == 0:
            atexit.register(self.close)

    @property
    def tuning(self) -> Tuning:
        """What is known of the tuning now."""
        reason = self._known.reason or self._reason_to_wait()
        return replace(self._known, configuration=self._in_force, page=self._page(), reason=reason)

    def _reason_to_wait(self) -> str:
        """Return why the tuning waits; empty if it does not, or if its reporter has said so."""
        is_first = self._known.state == "waiting" and not self._known.reason
        return (self._tunable.observers.call(self._awaits) or "") if is_first else ""

    def follow(self, told: Mapping[str, Any], step: int) -> None:
        """Take up what the reporter told all ranks with a command, which they are to carry out.

        Args:
            told: fields of a Tuning; empty: nothing is new.
            step: of now.
        """
        if not told:
            return
        self._is_over = told["state"] in ("finished", "failed", "off")
        best = self._in_force if told["state"] == "finished" else _read(told.get("best"))
        before, now = self._known, {"round": self._known.round, **told, "best": best}
        if told["state"] == "finished":
            self._before = before_that(now["round"], told["summary"])
        elif self._is_over:
            now["summary"] = told["reason"] + self._before
        self._known = replace(self._first, **now, at_step=step)
        is_news = replace(self._known, at_step=before.at_step) != before
        if self._is_over and is_news:
            self._untold = True
            if self._handle is None:
                self._handle = register_optimizer_step_post_hook(called_untraced(_teller(self)))

    def end(self, state: State, reason: str, step: int) -> None:
        """The tuning ends without a result, as all ranks know. One that is there stays."""
        if not self._is_over:
            self.follow({"state": state, "reason": reason}, step)

    def forward_begins(self) -> None:
        """Tell what has become known, now at the latest. Torch goes through no hooks, so that ours
        can leave them.
        """
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._impatience.step()
        self._tell()

    def _tell(self) -> None:
        """Tell the user's callbacks, on the training thread."""
        if not self._untold:
            return
        self._untold = False
        if self._path is not None:
            write_result_line(self._path, self.tuning)
        tell(self, self.tuning)

    def forget(self) -> None:
        """There is no tuning after all, as whoever asked for it says."""
        self._path = None
        self._impatience.forget()

    def close(self) -> None:
        """The training is over on this rank: nobody is called any more, but scripts want a line."""
        atexit.unregister(self.close)
        if os.getpid() == self._process and not self._page():  # Else the reporter says how it ends.
            self._impatience.end()
        if self._path is None or os.getpid() != self._process:
            return
        if not self._is_over:
            step, summary = self._count.made, ENDED_FIRST + self._before
            self._known = replace(
                self._known, state="failed", reason=ENDED_FIRST, summary=summary, at_step=step
            )
        if self._untold or not self._is_over:
            write_result_line(self._path, self.tuning)
        self._path = None

    @property
    def _in_force(self) -> Configuration:
        """The configuration in force, or that from the next forward pass on."""
        return self._tunable.layout_to_come.configuration


def _teller(outcome: Outcome) -> Callable[..., None]:
    """Return a hook that does not keep the outcome: torch keeps hooks for ever, and the outcome
    knows the model.
    """
    reference = ref(outcome)

    def hook(*_: Any) -> None:
        found = reference()
        if found is not None:
            found._tunable.observers.call(found._tell)

    return hook


def _read(configuration: Mapping[str, Any] | None) -> Configuration | None:
    """Read a configuration; None, too, if it has a knob that only other ranks of earlier lives
    knew.
    """
    if configuration is None:
        return None
    try:
        return Configuration.from_json(configuration)
    except ValueError:
        return None
