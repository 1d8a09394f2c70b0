"""A model that sleeps while a GPU would compute; its gradients are real.

A GPU computes without using the CPU, and so does a sleep: what is left to the CPU is what a
training on GPUs leaves it, launching and communicating.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from bagua_simulator.workload import FLOAT_BYTES, Architecture, Layer
from bagua_simulator.workloads import CATALOG, architecture

Shape = tuple[int, ...]
IMAGE_CHANNELS = 3
LARGEST_FACTOR = 64.0
# Widths are whole numbers: a factor that is known better changes none of them.
FACTOR_TOLERANCE = 1e-9


def scaled(architecture: Architecture, gradient_bytes: int) -> Architecture:
    """The model with all its layers, whose float32 gradients come to ``gradient_bytes`` as nearly
    as whole widths allow.

    Every dimension is multiplied by one factor and is at least 1, but for kernels and the channels
    of images: so each matrix keeps its share of the gradients. Layers keep their operations,
    those of the full size.

    Raises:
        ValueError: a size that no factor comes near.
    """
    low, high = 0.0, LARGEST_FACTOR
    while high - low > FACTOR_TOLERANCE:
        factor = (low + high) / 2
        if _gradient_bytes(architecture, factor) < gradient_bytes:
            low = factor
        else:
            high = factor
    found = min((low, high), key=lambda f: abs(_gradient_bytes(architecture, f) - gradient_bytes))
    if not 0.9 < _gradient_bytes(architecture, found) / max(gradient_bytes, 1) < 1.1:
        raise ValueError(f"{architecture.name} cannot be scaled to {gradient_bytes} bytes")
    return replace(
        architecture, layers=tuple(_scaled(layer, found) for layer in architecture.layers)
    )


def _gradient_bytes(architecture: Architecture, factor: float) -> int:
    return FLOAT_BYTES * sum(
        math.prod(_narrowed(shape, factor))
        for layer in architecture.layers
        for _, shape in layer.parameters
    )


def _scaled(layer: Layer, factor: float) -> Layer:
    parameters = tuple((name, _narrowed(shape, factor)) for name, shape in layer.parameters)
    return replace(layer, parameters=parameters)


def _narrowed(shape: Shape, factor: float) -> Shape:
    widths, kernel = shape[:2], shape[2:]
    return (
        *(
            width if kernel and width == IMAGE_CHANNELS else max(1, round(width * factor))
            for width in widths
        ),
        *kernel,
    )


class SleepingTraining:
    """A published model with gradients of ``gradient_bytes`` that sleeps ``compute_seconds``."""

    def __init__(self, name: str, gradient_bytes: int, compute_seconds: float, rank: int) -> None:
        if name not in CATALOG:
            raise ValueError(f"no workload {name}; there are {', '.join([*CATALOG, 'digits'])}")
        full = replace(architecture(name), compute_seconds=compute_seconds)
        self._architecture = scaled(full, gradient_bytes)
        self._rank = rank
        self._first: SleepingModel | None = None

    def model(self) -> SleepingModel:
        """All of them share one memory: what they measure does not depend on values."""
        model = SleepingModel(self._architecture, self._rank, like=self._first)
        self._first = self._first or model
        return model

    def stepper(self, wrapped: nn.Module) -> Callable[[], None]:
        value = torch.zeros((), requires_grad=True)

        def step() -> None:
            wrapped.zero_grad(set_to_none=True)
            wrapped(value).backward()

        return step


class SleepingModel(nn.Module):
    """Has the parameters of an architecture, in forward order; takes its time and gives gradients.

    The forward pass sleeps in one piece. In the backward pass, which takes two thirds of the time,
    a layer sleeps until the moment when its share of the operations and those before it would be
    done: one that is late does not sleep, as a GPU computes on while the CPU is busy.

    The gradient of parameter i (from 0) on rank r is everywhere ``gradient_value(i, r)``, times
    the gradient of the output. It is written once, into memory that is used again in the next
    backward pass: gradients do not accumulate, let go of them before (``set_to_none=True``).

    Args:
        like: share this one's memory, that of values and that of gradients.
    """

    def __init__(
        self, architecture: Architecture, rank: int, like: SleepingModel | None = None
    ) -> None:
        super().__init__()
        shapes = [shape for layer in architecture.layers for _, shape in layer.parameters]
        values = [p.detach() for p in like.parameters()] if like else map(torch.zeros, shapes)
        self.values = nn.ParameterList(values)
        self._gradients: list[torch.Tensor] = (
            like._gradients if like else [*map(torch.empty, shapes)]
        )
        self._rank = rank
        self._places, self._deadlines = _schedule(architecture)
        self._forward_seconds = architecture.compute_seconds - self._deadlines[0]
        self._backward_began = 0.0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        ends = time.perf_counter() + self._forward_seconds
        parameters = list(self.values)
        for layer, (first, last) in enumerate(self._places):
            value = _SleepingLayer.apply(value, self, layer, *parameters[first:last])  # type: ignore[no-untyped-call]
        _sleep_until(ends)
        self._backward_began = max(ends, time.perf_counter())
        return value

    def gradients(self, layer: int, scale: float) -> list[torch.Tensor]:
        """Those of a layer's parameters, at the moment when they are ready."""
        _sleep_until(self._backward_began + self._deadlines[layer])
        return [
            # Autograd keeps a tensor that nobody else holds, instead of copying it.
            self._gradients[index].fill_(scale * gradient_value(index, self._rank)).detach()
            for index in range(*self._places[layer])
        ]


def gradient_value(index: int, rank: int) -> float:
    """Of the elements of a parameter's gradient; differs by parameter and rank."""
    return (index + 1) * (rank + 1) / 1024


class _SleepingLayer(torch.autograd.Function):
    """Passes a value through; in the backward pass gives its parameters their gradients."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, model: SleepingModel, layer: int, *_: torch.Tensor
    ) -> torch.Tensor:
        ctx.model, ctx.layer = model, layer
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient, None, None, *ctx.model.gradients(ctx.layer, gradient.item())


def _schedule(architecture: Architecture) -> tuple[list[tuple[int, int]], list[float]]:
    """For each layer with parameters: the first and the one after the last of them, and when it
    is done, in seconds since the beginning of the backward pass."""
    workload = architecture.workload()
    ready = {
        tensor.name: seconds
        for tensor, seconds in zip(workload.tensors, workload.ready_seconds, strict=True)
    }
    places, deadlines = [], []
    first = 0
    for layer in architecture.layers:
        if layer.parameters:
            last = first + len(layer.parameters)
            places.append((first, last))
            deadlines.append(max(ready[name] for name, _ in layer.parameters))
            first = last
    return places, deadlines


def _sleep_until(moment: float) -> None:
    seconds = moment - time.perf_counter()
    if seconds > 0:
        time.sleep(seconds)
