"""HTTP client of the service (API v2), used by the reporter thread of rank 0."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from bagua_client.service.transport import ServiceUnavailable, Transport
from bagua_wire.messages import BEING_TUNED
from bagua_wire.profile import Profile

RESULT_NUMBERS = {
    **dict.fromkeys(("speedup", "low", "high", "seconds", "cost_steps", "cost_seconds"), float),
    **dict.fromkeys(("trials", "steps", "payback_steps"), int),
    **dict.fromkeys(("default_peak_bytes", "peak_bytes", "device_bytes"), int),
}


@dataclass(frozen=True)
class JobState:
    """What the service wants the ranks to run.

    Attributes:
        trial: the trial to run; None: tuning has ended, or the next trial is being chosen.
        configuration: the configuration that all ranks should run now, by knob.
        trials_measured: number of trials measured so far.
        max_trials: maximum number of trials before the best and the default are measured again.
        speedup: speed-up of the best trial so far over the default; None: not known yet.
        summary: the result in one line; None: tuning has not ended.
        deciding: whether the next trial is being chosen, with the last one still open or with no
            open trial; ask again soon.
        round: number of the tuning: 0 is the first; another one follows a lasting change.
        incumbent: the best configuration so far; None: not known.
        result: the known numbers of the result, by their names in RESULT_NUMBERS.
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
        """Read the service's answer.

        Raises:
            ServiceUnavailable: the document is not the state of a job.
        """
        try:
            trial, progress, result = document["trial"], document["progress"], document["result"]
            state = cls(
                trial=None if trial is None else int(trial["index"]),
                configuration=dict(document["configuration"]),
                trials_measured=int(progress["trials_measured"]),
                max_trials=int(progress["max_trials"]),
                speedup=_numbers(progress).get("speedup"),
                summary=None if result is None else str(result["summary"]),
                deciding=bool(document["deciding"])
                or (trial is None and document.get("state") in BEING_TUNED),
                round=int(document["round"]),
                incumbent=dict(found) if (found := progress.get("incumbent")) else None,
                result=_numbers(result or {}),
            )
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise ServiceUnavailable(f"its answer is not the state of a job ({error!r})") from error
        return state


def _numbers(result: Mapping[str, Any]) -> dict[str, float]:
    """The known numbers of the result."""
    said = {name: result[name] for name in RESULT_NUMBERS if result.get(name) is not None}
    return {name: RESULT_NUMBERS[name](said[name]) for name in said if math.isfinite(said[name])}


class StepTimes(NamedTuple):
    """The times of one step on all ranks.

    Attributes:
        step: the step's number.
        seconds: duration of the step on each rank.
        compute_seconds: how long each rank computed in it; None: not known for all ranks.
        complexity: of the largest batch of a rank; None: not known for all ranks.
    """

    step: int
    seconds: Sequence[float]
    compute_seconds: Sequence[float] | None = None
    complexity: float | None = None


class Progress(NamedTuple):
    """How far the training of a tuned job has got.

    Attributes:
        step: number of the last step.
        seconds: median duration of the latest steps; a step takes as long as its slowest rank.
    """

    step: int
    seconds: float


class ServiceClient:
    """One job at one service.

    All methods except :meth:`copy` and :meth:`bring` return the job's state. All raise the errors
    of :meth:`bagua_client.service.transport.Transport.send`; JobUnknown means that the job is not
    (or no longer) registered, or that the service has no such request.
    """

    def __init__(self, url: str, job_id: str, token: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._copies_url = f"{self.url}/api/v2/copies"
        self._job_url = f"{self.url}/api/v2/jobs/{job_id}"
        self._transport = Transport(token)
        self.cut, self.close = self._transport.cut, self._transport.close

    def register(self, description: Mapping[str, Any]) -> JobState:
        return self._send("PUT", self._job_url, description)

    def state(self) -> JobState:
        return self._send("GET", f"{self._job_url}/state", None)

    def copy(self) -> dict[str, Any]:
        """Return what the service knows of the job, to be given to the service of another host."""
        copy = self._transport.send("GET", f"{self._job_url}/copy", None)
        if not isinstance(copy, dict):
            raise ServiceUnavailable("its answer is no copy of a job")
        return copy

    def bring(self, copy: Mapping[str, Any]) -> int:
        """Give the service a copy from another host's. Returns how many jobs were new to it."""
        answer = self._transport.send("POST", self._copies_url, copy)
        adopted = answer.get("jobs") if isinstance(answer, dict) else None
        return adopted if isinstance(adopted, int) else 0

    def observe(
        self, trial: int, steps: Sequence[StepTimes], memory: Mapping[str, Any] | None = None
    ) -> JobState:
        known = [{k: v for k, v in step._asdict().items() if v is not None} for step in steps]
        body = {"trial": trial, "steps": known, **({} if memory is None else {"memory": memory})}
        return self._send("POST", f"{self._job_url}/observations", body)

    def renew(self, progress: Progress | None = None) -> JobState:
        """Report that the training is running and, now and then once it is tuned, its progress."""
        if progress is None:
            return self.observe(0, [])
        return self._send("POST", f"{self._job_url}/progress", progress._asdict())

    def profile(self, trial: int, profile: Profile) -> JobState:
        body = {"trial": trial, **asdict(profile)}
        return self._send("POST", f"{self._job_url}/profiles", body)

    def event(
        self,
        kind: str,
        trial: int | None,
        step: int,
        message: str,
        seconds: float | None,
        memory: Mapping[str, Any] | None = None,
    ) -> JobState:
        body: dict[str, Any] = {"kind": kind, "trial": trial, "step": step, "message": message}
        body["seconds"] = seconds
        if memory is not None:
            body["memory"] = memory
        return self._send("POST", f"{self._job_url}/events", body)

    def _send(self, method: str, url: str, body: Mapping[str, Any] | None) -> JobState:
        return JobState.from_json(self._transport.send(method, url, body))
