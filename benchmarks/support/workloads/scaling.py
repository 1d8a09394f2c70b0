"""Published models with narrower layers, so that their gradients suit a slow network."""

from __future__ import annotations

import math
from dataclasses import replace

from bagua_simulator.workload import FLOAT_BYTES, Architecture, Layer

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
