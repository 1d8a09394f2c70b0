"""Jobs that nobody has seen: models, networks and truths drawn at random from a seed.

A run draws its seed itself, so that nothing can be tuned to what it finds there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence

import numpy as np

from bagua_simulator import Simulator
from bagua_simulator.cluster import Cluster
from bagua_simulator.workload import FLOAT_BYTES, Architecture, Layer
from benchmarks.support.noise.odd import KIB, Oddities, OddSimulator
from benchmarks.support.noise.unseen import MIB, Case

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
