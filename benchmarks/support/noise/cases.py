"""Jobs that no search was made on, under two ground truths: a list, and as many as a seed draws.

Shapes of the list are those of the papers; computing times are rounded, of a GPU that reaches some
60 TFLOP/s. A run draws its seed itself, so that nothing can be tuned to what it finds there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bagua_simulator import Simulator
from bagua_simulator.cluster import Cluster, Phase, parse_bandwidth
from bagua_simulator.simulator import CONTENTION, LAUNCH_SECONDS, Bucket
from bagua_simulator.workload import FLOAT_BYTES, Architecture, Layer, Workload
from bagua_simulator.workloads import architecture
from bagua_wire.configuration import Value

MIB = 1024**2
TCP_LATENCY_SECONDS, RDMA_LATENCY_SECONDS = 80e-6, 5e-6
KIB = 1024
FREE_CHANNELS = 2
Generator = np.random.Generator
# What one step's gradients may take; fewer would leave nothing to cut, more only costs time.
FEWEST_BYTES, MOST_BYTES = 8 * MIB, 2048 * MIB
# How long the gradients would take on an idle link, over the time that a step computes. At the low
# end nothing can be gained, at the high end only the network counts.
COMMUNICATION_SHARES = (0.05, 2.5)
COMPUTE_SECONDS = (0.015, 0.8)
# Bytes per second: 0.5 to 400 Gbit/s between nodes; a slow PCIe switch and NVLink inside them.
SLOWEST_LINK, FASTEST_LINK = 0.0625e9, 50e9
INSIDE_RATES = (10e9, 100e9)


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
    return _product(name, outputs, inputs, tokens, True)


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


@dataclass(frozen=True)
class Oddities:
    """What is odd about a network.

    Attributes:
        ripple: by which share the bandwidth rises and falls with the size of a part.
        ripple_octaves: so many doublings of the size later it is where it was.
        ripple_phase: of the ripple at one byte, in radians.
        cliff_bytes: below this size of a part a collective takes another, slow way.
        cliff_seconds: by how much longer that takes.
        channel_penalty: what each doubling of the channels beyond two adds to all that travels.
    """

    ripple: float = 0.3
    ripple_octaves: float = 2.0
    ripple_phase: float = 0.0
    cliff_bytes: float = 256 * KIB
    cliff_seconds: float = 300e-6
    channel_penalty: float = 0.12


class OddSimulator(Simulator):
    """A network as no cost model expects it: bandwidth ripples with the size, small parts fall off
    a cliff, many channels cost something."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        contention: float = CONTENTION,
        launch_seconds: float = LAUNCH_SECONDS,
        oddities: Oddities | None = None,
    ) -> None:
        super().__init__(workload, cluster, contention, launch_seconds)
        self.oddities = oddities or Oddities()

    def _parts(
        self, bucket: Bucket, configuration: Mapping[str, Value], channels: int
    ) -> list[tuple[Phase, ...]]:
        odd = self.oddities
        parts = super()._parts(bucket, configuration, channels)
        part_bytes = bucket.bytes / max(len(parts), 1)
        turns = math.log2(max(part_bytes, 1)) / odd.ripple_octaves
        factor = 1 + odd.ripple * math.sin(2 * math.pi * turns + odd.ripple_phase)
        factor /= 1 + odd.channel_penalty * max(0.0, math.log2(channels / FREE_CHANNELS))
        late = odd.cliff_seconds if part_bytes < odd.cliff_bytes else 0.0
        return [
            tuple(
                # Bytes rather than bandwidth: what the link allows at most changes too then.
                replace(phase, bytes=phase.bytes / factor, seconds=phase.seconds + late)
                for phase in phases
            )
            for phases in parts
        ]


def new_seed() -> int:
    """One that nobody chose."""
    return int.from_bytes(os.urandom(4), "little")


def drawn_case(seed: int, number: int) -> Case:
    """The job of this number of all that the seed draws; every second has the odd truth."""
    generator = np.random.default_rng((seed, number))
    architecture = draw_model(generator)
    cluster = draw_cluster(generator, architecture)
    workload = architecture.workload()
    contention = _log_uniform(generator, 0.03, 0.3)
    launch_seconds = _log_uniform(generator, 5e-6, 50e-6)
    simulator = (
        OddSimulator(workload, cluster, contention, launch_seconds, draw_oddities(generator))
        if number % 2
        else Simulator(workload, cluster, contention, launch_seconds)
    )
    name = f"drawn-{number}/{architecture.name}/{type(simulator).__name__}"
    return Case(name, simulator, is_drawn=True)


def draw_cluster(generator: Generator, architecture: Architecture) -> Cluster:
    """2 to 16 nodes, or one; half of the links need several flows; whether the network matters to
    the model is drawn too."""
    nodes = int(generator.choice([1, 2, 2, 4, 4, 8, 16]))
    ranks = int(generator.choice([1, 2, 4, 8] if nodes > 1 else [4, 8]))
    share = _log_uniform(generator, *COMMUNICATION_SHARES)
    rate = 2 * _bytes_of(architecture.layers) / (share * architecture.compute_seconds)
    inside = rate if nodes == 1 else float(generator.choice(INSIDE_RATES))
    is_thin = generator.random() < 0.5
    flow_share = _log_uniform(generator, 0.1, 0.7)
    bandwidth = min(max(rate, SLOWEST_LINK), FASTEST_LINK)
    return Cluster(
        nodes=nodes,
        ranks_per_node=ranks,
        bandwidth_bytes_per_second=bandwidth,
        latency_seconds=_log_uniform(generator, 3e-6, 200e-6),
        inside_bandwidth_bytes_per_second=min(max(inside, min(INSIDE_RATES)), max(INSIDE_RATES)),
        inside_latency_seconds=_log_uniform(generator, 3e-6, 10e-6),
        flow_bytes_per_second=flow_share * bandwidth if is_thin else math.inf,
    )


