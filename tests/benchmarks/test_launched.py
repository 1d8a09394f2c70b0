"""Trainings that make their steps in turns: no more than they are told to, all ranks the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed import Network, Testbed
from turns.job import JobError, SteppedJob

SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.fixture
def testbed() -> Iterator[Testbed]:
    with Testbed(Network(None), nodes=1, ordinary_priority=True) as found:
        yield found


def test_a_training_makes_the_steps_that_it_is_told_to_make(
    testbed: Testbed, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    job = SteppedJob(testbed, tmp_path / "job", [str(script), "10"], first_steps=2)
    told = job.wait(60)
    assert [each["steps"] for each in told] == [2, 2]
    assert [each["configuration"] for each in told] == [None, None]
    for steps, total in ((3, 5), (1, 6)):
        seconds = job.make(steps, 60)
        assert len(seconds) == steps
        assert min(seconds) > 0
        ranks = [json.loads((tmp_path / "job" / f"{rank}.json").read_text()) for rank in (0, 1)]
        assert [rank["steps"] for rank in ranks] == [total, total]
    with pytest.raises(JobError, match="the job has ended"):
        job.make(5, 60)
