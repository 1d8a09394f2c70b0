"""What the service says is what the ranks run: every knob, on all of them, in the same step."""

from __future__ import annotations

import json
import math
import random
import time
import zlib
from itertools import groupby
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.agent import report
from bagua_client.agent.report import ROOM_BYTES
from bagua_client.integrations.distributed_data_parallel import tunable_of
from bagua_client.measuring.clock import CpuClock
from bagua_client.reporter.conversation import told_of
from bagua_client.service.client import JobState
from bagua_client.torch_private import reducer as torchs
from bagua_wire.knobs import KNOBS
from tests.client.agent.scripted_service import ScriptedService, tuned_at
from tests.ranks import RankPool

MOST_STEPS = 4000
TRIED = [
    Configuration(first_bucket_bytes=2**20),
    Configuration(2000, channels=4),
    Configuration(3000, first_bucket_bytes=1, last_bucket_bytes=1500),
    Configuration(1000, "shards", channels=2, buckets=(1, 2, 3, 4)),
    Configuration(1000, channels=2, buckets=(9, 1)),
]


def _tune(
    url: str, last: Configuration = TRIED[-1], count: int = 10
) -> list[tuple[Configuration, list[int], float]]:
    """After each step the configuration, the tensors by bucket, and a gradient's value."""
    layers = [torch.nn.Linear(16, 16, bias=False) for _ in range(count)]
    with tuned_at(url):
        model = DistributedDataParallel(torch.nn.Sequential(*layers))
    seen = []
    while len(seen) < MOST_STEPS and (model.is_tuning or model.configuration != last):
        model.zero_grad()
        model(torch.ones(1, 16) * (dist.get_rank() + 1)).sum().backward()
        tensors = [len(bucket) for bucket in tunable_of(model).layout.partition]
        gradient = layers[0].weight.grad
        assert gradient is not None
        seen.append((model.configuration, tensors, float(gradient.sum())))
    return seen


@pytest.mark.skipif(
    not torchs.HAS_BUCKET_CAPS, reason="torch before 2.11 cannot set the size of each bucket"
)
def test_all_ranks_run_what_the_service_says(four_ranks: RankPool) -> None:
    with ScriptedService([[configuration.to_json() for configuration in TRIED]]) as service:
        first, *others = four_ranks.run(_tune, service.url)
        assert service.bodies("disagreement") == []
        (registration,) = service.bodies("PUT")
    assert others == [first] * 3
    assert [configuration for configuration, _ in groupby(first, lambda step: step[0])] == TRIED
    tensors = {configuration: buckets for configuration, buckets, _ in first}
    assert tensors[TRIED[0]] == [10]
    # A tensor is 1024 bytes.
    assert tensors[TRIED[1]] == [2] * 5
    assert tensors[TRIED[2]] == [1, 3, 3, 1, 2]
    assert tensors[TRIED[3]] == [1, 2, 3, 4]
    assert tensors[TRIED[4]] == [9, 1]
    gradients = [gradient for *_, gradient in first]
    assert gradients == pytest.approx([gradients[0]] * len(gradients), rel=1e-4, abs=0)
    # What is tried is what the client offered.
    offered = registration["knobs"]
    # What changes the numbers only where it is allowed.
    assert set(offered) == set(registration["default_configuration"])
    assert set(offered) == set(TRIED[0].to_json()) - {"wire_precision", "algorithm"}
    assert offered["channels"] == {"type": "categorical", "values": [1, 2, 4, 8, 16]}
    assert offered["hierarchical"]["values"] == ["off", "leaders", "shards"]
    for edge in ("first_bucket_bytes", "last_bucket_bytes"):
        assert offered[edge] == {"type": "categorical", "values": [0, 2**20, 2**22]}
    assert offered["buckets"] == {"type": "partition"}


def _tune_long_steps(url: str, last: Configuration) -> None:
    """As if the hook were a small part of a step."""
    with mock.patch.object(report, "MOST_SHARE", math.inf):
        _tune(url, last)


@pytest.mark.skipif(
    not torchs.HAS_BUCKET_CAPS, reason="torch before 2.11 cannot set the size of each bucket"
)
def test_all_steps_until_a_switch_are_told_but_the_two_of_the_switch(two_ranks: RankPool) -> None:
    with ScriptedService([[configuration.to_json() for configuration in TRIED[:3]]]) as service:
        two_ranks.run(_tune_long_steps, service.url, TRIED[2])
        told: dict[int, list[int]] = {}
        for body in service.bodies("observations"):
            told.setdefault(body["trial"], []).extend(step["step"] for step in body["steps"])
    for trial in (0, 1):
        first, last = told[trial][0], told[trial][-1]
        assert told[trial] == list(range(first, last + 1))
        assert told[trial + 1][0] - last <= 3


