"""What has come of a model's tuning: ``model.tuning``, and who is told when a round of it ends."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

from torch.utils.hooks import RemovableHandle

from bagua_client.configuration import Configuration

logger = logging.getLogger(__name__)

State = Literal["off", "waiting", "tuning", "finished", "failed"]
Callback = Callable[["Tuning"], object]
AnyCallback = TypeVar("AnyCallback", bound=Callback)


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What was known when it was asked for. All but ``rank`` and ``page`` is the same on all ranks
    in the same step.

    Attributes:
        state: ``off``: nothing is tuned; ``waiting``: nothing is tried yet, or the service is away;
            ``tuning``: configurations are tried; ``finished``: a round ended with a result;
            ``failed``: it ended without one.
        reason: why it is off, waits or failed; else empty.
        configuration: in force, or in force from the next step on.
        default: the configuration that speed-ups are over.
        best: what was kept, or the best so far, which is not confirmed; None: not known yet.
        speedup: of the best over the default; None: not known.
        low, high: the 95 % interval of that; None before it is confirmed.
        trials: configurations that were measured in this round.
        steps: so many the round took; None before its end, like the next three.
        seconds: so long, in which the training trained.
        cost_steps: what slower trials and re-cuts cost, in steps of the default's length.
        cost_seconds: the same in seconds.
        payback_steps: after so many steps that is earned; None where the default was kept.
        summary: how the round ended, in a line; where it has no result, that of the round before
            goes with it. Empty before the end.
        round: 0 is the first; another one follows a lasting change of the step times.
        at_step: the step in which that was told, counted from when the model was wrapped.
        job: its name; empty where nothing is tuned.
        rank: this one, among those that train the model.
        page: the job's, for a browser, on rank 0 as soon as it is known; else empty. It may hold
            the token of the service that rank 0 started.
    """

    state: State
    configuration: Configuration
    default: Configuration
    rank: int
    reason: str = ""
    best: Configuration | None = None
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    trials: int = 0
    steps: int | None = None
    seconds: float | None = None
    cost_steps: float | None = None
    cost_seconds: float | None = None
    payback_steps: int | None = None
    summary: str = ""
    round: int = 0
    at_step: int = 0
    job: str = ""
    page: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {words}" if (words := self.summary or self.reason) else self.state

    def to_json(self) -> dict[str, Any]:
        """All of it but the token, in JSON's types."""
        named = {"configuration": self.configuration, "default": self.default, "best": self.best}
        found = {name: each and each.to_json() for name, each in named.items()}
        return {**asdict(self), **found, "page": self.page.partition("#")[0]}


_callbacks: OrderedDict[int, Callback] = OrderedDict()  # as RemovableHandle wants it
_ended: WeakKeyDictionary[object, Tuning] = WeakKeyDictionary()
"""By whose tuning it was, the latest round that ended."""


def on_tuned(callback: AnyCallback) -> RemovableHandle:
    """Have ``callback`` called when a round of tuning ends, of any model of this process: on every
    rank, on the training thread, in the same step, after the optimizer's step (or, in a training
    without torch's optimizers, before the next forward pass). Another round, after a lasting
    change of the step times, calls it again; one that failed, too.

    What it raises is logged, and the training goes on. For models whose tuning has ended already
    it is called now.

    Args:
        callback: is given a :class:`Tuning`; its ``job`` says of which model.

    Returns:
        A handle; ``handle.remove()`` ends it.

    Raises:
        TypeError: ``callback`` cannot be called.
    """
    if not callable(callback):
        raise TypeError(f"on_tuned takes a function of a Tuning, not a {type(callback).__name__}")
    handle = RemovableHandle(_callbacks)
    _callbacks[handle.id] = callback
    for tuning in list(_ended.values()):
        _call(callback, tuning)
    return handle


def tell(owner: object, tuning: Tuning) -> None:
    """A round of the owner's tuning has ended: call all callbacks, in the order they came."""
    _ended.pop(owner, None)
    _ended[owner] = tuning
    for callback in list(_callbacks.values()):
        _call(callback, tuning)


def _call(callback: Callback, tuning: Tuning) -> None:
    try:
        callback(tuning)
    except Exception:
        logger.exception(
            "a callback of on_tuned failed on rank %d; the training goes on", tuning.rank
        )
