"""Buckets are cut anew between two steps, on all ranks or on none."""

from __future__ import annotations

import gc
import logging
import threading
import time
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.communication import communicator
from bagua_client.integrations.distributed_data_parallel import tunable_of
from bagua_client.measuring.clock import clock_for
from bagua_client.torch_private import reducer as torchs
from bagua_client.tunable.tunable import Timeline
from tests.client.comparison import difference, pair
from tests.client.listening import logged
from tests.ranks import RankPool

needs_bucket_caps = pytest.mark.skipif(
    not torchs.HAS_BUCKET_CAPS, reason="torch before 2.11 cannot set the size of each bucket"
)
DEFAULT = Configuration(first_bucket_bytes=2**20)


def _model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))


def _step(model: nn.Module, inputs: torch.Tensor) -> None:
    model(inputs).square().mean().backward()


def _own_inputs() -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(5, 6, generator=generator)


def _set_in_the_middle_of_a_step() -> str | None:
    stock, ours = models = pair(_model())
    last = list(ours.parameters())[-1]
    changes = iter([Configuration(1), Configuration(300), Configuration(1, channels=2)])

    def change(_: torch.Tensor) -> None:
        assert ours.reconfigure(next(changes))

    last.register_post_accumulate_grad_hook(change)
    found = None
    for _ in range(3):
        for model in models:
            model.zero_grad()
            _step(model, _own_inputs())
        found = found or difference(stock, ours)
    return found


def test_what_is_set_in_the_middle_of_a_step_waits_for_the_next(two_ranks: RankPool) -> None:
    assert two_ranks.run(_set_in_the_middle_of_a_step) == [None] * 2


def _disagree(configurations: list[Configuration]) -> tuple[bool, str, list[str], str | None]:
    stock, ours = models = pair(_model())
    assert ours.reconfigure(Configuration(100, "leaders"))
    for model in models:
        _step(model, _own_inputs())
    with logged(logging.WARNING) as lines:
        agreed = ours.reconfigure(configurations[dist.get_rank()])
        for model in models:
            for _ in range(3):
                _step(model, _own_inputs())
    return agreed, str(ours.configuration), lines, difference(stock, ours)


@pytest.mark.parametrize(
    ("configurations", "who"),
    [
        ([Configuration(1), Configuration(1), Configuration(500), Configuration(1)], "rank 2"),
        ([Configuration(size) for size in (1, 200, 400, 800)], "ranks 1, 2, 3"),
    ],
)
def test_ranks_that_disagree_all_return_to_the_default_and_train_on(
    four_ranks: RankPool, configurations: list[Configuration], who: str
) -> None:
    results = four_ranks.run(_disagree, configurations)
    for rank, (agreed, configuration, errors, found) in enumerate(results):
        assert (agreed, configuration, found) == (False, str(DEFAULT), None)
        if rank == 0:
            (error,) = errors
            assert error.startswith(f"{who} disagreed with the others")
            assert f"return to the default ({DEFAULT})" in error
        else:
            assert errors == []


def _no_groups_on(rank: int, is_counted: bool) -> dict[str, Any]:
    """A rank that cannot make a group, as if it had no descriptor left, before or after c10d has
    counted the group; then it can."""
    stock, ours = models = pair(_model())
    assert ours.reconfigure(Configuration(100, "leaders"))
    for model in models:
        _step(model, _own_inputs())
    name = "_new_process_group_helper" if is_counted else "_new_group_with_tag"
    fails = mock.patch.object(
        dist.distributed_c10d, name, side_effect=OSError(24, "Too many open files")
    )
    asked = Configuration(200, "leaders", channels=2)
    with mock.patch.object(communicator, "CONNECT_SECONDS", 1.0), logged(logging.WARNING) as lines:
        with fails if dist.get_rank() == rank else nullcontext():
            agreed = ours.reconfigure(asked)
        back_at = ours.configuration
        for model in models:
            for _ in range(2):
                _step(model, _own_inputs())
    again = ours.reconfigure(asked)
    for model in models:
        for _ in range(2):
            _step(model, _own_inputs())
    dist.barrier(dist.new_group())  # The user's own come as ever.
    found = difference(stock, ours)
    return {"agreed": agreed, "back_at": back_at, "again": again, "errors": lines, "found": found}


