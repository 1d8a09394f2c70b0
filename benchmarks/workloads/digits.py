"""The real training of examples/digits.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from examples.digits import digits, resnet18

BATCH = 16
"""Images of each rank in a step."""


class DigitsTraining:
    """ResNet-18 on scikit-learn's digits; every replica begins with the same values."""

    def __init__(self, rank: int, device: torch.device, seed: int) -> None:
        self._seed = seed
        self._device = device
        images, labels, _, _ = digits()
        self._images, self._labels = images.to(device), labels.to(device)
        # Ranks draw from the same images in orders of their own.
        self._generator = torch.Generator().manual_seed(1000 * seed + rank)

    def model(self) -> nn.Module:
        torch.manual_seed(self._seed)
        return resnet18().to(self._device)

    def stepper(self, wrapped: nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

        def step() -> None:
            chosen = torch.randint(len(self._labels), (BATCH,), generator=self._generator)
            chosen = chosen.to(self._device)
            optimizer.zero_grad()
            loss = functional.cross_entropy(wrapped(self._images[chosen]), self._labels[chosen])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return step
