"""The launcher follows ``fully_shard`` where a tuning is asked for, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import ClassVar, get_type_hints

import pytest
from torch import nn

from bagua_client.integrations import sharded_model
from bagua_client.integrations.tuned_model import become

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


class _Particular(nn.Module):
    """As transformers' models do it: reads the annotations of what is derived from it."""

    derived: ClassVar[list[type]] = []

    def __init_subclass__(cls) -> None:
        get_type_hints(cls)
        _Particular.derived.append(cls)


def test_what_a_models_class_does_where_another_is_derived_from_it_is_left_to_the_user() -> None:
    model = _Particular()
    assert become(model, sharded_model.ShardedModel) == ""
    assert isinstance(model, sharded_model.ShardedModel)
    assert _Particular.derived == []
    get_type_hints(type(model))
