"""What differs on a GPU: streams, events and NCCL. Skipped where there is none."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.integrations.distributed_data_parallel import tunable_of
from tests.client.comparison import difference, pair
from tests.client.setting import Setting
from tests.e2e.service import ServiceProcess
from tests.ranks import RankPool

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(256, 256), nn.Tanh()]
    return nn.Sequential(*layers)


def _compare(backend: str) -> None:
    """50 steps, re-cut at random every five of them; in the second half all buckets travel by our
    hook."""
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    torch.backends.cuda.matmul.allow_tf32 = False
    stock, ours = pair(_model().cuda(), process_group=dist.new_group(backend=backend))
    assert ours.reconfigure(ours.configuration)
    tunable = tunable_of(ours)
    first_sizes = tunable.offer.values()["first_bucket_bytes"]
    choose = random.Random(1)
    for step in range(50):
        if step % 5 == 4:
            assert ours.reconfigure(_setting(choose, first_sizes).of(ours))
        if step == 25:
            tunable.attach()
        torch.manual_seed(10 * step + dist.get_rank())
        inputs = torch.randn(4, 256, device="cuda")
        for wrapped in (stock, ours):
            wrapped.zero_grad(set_to_none=step % 2 == 0)
            wrapped(inputs).square().mean().backward()
            with torch.no_grad():
                for parameter in wrapped.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.1 * parameter.grad
        assert (wrong := difference(stock, ours, f"step {step}")) is None, wrong


def _setting(choose: random.Random, first_sizes: Sequence[Any]) -> Setting:
    configuration = Configuration(
        bucket_bytes=choose.choice([1, 2**16, 2**19, 2**25]),
        hierarchical=choose.choice(["off", "leaders", "shards"]),
        channels=choose.choice([1, 2, 4]),
        first_bucket_bytes=choose.choice(first_sizes),
        last_bucket_bytes=choose.choice([0, 2**16]),
    )
    ends = tuple(choose.random() < 0.5 for _ in range(8))
    return Setting(configuration, choose.choice([None, ends]))


@pytest.mark.parametrize(
    ("ranks_per_node", "backend"),
    [((1,), "nccl"), ((2, 2), "gloo"), ((2, 2), "nccl")],
)
def test_gradients_are_stocks_while_buckets_change(
    ranks_per_node: tuple[int, ...], backend: str
) -> None:
    """NCCL takes one rank for each GPU, so several ranks on one GPU talk over gloo."""
    if backend == "nccl" and sum(ranks_per_node) > torch.cuda.device_count():
        pytest.skip(f"needs {sum(ranks_per_node)} CUDA devices")
    pool = RankPool(ranks_per_node)
    try:
        pool.run(_compare, backend)
    finally:
        pool.close()


def _tune() -> list[Configuration]:
    model = DistributedDataParallel(_model().cuda())
    seen = []
    for _ in range(3000):
        if not model.is_tuning:
            break
        model.zero_grad()
        model(torch.randn(64, 256, device="cuda")).square().mean().backward()
        seen.append(model.configuration)
    return seen


def test_a_job_on_the_gpu_is_tuned_by_its_events(
    service: ServiceProcess, tuned_ranks: Callable[..., RankPool]
) -> None:
    service.start()
    seen = tuned_ranks(service.url).run(_tune)
    assert all(configurations == seen[0] for configurations in seen)
    assert service.job()["state"] == "finished"
    assert len({configuration.bucket_bytes for configuration in seen[0]}) > 1
