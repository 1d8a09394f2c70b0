"""A step's record, made by real ranks."""

from __future__ import annotations

import time

import pytest
import torch

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.reducer.timeline import Timeline
from tests.ranks import RankPool


def _recorded_step(hierarchical: str) -> list[str]:
    """What is wrong with the record of a step of several buckets."""
    layers = [torch.nn.Linear(64, 64) for _ in range(6)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    assert model.reconfigure(Configuration(bucket_bytes=20_000, hierarchical=hierarchical))
    timeline = Timeline(time.perf_counter)
    began = time.perf_counter()
    model._reducer.timeline = timeline
    model(torch.ones(1, 64)).sum().backward()
    finished = time.perf_counter()
    model._reducer.timeline = None
    partition = model._reducer.layout.partition
    assert len(partition) > 2
    model(torch.ones(1, 64)).sum().backward()  # not recorded
    wrong = []
    if sorted(timeline.ready) != list(range(12)) or len(timeline.started) != len(partition):
        wrong.append(f"incomplete: {timeline.ready}, {timeline.started}")
    if sorted(timeline.ended) != list(range(len(partition))):
        wrong.append(f"ends: {timeline.ended}")
    if timeline.started != sorted(timeline.started):
        wrong.append(f"starts out of order: {timeline.started}")
    for place, bucket in enumerate(partition):
        last_ready = max(timeline.ready[index] for index in bucket)
        started, ended = timeline.started[place], timeline.ended[place]
        if not began <= last_ready <= started <= ended <= finished:
            wrong.append(f"bucket {place}: {last_ready}, {started}, {ended} until {finished}")
    return wrong


@pytest.mark.parametrize("hierarchical", ["off", "leaders", "shards"])
def test_tensors_are_ready_before_their_bucket_starts_and_it_ends_within_the_step(
    four_ranks: RankPool, hierarchical: str
) -> None:
    assert four_ranks.run(_recorded_step, hierarchical) == [[]] * 4
