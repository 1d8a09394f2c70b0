"""Algorithms are found by name, with the errors that Bagua's registry has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.algorithms import (
    Algorithm,
    AsyncModelAverageAlgorithm,
    ByteGradAlgorithm,
    DecentralizedAlgorithm,
    GlobalAlgorithmRegistry,
    GradientAllReduceAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    PowerSGDAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
    QuantizedAlgorithm,
    find,
    register,
)
from bagua_client.communication.communicator import Communicator
from bagua_client.communication.operations import Operation
from tests.client.comparison import difference, pair
from tests.ranks import RankPool
from tests.strangers import lay

pytestmark = pytest.mark.slow

WEIGHTS = [nn.Parameter(torch.zeros(1))]
ADAM = partial(QAdamOptimizer, WEIGHTS)
SGD = partial(QAdamAlgorithm, torch.optim.SGD(WEIGHTS))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def registry_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict(GlobalAlgorithmRegistry._declarations)
    monkeypatch.setattr(GlobalAlgorithmRegistry, "_declarations", known)


def test_bagua_names_are_there_and_take_arguments() -> None:
    assert isinstance(find("gradient_allreduce"), GradientAllReduceAlgorithm)
    assert find("gradient_allreduce") is not find("gradient_allreduce")
    assert "bytegrad" in GlobalAlgorithmRegistry.available_algorithms()
    found = Algorithm.init("bytegrad", hierarchical=False, average=False)
    assert isinstance(found, ByteGradAlgorithm)
    assert (found.hierarchical, found.average, found.name) == (False, False, "bytegrad")
    with pytest.raises(TypeError, match="peers"):
        Algorithm.init("bytegrad", peers=3)


def test_torchs_power_sgd_is_there_with_torchs_arguments() -> None:
    found = Algorithm.init("powersgd", matrix_approximation_rank=8, start_powerSGD_iter=20)
    assert isinstance(found, PowerSGDAlgorithm)
    assert (found.state.matrix_approximation_rank, found.state.start_powerSGD_iter) == (8, 20)
    with pytest.raises(TypeError, match="orthogonalization_epsilon"):
        Algorithm.init("powersgd", orthogonalization_epsilon=1e-8)


STRANGERS = """
from bagua_client import Algorithm, register


class Aside(Algorithm):
    pass


@register("theirs")
class Theirs(Algorithm):
    pass
