"""The same models on a CUDA device: they compute, at their full size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.support.models import VGG16, BertBase, GPT2Small, ResNet50

Model = ResNet50 | VGG16 | BertBase | GPT2Small
# With the samples of each rank in a step: about 30, 20, 55 and 110 ms of computing on an H200.
MODELS: dict[str, tuple[type[Model], int]] = {
    "resnet50": (ResNet50, 128),
    "vgg16": (VGG16, 64),
    "bert-base": (BertBase, 32),
    "gpt2-small": (GPT2Small, 22),
}


class ComputingTraining:
    """A published model with bfloat16 products and float32 gradients, trained on random data."""

    def __init__(self, name: str, device: torch.device) -> None:
        if name not in MODELS:
            raise ValueError(f"no workload {name} on {device.type}; there are {', '.join(MODELS)}")
        self._kind, self._batch = MODELS[name]
        self._device = device

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        with self._device:  # a processor would take seconds to draw the values of each model
            model = self._kind()
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    def stepper(self, wrapped: nn.Module) -> Callable[[], None]:
        inputs = self._kind.batch(self._batch, self._device)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3, momentum=0.9)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self._device.type, dtype=torch.bfloat16):
                loss = wrapped(*inputs)
            loss.backward()
            optimizer.step()

        return step
