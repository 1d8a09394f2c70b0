"""A step's record, made by real ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.integrations.distributed_data_parallel import tunable_of
from bagua_client.measuring.clock import clock_for
from bagua_client.tunable.tunable import Timeline
from tests.ranks import RankPool


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
