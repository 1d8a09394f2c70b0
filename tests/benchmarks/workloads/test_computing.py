"""The models that compute on GPUs make a step, here on a processor with few samples."""

from __future__ import annotations

import pytest
import torch

from benchmarks.workloads import computing


@pytest.mark.parametrize("name", ["resnet50", "bert-base"])
def test_a_model_takes_a_step_that_gives_every_parameter_a_gradient(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, _ = computing.MODELS[name]
    monkeypatch.setitem(computing.MODELS, name, (kind, 2))
    workload = computing.ComputingTraining(name, torch.device("cpu"))
    model, again = workload.model(), workload.model()
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    workload.stepper(model)()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_what_no_gpu_trains_is_refused() -> None:
    with pytest.raises(ValueError, match="there are resnet50, vgg16"):
        computing.ComputingTraining("digits", torch.device("cpu"))
