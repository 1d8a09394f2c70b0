"""Models and networks that ``benchmarks/search.py`` does not have, under two ground truths.

Shapes are those of the papers; computing times are rounded, of a GPU that reaches some 60 TFLOP/s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from bagua_simulator import Simulator
from bagua_simulator.cluster import Cluster
from bagua_simulator.units import parse_bandwidth
from bagua_simulator.workload import Architecture, Layer
from bagua_simulator.workloads import architecture
from benchmarks.support.noise.odd import OddSimulator

MIB = 1024**2
TCP_LATENCY_SECONDS, RDMA_LATENCY_SECONDS = 80e-6, 5e-6


def alexnet() -> Architecture:
    """61 million parameters in 16 tensors, nine tenths in three (Krizhevsky et al. 2012)."""
    convolutions = ((3, 64, 11, 55), (64, 192, 5, 27), (192, 384, 3, 13), (384, 256, 3, 13),
                    (256, 256, 3, 13))  # fmt: skip
    layers = [_convolution(f"features.{i}", *shape) for i, shape in enumerate(convolutions)]
    widths = ((9216, 4096), (4096, 4096), (4096, 1000))
    layers += [_linear(f"classifier.{i}", *shape) for i, shape in enumerate(widths)]
    return Architecture("alexnet", tuple(layers), 0.03)


def mobilenet() -> Architecture:
    """3.5 million parameters in 158 tensors, most of them tiny (Sandler et al. 2018)."""
    layers = [_convolution("stem", 3, 32, 3, 112), _norm("stem.bn", 32)]
    inputs = 32
    settings = ((1, 16, 1, 112), (6, 24, 2, 56), (6, 32, 3, 28), (6, 64, 4, 14), (6, 96, 3, 14),
                (6, 160, 3, 7), (6, 320, 1, 7))  # fmt: skip
    for stage, (expansion, outputs, blocks, size) in enumerate(settings):
        for block in range(blocks):
            name, hidden = f"features.{stage}.{block}", expansion * inputs
            if expansion > 1:
                layers.append(_convolution(f"{name}.a", inputs, hidden, 1, size))
                layers.append(_norm(f"{name}.an", hidden))
            layers += [_convolution(f"{name}.b", 1, hidden, 3, size), _norm(f"{name}.bn", hidden)]
            layers.append(_convolution(f"{name}.c", hidden, outputs, 1, size))
            layers.append(_norm(f"{name}.cn", outputs))
            inputs = outputs
    layers += [_convolution("head", 320, 1280, 1, 7), _norm("head.bn", 1280)]
    return Architecture("mobilenet", (*layers, _linear("classifier", 1280, 1000)), 0.06)


def vit_large() -> Architecture:
    """304 million parameters, 24 equal layers (Dosovitskiy et al. 2021)."""
    layers = [_linear("patches", 768, 1024, 196)]
    for index in range(24):
        layers += _block(f"blocks.{index}", 1024, 4096, 197)
    return Architecture("vit-large", (*layers, _linear("head", 1024, 1000)), 0.25)


def lstm() -> Architecture:
    """66 million parameters in 11 tensors; half are ready at the very end (Zaremba et al. 2014)."""
    vocabulary, width = 10_000, 1500
    layers = [Layer((("embedding", (vocabulary, width)),), 1e6)]
    for index in range(2):
        shapes = (("w_ih", (4 * width, width)), ("w_hh", (4 * width, width)),
                  ("b_ih", (4 * width,)), ("b_hh", (4 * width,)))  # fmt: skip
        named = tuple((f"lstm.{index}.{name}", shape) for name, shape in shapes)
        layers.append(Layer(named, 2.0 * 35 * 8 * width**2))
    return Architecture("lstm", (*layers, _linear("decoder", width, vocabulary, 35)), 0.05)


def tiny_llama() -> Architecture:
    """1.1 billion parameters, 22 layers without biases (Zhang et al. 2024)."""
    width, hidden, tokens = 2048, 5632, 2048
    layers = [Layer((("embedding", (32_000, width)),), 1e6)]
    for index in range(22):
        square, up = (width, width), (width, hidden)
        shapes = {"q": square, "k": (width, 256), "v": (width, 256), "o": square}
        shapes |= {"gate": up, "up": up, "down": (hidden, width)}
        for name, shape in shapes.items():
            named = ((f"layers.{index}.{name}", shape),)
            layers.append(Layer(named, 2.0 * math.prod(shape) * tokens))
        layers.append(_norm(f"layers.{index}.norm", width))
    return Architecture("tiny-llama", (*layers, _linear("head", width, 32_000, tokens)), 0.6)


MODELS: dict[str, Callable[[], Architecture]] = {
    "bert-base": lambda: architecture("bert-base"),
    "gpt2-small": lambda: architecture("gpt2-small"),
    "alexnet": alexnet,
    "mobilenet": mobilenet,
    "vit-large": vit_large,
    "lstm": lstm,
    "tiny-llama": tiny_llama,
}


def clusters() -> dict[str, Cluster]:
    """One link that a single flow does not fill, slow and fast ones, one without nodes."""

    def make(nodes: int, ranks: int, bandwidth: str, flow: float, latency: float) -> Cluster:
        rate = parse_bandwidth(bandwidth)
        return Cluster(nodes, ranks, rate, latency, flow_bytes_per_second=flow)

    return {
        "100Gbit-2x1-thin": make(2, 1, "100Gbit", 2.9e9, TCP_LATENCY_SECONDS),
        "10Gbit-2x1": make(2, 1, "10Gbit", math.inf, TCP_LATENCY_SECONDS),
        "25Gbit-4x4": make(4, 4, "25Gbit", 3e9, TCP_LATENCY_SECONDS),
        "100Gbit-8x8-thin": make(8, 8, "100Gbit", 3e9, TCP_LATENCY_SECONDS),
        "200Gbit-16x8-rdma": make(16, 8, "200Gbit", math.inf, RDMA_LATENCY_SECONDS),
        "nvlink-1x8": make(1, 8, "100Gbit", math.inf, RDMA_LATENCY_SECONDS),
    }


@dataclass(frozen=True)
class Case:
    """A job on a cluster, and which of the two ground truths holds there.

    Attributes:
        is_drawn: it was drawn at random, see drawn.
    """

    name: str
    simulator: Simulator
    is_drawn: bool = False

    @property
    def kind(self) -> str:
        """By what cases are told apart in tables."""
        truth = "odd truth" if isinstance(self.simulator, OddSimulator) else "simulator's truth"
        return f"{truth}, drawn" if self.is_drawn else truth


def cases() -> list[Case]:
    """Every model on every cluster under both truths; any part of the list has some of each."""
    every = [
        Case(f"{model}/{place}/{truth.__name__}", truth(make().workload(), cluster))
        for model, make in MODELS.items()
        for place, cluster in clusters().items()
        for truth in (Simulator, OddSimulator)
    ]
    stride = 25  # has no factor in common with 84
    return [every[(stride * number) % len(every)] for number in range(len(every))]


def _convolution(name: str, inputs: int, outputs: int, kernel: int, size: int) -> Layer:
    shape = (outputs, inputs, kernel, kernel)
    return Layer(((f"{name}.weight", shape),), 2.0 * math.prod(shape) * size**2)


def _linear(name: str, inputs: int, outputs: int, tokens: int = 1) -> Layer:
    named = ((f"{name}.weight", (outputs, inputs)), (f"{name}.bias", (outputs,)))
    return Layer(named, 2.0 * inputs * outputs * tokens)


def _norm(name: str, width: int) -> Layer:
    return Layer(((f"{name}.weight", (width,)), (f"{name}.bias", (width,))), 10.0 * width)


def _block(name: str, width: int, hidden: int, tokens: int) -> list[Layer]:
    return [
        _norm(f"{name}.norm1", width),
        _linear(f"{name}.qkv", width, 3 * width, tokens),
        _linear(f"{name}.proj", width, width, tokens),
        _norm(f"{name}.norm2", width),
        _linear(f"{name}.fc1", width, hidden, tokens),
        _linear(f"{name}.fc2", hidden, width, tokens),
    ]
