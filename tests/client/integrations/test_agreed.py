"""A variable that is not set alike on all ranks: none uses it, and the training goes on."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks import (
    _reducer_allreduce_and_upcast_hook,
)
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.nn.parallel.distributed import _MixedPrecision

from bagua_client import Configuration, DistributedDataParallel, tune
from bagua_client.communication import agreement
from bagua_client.communication.communicator import Communicator
from bagua_client.torch_private import groups
from bagua_client.torch_private.reducer import user_hook_of
from tests.client.comparison import difference
from tests.client.listening import logged
from tests.ranks import RankPool

CHANNELS, SIZE, FILE = "BAGUA_DEFAULT_CHANNELS", "BAGUA_DEFAULT_BUCKET_SIZE", "BAGUA_CONFIGURATION"
DEFAULT = Configuration(first_bucket_bytes=2**20)
WIDTH = 400
"""Two layers of this width have more bytes than torch's first bucket, one has fewer."""
Variables = dict[str, str]


def _model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))


def _train(
    by_rank: Sequence[Variables],
    in_place: bool = False,
    patience_seconds: float = 2.0,
    **options: Any,
) -> tuple[Configuration, list[str]]:
    """Wrap and train beside torch's class. Returns what it begins with, and what is said."""
    plain = _model()
    twin = Stock(copy.deepcopy(plain), **options)
    with (
        logged(logging.WARNING) as lines,
        mock.patch.dict(os.environ, by_rank[dist.get_rank()]),
        mock.patch.object(agreement, "ANSWER_SECONDS", patience_seconds),
    ):
        model = (
            tune(Stock(plain, **options)) if in_place else DistributedDataParallel(plain, **options)
        )
    assert isinstance(model, DistributedDataParallel)
    begins_with = model.configuration
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        inputs = torch.randn(2, WIDTH)
        for each in (model, twin):
            each.zero_grad()
            each(inputs).square().mean().backward()
        assert difference(model, twin) is None
    return begins_with, lines


def _said(results: Sequence[tuple[Configuration, list[str]]]) -> str:
    """The one line that is said, where all begin with torch's default."""
    assert [begins_with for begins_with, _ in results] == [DEFAULT] * len(results)
    said = [line for _, lines in results for line in lines]
    assert len(said) == 1, said
    return said[0]


def _is_not_used(variable: str, reason: str) -> str:
    return f"{variable} is not used; training begins with the default: {reason}"


@pytest.mark.slow
def test_other_channels_on_a_rank_are_used_by_none(three_ranks: RankPool) -> None:
    two, four = {CHANNELS: "2"}, {CHANNELS: "4"}
    line = _said(three_ranks.run(_train, [two, two, four]))
    assert line == _is_not_used(
        CHANNELS,
        "it has another value on rank 2 than on the other ranks; set the same value on all ranks",
    )


def test_channels_on_one_rank_only_are_used_by_none(two_ranks: RankPool) -> None:
    line = _said(two_ranks.run(_train, [{CHANNELS: "2"}, {}], True))
    assert line == _is_not_used(
        CHANNELS,
        "not all ranks have it set and a model that bagua_client tunes; set both on all ranks "
        "(rank 1 has not answered)",
    )


def test_a_rank_where_something_else_is_set_answers(two_ranks: RankPool) -> None:
    both = {SIZE: "5000"}
    results = two_ranks.run(_train, [{**both, CHANNELS: "2"}, both])
    assert [begins_with for begins_with, _ in results] == [Configuration(5000)] * 2
    (line,) = [line for _, lines in results for line in lines]
    assert line == _is_not_used(CHANNELS, "it is not set on rank 1; set it on all ranks")


@pytest.mark.parametrize(("other", "unused"), [({}, False), ({SIZE: "9000"}, True)])
def test_another_size_on_a_rank_is_used_by_none(
    two_ranks: RankPool, other: Variables, unused: bool
) -> None:
    # Where it looks for unused parameters, torch never sends the other ranks its first rank's cut.
    variables = [{SIZE: "5000"}, other]
    line = _said(two_ranks.run(partial(_train, find_unused_parameters=unused), variables))
    assert line.startswith(_is_not_used(SIZE, ""))
    assert "rank 1" in line


def test_a_size_that_all_ranks_have_is_used(two_ranks: RankPool) -> None:
    results = two_ranks.run(partial(_train, find_unused_parameters=True), [{SIZE: "5000"}] * 2)
    assert results == [(Configuration(5000), [])] * 2


def _in_half() -> DistributedDataParallel:
    """With torch's own mixed precision. Only a GPU can train with it, and torch's build for CUDA
    makes no stream where there is none."""
    half = torch.bfloat16
    precision = _MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half)
    with mock.patch.object(torch, "Stream"):
        return DistributedDataParallel(_model(), mixed_precision=precision)


def _hook_of_mixed_precision(by_rank: Sequence[Variables]) -> bool:
    with mock.patch.dict(os.environ, by_rank[dist.get_rank()]):
        model = _in_half()
    assert model.configuration == DEFAULT
    hook = user_hook_of(model)
    return hook is not None and hook.run is _reducer_allreduce_and_upcast_hook


def test_the_hook_of_torchs_mixed_precision_stays(two_ranks: RankPool) -> None:
    sizes = [{SIZE: "5000"}, {SIZE: "9000"}]
    assert two_ranks.run(_hook_of_mixed_precision, sizes) == [True, True]


@pytest.mark.slow
def test_nobody_waits_until_the_others_collectives_run_out_of_time() -> None:
    pool = RankPool([2], collective_timeout_seconds=8.0)
    try:
        results = pool.run(_train, [{CHANNELS: "2", SIZE: "1000000"}, {}], False, 60.0)
    finally:
        pool.close()
    lines = [line for _, each in results for line in each]
    assert [name for line in lines for name in (SIZE, CHANNELS) if name in line] == [SIZE, CHANNELS]
    assert all("rank 1 has not answered" in line for line in lines)


def _keys_added() -> int:
    store = groups.store()
    assert store is not None
    before = store.num_keys()
    wrapped = DistributedDataParallel(_model())
    wrapped(torch.ones(2, WIDTH)).sum().backward()
    return store.num_keys() - before


def test_nobody_is_asked_where_nothing_is_set(two_ranks: RankPool) -> None:
    assert two_ranks.run(_keys_added) == [0, 0]


def _with_room_for(most: Sequence[int]) -> tuple[Configuration, list[str]]:
    room = mock.PropertyMock(return_value=most[dist.get_rank()])
    with mock.patch.object(Communicator, "most_channels", room):
        return _train([{CHANNELS: "4"}] * 2)


def test_gpus_with_room_for_other_numbers_begin_with_the_smallest(two_ranks: RankPool) -> None:
    results = two_ranks.run(_with_room_for, [4, 2])
    assert [begins_with.channels for begins_with, _ in results] == [2, 2]
    (line,) = [line for _, lines in results for line in lines]
    assert line == "BAGUA_DEFAULT_CHANNELS=4 is not possible here: a GPU has room for 2"


def _alone() -> Configuration:
    with mock.patch.dict(os.environ, {CHANNELS: "2"}):
        return _in_half().configuration


def test_a_single_rank_whose_buckets_are_not_ours_to_carry_is_wrapped() -> None:
    pool = RankPool([1])
    try:
        assert pool.run(_alone) == [DEFAULT]
    finally:
        pool.close()
