"""After the tuning: real ranks watch step times, which a clock of the test's own makes up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.agent import Agent, State
from bagua_client.integrations.distributed_data_parallel import tunable_of
from bagua_client.measuring import rank_measurement
from bagua_client.measuring.clock import CpuClock
from tests.client.agent.scripted_service import ScriptedService, tuned_at
from tests.ranks import RankPool

FIRST = {"bucket_bytes": 3000}
SECOND = [{"bucket_bytes": 5000}, {"bucket_bytes": 2000, "hierarchical": "shards"}]
FLAT = [{"bucket_bytes": 1000, "hierarchical": "leaders"}, FIRST]
MOST_STEPS = 4000


class MadeUpClock(CpuClock):
    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now


class _Job:
    """A tuned model; remembers for each step whether it was tuned, and its configuration."""

    def __init__(self, clock: MadeUpClock) -> None:
        layers = [torch.nn.Linear(16, 16) for _ in range(5)]
        self.model = DistributedDataParallel(torch.nn.Sequential(*layers))
        self.clock = clock
        self.seen: list[tuple[bool, Configuration]] = []
        self.gradients: list[float] = []

    def train(self, seconds: float, steps: int, until: Callable[[], bool] | None = None) -> None:
        """Take steps; stops early when ``until`` holds, which must be so on all ranks at once."""
        for _ in range(steps):
            self.clock.now += seconds
            self.model.zero_grad()
            self.model(torch.ones(1, 16) * (dist.get_rank() + 1)).sum().backward()
            self.seen.append((self.model.is_tuning, self.model.configuration))
            time.sleep(0.001)
            if until is not None and until():
                return

    def is_tuned(self) -> bool:
        return not self.model.is_tuning

    def groups(self) -> int:
        return len(dist.distributed_c10d._world.pg_map)


@contextmanager
def _job(url: str) -> Iterator[_Job]:
    clock = MadeUpClock()
    with tuned_at(url), mock.patch.object(rank_measurement, "clock_for", return_value=clock):
        yield _Job(clock)


def _two_rounds(url: str) -> tuple[list[tuple[bool, Configuration]], int, list[int]]:
    with _job(url) as job:
        job.train(0.1, MOST_STEPS, job.is_tuned)
        job.train(0.1, 300)
        changed, groups = len(job.seen), [job.groups()]
        job.train(0.2, MOST_STEPS, lambda: job.model.is_tuning)
        job.train(0.2, MOST_STEPS, job.is_tuned)
        job.train(0.2, 100)
        groups.append(job.groups())
        return job.seen, changed, groups


def test_a_lasting_change_opens_a_round_on_all_ranks_in_the_same_step(four_ranks: RankPool) -> None:
    with ScriptedService([FLAT, SECOND]) as service:
        first, *others = four_ranks.run(_two_rounds, service.url)
        (drift,) = service.bodies("drift")
        progress = service.bodies("progress")[0]
        observed = {batch["trial"] for batch in service.bodies("observations")}
    assert others == [first] * 3
    seen, changed, groups = first
    # All ranks' group and the control group; then three more, made again for the winner.
    assert groups == [2, 5]
    tuned = [tunes for tunes, _ in seen]
    rounds = [at for at in range(1, len(tuned)) if tuned[at] != tuned[at - 1]]
    assert [tuned[at] for at in rounds] == [False, True, False]
    assert changed < drift["step"] <= changed + 100
    assert rounds[1] > changed
    # How far the job came with the first result, and what its steps took.
    assert changed < progress["step"] <= rounds[1]
    assert progress["seconds"] == pytest.approx(0.1)
    ran = [configuration for _, configuration in seen]
    assert ran[rounds[0] + 2] == Configuration(3000)
    assert ran[rounds[1] + 2] == Configuration(5000)
    assert ran[-1] == Configuration(2000, "shards")
    assert observed == {0, 1, 2, 3}


def _reconfigured_at_the_end(url: str) -> tuple[list[int], Configuration]:
    """The user sets a configuration before what was found is in force."""
    with _job(url) as job:
        job.train(0.1, MOST_STEPS, job.is_tuned)
        assert job.model.reconfigure(Configuration(4000, "leaders"))
        job.train(0.1, 300)
        groups = [job.groups()]
        job.train(0.2, MOST_STEPS, lambda: job.model.is_tuning)
        job.train(0.2, MOST_STEPS, job.is_tuned)
        assert job.model.reconfigure(Configuration(4000))
        job.train(0.2, 300)
        groups.append(job.groups())
        job.train(0.1, MOST_STEPS, lambda: job.model.is_tuning)
        job.train(0.1, MOST_STEPS, job.is_tuned)
        job.train(0.1, 2)
        return groups, job.model.configuration


@pytest.mark.slow
def test_a_configuration_of_the_users_at_the_end_of_a_round_stops_no_later_one(
    four_ranks: RankPool,
) -> None:
    with ScriptedService([FLAT, SECOND, FLAT]) as service:
        results = four_ranks.run(_reconfigured_at_the_end, service.url)
    # All ranks' group and the control group; three more for the user's first configuration.
    assert results == [([5, 2], Configuration(3000))] * 4


def _watched_without_service(url: str) -> set[tuple[bool, Configuration]]:
    with _job(url) as job:
        job.train(0.1, MOST_STEPS, job.is_tuned)
        tuned = len(job.seen)
        for seconds in (0.1, 0.2, 0.1):
            job.train(seconds, 150)
        return set(job.seen[tuned:])


def test_a_service_that_is_gone_while_watching_costs_no_step(two_ranks: RankPool) -> None:
    with ScriptedService([[FIRST]], refuses={"drift": 503}) as service:
        results = two_ranks.run(_watched_without_service, service.url)
    assert results == [{(False, Configuration(3000))}] * 2


def _two_models(url: str) -> list[tuple[bool, bool]]:
    """The second is tuned after the first; a step of the process is one of each."""
    with _job(url) as first:
        second = _Job(first.clock)
        seen = [(True, True)]
        while seen[-1] != (False, False) and len(seen) < MOST_STEPS:
            # The second's tuning makes the process's steps slower.
            first.train(0.1 if seen[-1][0] else 0.3, 1)
            second.train(0.0, 1)
            seen.append((first.model.is_tuning, second.model.is_tuning))
        for _ in range(300):
            first.train(0.2, 1)
            second.train(0.0, 1)
        return seen


@pytest.mark.slow
def test_models_of_one_process_do_not_take_one_anothers_tuning_for_drift(
    two_ranks: RankPool,
) -> None:
    with ScriptedService([[FIRST]], steps=200) as service:
        one, other = two_ranks.run(_two_models, service.url)
        assert service.bodies("drift") == []
        assert len(service.bodies("PUT")) == 2
    assert one == other
    assert one[-1] == (False, False)
    assert one.count((False, True)) > 200


def _after_an_unfinished_one(url: str) -> list[Configuration]:
    """What is in force for the second model, whose process has made two steps of the first."""
    with _job(url) as first:
        second = _Job(first.clock)
        first.train(0.1, 2)
        second.train(0.1, MOST_STEPS, second.is_tuned)
        second.train(0.1, 2)
        return [first.model.configuration, second.model.configuration]


def test_a_model_that_trains_no_more_does_not_hold_up_the_next(two_ranks: RankPool) -> None:
    with ScriptedService([[FIRST]]) as service:
        for first, second in two_ranks.run(_after_an_unfinished_one, service.url):
            assert first != Configuration(3000)
            assert second == Configuration(3000)


def _watched_steps(url: str, kept: int, find_unused: bool) -> tuple[int, int, int]:
    """Of six reductions some time after a tuning: how many were counted, and the buckets that our
    hook was given; and the buckets of a step."""
    with tuned_at(url):
        layers = [torch.nn.Linear(16, 16) for _ in range(4)]
        model = DistributedDataParallel(
            torch.nn.Sequential(*layers), find_unused_parameters=find_unused
        )
    tunable = tunable_of(model)
    agent = tunable.listener
    assert isinstance(agent, Agent)

    def train(steps: int) -> None:
        for _ in range(steps):
            with model.no_sync():
                model(torch.ones(1, 16)).sum().backward()
            model(torch.ones(1, 16)).sum().backward()

    steps = 0
    while agent.state is not State.WATCHING and steps < MOST_STEPS:
        train(1)
        steps += 1
    train(4)
    counted = agent.measurement.step
    saw = tunable.observation.bucket_starts
    with mock.patch.object(tunable.observation, "bucket_starts", side_effect=saw) as seen:
        train(4)
        # After a pass forward alone, torch reduces in the next backward pass, whatever it is of.
        model(torch.ones(1, 16))
        train(1)
    assert model.configuration.bucket_bytes == kept
    return agent.measurement.step - counted, seen.call_count, len(tunable.layout.partition)


@pytest.mark.parametrize("kept", [25 * 2**20, 1024])
def test_what_torch_carries_is_watched_without_a_hook_on_its_buckets(
    two_ranks: RankPool, kept: int
) -> None:
    with ScriptedService([[{"bucket_bytes": kept}]]) as service:
        for steps, hooked, buckets in two_ranks.run(_watched_steps, service.url, kept, False):
            assert (steps, hooked) == (6, 0)
            assert buckets == {1024: 4, 25 * 2**20: 1}[kept]


def test_a_model_that_may_leave_gradients_out_is_watched_by_its_hook(two_ranks: RankPool) -> None:
    kept = 25 * 2**20
    with ScriptedService([[{"bucket_bytes": kept}]]) as service:
        found = two_ranks.run(_watched_steps, service.url, kept, True)
    assert found == [(6, 6, 1)] * 2
