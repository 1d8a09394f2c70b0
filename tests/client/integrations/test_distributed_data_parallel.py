"""The wrapper is used like torch's; what trainings do with it is in tests/client/beside_stock."""

from __future__ import annotations

import logging
import os
import sys
import threading
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as Stock

from bagua_client import Configuration, DistributedDataParallel, tune
from bagua_wire.knobs import MIB
from tests.client.comparison import difference, pair
from tests.client.listening import logged
from tests.ranks import RankPool


def _model(width: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))


def _seed_by_rank() -> None:
    torch.manual_seed(100 + dist.get_rank())


def _train_both(models: tuple[nn.Module, nn.Module], width: int = 6, steps: int = 4) -> None:
    _seed_by_rank()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for _ in range(steps):
        inputs = torch.randn(5, width)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()


# Several groups and models


def _train_in_sub_group(ranks: list[int], hierarchical: str) -> str | None:
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return None
    stock, ours = pair(_model(), process_group=group)
    assert ours.reconfigure(Configuration(100, hierarchical))
    _train_both((stock, ours))
    return difference(stock, ours)


@pytest.mark.parametrize(
    ("ranks", "hierarchical"), [([1, 3], "off"), ([2, 3], "shards"), ([0, 2, 3], "leaders")]
)
def test_a_sub_group_trains_while_the_other_ranks_do_something_else(
    four_ranks: RankPool, ranks: list[int], hierarchical: str
) -> None:
    assert four_ranks.run(_train_in_sub_group, ranks, hierarchical) == [None] * 4


# Loops that are not one forward and one backward pass


def _regularised_after_the_backward_pass() -> str | None:
    models = pair(_model())
    _seed_by_rank()
    for _ in range(4):
        inputs = torch.randn(5, 6)
        for model in models:
            model.zero_grad()
            model(inputs).square().mean().backward()
            # Without a forward pass of the wrapper, so every rank adds the same on its own.
            (0.1 * next(model.parameters()).square().sum()).backward()
        if (wrong := difference(*models)) is not None:
            return wrong
    return None


def test_a_backward_pass_of_the_parameters_alone_stays_local(two_ranks: RankPool) -> None:
    assert two_ranks.run(_regularised_after_the_backward_pass) == [None, None]


class _Smoothed(nn.Module):
    """Puts a new tensor in the place of its buffer in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        result: torch.Tensor = self.linear(x) + self.mean
        return result


def _means_before_their_update() -> list[list[float]]:
    models = pair(_Smoothed())
    _seed_by_rank()
    _train_both(models)
    found = []
    for model in models:
        model(torch.zeros(1, 6))
        found.append(model.module.mean.tolist())
    return found


def test_a_buffer_that_the_model_replaces_follows_rank_0_too(two_ranks: RankPool) -> None:
    (stock, ours), (others_stock, others_ours) = two_ranks.run(_means_before_their_update)
    assert stock == others_stock
    assert ours == others_ours
    assert ours == pytest.approx(stock)


# The size to start from


def _caps(size: str | None, **options: int) -> tuple[int, int]:
    variables = {} if size is None else {"BAGUA_DEFAULT_BUCKET_SIZE": size}
    with mock.patch.dict(os.environ, variables):
        wrapped = DistributedDataParallel(_model(), **options)
    assert wrapped(torch.ones(1, 6)).shape == (1, 2)
    return wrapped.configuration.bucket_bytes, wrapped.configuration.first_bucket_bytes


@pytest.mark.parametrize(
    ("size", "options", "expected"),
    [
        (None, {}, (25 * MIB, MIB)),
        (None, {"bucket_cap_mb": 25}, (25 * MIB, 0)),
        (None, {"bucket_cap_mb": 4}, (4 * MIB, 0)),
        ("1000", {}, (1000, 0)),
        ("1000", {"bucket_cap_mb": 4}, (4 * MIB, 0)),
    ],
)
def test_the_default_is_torchs_or_what_the_user_gave(
    two_ranks: RankPool, size: str | None, options: dict[str, int], expected: tuple[int, int]
) -> None:
    assert two_ranks.run(partial(_caps, size, **options)) == [expected] * 2


# The channels to start with


def _with_channels(own_hook: bool) -> tuple[int, int, str | None, list[str]]:
    groups = len(dist.distributed_c10d._world.pg_map)
    with logged(logging.WARNING) as lines:
        with mock.patch.dict(os.environ, {"BAGUA_DEFAULT_CHANNELS": "4"}):
            models = pair(_model(width=1024))
        for model in models if own_hook else ():
            model.register_comm_hook(None, allreduce_hook)
        _train_both(models, width=1024)
    return (
        models[1].configuration.channels,
        len(dist.distributed_c10d._world.pg_map) - groups,
        difference(*models),
        lines,
    )


@pytest.mark.parametrize(("own_hook", "channels"), [(False, 4), (True, 1)])
def test_a_job_begins_on_the_channels_that_the_environment_says(
    two_ranks: RankPool, own_hook: bool, channels: int
) -> None:
    assert two_ranks.run(_with_channels, own_hook) == [(channels, 3, None, [])] * 2


def _wrapped_with_a_hook_of_its_own() -> int:
    theirs = Stock(_model())
    theirs.register_comm_hook(None, allreduce_hook)
    with mock.patch.dict(os.environ, {"BAGUA_DEFAULT_CHANNELS": "4"}):
        return tune(theirs).configuration.channels


def test_a_job_whose_own_hook_carries_the_buckets_begins_as_it_would(two_ranks: RankPool) -> None:
    assert two_ranks.run(_wrapped_with_a_hook_of_its_own) == [1, 1]


# Off is off

OF_A_TUNING = tuple(
    f"bagua_client.{name}" for name in ("agent", "checking", "guard", "measuring", "reporter")
)


def _what_appears_when_off(autotune: str | None) -> tuple[int, int, list[str], list[str]]:
    variables = {} if autotune is None else {"BAGUA_AUTOTUNE": autotune}
    agent = {name for name in sys.modules if name.startswith(OF_A_TUNING)}
    hidden = {name: sys.modules.pop(name) for name in agent}
    threads, groups = threading.active_count(), len(dist.distributed_c10d._world.pg_map)
    try:
        with mock.patch.dict(os.environ, variables), logged(logging.WARNING) as lines:
            wrapped = DistributedDataParallel(_model())
            for _ in range(3):
                wrapped(torch.ones(1, 6)).mean().backward()
        return (
            threading.active_count() - threads,
            len(dist.distributed_c10d._world.pg_map) - groups,
            [name for name in sys.modules if name.startswith(OF_A_TUNING)],
            lines,
        )
    finally:
        sys.modules.update(hidden)


@pytest.mark.parametrize("autotune", [None, "0"])
def test_without_autotune_there_is_no_thread_no_group_and_no_agent(
    four_ranks: RankPool, autotune: str | None
) -> None:
    assert four_ranks.run(_what_appears_when_off, autotune) == [(0, 0, [], [])] * 4


def _tune_what_is_ours() -> None:
    model = DistributedDataParallel(_model())
    assert tune(model, algorithm="gradient_allreduce") is model
    with pytest.raises(
        ValueError,
        match="already wrapped with algorithm 'gradient_allreduce'; give 'bytegrad' there",
    ):
        tune(model, algorithm="bytegrad")
    model = DistributedDataParallel(_model(), algorithm="bytegrad")
    assert tune(model) is tune(model, algorithm="bytegrad") is model


def test_another_algorithm_for_a_model_of_ours_is_an_error(two_ranks: RankPool) -> None:
    two_ranks.run(_tune_what_is_ours)
