"""Bagua's release, unmodified: its algorithm files are user-written algorithms here, and train as
ours; and its own tests of helpers, store and data (all: make upstream)."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bagua_compat.torch_api import algorithms
from tests.client.algorithms.small import loss_of, small_model
from tests.compat.scripts import apart, begun_model, release_module, sgd, weights_of
from tests.ranks import RankPool
from tests.upstream_bagua import run
from tests.upstream_bagua.running import PASSED, copy_release, run_file

pytestmark = pytest.mark.slow

STEPS = 10
RECUTS = {2: 100, 6: 400}
"""Steps before which buckets are cut anew, and their least bytes."""
WARM_UP = 4


class _Done:
    """A stream or an event of a device whose work is done when the call returns."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self, event: Any) -> None:
        pass


class _TorchOnCpu:
    """Bagua's files take it for granted that there is a GPU."""

    cuda = SimpleNamespace(
        Event=_Done, Stream=_Done, current_stream=_Done, synchronize=lambda: None
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _of_the_release(file: str) -> Any:
    module = release_module(f"algorithms/{file}.py")
    module.torch = _TorchOnCpu()
    return module


def _trained(file: str, kind: str, arguments: dict[str, Any], is_theirs: bool) -> Any:
    """The loss of each step, this rank's weights after the last, and how many buckets it had."""
    model = begun_model()
    module: Any = _of_the_release(file) if is_theirs else getattr(algorithms, file)
    if file == "q_adam":
        optimizer = module.QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=WARM_UP)
        algorithm = module.QAdamAlgorithm(optimizer, **arguments)
    else:
        optimizer = sgd(model, momentum=0.5)
        algorithm = getattr(module, kind)(**arguments)
    model.with_bagua([optimizer], algorithm)
    losses, counts = [], []
    for step in range(STEPS):
        if step in RECUTS:
            in_force = model.bagua_ddp.wrapper.configuration
            assert model.bagua_ddp.wrapper.reconfigure(
                replace(in_force, bucket_bytes=RECUTS[step], first_bucket_bytes=0)
            )
        optimizer.zero_grad()
        loss = loss_of(model, dist.get_rank(), step)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
        counts.append(len(model.bagua_buckets))
    return torch.tensor(losses), weights_of(model), counts


def _compared(
    file: str, kind: str, arguments: dict[str, Any]
) -> tuple[float, float, float, list[int]]:
    """How far losses and weights are off ours, how far the weights have moved, the buckets."""
    theirs, weights, counts = _trained(file, kind, arguments, True)
    ours, expected, _ = _trained(file, kind, arguments, False)
    pairs = (theirs, ours), (weights, expected), (weights, weights_of(small_model()))
    losses, off, moved = (float((one - other).abs().max()) for one, other in pairs)
    return losses, off, moved, counts


