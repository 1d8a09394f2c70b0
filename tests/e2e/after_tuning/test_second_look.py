"""An algorithm that wins the tuning and harms the training only later is given up, for good."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from unittest import mock

import pytest
import requests
import torch
import torch.distributed as dist
from torch import nn

from bagua_client import DistributedDataParallel
from bagua_client.algorithms import GradientAllReduceAlgorithm, register
from bagua_client.communication.communicator import Communicator
from bagua_client.communication.operations import Operation
from bagua_client.configuration import Configuration
from tests.e2e.programs.training import Lines
from tests.e2e.service import ServiceProcess
from tests.ranks import RankPool
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

WIDTH, BATCH = 64, 32
HELD_UP_SECONDS, STEP_SECONDS = 0.02, 0.003
BIAS_PER_STEP = 5e-6
STEPS_AFTER = 60
MOST_STEPS = 20_000
MOST_SECONDS = 120.0


@dataclass
class HoldUp:
    """What travels by the job's own way takes long."""

    def start(self, flat: torch.Tensor) -> None:
        time.sleep(HELD_UP_SECONDS)


class Usual(GradientAllReduceAlgorithm):
    """Averages gradients, slowly."""

    def operations(
        self, communicator: Communicator, configuration: Configuration, channel: int
    ) -> Sequence[Operation]:
        return [*super().operations(communicator, configuration, channel), HoldUp()]

    def __init__(self) -> None:
        super().__init__()
        self.is_torchs = False


@dataclass
class Bias:
    """Adds a little to all gradients."""

    amount: float = 0.0

    def start(self, flat: torch.Tensor) -> None:
        flat += self.amount


BIAS = Bias()


class Drifting(GradientAllReduceAlgorithm):
    """Averages gradients fast, and adds what :data:`BIAS` says."""

    def __init__(self) -> None:
        super().__init__()
        self.is_torchs = False

    def operations(
        self, communicator: Communicator, configuration: Configuration, channel: int
    ) -> Sequence[Operation]:
        return [*super().operations(communicator, configuration, channel), BIAS]


@dataclass
class Course:
    """What became of the job on one rank.

    Attributes:
        algorithms: in force after each step, or from the next one on; empty: the job's own.
        told_at: the step in which all ranks were told what the training was waiting for.
        summaries: how its rounds ended, as all ranks were told.
        logged: the client's log lines.
    """

    algorithms: list[str] = field(default_factory=list)
    told_at: int = 0
    summaries: list[str] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)


def _train(awaited: str) -> Course:
    """Train until a round ends with these words, and some steps more."""
    register("drifting")(Drifting)
    handler = Lines()
    logger = logging.getLogger("bagua_client")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    # A busy machine's steps change by themselves, and a further round might meet the harm first.
    settings = {"BAGUA_AUTOTUNE_ALLOW": "drifting", "BAGUA_AUTOTUNE_MAX_ROUNDS": "1"}
    torch.manual_seed(7)
    with mock.patch.dict(os.environ, settings):
        model = DistributedDataParallel(nn.Linear(WIDTH, 4), algorithm=Usual())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    teacher = torch.linspace(-1, 1, 4 * WIDTH).reshape(WIDTH, 4)
    course, until = Course(), time.monotonic() + MOST_SECONDS
    for step in range(MOST_STEPS):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        inputs = torch.randn(BATCH, WIDTH, generator=generator)
        noise = torch.randn(BATCH, 4, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs @ teacher / 8 + noise)
        model.report_loss(loss)
        loss.backward()
        optimizer.step()
        course.algorithms.append(model.configuration.algorithm)
        summary = model.tuning.summary
        if summary not in ("", *course.summaries[-1:]):
            course.summaries.append(summary)
        time.sleep(STEP_SECONDS)
        if not model.is_tuning:
            BIAS.amount += BIAS_PER_STEP
        if summary and awaited in summary and not course.told_at:
            course.told_at = step
        if (course.told_at and step > course.told_at + STEPS_AFTER) or time.monotonic() > until:
            break
    logger.removeHandler(handler)
    course.logged = handler.lines
    return course


def _alike(courses: list[Course]) -> Course:
    """All ranks ran the same in the same step, and were told the same."""
    first, second = courses
    assert (first.algorithms, first.summaries) == (second.algorithms, second.summaries)
    return first


def test_a_winner_that_harms_the_training_slowly_is_given_up_for_good(
    service: ServiceProcess, tuned_ranks: Callable[..., RankPool]
) -> None:
    service.start()
    course = _alike(tuned_ranks(service.url, (1, 1)).run(_train, "suffered", timeout_seconds=250))
    assert course.told_at, course.logged
    assert set(course.algorithms[course.told_at :]) == {""}
    (gave_up,) = [line for line in course.logged if "autotune stops using" in line]
    assert "drifting" in gave_up
    assert "was to be expected, as a training by default does not turn back" in gave_up
    # It is the fastest, and harmless at first.
    won, returned = course.summaries
    assert "algorithm drifting (changes the numbers)" in won
    assert "(the default) kept: the training suffered in the long run: the loss is" in returned
    assert "drifting" in course.algorithms
    wait_until(lambda: service.job()["result"]["kept"] == "baseline", "the result")
    job, trials = service.job(), service.trials()
    assert job["result"]["summary"] == returned
    assert trials[-1]["state"] == "failed"
    assert trials[-1]["configuration"]["algorithm"] == "drifting"
    assert trials[-1]["failure"].startswith("the training suffered in the long run: the loss is")
    metrics = requests.get(f"{service.url}/metrics", timeout=30).text
    for family in ("job_result", "trial_failures_total"):
        (line,) = [
            line
            for line in metrics.splitlines()
            if line.startswith(f"bagua_autotune_{family}{{") and 'reason="diverged"' in line
        ]
        assert float(line.rpartition(" ")[2]) >= 1

    again = _alike(tuned_ranks(service.url, (1, 1)).run(_train, "", timeout_seconds=250))
    assert set(again.algorithms) == {""}
    newest = service.get("jobs")["jobs"][0]
    assert newest["id"] != job["id"]
    notes = service.get(f"jobs/{newest['id']}/events")["events"]
    assert any("BAGUA_AUTOTUNE_FRESH=1 forgets that" in event["message"] for event in notes)
