"""The launcher follows ``fully_shard`` where a tuning is asked for, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch.distributed.fsdp as fsdp
torchs = [fsdp.fully_shard]  # What a module holds by a name is replaced, too.
from bagua_client.integrations.replacement import follow_fully_shard
follow_fully_shard()
follow_fully_shard()
ours = fsdp.fully_shard
print(ours in torchs, getattr(ours, "__wrapped__", None) in torchs, ours.__name__)
assert callable(ours.state)  # As torch's has it.
"""


@pytest.mark.parametrize(
    ("autotune", "said"), [("0", "True False fully_shard"), ("1", "False True fully_shard")]
)
def test_it_is_followed_where_a_tuning_is_asked_for(autotune: str, said: str) -> None:
    environment = {**os.environ, "BAGUA_AUTOTUNE": autotune}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == said, done.stderr
