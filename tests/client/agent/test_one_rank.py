"""One rank alone is tuned where it has something to try, and refused where it has not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as Stock

import bagua_client
from bagua_client.agent import job
from bagua_client.agent.job import describe_job, nothing_to_try
from bagua_client.communication.communicator import NOBODY_ELSE
from bagua_client.environment import Environment
from bagua_client.integrations import distributed_data_parallel, sharded_model
from bagua_client.integrations.single_model import tunable_of
from tests.client.test_single import BLOCKS, WIDTH, Model, Training
from tests.ranks import RankPool

REASON = f"{NOBODY_ELSE}; {job.NO_BLOCKS}"
ALLOWED = frozenset({"bytegrad", "bf16"})


def _wrapped(recomputes: bool) -> tuple[str, str, Any]:
    """Why nothing is tried of a wrapper of one rank, at first and once its steps are known, and
    what a job would be registered with."""
    ours: Any = bagua_client.tune(Stock(Model(recomputes)))
    tunable = distributed_data_parallel.tunable_of(ours)
    first = nothing_to_try(tunable, ALLOWED)
    tunable.attach()
    Training(ours).run(5)
    found = describe_job(tunable, Environment(), "alone")
    return first, nothing_to_try(tunable, ALLOWED), found["knobs"]


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_wrapper_of_one_rank_offers_no_buckets(one_rank: RankPool, recomputes: bool) -> None:
    ((first, later, knobs),) = one_rank.run(_wrapped, recomputes)
    said = "" if recomputes else REASON
    assert (first, later) == (said, said)
    assert list(knobs) == (["recomputed_blocks"] if recomputes else [])


def test_a_single_process_describes_itself_by_its_parameters() -> None:
    ours: Any = bagua_client.tune(Model())
    training = Training(ours)
    training.run(2)
    assert ours.reconfigure(bagua_client.Configuration())
    training.run(4)
    found = describe_job(tunable_of(ours), Environment(), "alone")
    values = found["knobs"]["recomputed_blocks"]["values"]
    assert (values[0], min(values)) == (BLOCKS, 0)
    assert found["default_configuration"] == {"recomputed_blocks": BLOCKS}
    assert (found["world_size"], found["ranks_per_node"]) == (1, [1])
    assert {each["name"] for each in found["tensors"]} == {n for n, _ in ours.named_parameters()}
    assert "backend" not in found["software"]


def test_a_model_with_nothing_to_try_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BAGUA_AUTOTUNE", "1")
    monkeypatch.setattr(job, "describe_job", None)
    ours: Any = bagua_client.tune(nn.Linear(WIDTH, 1))
    ours(torch.ones(1, WIDTH)).sum().backward()
    assert ours.tuning.state == "off"
    assert ours.tuning.reason == REASON
    assert not ours._forward_hooks
    assert not ours._forward_pre_hooks


def _sharded() -> tuple[str, list[float], list[float]]:
    """What a sharded model of one rank is tuned as, and its losses beside an untouched one's."""
    found = []
    for is_ours in (False, True):
        model: Any = Model()
        for block in model.blocks:
            fully_shard(block)
        model = fully_shard(model)
        ours = bagua_client.tune(model) if is_ours else model
        found.append(Training(ours).run(7, {1: BLOCKS, 4: 1, 6: 0} if is_ours else {}))
    return type(sharded_model.tunable_of(ours)).__name__, *found


def test_what_fully_shard_leaves_on_one_rank_is_changed_as_well(one_rank: RankPool) -> None:
    ((kind, untouched, changed),) = one_rank.run(_sharded)
    assert kind == "TunableSingle"
    assert changed == untouched
