"""What the ranks of a checked job measure and write; nothing of the training changes."""

from __future__ import annotations

import json
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import bagua_client
from bagua_client import DistributedDataParallel
from bagua_client.checking import check
from bagua_client.checking.check import gathered, gradients, shares
from bagua_client.checking.surroundings import Surroundings
from bagua_client.layout import TensorSpec, describe
from bagua_client.tunable.tunable import Timeline
from bagua_wire.profile import BucketTiming
from tests.client.comparison import difference
from tests.ranks import RankPool

# The last rank computes longest.
COMPUTING_SECONDS = 0.02
STEPS = 25


def _train(path: str, models: int, passes: int) -> None:
    """So many models beside a stock one, which takes the same steps."""
    rank = torch.distributed.get_rank()
    # A process checks one model, and keeps it; these ranks serve other tests, too.
    kept = mock.patch.object(check, "_checks", [])
    with kept, mock.patch.dict(os.environ, {"BAGUA_AUTOTUNE_CHECK": path}):
        wrapped = [DistributedDataParallel(torch.nn.Linear(64, 64)) for _ in range(models)]
    model = wrapped[0]
    stock = TorchDistributedDataParallel(torch.nn.Linear(64, 64))
    stock.module.load_state_dict(model.module.state_dict())
    both = [(each, torch.optim.SGD(each.parameters(), lr=0.01)) for each in (model, stock)]
    for step in range(STEPS):
        torch.manual_seed(10 * step + rank)
        inputs = torch.randn(4, 64)
        for each, optimizer in both:
            optimizer.zero_grad()
            for _ in range(passes):
                time.sleep(COMPUTING_SECONDS * rank)
                each(inputs).square().mean().backward()
            optimizer.step()
    assert difference(stock, model, "at the end") is None


def checked(pool: RankPool, path: Path, models: int = 1, passes: int = 1) -> Any:
    pool.run(_train, str(path), models, passes)
    return json.loads(path.read_text())


