"""What the strategies are called, what they take, and what they refuse; nothing is trained."""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bagua_client.algorithms import ByteGradAlgorithm, GlobalAlgorithmRegistry
from tests.integrations.arms import needs

PACKAGES = ("lightning", "pytorch_lightning")

pytestmark = [pytest.mark.slow, needs(*PACKAGES)]


def _ours(package: str) -> ModuleType:
    importlib.import_module("bagua_client.lightning")
    return importlib.import_module(f"bagua_client.lightning.of_{package}")


@pytest.fixture
def ours() -> Any:
    """The strategies of the newer of Lightning's packages."""
    return _ours("lightning")


def _trainer(ours: Any, strategy: Any) -> Any:
    package = ours.__name__.rpartition("of_")[2]
    trainers = importlib.import_module(package).Trainer
    return trainers(strategy=strategy, accelerator="cpu", devices=2, logger=False, barebones=True)


def test_each_algorithm_has_a_name_in_both_registries(ours: Any) -> None:
    algorithms = GlobalAlgorithmRegistry.available_algorithms("replicated")
    names = {f"bagua_{name}" for name in algorithms} | {"bagua", "bagua_spawn", "bagua_fork"}
    assert names <= set(ours.StrategyRegistry.available_strategies())
    assert names <= set(ours.STRATEGY_REGISTRY.available_strategies())
    assert type(_trainer(ours, "bagua_bytegrad").strategy) is ours.BaguaStrategy


def test_importing_it_again_changes_nothing(ours: Any) -> None:
    before = dict(ours.StrategyRegistry)
    importlib.reload(importlib.import_module("bagua_client.lightning"))
    assert dict(ours.StrategyRegistry) == before


@pytest.mark.parametrize(
    ("before", "chosen"),
    [((), "lightning"), (PACKAGES[1:], "pytorch_lightning"), (PACKAGES, "lightning")],
)
def test_the_class_is_for_the_package_that_the_script_has_imported(
    monkeypatch: pytest.MonkeyPatch, before: tuple[str, ...], chosen: str
) -> None:
    module = importlib.import_module("bagua_client.lightning")
    expected = _ours(chosen).BaguaStrategy
    for package in PACKAGES:
        if package not in before:
            monkeypatch.delitem(sys.modules, package, raising=False)
    importlib.reload(module)
    assert module.BaguaStrategy is expected
    monkeypatch.undo()
    importlib.reload(module)


def _forget(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """As if they were not installed."""
    for name in list(sys.modules):
        if name.partition(".")[0] in packages:
            monkeypatch.delitem(sys.modules, name)
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules, f"bagua_client.lightning.of_{package}", raising=False)


def test_one_package_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("bagua_client.lightning")
    expected = _ours("pytorch_lightning").BaguaStrategy
    with monkeypatch.context() as patch:
        _forget(patch, "lightning")
        importlib.reload(module)
        assert module.BaguaStrategy is expected
    importlib.reload(module)


def test_without_lightning_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("bagua_client.lightning")
    with monkeypatch.context() as patch:
        _forget(patch, *PACKAGES)
        with pytest.raises(ImportError, match="pip install lightning"):
            importlib.reload(module)
    importlib.reload(module)


def test_arguments_go_to_whom_they_are_for(ours: Any) -> None:
    strategy = ours.BaguaStrategy(
        algorithm="async",
        sync_interval_ms=100,
        warmup_steps=10,
        find_unused_parameters=True,
        bucket_cap_mb=7,
        start_method="spawn",
        process_group_backend="gloo",
    )
    assert strategy._ddp_kwargs == {
        "gradient_as_bucket_view": True,
        "find_unused_parameters": True,
        "bucket_cap_mb": 7,
    }
    assert strategy._start_method == "spawn"
    assert strategy.process_group_backend == "gloo"
    algorithm = strategy._choice._make((), 0, None)
    assert (algorithm.sync_interval_ms, algorithm.warmup_steps) == (100, 10)


