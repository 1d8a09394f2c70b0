"""What the ranks know of their tuning, and when they tell it; see bagua_client.tuning."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from bagua_client import tuning
from bagua_client.configuration import Configuration
from bagua_client.result_line import write_result_line
from bagua_client.tuning import Tuning

ENDED_FIRST = "the training ended before its tuning did"


class Outcome:
    """Of one model's tuning, on one rank. All ranks do each of this in the same step, but for
    :meth:`close`.

    The end of a round comes to be known in a backward pass, which on a GPU is another thread's:
    who waits for it is called at the optimizer's step, or at the next forward pass.

    Args:
        job: its name.
        rank: this one.
        default: the job's.
        path: where rank 0 writes result lines; None: nowhere.

    Attributes:
        page: gives the job's, as soon as it is known.
    """

    def __init__(self, job: str, rank: int, default: Configuration, path: str | None) -> None:
        self._first = self._known = Tuning(
            state="waiting", configuration=default, default=default, job=job, rank=rank
        )
        self.page: Callable[[], str] = str
        self._path = path if rank == 0 else None
        self._process = os.getpid()
        self._untold: Tuning | None = None
        self._handle: RemovableHandle | None = None
        self._is_over = False
        if self._path is not None:
            atexit.register(self.close)

    def now(self, configuration: Configuration) -> Tuning:
        """What is known, while that configuration is in force."""
        return replace(self._known, configuration=configuration, page=self.page())

    def follow(self, told: Mapping[str, Any], configuration: Configuration, step: int) -> None:
        """All ranks were told what the reporter says with a command.

        Args:
            told: fields of a Tuning; empty: nothing is new.
            configuration: that will be in force.
            step: of now.
        """
        if not told:
            return
        now = {"configuration": configuration, "at_step": step, "best": _read(told.get("best"))}
        self._known = replace(self._first, **{"round": self._known.round, **told, **now})
        self._is_over = self._known.state in ("finished", "failed")
        if self._is_over:
            self._wait_to_tell()

    def fail(self, reason: str, configuration: Configuration, step: int) -> None:
        """The tuning ends by an error that all ranks know of. A result that is there stays."""
        if not self._is_over:
            self.follow({"state": "failed", "reason": reason}, configuration, step)

    def deliver(self) -> None:
        """Tell what is to be told; on the training thread."""
        untold, self._untold = self._untold, None
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if untold is None:
            return
        untold = replace(untold, page=self.page())
        if self._path is not None:
            write_result_line(self._path, untold)
        tuning.tell(self, untold)

    def close(self) -> None:
        """The training is over on this rank: nobody is called any more, but scripts want a line."""
        atexit.unregister(self.close)
        if self._path is None or os.getpid() != self._process:
            return
        if not self._is_over:
            self._untold = replace(self._known, state="failed", reason=ENDED_FIRST)
        path, self._path = self._path, None
        if self._untold is not None:
            write_result_line(path, replace(self._untold, page=self.page()))

    def _wait_to_tell(self) -> None:
        self._untold = self._known
        if self._handle is None:
            self._handle = register_optimizer_step_post_hook(lambda *_: self.deliver())


def _read(configuration: Mapping[str, Any] | None) -> Configuration | None:
    """None, too, for one of a knob that only other ranks of the job's earlier lives knew."""
    if configuration is None:
        return None
    try:
        return Configuration.from_json(configuration)
    except ValueError:
        return None