@pytest.mark.parametrize(
    ("rank", "is_counted"), [pytest.param(0, False, marks=pytest.mark.slow), (3, True)]
)
def test_a_rank_that_cannot_make_process_groups_is_voted_on(
    four_ranks: RankPool, rank: int, is_counted: bool
) -> None:
    results = four_ranks.run(_no_groups_on, rank, is_counted)
    for each in results:
        assert (each["agreed"], each["again"], each["found"]) == (False, True, None)
        assert each["back_at"] == DEFAULT
    assert any("Too many open files" in error for error in results[rank]["errors"])
    assert any(
        "cannot make the process groups" in error and "all ranks return" in error
        for error in results[0]["errors"]
    )


FITS, DOES_NOT_FIT = Configuration(buckets=(1, 7)), Configuration(buckets=(2, 7))


def _explicit(configurations: list[Configuration]) -> tuple[bool, Configuration, list[str]]:
    ours = DistributedDataParallel(_model())
    assert ours.reconfigure(Configuration(1))
    for _ in range(3):
        _step(ours, _own_inputs())
    with logged(logging.WARNING) as lines:
        agreed = ours.reconfigure(configurations[dist.get_rank()])
    for _ in range(3):
        _step(ours, _own_inputs())
    return agreed, ours.configuration, lines


@needs_bucket_caps
def test_explicit_buckets_that_do_not_fit_the_model_are_voted_down(two_ranks: RankPool) -> None:
    results = two_ranks.run(_explicit, [DOES_NOT_FIT] * 2)
    for rank, (agreed, configuration, lines) in enumerate(results):
        assert (agreed, configuration) == (False, DEFAULT)
        assert lines[0] == (
            f"rank {rank} cannot carry out 2 explicit buckets: "
            "the explicit buckets hold 9 tensors, but the model has 8"
        )
    assert "no rank can carry out the configuration 2 explicit buckets: all" in results[0][2][1]


def _explicit_before_the_order_is_known() -> tuple[bool, bool, list[str]]:
    ours = DistributedDataParallel(_model())
    with logged(logging.WARNING) as lines:
        too_early = ours.reconfigure(FITS)
    assert ours.reconfigure(Configuration(1))
    for _ in range(2):
        _step(ours, _own_inputs())
    return too_early, ours.reconfigure(FITS), lines


@needs_bucket_caps
def test_explicit_buckets_wait_for_the_order_that_they_count_in(two_ranks: RankPool) -> None:
    for too_early, later, lines in two_ranks.run(_explicit_before_the_order_is_known):
        assert (too_early, later) == (False, True)
        assert "known after the first steps" in lines[0]


def _sizes_cut(configurations: list[Configuration]) -> list[list[int]]:
    """What torch says that it cut, in elements' bytes."""
    ours = DistributedDataParallel(_model())
    assert ours.reconfigure(Configuration(1))
    for _ in range(2):
        _step(ours, _own_inputs())
    cut = []
    for configuration in configurations:
        assert ours.reconfigure(configuration)
        sizes: list[int] = []
        for _ in range(2):
            _step(ours, _own_inputs())
        tunable_of(ours).attach()
        tunable_of(ours).record(timeline := Timeline(time.perf_counter))
        _step(ours, _own_inputs())
        tunable_of(ours).record(None)
        sizes += timeline.bucket_bytes
        cut.append(sizes)
    return cut


@needs_bucket_caps
def test_torch_cuts_what_was_planned(two_ranks: RankPool) -> None:
    weight, bias = 6 * 6 * 4, 6 * 4
    whole = weight + bias
    configurations = {
        Configuration(1): [bias, weight] * 4,
        Configuration(whole): [whole] * 4,
        Configuration(2 * whole, first_bucket_bytes=whole): [whole, 2 * whole, whole],
        Configuration(3 * whole, last_bucket_bytes=2 * whole): [2 * whole, 2 * whole],
        Configuration(buckets=(3, 4, 1)): [2 * bias + weight, 2 * whole, weight],
    }
    found = two_ranks.run(_sizes_cut, list(configurations))
    # Torch's reducer is told the bias of a layer before its weight, or after it.
    for sizes in found:
        assert [sum(cut) for cut in sizes] == [4 * whole] * len(configurations)
        assert sizes[1] == [whole] * 4
        assert sizes[2] == [whole, 2 * whole, whole]
        assert sizes[3] == [2 * whole, 2 * whole]
        assert [len(cut) for cut in sizes] == [8, 4, 3, 2, 3]


def _buckets_left_over(configurations: list[Configuration]) -> int:
    """How much more memory tensors hold after many re-cuts than after the first."""
    ours = DistributedDataParallel(_model(), gradient_as_bucket_view=True)
    held = []
    for configuration in [*configurations, configurations[0]]:
        assert ours.reconfigure(configuration)
        for _ in range(3):
            _step(ours, _own_inputs())
        gc.collect()
        storages = {
            gradient.untyped_storage().data_ptr(): gradient.untyped_storage().nbytes()
            for parameter in ours.parameters()
            if (gradient := parameter.grad) is not None
        }
        held.append(sum(storages.values()))
    return max(held) - held[0]


