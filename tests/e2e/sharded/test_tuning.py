"""A sharded model tuned end to end beside an untouched one: real ranks, HTTP and service."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import bagua_client
from bagua_client.integrations.replacement import follow_fully_shard
from tests.client.sharded.models import WIDTH, Kind, sharded, state_of, train
from tests.e2e.service import ServiceProcess
from tests.ranks import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

SIX = Kind(blocks=6)
MOST_STEPS = 6000
STEPS_AFTER = 20


def _train(
    micro_batches: int, kind: Kind = SIX, is_launched: bool = False
) -> tuple[str, bool, list[str], dict[str, Any]]:
    """How the tuning ended; whether the weights are those of an untouched model, bit for bit; which
    configurations were in force, and which is kept.

    Args:
        is_launched: whether the model is tuned as by the launcher.
    """
    untouched = sharded(kind)
    if is_launched:
        follow_fully_shard()
    ours: Any = sharded(kind) if is_launched else bagua_client.tune(sharded(kind))
    models: list[Any] = [untouched, ours]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    left, in_force = STEPS_AFTER, []
    for step in range(MOST_STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            batch = dist.get_rank() // kind.tensor_ranks
            torch.manual_seed(step * dist.get_world_size() + batch)
            for _ in range(micro_batches):
                model(torch.randn(4, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if str(ours.configuration) not in in_force:
            in_force.append(str(ours.configuration))
        left -= ours.tuning.state == "finished"
        if not left:
            break
    one, other = state_of(untouched), state_of(ours)
    are_equal = all(torch.equal(one[name], other[name]) for name in one)
    return ours.tuning.state, are_equal, in_force, ours.configuration.values


def test_a_sharded_job_is_tuned_and_learns_what_it_would_have_learned(
    service: ServiceProcess, tuned_ranks: Callable[..., RankPool]
) -> None:
    service.start()
    micro_batches = 3
    (state, are_equal, in_force, kept), other = tuned_ranks(service.url, (2,)).run(
        _train, micro_batches, timeout_seconds=280
    )
    assert (state, are_equal) == ("finished", True)
    assert other == (state, are_equal, in_force, kept)
    job, trials = service.job(), service.trials()
    assert job["state"] == "finished"
    assert len(in_force) >= len({str(trial["configuration"]) for trial in trials}) > 1
    assert {trial["state"] for trial in trials} == {"measured"}
    assert {trial["configuration"]["kept_units"] for trial in trials} > {0}
    assert job["result"]["configuration"].items() <= kept.items()
    over = {trial["configuration"].get("kept_over_micro_batches") for trial in trials}
    assert over == {"off", "on"}
    if not hasattr(FSDPModule, "set_custom_all_gather"):
        return  # What torch before 2.9 gathers is not seen.
    gathers = service.profiles()[0]["gathers"]
    # Six blocks are gathered in both passes of each micro-batch, what is left of the model in one.
    expected = sorted(([*range(6)] * 2 + [6]) * micro_batches)
    assert sorted(gather["tensor"] for gather in gathers) == expected
    assert len(service.profiles()[0]["buckets"]) == 7 * micro_batches
    assert all(gather["started_seconds"] < gather["ended_seconds"] for gather in gathers)


def test_a_job_with_tensor_parallelism_is_one_job(
    service: ServiceProcess, tuned_ranks: Callable[..., RankPool]
) -> None:
    service.start()
    kind = Kind(blocks=6, tensor_ranks=2)
    found = tuned_ranks(service.url, (4,)).run(_train, 1, kind, True, timeout_seconds=280)
    assert [each[:2] for each in found] == [("finished", True)] * 4
    assert found == [found[0]] * 4
    job = service.job()
    assert job["state"] == "finished"
    assert job["result"]["configuration"].items() <= found[0][3].items()


def _train_and_tell() -> str:
    """How the tuning of a job ended whose training tells which micro-batch is the last."""
    ours: Any = bagua_client.tune(sharded(Kind(blocks=6)))
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-3)
    for step in range(MOST_STEPS):
        torch.manual_seed(step * dist.get_world_size() + dist.get_rank())
        for is_last in (False, False, True):
            ours.report_last_micro_batch(is_last)
            ours(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if ours.tuning.state == "finished":
            break
    return str(ours.tuning.state)


def test_a_job_that_tells_which_micro_batch_is_the_last_may_reduce_in_it_only(
    service: ServiceProcess, tuned_ranks: Callable[..., RankPool]
) -> None:
    service.start()
    states = tuned_ranks(service.url, (2,)).run(_train_and_tell, timeout_seconds=280)
    assert states == ["finished"] * 2
    trials = service.trials()
    assert {trial["state"] for trial in trials} == {"measured"}
    assert {trial["configuration"]["deferred_reduction"] for trial in trials} == {"off", "on"}


def _train_in_fewer_bits() -> tuple[str, dict[str, torch.Tensor], list[float], str]:
    """How the tuning of a job that lists what changes its numbers ended; the weights, the losses,
    and what is kept."""
    ours: Any = bagua_client.tune(sharded(Kind(blocks=6)))
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-3)
    left, losses = STEPS_AFTER, []
    for step in range(MOST_STEPS):
        torch.manual_seed(step * dist.get_world_size() + dist.get_rank())
        loss = ours(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        ours.report_loss(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        left -= ours.tuning.state == "finished"
        if not left:
            break
    return ours.tuning.state, state_of(ours), losses, str(ours.configuration)


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_custom_all_gather"), reason="torch before 2.9 sends it all itself"
)
def test_a_sharded_job_tries_eight_bits_if_it_lists_them(
    service: ServiceProcess, tuned_ranks: Callable[..., RankPool]
) -> None:
    service.start()
    allowed = {"BAGUA_AUTOTUNE_ALLOW": "quantized,quantized_gradients"}
    ranks = tuned_ranks(service.url, (2,), **allowed)
    (state, weights, losses, kept), other = ranks.run(_train_in_fewer_bits, timeout_seconds=280)
    assert (state, kept) == (other[0], other[3])
    assert state == "finished"
    assert all(torch.equal(weights[name], other[1][name]) for name in weights)
    assert losses[-1] < losses[0] / 4
    trials = service.trials()
    tried = {trial["configuration"]["algorithm"] for trial in trials}
    assert {"gradient_allreduce", "quantized"} <= tried
    assert {trial["state"] for trial in trials} == {"measured"}


def _leave(steps: int) -> tuple[str, bool]:
    """Train a model so long, and leave it; the state of its tuning, and whether it is gone, at once
    and with its parameters."""
    model: Any = bagua_client.tune(sharded(Kind()))
    train(model, Kind(), {}, steps)
    state, left = model.tuning.state, [weakref.ref(model)]
    left += map(weakref.ref, model.parameters())
    del model
    gc.collect()
    return state, not any(each() is not None for each in left)


def test_a_model_that_is_left_in_mid_tuning_leaves_its_memory(
    service: ServiceProcess, tuned_ranks: Callable[..., RankPool]
) -> None:
    service.start()
    ranks = tuned_ranks(service.url, (2,))
    for state, is_gone in ranks.run(_leave, 30, timeout_seconds=60):
        assert is_gone, state
