"""The models that compute on GPUs make a step, here small, on a processor."""

from __future__ import annotations

import math

import pytest
import torch

from bagua_simulator.workloads import architecture
from benchmarks.support.workloads import computing

pytestmark = pytest.mark.slow

# Products in bfloat16 are slow on processors that have no instructions for them: at full size a
# step takes minutes there.
SMALL = {
    "resnet50": {"SIDE": 16, "STAGES": ((64, 1), (128, 1))},
    "bert-base": {"VOCABULARY": 100, "CONTEXT": 16, "SEQUENCE": 8, "WIDTH": 24, "LAYERS": 2},
    "gpt2-small": {"VOCABULARY": 100, "CONTEXT": 16, "WIDTH": 24, "LAYERS": 2},
}


@pytest.mark.parametrize("name", SMALL)
def test_a_model_takes_a_step_that_gives_every_parameter_a_gradient(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, _ = computing.MODELS[name]
    monkeypatch.setitem(computing.MODELS, name, (kind, 2))
    for constant, value in SMALL[name].items():
        monkeypatch.setattr(kind, constant, value)
    workload = computing.ComputingTraining(name, torch.device("cpu"))
    model, again = workload.model(), workload.model()
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    workload.stepper(model)()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_the_models_are_of_their_published_sizes() -> None:
    with torch.device("meta"):
        sizes = {
            name: sum(p.numel() for p in kind().parameters())
            for name, (kind, _) in computing.MODELS.items()
        }
    layers = architecture("resnet50").layers
    shapes = [shape for layer in layers for _, shape in layer.parameters]
    assert sizes["resnet50"] == sum(map(math.prod, shapes))
    assert sizes["vgg16"] == 138_357_544  # Simonyan and Zisserman 2015, table 2: 138 million
    # With what only pre-training has: BERT-base alone has 109 million.
    assert 109e6 < sizes["bert-base"] < 112e6
    assert sizes["gpt2-small"] == pytest.approx(124.4e6, rel=0.001)