def _tune_without_room(url: str, last: Configuration) -> tuple[list[Configuration], int]:
    """The configuration after each step, and how many commands did not come with a report."""
    with (
        mock.patch.object(report, "ROOM_BYTES", 8),
        mock.patch.object(
            report.Exchange,
            "start_command",
            autospec=True,
            side_effect=report.Exchange.start_command,
        ) as apart,
    ):
        return [configuration for configuration, *_ in _tune(url, last)], apart.call_count


@pytest.mark.slow
def test_a_command_that_no_report_has_room_for_comes_too(two_ranks: RankPool) -> None:
    tried = [Configuration(2000), Configuration(1000, channels=2)]
    with ScriptedService([[each.to_json() for each in tried]]) as service:
        first, second = two_ranks.run(_tune_without_room, service.url, tried[-1])
        assert service.bodies("disagreement") == []
    assert first == second
    configurations, apart = first
    assert set(tried) <= set(configurations)
    assert configurations[-1] == tried[-1]
    assert apart >= len(tried)


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_a_report_has_room_for_a_trial_of_all_knobs_beside_the_best(kind: str) -> None:
    """Else each trial takes a step more."""
    names = [name for name, knob in KNOBS.items() if kind in knob.models and name != "buckets"]
    rng = random.Random(0)
    tried, best = (
        {name: rng.choice(["shared", "leaders", rng.randrange(2**31)]) for name in names}
        for _ in range(2)
    )
    state = JobState(41, tried, 40, 60, 1.3431137713109, None, round=1, incumbent=best)
    command = {"trial": 41, "watch": True, "told": told_of(state, {}), "configuration": tried}
    assert len(zlib.compress(json.dumps(command).encode())) <= ROOM_BYTES


def _set_by_hand(url: str) -> tuple[str, Configuration, bool]:
    """What is said to who sets a configuration during a tuning; what is in force at its end, and
    whether one can be set then."""
    with tuned_at(url):
        model = DistributedDataParallel(torch.nn.Linear(16, 16))
    with pytest.raises(RuntimeError) as refusal:
        model.reconfigure(Configuration(1))
    for _ in range(MOST_STEPS):
        model(torch.ones(1, 16)).sum().backward()
        if not model.is_tuning:
            break
    kept = model.configuration
    return str(refusal.value), kept, model.reconfigure(Configuration(1))


def test_nothing_is_set_by_hand_during_a_tuning(four_ranks: RankPool) -> None:
    with ScriptedService([[configuration.to_json() for configuration in TRIED[:2]]]) as service:
        for message, kept, is_set in four_ranks.run(_set_by_hand, service.url):
            assert "is being tuned" in message
            assert kept == TRIED[1]
            assert is_set


STEPS = 2
STEP_SECONDS = 0.01


class _LaggingClock:
    """Knows a mark once the training has made so many steps more."""

    def __init__(self, lag_steps: int) -> None:
        self.step, self._lag_steps = 0, lag_steps
        self._made_in: dict[float, int] = {}

    def mark(self) -> float:
        now = time.perf_counter()
        self._made_in[now] = self.step
        return now

    def is_known(self, mark: float) -> bool:
        return self.step >= self._made_in[mark] + self._lag_steps


def _tune_knowing_late(url: str, lag_steps: int) -> None:
    clock = _LaggingClock(lag_steps)
    with (
        tuned_at(url),
        mock.patch.object(CpuClock, "mark", staticmethod(clock.mark)),
        mock.patch.object(CpuClock, "is_known", lambda _, mark: clock.is_known(mark)),
    ):
        model = DistributedDataParallel(torch.nn.Linear(32, 32))
        while model.is_tuning:
            clock.step += 1
            time.sleep(STEP_SECONDS)
            model(torch.ones(1, 32)).sum().backward()


def _last_steps(service: ScriptedService) -> dict[int, tuple[list[int], int]]:
    """By trial its steps, and the first step under the next one."""
    told: dict[int, list[int]] = {}
    for body in service.bodies("observations"):
        told.setdefault(body["trial"], []).extend(step["step"] for step in body["steps"])
    switched: dict[int, Any] = {b["trial"]: b["step"] for b in service.bodies("switched")}
    return {trial: (told[trial], switched[trial + 1]) for trial in told if trial + 1 in switched}


@pytest.mark.parametrize("lag_steps", [0, 2])
def test_all_steps_of_a_trial_up_to_the_switch_are_told(
    two_ranks: RankPool, lag_steps: int
) -> None:
    sizes = [{"bucket_bytes": 1000 * size} for size in range(1, 7)]
    with ScriptedService([sizes], steps=STEPS) as service:
        two_ranks.run(_tune_knowing_late, service.url, lag_steps)
        found = _last_steps(service)
    assert len(found) == len(sizes) - 1
    for steps, switched in found.values():
        assert steps == list(range(steps[0], steps[-1] + 1))
        # The two steps of the switch are of neither.
        assert steps[-1] == switched - 2