"""


def test_one_of_another_package_is_found_and_a_broken_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"aside": "Aside", "theirs": "Theirs", "broken": "Lacking"}
    entries = {name: f"aside_algorithm:{value}" for name, value in names.items()}
    lay(tmp_path, {"aside_algorithm.py": STRANGERS}, {"bagua_client.algorithms": entries})
    monkeypatch.syspath_prepend(tmp_path)
    assert {"aside", "broken"} <= set(GlobalAlgorithmRegistry.available_algorithms())
    assert "aside" in GlobalAlgorithmRegistry.available_algorithms("replicated")
    assert "broken" not in GlobalAlgorithmRegistry.available_algorithms("replicated")
    assert (find("aside").name, find("theirs").name) == ("aside", "theirs")
    assert str(GlobalAlgorithmRegistry).startswith("Registered Algorithms: ")
    told = r"'broken' \(aside_algorithm:Lacking\) cannot be imported: AttributeError"
    with pytest.raises(ValueError, match=told):
        find("broken")


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'bitgrad'; known are: .*bytegrad, .*gradient_allreduce"):
        find("bitgrad")
    with pytest.raises(KeyError, match="'bitgrad'"):
        GlobalAlgorithmRegistry.get("bitgrad")


def test_a_name_is_a_string_and_given_once() -> None:
    register("gradient_allreduce")(GradientAllReduceAlgorithm)
    with pytest.raises(ValueError, match="'gradient_allreduce' already"):
        register("gradient_allreduce")(Algorithm)
    with pytest.raises(TypeError, match="must be a string"):
        GlobalAlgorithmRegistry.register(3, Algorithm)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "arguments", "says"),
    [
        (ByteGradAlgorithm, {"range_elements": 100}, "must have 1024, 2048"),
        (QuantizedAlgorithm, {"range_elements": 1000}, "a range must have"),
        (QuantizedAlgorithm, {"weights": False, "gradients": False}, "neither the weights nor"),
        (DecentralizedAlgorithm, {"peer_selection_mode": "some"}, "peer_selection_mode"),
        (DecentralizedAlgorithm, {"communication_interval": 0}, "communication_interval"),
        (LowPrecisionDecentralizedAlgorithm, {"communication_interval": 0}, "_interval"),
        (AsyncModelAverageAlgorithm, {"peer_selection_mode": "shift_one"}, "must be 'all'"),
        (PowerSGDAlgorithm, {"matrix_approximation_rank": 0}, "powersgd needs"),
        (PowerSGDAlgorithm, {"start_powerSGD_iter": -1}, "powersgd needs"),
        (PowerSGDAlgorithm, {"min_compression_rate": 0}, "powersgd needs"),
        (SGD, {}, "needs a QAdamOptimizer"),
        (ADAM, {"lr": -1.0}, "invalid lr"),
        (ADAM, {"eps": -1.0}, "invalid eps"),
        (ADAM, {"betas": (1.0, 0.9)}, "invalid betas"),
        (ADAM, {"betas": (0.9, 1.0)}, "invalid betas"),
        (ADAM, {"warmup_steps": 0}, "invalid warmup_steps"),
    ],
)
def test_arguments_that_cannot_be_are_refused_where_they_are_given(
    make: Callable[..., object], arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        make(**arguments)


class Coarse:
    """Rounds what travels to whole numbers: an operation without communication."""

    def start(self, flat: torch.Tensor) -> None:
        flat.round_()


class CoarseAllReduce(Algorithm):
    """Gradients rounded before and after the all-reduce."""

    def scale(self, world_size: int) -> float:
        return 1.0

    def operations(
        self, communicator: Communicator, configuration: Configuration, channel: int
    ) -> Sequence[Operation]:
        return [Coarse(), *communicator.sum_operations(configuration, channel), Coarse()]


@contextmanager
def _registered() -> Iterator[None]:
    known = GlobalAlgorithmRegistry._declarations
    with mock.patch.object(GlobalAlgorithmRegistry, "_declarations", dict(known)):
        register("coarse")(CoarseAllReduce)
        yield


def _inputs(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(5, 6, generator=generator)


def _coarse_gradients(hierarchical: str) -> float:
    model = nn.Linear(6, 2)
    with _registered():
        ours = DistributedDataParallel(model, algorithm="coarse")
    assert ours.reconfigure(Configuration(20, hierarchical))
    worst = 0.0
    for step in range(4):
        ours.zero_grad()
        (10 * ours(_inputs(dist.get_rank(), step))).square().mean().backward()
        expected = torch.zeros(2, 6)
        for rank in range(dist.get_world_size()):
            loss = (10 * model(_inputs(rank, step))).square().mean()
            (gradient,) = torch.autograd.grad(loss, [model.weight])
            expected += gradient.round()
        worst = max(worst, float((model.weight.grad - expected).abs().max()))
    return worst


@pytest.mark.parametrize("hierarchical", ["off", "shards"])
def test_operations_added_around_the_all_reduce(four_ranks: RankPool, hierarchical: str) -> None:
    assert four_ranks.run(_coarse_gradients, hierarchical) == [0.0] * 4


def _instance() -> str | None:
    class Doubled(Algorithm):
        def scale(self, world_size: int) -> float:
            return 2.0 / world_size

        def operations(
            self, communicator: Communicator, configuration: Configuration, channel: int
        ) -> Sequence[Operation]:
            return communicator.sum_operations(configuration, channel)

    stock, _ = pair(nn.Linear(6, 2))
    twin = nn.Linear(6, 2)
    twin.load_state_dict(stock.module.state_dict())
    ours = DistributedDataParallel(twin, algorithm=Doubled())
    inputs = _inputs(dist.get_rank(), 0)
    (2 * stock(inputs).mean()).backward()
    ours(inputs).mean().backward()
    return difference(stock, ours)


def test_an_instance_is_taken_as_it_is(two_ranks: RankPool) -> None:
    assert two_ranks.run(_instance) == [None, None]
