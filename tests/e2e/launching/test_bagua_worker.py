"""Bagua's own client and messages, from its release on PyPI, drive whole tunings.

Real HTTP to a real service process; the ranks are processes of their own that meet at a barrier
in each window, as training does.  The objective is that of Bagua's own test: buckets of 20 MiB
are best, and hierarchical is 10 % worse.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import requests

from tests.e2e.service import ServiceProcess
from tests.outside import BAGUA, folder_of

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

MI = 1024**2
WORLD_SIZE = 2
# The ranks do not wait for decisions: so many windows that these are over however slow they are.
MOST_WINDOWS = 20_000
WINDOW_SECONDS = 0.01
WINDOWS_BEFORE_RESTART = 5
NOISE, SLOWER = 0.02, 0.2
"""Of every speed, and how much slower rank 1 is: relative."""


@dataclass(frozen=True)
class Model:
    """``tensors``: name, Mi elements, dtype.  ``order``: as spans tell it; empty: no spans."""

    name: str
    tensors: list[tuple[str, int, str]]
    best: list[list[str]]
    order: list[str] = field(default_factory=list)


FIVE = [(name, size, "f32") for name, size in zip("ABCDE", range(1, 6), strict=True)]
MODELS = [
    Model("basic", FIVE, [["A", "B", "C"], ["D"], ["E"]]),
    Model(
        "mixed_precision",
        [("A", 1, "f32"), ("B", 3, "f32"), ("C", 5, "f16"), ("D", 7, "f16"), ("E", 11, "f32")],
        [["C", "D"], ["A", "B"], ["E"]],
    ),
    Model("out_of_order", FIVE, [["D"], ["E"], ["A", "B", "C"]], list("DEABC")),
]


@pytest.fixture
def bagua_service(service: ServiceProcess, monkeypatch: pytest.MonkeyPatch) -> ServiceProcess:
    """Started as Bagua's launcher would, with Bagua's variables."""
    monkeypatch.setenv("WORLD_SIZE", str(WORLD_SIZE))
    # So long that windows are counted instead: the speed of this machine decides nothing.
    monkeypatch.setenv("BAGUA_AUTOTUNE_WARMUP_TIME_S", "3600")
    monkeypatch.setenv("BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S", "3600")
    service.start()
    return service


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a model wait: for each other, and for the service's restart."""

    barrier: Any
    reached: Any
    go_on: Any


@dataclass(frozen=True)
class Rank:
    """One worker process; its speeds are ``slowness`` times the objective, with noise."""

    model: Model
    rank: int
    port: int
    model_name: str
    release: str
    slowness: float

    def train(self, meeting: Meeting, results: Any) -> None:
        """What Bagua's BaguaDistributedDataParallel does with the service."""
        # Bagua was written for pydantic 1.
        warnings.filterwarnings("ignore", module="pydantic")
        sys.path.insert(0, self.release)
        from bagua.bagua_define import BaguaHyperparameter
        from bagua.service import AutotuneClient

        client = AutotuneClient("127.0.0.1", self.port)
        noise = random.Random(f"{self.model.name} {self.rank}")
        hyperparameters = BaguaHyperparameter()
        answer = _checked(client.register_tensors(self.model_name, self._tensors()))
        answer = _checked(client.ask_hyperparameters(self.model_name, self.rank, 0))
        for window in range(1, MOST_WINDOWS):
            meeting.barrier.wait()
            if window == WINDOWS_BEFORE_RESTART:
                meeting.reached.set()
                meeting.go_on.wait()
            hyperparameters.update(answer["recommended_hyperparameters"])
            if answer["is_autotune_completed"]:
                break
            time.sleep(WINDOW_SECONDS)  # a window is 100 iterations of training
            speed = self._score(hyperparameters) * noise.gauss(self.slowness, NOISE)
            iteration = 100 * window
            _checked(
                client.report_metrics(
                    self.model_name,
                    self.rank,
                    iteration,
                    hyperparameters.model_dump(warnings=False),
                    speed,
                )
            )
            _checked(client.report_tensor_execution_order(self._spans()))
            answer = _checked(client.ask_hyperparameters(self.model_name, self.rank, iteration))
        meeting.reached.set()
        names = [[t["name"].rpartition(".")[2] for t in b] for b in hyperparameters.buckets]
        results.put((self.model.name, self.rank, window, names, answer["is_autotune_completed"]))

    def _tensors(self) -> list[Any]:
        from bagua.bagua_define import TensorDeclaration

        return [
            TensorDeclaration(name=f"{self.model.name}.{name}", num_elements=size * MI, dtype=dtype)
            for name, size, dtype in self.model.tensors
        ]

    def _spans(self) -> list[Any]:
        """Sent in the order of the names, told apart by their times, as an exporter may do."""
        from bagua.bagua_define import BaguaCoreTelemetrySpan

        return [
            BaguaCoreTelemetrySpan(
                trace_id=2**128 - 1 - time,
                action="tensor_ready",
                tensor_name=f"{self.model.name}.{name}",
                start_time=1_700_000_000_000 + time,
                end_time=1_700_000_000_001 + time,
            )
            for name, time in sorted((name, i) for i, name in enumerate(self.model.order))
        ]

    def _score(self, hyperparameters: Any) -> float:
        from bagua.bagua_define import get_tensor_declaration_bytes

        sizes = [sum(map(get_tensor_declaration_bytes, b)) for b in hyperparameters.buckets]
        score = -float(sum(abs(size - 20 * MI) for size in sizes))
        return score * (1.1 if hyperparameters.is_hierarchical_reduce else 1.0)


def _checked(response: requests.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def tune(service: ServiceProcess) -> list[Any]:
    """Run two ranks of each model at once, whose names differ by process, as those with an ``id()``
    do; kill and restart the service in the middle, while the ranks wait. What each ended with."""
    release = str(folder_of(BAGUA))
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    meetings, processes = [], []
    for model in MODELS:
        meeting = Meeting(context.Barrier(WORLD_SIZE), context.Event(), context.Event())
        meetings.append(meeting)
        for number in range(WORLD_SIZE):
            name = f"{model.name}_14023423423423{number}"
            worker = Rank(model, number, service.port, name, release, 1 + SLOWER * number)
            processes.append(context.Process(target=worker.train, args=(meeting, results)))
    try:
        for process in processes:
            process.start()
        for meeting in meetings:
            assert meeting.reached.wait(240)
        service.kill()
        service.start()
        for meeting in meetings:
            meeting.go_on.set()
        return sorted(results.get(timeout=400) for _ in processes)
    finally:
        for process in processes:
            process.terminate()
            process.join()


def test_bagua_s_own_client_tunes_three_models_on_two_ranks(bagua_service):
    results = tune(bagua_service)
    for model in MODELS:
        ranks = [result for result in results if result[0] == model.name]
        assert [rank for _, rank, *_ in ranks] == [0, 1]
        windows = {window for _, _, window, _, _ in ranks}
        assert len(windows) == 1, "the ranks did not end in the same window"
        for _, _, _, buckets, is_completed in ranks:
            assert is_completed
            assert buckets == model.best
    jobs = bagua_service.get("jobs")["jobs"]
    assert sorted(job["name"] for job in jobs) == sorted(model.name for model in MODELS)
    assert {job["state"] for job in jobs} == {"finished"}
    assert {job["result"]["kept"] for job in jobs} == {"winner"}
    for job in jobs:
        print(job["name"], job["result"]["summary"])