def draw_oddities(generator: Generator) -> Oddities:
    return Oddities(
        ripple=generator.uniform(0.05, 0.4),
        ripple_octaves=generator.uniform(1, 4),
        ripple_phase=generator.uniform(0, 2 * math.pi),
        cliff_bytes=_log_uniform(generator, 32 * KIB, MIB),
        cliff_seconds=_log_uniform(generator, 50e-6, 1e-3),
        channel_penalty=generator.uniform(0.0, 0.25),
    )


def draw_model(generator: Generator) -> Architecture:
    """Of one of three shapes, neither tiny nor huge."""
    shapes: list[Callable[[Generator], list[Layer]]] = [_equal_blocks, _pyramid, _uneven]
    draw = shapes[generator.integers(len(shapes))]
    layers = draw(generator)
    while not FEWEST_BYTES <= _bytes_of(layers) <= MOST_BYTES:
        layers = draw(generator)
    is_tied = draw is _equal_blocks and generator.random() < 0.3
    return Architecture(
        name=draw.__name__.strip("_").replace("_", "-"),
        layers=tuple(layers),
        compute_seconds=_log_uniform(generator, *COMPUTE_SECONDS),
        late=(layers[-1].parameters[0][0],) if is_tied else (),
    )


def _equal_blocks(generator: Generator) -> list[Layer]:
    """As of a transformer: an embedding, equal layers with small and large tensors, a head."""
    depth, width = int(generator.integers(4, 37)), 64 * int(generator.integers(4, 33))
    vocabulary = round(_log_uniform(generator, 500, 50_000))
    tokens = _log_uniform(generator, 100, 4000)
    widening = int(generator.choice([2, 3, 4]))
    has_bias = generator.random() < 0.6
    layers = [Layer((("embedding", (vocabulary, width)),), 1e6)]
    for block in range(depth):
        layers.append(Layer(((f"{block}.norm", (width,)),), 10.0 * width))
        for name, outputs, inputs in (
            ("qkv", 3 * width, width),
            ("proj", width, width),
            ("up", widening * width, width),
            ("down", width, widening * width),
        ):
            layers.append(_product(f"{block}.{name}", outputs, inputs, tokens, has_bias))
    return [*layers, _product("head", vocabulary, width, tokens, False)]


def _pyramid(generator: Generator) -> list[Layer]:
    """As of a convolutional net: early layers compute most, late ones have most parameters."""
    stages, width = int(generator.integers(3, 6)), 8 * int(generator.integers(2, 17))
    kernel, pixels = int(generator.choice([1, 3, 5])), 112.0
    layers, inputs = [], 3
    for stage in range(stages):
        for place in range(int(generator.integers(1, 9))):
            name, outputs = f"{stage}.{place}", width * 2**stage
            layers.append(_product(name, outputs, inputs * kernel**2, pixels**2, False))
            norm = ((f"{name}.scale", (outputs,)), (f"{name}.shift", (outputs,)))
            layers.append(Layer(norm, 10.0 * outputs))
            inputs = outputs
        pixels /= 2
    if generator.random() < 0.5:
        hidden = 256 * int(generator.integers(2, 17))
        layers.append(_product("hidden.0", hidden, inputs * 9, 1, True))
        layers.append(_product("hidden.1", hidden, hidden, 1, True))
        inputs = hidden
    return [*layers, _product("head", 1000, inputs, 1, True)]


def _uneven(generator: Generator) -> list[Layer]:
    """Few or many tensors of any size, that compute anything."""
    count = round(_log_uniform(generator, 6, 250))
    sizes = np.exp(generator.uniform(math.log(1e3), math.log(3e7), count))
    scale = _log_uniform(generator, 2 * FEWEST_BYTES, MOST_BYTES / 2) / (FLOAT_BYTES * sizes.sum())
    operations = np.exp(generator.normal(0.0, 1.5, count))
    return [
        Layer(((f"{place}", (max(1, round(size * scale)),)),), float(work))
        for place, (size, work) in enumerate(zip(sizes, operations, strict=True))
    ]


def _product(name: str, outputs: int, inputs: int, times: float, has_bias: bool) -> Layer:
    """A matrix that is used so many times in a step."""
    parameters: tuple[tuple[str, tuple[int, ...]], ...] = ((f"{name}.weight", (outputs, inputs)),)
    if has_bias:
        parameters += ((f"{name}.bias", (outputs,)),)
    return Layer(parameters, 2.0 * outputs * inputs * times)


def _bytes_of(layers: Sequence[Layer]) -> int:
    shapes = [shape for layer in layers for _, shape in layer.parameters]
    return FLOAT_BYTES * sum(math.prod(shape) for shape in shapes)


def _log_uniform(generator: Generator, low: float, high: float) -> float:
    return math.exp(generator.uniform(math.log(low), math.log(high)))
