"""Jobs driven step by step over HTTP, so that a test decides when the next thing happens."""

from __future__ import annotations

import time
from typing import Any

import requests

from tests.autotune.support import Ranks, peaked, registration

MIB = 1024**2
TIMEOUT_SECONDS = 30


class DrivenJob:
    """Rank 0 of a job of this project's own client, as far as the service sees it."""

    steps_of_a_report = 5

    def __init__(
        self,
        url: str,
        job_id: str,
        token: str = "",
        **changes: Any,
    ) -> None:
        self.path = f"{url}/api/v2/jobs/{job_id}"
        self.session = requests.Session()
        if token:
            self.session.headers["Authorization"] = f"Bearer {token}".encode()
        self._ranks = Ranks(noise=0.02)
        body = registration(**changes)
        self.state = self._answer(self.session.put(self.path, json=body, timeout=TIMEOUT_SECONDS))

    def get(self, what: str) -> Any:
        return self._answer(self.session.get(f"{self.path}/{what}", timeout=TIMEOUT_SECONDS))

    def run_trials(self, count: int) -> None:
        """Run so many trials, or what is left of them."""
        for _ in range(count):
            trial = self.state["trial"]
            while self.state["trial"] and self.state["trial"] == trial:
                self._report()
                trial = {**trial, "state": "running"}

    def finish(self) -> None:
        while self.state["trial"]:
            self._report()

    def drift(self, factor: float) -> None:
        """All steps take so many times as long from now on, which the ranks tell."""
        step = self._ranks.step
        self._ranks = Ranks(noise=0.02, step_seconds=lambda ran: factor * peaked(ran))
        self._ranks.step = step
        self._tell(kind="drift", step=step, message="slower", seconds=0.2 * factor)

    def _tell(self, **event: Any) -> None:
        self._take(self.session.post(f"{self.path}/events", json=event, timeout=TIMEOUT_SECONDS))

    def _report(self, count: int | None = None) -> None:
        steps = [
            {"step": step, "seconds": seconds, "compute_seconds": [0.8 * s for s in seconds]}
            for step, seconds in self._ranks.run(
                self.state["configuration"], count or self.steps_of_a_report
            )
        ]
        body = {"trial": self.state["trial"]["index"], "steps": steps}
        self._take(self.session.post(f"{self.path}/observations", json=body))

    def _take(self, response: requests.Response) -> None:
        """The state that is answered, once nothing is being decided."""
        self.state = self._answer(response)
        while self.state["deciding"]:
            time.sleep(0.01)
            self.state = self.get("state")

    @staticmethod
    def _answer(response: requests.Response) -> Any:
        response.raise_for_status()
        return response.json()


def run_bagua_job(url: str, model: str, windows: int) -> None:
    """Two ranks of a Bagua job, whose protocol has speeds and no step times."""

    def post(route: str, **body: Any) -> Any:
        body["model_name"] = model
        response = requests.post(f"{url}/api/v1/{route}", json=body, timeout=TIMEOUT_SECONDS)
        response.raise_for_status()
        return response.json()

    tensors = [{"name": f"w{i}", "num_elements": MIB, "dtype": "f32"} for i in range(8)]
    ran = post("register_tensors", tensor_list=tensors)["recommended_hyperparameters"]
    for window in range(1, windows + 1):
        where = {"train_iter": 100 * window}
        speed = 100.0 + ran["bucket_size"] / MIB
        for rank in (0, 1):
            post("report_metrics", rank=rank, hyperparameters=ran, speed=speed, **where)
        for rank in (0, 1):
            ran = post("ask_hyperparameters", rank=rank, **where)["recommended_hyperparameters"]
        time.sleep(0.02)