def test_gradients_leave_the_old_buckets_for_the_new_ones(four_ranks: RankPool) -> None:
    configurations = [
        Configuration(200),
        Configuration(300, "leaders"),
        Configuration(200, "leaders"),
        Configuration(300, "shards"),
        Configuration(400),
    ]
    assert four_ranks.run(_buckets_left_over, configurations) == [0] * 4


def _relays_of(configuration: Configuration, then: Configuration | None) -> tuple[int, list[str]]:
    """How many threads it takes, and which of them are left after it."""
    before = set(threading.enumerate())
    ours = DistributedDataParallel(_model())
    assert ours.reconfigure(configuration)
    for _ in range(3):
        _step(ours, _own_inputs())
    relays = set(threading.enumerate()) - before
    if then is None:
        del ours
        gc.collect()
    else:
        assert ours.reconfigure(then)
        for _ in range(3):
            _step(ours, _own_inputs())
        assert set(threading.enumerate()) <= before | relays
    for relay in relays:
        relay.join(timeout=10)
    return len(relays), [relay.name for relay in relays if relay.is_alive()]


@pytest.mark.parametrize(
    ("configuration", "relays", "then"),
    [
        (Configuration(1, "shards"), 3, Configuration(1, channels=4)),
        (Configuration(1, "shards", channels=2), 6, None),
    ],
    ids=str,
)
def test_the_threads_end_with_the_wrapper_or_with_the_need_for_them(
    four_ranks: RankPool, configuration: Configuration, relays: int, then: Configuration | None
) -> None:
    results = four_ranks.run(_relays_of, configuration, then)
    assert results == [(relays, [])] * 4


# A step's record, made by real ranks.


def _recorded_step(backend: str, configuration: Configuration) -> list[str]:
    """What is wrong with the record of a step of several buckets."""
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", dist.get_rank())
        torch.cuda.set_device(device)
    layers = [torch.nn.Linear(64, 64) for _ in range(6)]
    model = DistributedDataParallel(
        torch.nn.Sequential(*layers).to(device), process_group=dist.new_group(backend=backend)
    )
    assert model.reconfigure(configuration)
    tunable = tunable_of(model)
    tunable.attach()
    inputs = torch.ones(1, 64, device=device)
    clock = clock_for(device)
    for _ in range(4):  # the order of gradients is recorded, and buckets cut by it
        model(inputs).sum().backward()
    timeline = Timeline(clock.mark)
    began = clock.mark()
    tunable.record(timeline)
    model(inputs).sum().backward()
    tunable.record(None)
    finished = clock.mark()
    model(inputs).sum().backward()  # not recorded
    if device.type == "cuda":
        torch.cuda.synchronize()
    partition = tunable.layout.partition
    assert len(partition) > 2
    if sorted(timeline.ready) != list(range(12)) or len(timeline.started) != len(partition):
        return [f"incomplete: {timeline.ready}, {timeline.started}"]
    if sorted(timeline.ended) != list(range(len(partition))):
        return [f"ends: {timeline.ended}"]
    wrong = []
    for place, bucket in enumerate(partition):
        marks = [timeline.ready[index] for index in bucket]
        last_ready = max(clock.seconds(began, mark) for mark in marks)
        started, ended, step = (
            clock.seconds(began, mark)
            for mark in (timeline.started[place], timeline.ended[place], finished)
        )
        if not 0 < last_ready <= started <= ended <= step:
            wrong.append(f"bucket {place}: {last_ready}, {started}, {ended} until {step}")
    return wrong


CONFIGURATIONS = [
    Configuration(bucket_bytes=20_000, hierarchical=hierarchical, channels=channels)
    for hierarchical, channels in [("off", 1), ("off", 2), ("leaders", 1), ("shards", 2)]
]


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_tensors_are_ready_before_their_bucket_starts_and_it_ends_within_the_step(
    four_ranks: RankPool, configuration: Configuration
) -> None:
    assert four_ranks.run(_recorded_step, "gloo", configuration) == [[]] * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_on_cuda_marks_are_the_devices(configuration: Configuration) -> None:
    """On one node of one rank, or on two of two where there are as many devices."""
    pool = RankPool((2, 2) if torch.cuda.device_count() >= 4 else (1,))
    try:
        found = pool.run(_recorded_step, "nccl", configuration)
    finally:
        pool.close()
    assert found == [[]] * pool.world_size