ALL_RANKS = {"hierarchical": False}
NODES_FIRST = {"hierarchical": True}
IN_PAIRS = {"hierarchical": False, "peer_selection_mode": "shift_one"}
EXACT, EIGHT_BITS = 1e-5, 0.1
"""Largest difference, as a share of how far the weights have moved. What eight bits lose depends on
which gradients share a bucket, and on nodes that reduce first or do not, as there is only one."""
ON_ONE_NODE = [
    ("gradient_allreduce", "GradientAllReduceAlgorithm", {}, EXACT),
    ("bytegrad", "ByteGradAlgorithm", NODES_FIRST, EIGHT_BITS),
    ("decentralized", "DecentralizedAlgorithm", {"communication_interval": 3}, EXACT),
    ("decentralized", "LowPrecisionDecentralizedAlgorithm", NODES_FIRST, EXACT),
    ("q_adam", "QAdamAlgorithm", ALL_RANKS, EIGHT_BITS),
]
ON_TWO_NODES = [
    ("gradient_allreduce", "GradientAllReduceAlgorithm", {**NODES_FIRST, "average": False}, EXACT),
    ("bytegrad", "ByteGradAlgorithm", ALL_RANKS, EIGHT_BITS),
    ("decentralized", "DecentralizedAlgorithm", {}, EXACT),
    ("decentralized", "DecentralizedAlgorithm", IN_PAIRS, EXACT),
    ("decentralized", "LowPrecisionDecentralizedAlgorithm", ALL_RANKS, EXACT),
    ("decentralized", "LowPrecisionDecentralizedAlgorithm", NODES_FIRST, EXACT),
    ("q_adam", "QAdamAlgorithm", NODES_FIRST, EIGHT_BITS),
]
CASES = [("two_ranks", *each) for each in ON_ONE_NODE]
CASES += [("four_ranks", *each) for each in ON_TWO_NODES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[2]}{case[3]}")
def test_bagua_s_own_file_trains_as_ours_and_is_recut(
    case: tuple[str, str, str, dict[str, Any], float], request: pytest.FixtureRequest
) -> None:
    ranks, *algorithm, share = case
    pool: RankPool = request.getfixturevalue(ranks)
    for losses, weights, moved, counts in pool.run(_compared, *algorithm):
        assert weights < share * moved
        assert losses < share * moved
        # Bagua keeps the weights of a decentralized one in a single bucket, however they are cut.
        is_recut = algorithm[1] != "DecentralizedAlgorithm"
        assert counts == [1, 1, *[1 + is_recut] * 4, 1, 1, 1, 1]


def _asynchronous() -> tuple[torch.Tensor, torch.Tensor, float]:
    """The losses of the warm-up, of Bagua's file and of gradients that are averaged; how far apart
    the ranks' weights are in the end."""
    warm, _, _ = _trained("gradient_allreduce", "GradientAllReduceAlgorithm", {}, False)
    module: Any = _of_the_release("async_model_average")
    model = begun_model()
    optimizer = sgd(model, momentum=0.5)
    algorithm = module.AsyncModelAverageAlgorithm(sync_interval_ms=1, warmup_steps=WARM_UP)
    model.with_bagua([optimizer], algorithm)
    losses: list[float] = []
    rounds: list[str] = []
    # A round waits for all ranks, so they end after the same one, in any number of steps.
    while len(rounds) < 3:
        optimizer.zero_grad()
        loss = loss_of(model, dist.get_rank(), len(losses))
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
        if len(losses) == WARM_UP + 1:
            model.bagua_buckets[0].append_python_op(rounds.append)
    dist.barrier()  # No rank changes its weights any more.
    before = len(rounds)
    while len(rounds) < before + 2:
        time.sleep(0.001)
    model.bagua_algorithm.abort(model)
    return torch.tensor(losses[:WARM_UP]), warm[:WARM_UP], apart(weights_of(model))


def test_bagua_s_own_file_averages_while_it_trains(two_ranks: RankPool) -> None:
    for losses, expected, difference in two_ranks.run(_asynchronous):
        assert torch.equal(losses, expected)
        assert difference < 2e-6


@pytest.mark.parametrize(
    ("file", "passed"),
    [
        ("contrib/test_load_balancing_data_loader.py", 2),
        ("contrib/test_cached_dataset.py", 1),
        ("contrib/test_store.py", 2),
    ],
)
def test_bagua_s_own_tests_pass_without_a_gpu(
    file: str, passed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of those for GPUs, which fail where ranks have not ended within a minute, nor that of
    StatisticalAverage, which allows a busy machine's clock a tenth of a second: test_parts.py."""
    if file in ("contrib/test_cached_dataset.py", "contrib/test_store.py"):
        pytest.importorskip("redis")
        if shutil.which("redis-server") is None:
            pytest.skip("no redis-server here (apt-get install redis-server)")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # With a GPU they would be skipped.
    copy_release(tmp_path)
    results = list(run_file(tmp_path, file, devices=0))
    found = Counter(result.outcome for result in results)
    assert found == Counter({PASSED: passed}), results


def test_a_run_without_time_begins_no_file_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--devices", "0", "--only", "test_utils", "--seconds", "0"]) == 0
    said = capsys.readouterr().out
    assert said.endswith("INCOMPLETE: not begun within 0 s: torch_api/test_utils.py\n")
