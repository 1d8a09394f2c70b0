"""The ranks that a model was wrapped for are not those that it trains with any more: its process
group is another one, or was destroyed. What was made for them goes, and the model goes on."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock

from bagua_client import DistributedDataParallel
from bagua_client.integrations.distributed_data_parallel import CHANGED, DESTROYED
from bagua_client.threads import TorchThread
from bagua_client.torch_private.groups import pg_names
from tests.client.listening import logged
from tests.ranks import RankFailure, RankPool

# Nobody answers there; several channels are what has groups and threads of its own.
TUNED = {
    "BAGUA_AUTOTUNE": "1",
    "BAGUA_AUTOTUNE_URL": "http://127.0.0.1:9",
    "BAGUA_DEFAULT_CHANNELS": "4",
}
STEPS = 5


def _wrapped(kind: type[Stock], group: dist.ProcessGroup | None = None) -> Stock:
    torch.manual_seed(5)
    layers = [nn.Linear(32, 32) for _ in range(4)]
    return kind(nn.Sequential(*layers), process_group=group, bucket_cap_mb=0.01)


def _train(model: Stock, rate: float) -> None:
    """Without a momentum, so that at a rate of zero the sum's order has no effect."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(STEPS):
        torch.manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()


def _numbers(model: Stock) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def _changed(kind: type[Stock], keep: int) -> Any:
    """The weights after ``keep`` of the ranks went on; None on the others."""
    first = dist.new_group(list(range(dist.get_world_size())))
    second = dist.new_group(list(range(keep)))
    known = len(pg_names())
    model = _wrapped(kind, first)
    _train(model, 0.0)
    if dist.get_rank() >= keep:
        return None
    model._update_process_group(second)  # type: ignore[no-untyped-call]
    made = len(pg_names())
    _train(model, 0.1)
    if isinstance(model, DistributedDataParallel):
        assert (model.tuning.state, model.tuning.reason) == ("off", CHANGED)
        assert model.configuration == model.tuning.configuration
        assert made > len(pg_names()) == known
    return _numbers(model)


def _with_lines(function: Callable[[], Any]) -> tuple[Any, list[str]]:
    with mock.patch.dict(os.environ, TUNED), logged() as lines:
        return function(), [line for line in lines if CHANGED in line or DESTROYED in line]


def _beside_stock(keep: int) -> tuple[bool, list[str]]:
    stock = _changed(Stock, keep)
    ours, lines = _with_lines(lambda: _changed(DistributedDataParallel, keep))
    return ours == stock, lines


@pytest.mark.parametrize(
    "ranks", ["two_ranks", pytest.param("three_ranks", marks=pytest.mark.slow)]
)
def test_a_model_that_gets_another_group_goes_on_as_torchs(
    ranks: str, request: pytest.FixtureRequest
) -> None:
    """Two ranks go on: those that there were, or without a third. A sum of more is rounded by the
    order in which buckets are cut."""
    pool: RankPool = request.getfixturevalue(ranks)
    (_, (said,)), *others = found = pool.run(_beside_stock, 2)
    assert all(is_equal for is_equal, _ in found)
    assert CHANGED in said
    assert [lines for _, lines in others] == [[]] * len(others)


Counted = tuple[int, int]
"""Descriptors and native threads of a process."""


def _count() -> Counted:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _meet(store: dist.Store, where: str, size: int) -> None:
    """Without a group: there is none."""
    store.set(f"{where}{os.environ['RANK']}", "here")
    store.wait([f"{where}{rank}" for rank in range(size)])


def _life(kind: type[Stock], store: str, keeps: bool) -> tuple[Counted, Counted]:
    """What there is in a life's middle, and what is left after it, once ours has ended."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    model = _wrapped(kind)
    _train(model, 0.1)
    within = _count()
    kept = model if keeps else None
    del model
    dist.destroy_process_group()
    gc.collect()
    while any(isinstance(thread, TorchThread) for thread in threading.enumerate()):
        time.sleep(0.01)
    # What is connected to a rank that has let go is counted by nobody, and the next life begins
    # when this one is over on all.
    meeting = dist.FileStore(f"{store}-over", size)
    _meet(meeting, "destroyed", size)
    left = _count()
    if isinstance(kept, DistributedDataParallel):
        assert not kept.is_tuning
    _meet(meeting, "counted", size)
    del kept
    _meet(meeting, "gone", size)
    return within, left


def _stocks_life(folder: str, keeps: bool) -> tuple[Counted, Counted]:
    dist.destroy_process_group()
    return _life(Stock, f"{folder}/stock", keeps)


def _lives(folder: str, keeps: bool) -> list[tuple[Counted, Counted]]:
    dist.destroy_process_group()
    with mock.patch.dict(os.environ, TUNED):
        return [_life(DistributedDataParallel, f"{folder}/{n}", keeps) for n in (1, 2)]


def _stocks(pool: RankPool, folder: Path, keeps: bool) -> list[tuple[Counted, Counted]]:
    """Once more where torch's own model, which is freed after its group, never ends: gloo waits in
    its destructor at times, where nothing of ours is."""
    for number in range(3):
        own = folder / f"stock{number}"
        own.mkdir()
        try:
            return list(pool.run(_stocks_life, str(own), keeps, timeout_seconds=30))
        except RankFailure:
            if number == 2:
                raise
    raise AssertionError


@pytest.mark.parametrize("keeps", [False, True])
def test_a_life_leaves_what_torchs_leaves(keeps: bool, two_ranks: RankPool, tmp_path: Path) -> None:
    """Whether the model goes before its group, or stays."""
    stocks = _stocks(two_ranks, tmp_path, keeps)
    for stock, (first, second) in zip(
        stocks, two_ranks.run(_lives, str(tmp_path), keeps), strict=True
    ):
        assert first[0] > stock[0], "there was something to let go of"
        assert first[1] == second[1] == stock[1]


def _anew(kind: type[Stock], store: str) -> list[float]:
    """Train on after the default group was destroyed and made anew."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = _wrapped(kind)
    _train(model, 0.1)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    assert dist.group.WORLD is not None
    model._update_process_group(dist.group.WORLD)  # type: ignore[no-untyped-call]
    _train(model, 0.1)
    return _numbers(model)


def _anew_beside_stock(folder: str) -> tuple[bool, list[str]]:
    stock = _anew(Stock, f"{folder}/stock")
    ours, lines = _with_lines(lambda: _anew(DistributedDataParallel, f"{folder}/ours"))
    return ours == stock, lines


def test_a_model_outlives_the_default_group(two_ranks: RankPool, tmp_path: Any) -> None:
    (is_equal, (said,)), (others_equal, others) = two_ranks.run(_anew_beside_stock, str(tmp_path))
    assert is_equal
    assert others_equal
    assert CHANGED in said
    assert others == []
