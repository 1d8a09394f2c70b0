"""Which reduction begins a step, which steps are recorded, and what reaches the service of them."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from bagua_client.agent import report
from bagua_client.integrations.distributed_data_parallel import tunable_of
from bagua_client.measuring import rank_measurement
from bagua_client.measuring.rank_measurement import StepBoundary
from tests.client.agent.scripted_service import ScriptedService
from tests.client.measuring.test_rank_measurement import until_tuned
from tests.ranks import RankPool

LAYERS, WIDTH = 5, 32


def _tune(url: str, backward_passes: int) -> list[int]:
    """The steps in which this rank recorded, until the tuning had ended.

    They are as short as those of no training; so the hook may take as much of them as it wants.
    """
    recorded: list[int] = []

    def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        tunable = tunable_of(model)
        for _ in range(backward_passes):
            with mock.patch.object(tunable, "record", wraps=tunable.record) as record:
                model(torch.ones(1, WIDTH)).sum().backward()
            recorded.extend(number for call in record.mock_calls if call.args[0] is not None)
        optimizer.step()

    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    with mock.patch.object(report, "MOST_SHARE", math.inf):
        until_tuned(url, step, torch.nn.Sequential(*layers))
    return recorded if dist.get_rank() else []


def test_three_measured_steps_of_each_trial_are_told_and_only_rank_0_records(
    two_ranks: RankPool,
) -> None:
    element_bytes = 4
    configurations = [{"bucket_bytes": size} for size in (10**6, WIDTH * WIDTH * element_bytes)]
    with ScriptedService([configurations], steps=12) as service:
        assert two_ranks.run(_tune, service.url, 1) == [[], []]
        (registration,) = service.bodies("PUT")
        profiles = service.bodies("profiles")
        first_measured: dict[int, int] = {}
        for batch in service.bodies("observations"):
            first_measured.setdefault(batch["trial"], batch["steps"][0]["step"])
    expected = [(trial, first + n) for trial, first in first_measured.items() for n in range(3)]
    assert [(profile["trial"], profile["step"]) for profile in profiles] == expected
    assert [len(profile["buckets"]) for profile in profiles] == [1] * 3 + [LAYERS] * 3
    for profile in profiles:
        _check(profile, registration["tensors"])


def _tune_slowed(url: str) -> None:
    """Where recording slows a step, as on a GPU."""
    with mock.patch.object(rank_measurement, "SLOWED_DEVICES", ("cpu",)):
        _tune(url, 1)


def test_where_recording_slows_a_step_no_recorded_one_is_measured(two_ranks: RankPool) -> None:
    large, small = {"bucket_bytes": 10**6}, {"bucket_bytes": 1000}
    crowded = {"bucket_bytes": 10**6, "channels": 8}
    with ScriptedService([[large, small, large, crowded]], steps=12) as service:
        two_ranks.run(_tune_slowed, service.url)
        recorded = [(each["trial"], each["step"]) for each in service.bodies("profiles")]
        told = [
            (batch["trial"], step["step"])
            for batch in service.bodies("observations")
            for step in batch["steps"]
        ]
    # Of the first trial three steps, of another configuration one, of the next visit to one none;
    # nor of one with so many channels that the marks would wait for one another.
    assert [trial for trial, _ in recorded] == [0, 0, 0, 1]
    assert not set(recorded) & set(told)
    first_told = {trial: min(step for t, step in told if t == trial) for trial in range(3)}
    for trial in (0, 1):
        assert first_told[trial] == max(step for t, step in recorded if t == trial) + 1


def _check(profile: dict[str, Any], tensors: list[dict[str, Any]]) -> None:
    ready = profile["ready_seconds"]
    assert len(ready) == len(tensors) == 2 * LAYERS
    assert min(ready) > 0
    assert max(ready) <= profile["step_seconds"]
    assert sum(bucket["bytes"] for bucket in profile["buckets"]) == sum(t["bytes"] for t in tensors)
    # The order of the layout is that of the registered tensors.
    done = 0
    for bucket in profile["buckets"]:
        first, size = done, 0
        while size < bucket["bytes"]:
            size, done = size + tensors[done]["bytes"], done + 1
        assert size == bucket["bytes"]
        assert max(ready[first:done]) <= bucket["started_seconds"] <= bucket["ended_seconds"]
        assert bucket["ended_seconds"] <= profile["step_seconds"]


def test_a_step_of_several_backward_passes_is_not_recorded(two_ranks: RankPool) -> None:
    with ScriptedService([[{"bucket_bytes": 1000}]], steps=12) as service:
        two_ranks.run(_tune, service.url, 2)
        assert service.bodies("observations")
        assert service.bodies("profiles") == []


WORDS, LINES, TOLD = 50, 4, 3


def _tune_sparse(url: str) -> Any:
    """The buckets that are planned for a model with sparse gradients, in bytes of its tensors."""

    def step(model: Any, *_: Any) -> None:
        model(torch.arange(LINES * TOLD).reshape(LINES, TOLD)).sum().backward()

    layers = torch.nn.EmbeddingBag(WORDS, WIDTH, sparse=True), torch.nn.Linear(WIDTH, 1)
    model = until_tuned(url, step, torch.nn.Sequential(*layers))
    return len(tunable_of(model).layout.partition)


def test_a_sparse_gradient_is_told_with_the_size_that_it_sends(two_ranks: RankPool) -> None:
    trials = [{"bucket_bytes": size} for size in (10**6, 64)]
    with ScriptedService([trials], steps=12) as service:
        planned = two_ranks.run(_tune_sparse, service.url)
        (registration,) = service.bodies("PUT")
        profiles = service.bodies("profiles")
    # A value for each of a row's elements, and its index; weight and bias of the layer.
    sparse, dense = LINES * TOLD * (4 * WIDTH + 8), 4 * (WIDTH + 1)
    assert len(profiles) == 2 * 3
    for profile in profiles:
        sizes = sorted(bucket["bytes"] for bucket in profile["buckets"])
        assert sizes[-1] == sparse
        assert sum(sizes) == sparse + dense
    assert planned == [len(profiles[-1]["buckets"])] * 2
    assert len({tensor["group"] for tensor in registration["tensors"]}) == 2
    assert "buckets" not in registration["knobs"]


def _optimizer(parameter: torch.nn.Parameter) -> torch.optim.SGD:
    return torch.optim.SGD([parameter], lr=0.1)


def test_several_reductions_before_an_optimizer_step_are_one_step() -> None:
    ours, others = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    boundary = StepBoundary([ours])
    optimizer, other_optimizer = _optimizer(ours), _optimizer(others)
    found = []
    for _ in range(3):
        for _ in range(3):
            found.append(boundary.begins())
            other_optimizer.step()
        optimizer.step()
    # Before the first optimizer step nobody can know.
    assert found == [True, True, True] + 2 * [True, False, False]
    boundary.close()


def test_without_a_torch_optimizer_every_reduction_is_a_step() -> None:
    ours, others = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    boundary = StepBoundary([ours])
    _optimizer(others).step()
    assert [boundary.begins() for _ in range(3)] == [True] * 3
    boundary.close()


def test_a_boundary_that_is_closed_or_gone_hears_of_no_optimizer() -> None:
    ours = torch.nn.Parameter(torch.ones(2))
    optimizer = _optimizer(ours)
    boundary = StepBoundary([ours])
    optimizer.step()
    boundary.begins()
    boundary.close()
    optimizer.step()
    assert not boundary.begins()
    gone = weakref.ref(boundary)
    del boundary
    gc.collect()
    assert gone() is None
    optimizer.step()


def test_parameters_that_come_to_an_optimizer_or_leave_it_later_are_seen() -> None:
    ours, others = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    boundary = StepBoundary([ours])
    optimizer = _optimizer(others)

    def steps() -> list[bool]:
        found = []
        for _ in range(2):
            optimizer.step()
            found += [boundary.begins(), boundary.begins()]
        return found

    assert steps() == [True] * 4  # as without an optimizer
    optimizer.add_param_group({"params": [ours]})
    assert steps() == [True, False] * 2
    optimizer.param_groups[1]["params"] = []
    assert steps()[1:] == [True] * 3
    optimizer.param_groups[0]["params"][0] = ours
    assert steps() == [True, False] * 2
    boundary.close()
