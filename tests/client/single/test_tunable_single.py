"""A model that a process trains by itself is changed between two steps. (That it learns what it
would have learned is in tests/client/tunable/recomputed.)"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import bagua_client
from bagua_client import Configuration
from bagua_client.integrations.single_model import SingleModel, tunable_of
from bagua_client.tunable.tunable import Nobody
from tests.client.single.models import BLOCKS, Model, Training, batch_of


@pytest.mark.parametrize("fullgraph", [False, True])
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


@pytest.mark.parametrize("begun", [False, True])
def test_copies_are_of_the_models_own_class(begun: bool) -> None:
    ours: Any = bagua_client.tune(Model())
    if begun:
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


def test_what_travels_cannot_be_changed(caplog: pytest.LogCaptureFixture) -> None:
    ours: Any = bagua_client.tune(Model())
    Training(ours).run(2)
    assert not ours.reconfigure(Configuration(channels=2))
    assert "single models do not have the knob channels" in caplog.text
    with pytest.raises(ValueError, match="is not for a model that a process trains by itself"):
        bagua_client.tune(Model(), algorithm="bytegrad")


def test_no_process_group_is_made() -> None:
    Training(bagua_client.tune(Model())).run(5, {1: BLOCKS, 4: 2})
    assert not torch.distributed.is_initialized()
