"""What a rank of Bagua sends to a service, as fast as it may: a report of its speed, and an ask.

The bodies are those of Bagua's client; the hyperparameters that a report carries are those that the
service told last, with all of their buckets. A model that is tuned to its end is followed by a new
one, so that there is always something to propose.
"""

from __future__ import annotations

import json
import math
import random
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.support.load import Connection

TENSORS, ELEMENTS = 161, 160_000
"""A model of 103 MB: 10 buckets at Bagua's default."""
ITERATIONS = 100
"""Of Bagua's worker, from one report to the next."""
BEST_BUCKET_POWER = 22
NOISE = 0.01


@dataclass(frozen=True)
class Worker:
    """One connection and its models.

    Attributes:
        begins_at, ends_at: pairs that end between them count; on the monotonic clock.
        is_tuned: its speed depends on the hyperparameters; else it wanders so much that this
            project's service waits for it to settle, and Bagua's has a long warm-up.
        pause_seconds: from one pair to the next.
    """

    port: int
    name: str
    begins_at: float
    ends_at: float
    is_tuned: bool = False
    pause_seconds: float = 0.0


@dataclass(frozen=True)
class Sent:
    """Pairs that counted, and how often other hyperparameters were told."""

    pairs: int
    proposals: int


def work(worker: Worker) -> Sent:
    """Send pairs until the time is over."""
    connection, draw = Connection(worker.port), random.Random(worker.name)
    pairs = proposals = models = 0
    while time.monotonic() < worker.ends_at:
        models += 1
        model = _Model(connection, f"{worker.name}-{models}")
        is_completed = False
        while not is_completed and time.monotonic() < worker.ends_at:
            is_new, is_completed = model.send_pair(_speed(model, worker.is_tuned, draw))
            if worker.begins_at <= time.monotonic() < worker.ends_at:
                pairs += 1
                proposals += is_new
            time.sleep(worker.pause_seconds)
    return Sent(pairs, proposals)


class _Model:
    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._name = json.dumps(name)
        self.iteration = 0
        tensors = [
            {"name": f"layer.{i}.weight", "num_elements": ELEMENTS, "dtype": "f32"}
            for i in range(TENSORS)
        ]
        content = {"model_name": name, "tensor_list": tensors, "whether_to_bucket": True}
        connection.post("/api/v1/register_tensors", json.dumps(content).encode())
        self._answer = b""
        self.told: dict[str, Any] = {}
        self._told_text = ""
        self._ask()

    def send_pair(self, speed: float) -> tuple[bool, bool]:
        """Whether other hyperparameters are told, and whether they are the last."""
        self.iteration += ITERATIONS
        content = (
            f'{{"model_name": {self._name}, "rank": 0, "train_iter": {self.iteration}, '
            f'"hyperparameters": {self._told_text}, "speed": {speed}}}'
        )
        self._connection.post("/api/v1/report_metrics", content.encode())
        return self._ask()

    def _ask(self) -> tuple[bool, bool]:
        content = f'{{"model_name": {self._name}, "rank": 0, "train_iter": {self.iteration}}}'
        answer = self._connection.post("/api/v1/ask_hyperparameters", content.encode())
        if answer == self._answer:  # what it tells need not be read again
            return False, False
        self._answer, told = answer, json.loads(answer)
        self.told = told["recommended_hyperparameters"]
        self._told_text = json.dumps(self.told)
        return True, told["is_autotune_completed"]


def _speed(model: _Model, is_tuned: bool, draw: random.Random) -> float:
    if not is_tuned:
        return 1.0 + (model.iteration // ITERATIONS) % 2
    distance = abs(math.log2(model.told["bucket_size"]) - BEST_BUCKET_POWER)
    return (10 - 0.5 * distance) * draw.gauss(1, NOISE)
