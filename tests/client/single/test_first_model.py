"""The launcher finds the model that a process trains by itself, and nothing else."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from bagua_client.integrations import single_model
from bagua_client.integrations.single_model import SingleModel, follow_first_model
from bagua_client.integrations.start import Beginning
from bagua_client.integrations.tuned_model import TunedModel
from tests.client.single.models import Model, Training
from tests.ranks import RankPool

HOOKS = nn.modules.module._global_forward_pre_hooks


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """What was begun with, while a launcher's hook is there; nothing is tuned."""
    found: list[nn.Module] = []
    monkeypatch.setenv("BAGUA_AUTOTUNE", "1")
    monkeypatch.setattr(single_model, "_begin", lambda model, *_: found.append(model))
    monkeypatch.setattr(atexit, "register", lambda _: None)
    follow_first_model()
    yield found
    HOOKS.clear()


def _no_grad(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(1, 8))


def _frozen(model: nn.Module) -> None:
    model.requires_grad_(False)(torch.ones(1, 8))


PASSES: dict[str, Callable[[nn.Module], object]] = {
    "in eval mode": lambda model: model.eval()(torch.ones(1, 8)),
    "without gradients": _no_grad,
    "of a frozen teacher": _frozen,
}


@pytest.mark.parametrize("passes", PASSES.values(), ids=PASSES)
def test_other_passes_are_not_a_training(
    begun: list[nn.Module], passes: Callable[[nn.Module], object]
) -> None:
    passes(Model())
    assert begun == []
    Training(trained := Model()).step(0)
    assert begun == [trained]
    assert isinstance(trained, SingleModel)


def test_the_outermost_is_found_once(begun: list[nn.Module]) -> None:
    generator, discriminator = Model(), Model()
    for number in range(2):
        Training(generator).step(number)
        Training(discriminator).step(number)
    assert begun == [generator]
    assert not isinstance(discriminator, TunedModel)
    assert not HOOKS, "and no module is looked at any more"


def test_what_is_compiled_is_found(recwarn: Any, begun: list[nn.Module]) -> None:
    model = Model()
    Training(model, lambda given: torch.compile(given, backend="eager")).step(0)
    assert begun == [model]
    assert not [each for each in recwarn if "global hooks" in str(each.message)]


@pytest.mark.parametrize("variables", [{}, {"BAGUA_AUTOTUNE": "0"}])
def test_nothing_is_watched_where_nobody_asks(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    follow_first_model()
    assert not HOOKS


def test_one_of_several_processes_is_none_that_trains_alone(
    begun: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    Training(Model()).step(0)
    assert begun == []


def _with_a_group(wraps: bool) -> list[str]:
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BAGUA_AUTOTUNE", "1")
        patch.setattr(single_model, "_begin", lambda model, *_: found.append(type(model).__name__))
        patch.setattr(atexit, "register", lambda _: None)
        follow_first_model()
        model: Any = Model()
        called = nn.parallel.DistributedDataParallel(model) if wraps else model
        called(torch.ones(1, 8))["out"].sum().backward()
        HOOKS.clear()
    return found


@pytest.mark.parametrize(("wraps", "names"), [(False, ["Model"]), (True, [])])
def test_in_a_group_of_one_rank_what_is_wrapped_keeps_its_way(
    one_rank: RankPool, wraps: bool, names: list[str]
) -> None:
    assert one_rank.run(_with_a_group, wraps) == [names]


def test_in_a_group_of_several_ranks_nothing_is_found(two_ranks: RankPool) -> None:
    assert two_ranks.run(_with_a_group, False) == [[], []]


def _lines_of(kind: str) -> list[str]:
    """What a rank says of a model that is trained in that way, until the end of its process."""
    at_exit: list[Callable[[], None]] = []
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(single_model.logger, "warning", lambda text, *of: lines.append(text % of))
        patch.setattr(single_model, "announce", lambda _, text: lines.append(text))
        patch.setenv("BAGUA_AUTOTUNE", "1")
        patch.setattr(atexit, "register", at_exit.append)
        patch.setattr(Beginning, "has_begun", False)
        follow_first_model()
        model: Any = nn.Sequential(nn.Linear(8, 1))
        if kind == "first FSDP":
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        model(torch.ones(1, 8)).sum().backward()
        HOOKS.clear()
        Beginning.has_begun = kind == "later"
        for each in at_exit:
            each()
    return lines


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("first FSDP", "autotune is off: FullyShardedDataParallel, FSDP's first version"),
        ("by itself", "autotune: nothing was tuned, as no model of this training was in"),
        ("later", ""),
    ],
)
def test_rank_0_says_once_that_several_train_a_model_that_is_not_tuned(
    kind: str, line: str, two_ranks: RankPool
) -> None:
    first, second = two_ranks.run(_lines_of, kind)
    assert second == []
    assert len(first) == (1 if line else 0)
    assert all(line in each for each in first)