@pytest.mark.parametrize(
    ("arguments", "is_view"),
    [
        ({}, True),
        ({"flatten": False}, False),
        ({"flatten": True, "gradient_as_bucket_view": False}, False),
    ],
)
def test_flattened_gradients_are_views_of_the_buckets(
    ours: Any, arguments: dict[str, bool], is_view: bool
) -> None:
    strategy = ours.BaguaStrategy(**arguments)
    assert strategy._ddp_kwargs["gradient_as_bucket_view"] is is_view


@pytest.mark.parametrize("algorithm", GlobalAlgorithmRegistry.available_algorithms("replicated"))
def test_ranks_that_are_spawned_are_sent_the_strategy(ours: Any, algorithm: str) -> None:
    strategy = ours.StrategyRegistry.get(f"bagua_{algorithm}")
    sent = pickle.loads(pickle.dumps(strategy))
    assert type(sent) is ours.BaguaStrategy
    assert sent._choice._algorithm == algorithm


def test_arguments_stand_where_bagua_had_them(ours: Any) -> None:
    parameters = list(inspect.signature(ours.BaguaStrategy).parameters)
    assert parameters[:7] == [
        "algorithm",
        "flatten",
        "accelerator",
        "parallel_devices",
        "cluster_environment",
        "checkpoint_io",
        "precision_plugin",
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"algorithm": "bytegrad", "sync_interval_ms": 5}, "'bytegrad' has no argument 'sync_int"),
        ({"interval": 5}, "'gradient_allreduce' has no argument 'interval'"),
        (
            {"algorithm": ByteGradAlgorithm(), "average": False},
            "'bytegrad' [^(]*.they belong where the algorithm itself is made",
        ),
        ({"algorithm": "qadam", "q_adam_optimizer": 1}, "it is what configure_optimizers returns"),
        ({"device_ids": [0]}, "'gradient_allreduce' has no argument 'device_ids'"),
    ],
)
def test_an_argument_that_nobody_has_is_refused(
    ours: Any, arguments: dict[str, Any], text: str
) -> None:
    for strategy in (ours.BaguaStrategy, ours.BaguaFabricStrategy):
        with pytest.raises(TypeError, match=text):
            strategy(**arguments)


def test_what_an_algorithm_cannot_be_is_told_at_once(ours: Any) -> None:
    for strategy in (ours.BaguaStrategy, ours.BaguaFabricStrategy):
        with pytest.raises(ValueError, match="no algorithm named 'horovod'; known are: async"):
            strategy(algorithm="horovod")
        with pytest.raises(ValueError, match="communication_interval must be at least 1"):
            strategy(algorithm="decentralized", communication_interval=0)


@needs("jsonargparse")
@pytest.mark.parametrize(
    ("arguments", "has_feedback"),
    [
        (["--trainer.strategy", "bagua_bytegrad"], False),
        (
            [
                "--trainer.strategy=bagua_client.lightning.BaguaStrategy",
                "--trainer.strategy.algorithm=bytegrad",
                "--trainer.strategy.dict_kwargs.error_feedback=true",
            ],
            True,
        ),
    ],
)
def test_the_command_line_knows_them(
    tmp_path: Path, arguments: list[str], has_feedback: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli = importlib.import_module("lightning.pytorch.cli")
    module = importlib.import_module("lightning.pytorch.demos.boring_classes").BoringModel
    monkeypatch.chdir(tmp_path)
    fixed = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false"]
    # Else it seeds whatever this process starts from here on, by a variable of the environment.
    made = cli.LightningCLI(
        module, run=False, args=[*fixed, *arguments], seed_everything_default=False
    )
    strategy = made.trainer.strategy
    assert type(strategy) is _ours("lightning").BaguaStrategy
    found = strategy._choice._make((), 0, None)
    assert (found.name, found.error_feedback) == ("bytegrad", has_feedback)


def test_a_scaler_of_the_training_is_qadams(ours: Any) -> None:
    from bagua_client.algorithms import QAdamOptimizer

    scaler = torch.amp.GradScaler("cpu")
    choice = ours.BaguaStrategy(algorithm="qadam", hierarchical=False)._choice
    optimizer = QAdamOptimizer([torch.nn.Parameter(torch.ones(2))])
    algorithm = choice._make([optimizer], 1, scaler)
    assert algorithm.grad_scaler is scaler
    assert algorithm.optimizer is optimizer
    assert not algorithm.hierarchical