def test_steps_of_the_slowest_rank_are_written_and_the_training_is_as_it_was(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    found = checked(two_ranks, tmp_path / "found.json", models=2)
    assert (found["ranks"], found["nodes"], found["backend"]) == (2, 1, "gloo")
    assert (found["models"], found["backward_passes"]) == (2, 1)
    # The stock model's part of a step is computing, as nobody knows better.
    assert len(found["steps"]) == 15
    for seconds, computing, _ in found["steps"]:
        assert 2 * COMPUTING_SECONDS <= computing <= seconds
    recorded = [travelled for *_, travelled in found["steps"] if travelled is not None]
    assert len(recorded) == 9
    # 64 x 64 and 64 numbers of four bytes; in the rank-1 form 2 x 64 and 64.
    assert found["shares"] == {
        "bits16": 0.5,
        "bits8": (4160 + 8 * 5) / (4 * 4160),
        "powersgd": 192 / 4160,
    }
    assert all(travelled > 0 for travelled in recorded)
    assert found["job"]["default_configuration"]["bucket_bytes"] > 0
    assert 0 < len(found["profiles"]) <= check.PROFILES_KEPT
    assert len(found["profiles"][0]["ready_seconds"]) == len(found["job"]["tensors"]) == 2
    [seen] = found["seen"]
    assert seen["ranks"] == [0, 1]
    assert (seen["device"], seen["backend"], seen["debug_level"]) == ("cpu", "gloo", "OFF")


def _rank_1_fails_in(place: type, name: str, path: str) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("on purpose")

    failing = mock.patch.object(place, name, fail)
    with failing if torch.distributed.get_rank() == 1 else nullcontext():
        _train(path, 1, 1)


def test_a_rank_that_cannot_measure_ends_the_check_and_no_training(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    path = tmp_path / "found.json"
    two_ranks.run(_rank_1_fails_in, Timeline, "tensor_ready", str(path))
    assert json.loads(path.read_text()) == {
        "refusal": "an error on rank 1; see the log of that rank"
    }


def test_a_rank_that_cannot_look_around_measures_all_the_same(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    path = tmp_path / "found.json"
    two_ranks.run(_rank_1_fails_in, Surroundings, "look", str(path))
    found = json.loads(path.read_text())
    assert len(found["steps"]) == 15
    assert [seen["ranks"] for seen in found["seen"]] == [[0], [1]]
    assert set(found["seen"][1]) == {"ranks"}


def test_of_steps_with_several_backward_passes_computing_is_known_as_well(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    found = checked(two_ranks, tmp_path / "found.json", passes=2)
    assert found["backward_passes"] == 2
    assert found["steps"]
    assert all(0 < computing <= seconds for seconds, computing, _ in found["steps"])


def test_a_single_rank_writes_that_it_communicates_nothing(tmp_path: Path) -> None:
    pool = RankPool([1])
    try:
        found = checked(pool, tmp_path / "found.json")
    finally:
        pool.close()
    assert found == {"refusal": "a single rank communicates nothing"}


@pytest.mark.parametrize(
    ("buckets", "seconds"),
    [
        ([], 0.0),
        ([(1.0, 2.0), (3.0, 5.0)], 3.0),
        ([(1.0, 4.0), (2.0, 3.0), (3.5, 6.0)], 5.0),
    ],
)
def test_time_in_which_several_buckets_travel_counts_once(
    buckets: list[tuple[float, float]], seconds: float
) -> None:
    timings = [BucketTiming(8, *each) for each in buckets]
    assert check.travelling_seconds(timings) == pytest.approx(seconds)


class Blocks(torch.nn.Module):
    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(3)]
        if recomputes:
            blocks = [checkpoint_wrapper(block) for block in blocks]
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def _trained_alone(path: Path | None, recomputes: bool = True) -> list[float]:
    """The losses; where a path is given the training is checked."""
    torch.manual_seed(0)
    model, losses = Blocks(recomputes), []
    variables = {} if path is None else {"BAGUA_AUTOTUNE_CHECK": str(path)}
    with mock.patch.object(check, "_checks", []), mock.patch.dict(os.environ, variables):
        bagua_client.tune(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 64)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        for each in check._checks:
            each.close()
    return losses


def test_it_is_measured_and_the_training_is_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    assert _trained_alone(path) == _trained_alone(None)
    found = json.loads(path.read_text())
    assert (found["ranks"], found["nodes"], found["backend"]) == (1, 1, "")
    assert len(found["steps"]) == 15
    assert all(computing == seconds for seconds, computing, _ in found["steps"])
    recomputing = found["recomputing"]
    assert recomputing["blocks"] == 3
    typical = sorted(seconds for seconds, *_ in found["steps"])[7]
    assert 0 < recomputing["seconds"] < 10 * typical
    assert recomputing["left_alone"] == ""
    assert "peak_bytes" not in recomputing, "nobody knows it on a CPU"


def test_where_nothing_is_recomputed_that_is_told(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    _trained_alone(path, recomputes=False)
    recomputing = json.loads(path.read_text())["recomputing"]
    assert (recomputing["blocks"], recomputing["seconds"]) == (0, None)


# How many bytes are left of a step's in fewer bits.


def specs(module: nn.Module) -> tuple[TensorSpec, ...]:
    return describe(list(module.named_parameters()))


def test_a_replicated_model_can_send_halves_quarters_and_vectors() -> None:
    found = shares(gradients(specs(nn.Conv2d(64, 64, 4))), has_shapes=True)
    weights, biases = 64 * 64 * 16, 64
    assert found["bits16"] == 0.5
    ranges = weights // 1024 + 1
    assert found["bits8"] == pytest.approx(0.25 + 2 * ranges / (weights + biases))
    # Beside the first size all others are columns, as in torch's hook.
    assert found["powersgd"] == pytest.approx((64 + 1024 + biases) / (weights + biases))


def test_what_is_narrow_small_or_no_float_stays_as_it_is() -> None:
    half = gradients(specs(nn.Linear(512, 512).to(torch.bfloat16)))
    assert set(shares(half, has_shapes=True)) == {"bits8", "powersgd"}
    # Of four rows and columns each, vectors are half as many numbers as the matrix.
    assert set(shares(gradients(specs(nn.Linear(4, 4))), has_shapes=True)) == {"bits16", "bits8"}
    whole = TensorSpec("counts", (1000,), 8, "torch.int64", "cpu#0")
    assert shares(gradients([whole]), has_shapes=True) == {}
    sparse = TensorSpec("embedding", (1000, 8), 4, "torch.float32", "cpu#0", is_sparse=True)
    assert shares(gradients([sparse]), has_shapes=True) == {}
    assert shares([], has_shapes=False) == {}


def test_of_a_sharded_model_weights_are_gathered_in_their_own_precision() -> None:
    unit = TensorSpec("layer", (4096,), 4, "torch.float32", "cpu#0")
    # Gathered for both passes, in float32; and then in bfloat16, with gradients in float32.
    for width, left in ((4, 2 / 3 + 1 / 6), (2, (4 + 2) / (4 + 4))):
        gathers = gathered([unit], [(0, 4096 * width)] * 2)
        found = shares([*gradients([unit]), *gathers], has_shapes=False)
        assert found["bits16"] == pytest.approx(left)
        sent = 4 + 2 * width
        assert found["bits8"] == pytest.approx(3 * (1 + 8 / 1024) / sent)
