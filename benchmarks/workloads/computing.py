"""The same models on a CUDA device: they compute, at their full size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.models import VGG16, BertBase, GPT2Small, ResNet50

Model = ResNet50 | VGG16 | BertBase | GPT2Small
# With the samples of each rank in a step: they fill a GPU's time, with room in 40 GiB.
MODELS: dict[str, tuple[type[Model], int]] = {
    "resnet50": (ResNet50, 256),
    "vgg16": (VGG16, 128),
    "bert-base": (BertBase, 32),
    "gpt2-small": (GPT2Small, 16),
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
        model = self._kind().to(self._device)
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
