"""The service over HTTP, as rank 0's reporter thread uses it (API v2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from bagua_client.transport import ServiceUnavailable, Transport

UNFINISHED = ("tuning", "confirming")
"""States of a job that has a next trial, also while it is between two."""
RESULT_NUMBERS = {
    **dict.fromkeys(("speedup", "low", "high", "seconds", "cost_steps", "cost_seconds"), float),
    **dict.fromkeys(("trials", "steps", "payback_steps"), int),
}


@dataclass(frozen=True)
class JobState:
    """What the service wants the ranks to run.

    Attributes:
        trial: the trial to run; None: tuning has ended, unless the next one is being chosen.
        configuration: what all ranks should run now, by knob.
        trials_measured: trials done so far.
        max_trials: at most so many are made before the best is measured again, in turns.
        speedup: of the best trial so far over the baseline; None: not known yet.
        summary: the result in a line, once tuning has ended.
        deciding: the next trial is being chosen, with the last one still open or none at all;
            ask again soon.
        round: 0 is the first tuning; another one follows a lasting change.
        incumbent: the best configuration so far; None: not known.
        result: numbers of the result that are known, by RESULT_NUMBERS' names.
    """

    trial: int | None
    configuration: Mapping[str, Any]
    trials_measured: int
    max_trials: int
    speedup: float | None
    summary: str | None
    deciding: bool = False
    round: int = 0
    incumbent: Mapping[str, Any] | None = None
    result: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_json(cls, document: Any) -> JobState:
        """Raises ServiceUnavailable if the document is not a job's state."""
        try:
            trial, progress, result = document["trial"], document["progress"], document["result"]
            state = cls(
                trial=None if trial is None else int(trial["index"]),
                configuration=dict(document["configuration"]),
                trials_measured=int(progress["trials_measured"]),
                max_trials=int(progress["max_trials"]),
                speedup=_numbers(progress).get("speedup"),
                summary=None if result is None else str(result["summary"]),
                # Earlier services decided before they answered.
                deciding=bool(document.get("deciding", False))
                or (trial is None and document.get("state") in UNFINISHED),
                round=int(document.get("round", 0)),
                incumbent=dict(found) if (found := progress.get("incumbent")) else None,
                result=_numbers(result or {}),
            )
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise ServiceUnavailable(f"its answer is not the state of a job ({error!r})") from error
        return state


def _numbers(result: Mapping[str, Any]) -> dict[str, float]:
    """Those that are known. Services of other releases say less, or more."""
    said = {name: result[name] for name in RESULT_NUMBERS if result.get(name) is not None}
    return {name: RESULT_NUMBERS[name](said[name]) for name in said if math.isfinite(said[name])}


class StepTimes(NamedTuple):
    """One step of all ranks.

    Attributes:
        step: its number.
        seconds: each rank's.
        compute_seconds: how long of that each rank computed; None: not all of them know.
        complexity: of the largest batch of a rank; None: not all of them know theirs.
    """

    step: int
    seconds: Sequence[float]
    compute_seconds: Sequence[float] | None = None
    complexity: float | None = None


@dataclass(frozen=True)
class BucketTiming:
    """One bucket's way in a step.

    Attributes:
        bytes: of its tensors, without padding.
        started_seconds: when it was handed to its process group.
        ended_seconds: when the last of its operations was done.
    """

    bytes: int
    started_seconds: float
    ended_seconds: float


@dataclass(frozen=True)
class Profile:
    """One step of rank 0 in detail. All times count from the end of the previous step's
    communication.

    Attributes:
        trial: the trial it belongs to.
        step: its number.
        step_seconds: the end of its own communication.
        ready_seconds: when each tensor became ready, in the registered order.
        buckets: in the order of the layout.
    """

    trial: int
    step: int
    step_seconds: float
    ready_seconds: Sequence[float]
    buckets: Sequence[BucketTiming]


class Progress(NamedTuple):
    """How far a tuned job is.

    Attributes:
        step: the last one that was made.
        seconds: median of the latest steps, each of its slowest rank.
    """

    step: int
    seconds: float


class ServiceClient:
    """One job at one service. Every method but those of copies answers with the job's state; all
    raise what :meth:`bagua_client.transport.Transport.send` does; JobUnknown says that the job is
    not registered (any more), or that there is no such request."""

    def __init__(self, url: str, job_id: str, token: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._copies_url = f"{self.url}/api/v2/copies"
        self._job_url = f"{self.url}/api/v2/jobs/{job_id}"
        self._transport = Transport(token)

    def register(self, description: Mapping[str, Any]) -> JobState:
        return self._send("PUT", self._job_url, description)

    def state(self) -> JobState:
        return self._send("GET", f"{self._job_url}/state", None)

    def copy(self) -> dict[str, Any]:
        """What is known of the job, for the service of another host."""
        copy = self._transport.send("GET", f"{self._job_url}/copy", None)
        if not isinstance(copy, dict):
            raise ServiceUnavailable("its answer is no copy of a job")
        return copy

    def bring(self, copy: Mapping[str, Any]) -> int:
        """Give it what another host's service knew; how many jobs it had not known."""
        answer = self._transport.send("POST", self._copies_url, copy)
        adopted = answer.get("jobs") if isinstance(answer, dict) else None
        return adopted if isinstance(adopted, int) else 0

    def observe(self, trial: int, steps: Sequence[StepTimes]) -> JobState:
        # What is not known is left out: an earlier service does not know all of it.
        known = [{k: v for k, v in step._asdict().items() if v is not None} for step in steps]
        body = {"trial": trial, "steps": known}
        return self._send("POST", f"{self._job_url}/observations", body)

    def renew(self, progress: Progress | None = None) -> JobState:
        """The training lives; once it is tuned, and at times, also how far it is."""
        if progress is None:
            return self.observe(0, [])
        return self._send("POST", f"{self._job_url}/progress", progress._asdict())

    def profile(self, profile: Profile) -> JobState:
        return self._send("POST", f"{self._job_url}/profiles", asdict(profile))

    def event(
        self, kind: str, trial: int | None, step: int, message: str, seconds: float | None
    ) -> JobState:
        body = {"kind": kind, "trial": trial, "step": step, "message": message, "seconds": seconds}
        return self._send("POST", f"{self._job_url}/events", body)

    def _send(self, method: str, url: str, body: Mapping[str, Any] | None) -> JobState:
        return JobState.from_json(self._transport.send(method, url, body))
