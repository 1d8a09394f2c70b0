"""What has come of a model's tuning: ``model.tuning``, and who is told when a round of it ends:
callbacks, and scripts, by a line of JSON."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
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
    """A snapshot of a model's tuning. All but ``rank`` and ``page`` is the same on all ranks in the
    same step.

    Attributes:
        state: ``off``: nothing is tuned; ``waiting``: no configuration has been tried yet, or the
            service does not answer; ``tuning``: configurations are being tried; ``finished``: a
            round ended with a result; ``failed``: it ended without one.
        reason: why the state is off or failed, or what it waits for; else empty.
        configuration: the one in force, or the one that will be from the next step on.
        default: the configuration that speed-ups are relative to.
        best: the configuration that was kept, or the best so far, which is not confirmed; None:
            not known yet.
        speedup: of ``best`` over ``default``; None: not known.
        low, high: the 95 % interval of the speed-up; None before it is confirmed.
        trials: how many configurations were measured in this round.
        steps: how many training steps the round took; None before its end, like the next three.
        seconds: how long the round took; the training went on meanwhile.
        cost_steps: the time lost to slower trials and re-cuts, in steps of the default.
        cost_seconds: the same in seconds.
        payback_steps: after so many steps the cost is earned back; None where the default was
            kept.
        default_peak_bytes, peak_bytes: the GPU memory that ``default`` and ``best`` take at their
            peak, on the fullest rank; None before the end, and where it is not known.
        device_bytes: what there is of it for that rank.
        summary: how the round ended, in a line; where it has no result, that of the round before
            goes with it. Empty before the end.
        round: 0 is the first; another one follows a lasting change of the step times.
        at_step: the step in which the ranks learned this, counted from the wrapping of the model.
        job: its name; empty where nothing is tuned.
        rank: this process's rank in the model's process group.
        page: the address of the job's web page, on rank 0 as soon as it is known; else empty. It
            may hold the token of the service that rank 0 started.
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
    default_peak_bytes: int | None = None
    peak_bytes: int | None = None
    device_bytes: int | None = None
    summary: str = ""
    round: int = 0
    at_step: int = 0
    job: str = ""
    page: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {words}" if (words := self.summary or self.reason) else self.state

    def to_json(self) -> dict[str, Any]:
        """Return the tuning without the token, in JSON's types."""
        named = {"configuration": self.configuration, "default": self.default, "best": self.best}
        found = {name: each and each.to_json() for name, each in named.items()}
        return {**asdict(self), **found, "page": self.page.partition("#")[0]}


_callbacks: OrderedDict[int, Callback] = OrderedDict()  # as RemovableHandle wants it
_ended: WeakKeyDictionary[object, Tuning] = WeakKeyDictionary()
"""The latest round that ended, by the object that was tuned."""


def on_tuned(callback: AnyCallback) -> RemovableHandle:
    """Call ``callback`` whenever a round of tuning ends, for any model of this process.

    It is called on every rank in the same step, on the training thread, after the optimizer's step
    (before the next forward pass if no optimizer of torch's is used). It is also called for rounds
    that failed, and again when a later round ends. For models whose tuning has already ended it is
    called at once. An exception that it raises is logged, and the training goes on.

    Args:
        callback: takes a :class:`Tuning`, whose ``job`` tells the model.

    Returns:
        A handle; after ``handle.remove()`` the callback is no longer called.

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


FORMAT = 1
STANDARD_OUTPUT = "-"


def write_result_line(path: str, tuning: Tuning) -> None:
    """Append it to the file, or print it where ``path`` is ``-``. A file that cannot be written is
    told, and is no error."""
    at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    document = {"format": FORMAT, "at": at, **tuning.to_json()}
    del document["rank"]  # it is 0
    line = json.dumps(document, allow_nan=False)
    try:
        if path == STANDARD_OUTPUT:
            print(line, flush=True)
            return
        with open(path, "a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        logger.warning("BAGUA_AUTOTUNE_RESULT: the result cannot be written (%s)", error)
