"""A model that a process trains by itself, with recomputed blocks, is found by the launcher and
changed between two steps. (That it learns what it would have learned: tests/client/tunable.)"""

from __future__ import annotations

import atexit
import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel

import bagua_client
from bagua_client import Configuration
from bagua_client.integrations import single_model
from bagua_client.integrations.beginning import Beginning
from bagua_client.integrations.single_model import SingleModel, follow_first_model, tunable_of
from bagua_client.integrations.tuned_model import TunedModel
from bagua_client.tunable.passes import Passes
from bagua_client.tunable.tunable import Nobody
from tests.ranks import RankPool

WIDTH, BLOCKS = 8, 4
Plan = Mapping[int, int]
"""Before which step how many blocks are recomputed from then on."""


class Model(nn.Module):
    """Dropout draws random numbers in its blocks."""

    def __init__(self, recomputes: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        blocks = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))
            for _ in range(BLOCKS)
        ]
        self.blocks = nn.Sequential(*map(checkpoint_wrapper, blocks) if recomputes else blocks)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.blocks(x)
        return {"hidden": hidden, "out": self.head(hidden)}


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


class Training:
    """Of one model.

    Args:
        called: makes of the model what the training calls.
    """

    def __init__(self, model: Model, called: Any = None) -> None:
        self.model = model
        self._called = model if called is None else called(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        torch.manual_seed(2)

    def step(self, number: int) -> float:
        """Returns the loss."""
        found = self._called(batch_of(number))
        loss = found["out"].square().mean() + found["hidden"].mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def run(self, steps: int, plan: Plan | None = None) -> list[float]:
        """The loss of each step."""
        losses = []
        for number in range(steps):
            if plan and number in plan:
                changed: Any = self.model
                asked = bagua_client.Configuration(recomputed_blocks=plan[number])
                assert changed.reconfigure(asked)
            losses.append(self.step(number))
            with torch.no_grad():
                self._called(batch_of(number))
        return losses


@pytest.mark.parametrize("fullgraph", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_is_compiled_as_one_is_left_alone_and_not_compiled_again(
    fullgraph: bool, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for make in (lambda model: model, bagua_client.tune):
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = partial(torch.compile, backend=counter, fullgraph=fullgraph)
        training = Training(make(Model()), compiled)
        losses = training.run(2)
        if make is bagua_client.tune:
            ours: Any = training.model
            assert ours.reconfigure(ours.configuration)
            losses += training.run(4)
            assert not ours.reconfigure(Configuration(recomputed_blocks=1))
            assert "the whole model may be compiled as one" in caplog.text
        else:
            losses += training.run(4)
        found.append((losses + training.run(2), counter.frame_count))
    assert found[0] == found[1]


def test_a_change_is_in_force_from_the_next_forward_pass_for_training_on() -> None:
    ours: Any = bagua_client.tune(Model())
    training = Training(ours)
    training.run(4, {1: BLOCKS})
    assert ours.reconfigure(Configuration(recomputed_blocks=1))
    recomputation = tunable_of(ours).recomputation
    ours.eval()(batch_of(4))
    with torch.no_grad():
        ours.train()(batch_of(4))
    assert recomputation.recomputed == BLOCKS
    training.step(4)
    assert recomputation.recomputed == 1
    assert str(ours.configuration) == "1 blocks recomputed"


def test_steps_are_counted_where_backward_passes_end() -> None:
    ours: Any = bagua_client.tune(Model())
    training = Training(ours)
    training.run(2, {1: BLOCKS})
    ended: list[int] = []

    class Listener(Nobody):
        def reduced(self) -> None:
            ended.append(len(ended))

    tunable_of(ours).report_to(Listener())
    training.run(3)
    ours.eval()(batch_of(0))["out"].sum().backward()
    ours.train()
    first, second = ours(batch_of(0)), ours(batch_of(1))
    (first["out"].sum() + second["out"].sum()).backward()
    assert len(ended) == 4
    broken = ours(batch_of(0))["out"]
    broken.register_hook(lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        broken.sum().backward()
    training.step(5)
    assert len(ended) >= 5, "an error in a backward pass is not the end of counting"


@pytest.mark.parametrize("has_run", [False, True])
def test_copies_are_of_the_models_own_class(has_run: bool) -> None:
    ours: Any = bagua_client.tune(Model())
    if has_run:
        Training(ours).run(5, {1: BLOCKS, 4: 2})
    for made in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), copy.copy(ours)):
        assert type(made) is Model
        assert not {"_tunable", "_agent", "_called"} & vars(made).keys()
        assert not made._forward_hooks
        assert set(made.state_dict()) == set(ours.state_dict())
    assert isinstance(ours, SingleModel)
    assert type(ours).__name__ == "Model"


def test_nothing_of_ours_keeps_the_model() -> None:
    ours: Any = bagua_client.tune(Model())
    Training(ours).run(5, {1: BLOCKS, 4: 2})
    tunable, gone = tunable_of(ours), weakref.ref(ours)
    del ours
    gc.collect()
    assert gone() is None
    assert tunable.is_left
    assert not tunable.parameters


def test_before_its_first_forward_pass_it_cannot_be_changed() -> None:
    ours: Any = bagua_client.tune(Model())
    with pytest.raises(RuntimeError, match="has not made a forward pass for training yet"):
        ours.reconfigure(Configuration())
    assert (ours.tuning.state, ours.tuning.rank) == ("off", 0)


@pytest.mark.parametrize("name", ["configuration", "tuning", "report_loss"])
def test_a_model_with_a_name_of_ours_keeps_its_own_and_is_not_tuned(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAGUA_AUTOTUNE", "1")
    model: Any = Model()
    own = nn.Linear(WIDTH, WIDTH)
    setattr(model, name, own)
    assert bagua_client.tune(model) is model
    for step in range(2):
        model(batch_of(step))["out"].sum().backward()
    assert getattr(model, name) is own
    assert not isinstance(model, TunedModel)
    assert f"the model has a {name!r} of its own" in caplog.text


def test_a_weight_among_what_a_model_gives_gets_no_hooks() -> None:
    passes, weight = Passes(), nn.Parameter(torch.ones(2))
    for _ in range(3):
        passes.forward_ends({"weight": weight, "twice": 2 * weight})
    assert not weight._backward_hooks
    held = 2 * weight
    passes.forward_ends(held)
    assert passes.open == 1


def test_it_has_no_algorithm() -> None:
    with pytest.raises(ValueError, match="is not for a model that a process trains by itself"):
        bagua_client.tune(Model(), algorithm="bytegrad")


def test_no_process_group_is_made() -> None:
    Training(bagua_client.tune(Model())).run(5, {1: BLOCKS, 4: 2})
    assert not torch.distributed.is_initialized()


# The launcher finds the model that a process trains by itself, and nothing else.

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
