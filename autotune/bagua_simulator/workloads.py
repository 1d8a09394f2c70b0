"""The models that can be simulated without a measured job, and cases for benchmarks: a model on a
cluster each.

Computing times are those of one NVIDIA V100, from published throughputs. Parameters have the names
of torchvision's and Hugging Face's implementations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from bagua_simulator.cluster import Cluster, parse_bandwidth
from bagua_simulator.simulator import Simulator
from bagua_simulator.workload import Architecture, Layer, Workload

# Operations of a normalisation for each of its values; it is bound by memory.
NORM_OPERATIONS = 10

VGG16_BATCH = 32
# On a P100 at this batch 144 (https://www.tensorflow.org/performance/benchmarks, 2017), times the
# ratio of the peak float32 rates of V100 and P100, 15.7 and 10.6 TFLOP/s.
VGG16_IMAGES_PER_SECOND = 144 * 15.7 / 10.6
RESNET50_BATCH = 128
# On a V100 with mixed precision (NVIDIA DeepLearningExamples, PyTorch ResNet50 v1.5, DGX-1).
RESNET50_IMAGES_PER_SECOND = 1200


def vgg16() -> Architecture:
    """138.4 million parameters, nine tenths of them in the last three layers (Simonyan and
    Zisserman 2015, configuration D), on images of 224 x 224."""
    layers, inputs, size, position = [], 3, 224, 0
    for channels, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convolutions):
            layers.append(_convolution(f"features.{position}", inputs, channels, 3, size, True))
            inputs, position = channels, position + 2
        size, position = size // 2, position + 1
    for index, (outputs, features) in enumerate(((4096, 512 * 49), (4096, 4096), (1000, 4096))):
        layers.append(_linear(f"classifier.{3 * index}", features, outputs))
    return Architecture("vgg16", tuple(layers), VGG16_BATCH / VGG16_IMAGES_PER_SECOND)


def resnet50() -> Architecture:
    """25.6 million parameters in 161 tensors (He et al. 2016, table 1), on images of 224 x 224."""
    layers = [_convolution("conv1", 3, 64, 7, 112), _norm("bn1", 64, 112**2)]
    inputs, size = 64, 56
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for block in range(blocks):
            # The first block of a stage is where the image shrinks, in its second convolution.
            before = size
            if block == 0 and stage > 1:
                size //= 2
            layers += _bottleneck(f"layer{stage}.{block}", inputs, width, before, size, block == 0)
            inputs = 4 * width
    layers.append(_linear("fc", 2048, 1000))
    return Architecture("resnet50", tuple(layers), RESNET50_BATCH / RESNET50_IMAGES_PER_SECOND)


def _bottleneck(
    name: str, inputs: int, width: int, before: int, size: int, has_shortcut: bool
) -> list[Layer]:
    layers = [
        _convolution(f"{name}.conv1", inputs, width, 1, before),
        _norm(f"{name}.bn1", width, before**2),
        _convolution(f"{name}.conv2", width, width, 3, size),
        _norm(f"{name}.bn2", width, size**2),
        _convolution(f"{name}.conv3", width, 4 * width, 1, size),
        _norm(f"{name}.bn3", 4 * width, size**2),
    ]
    if has_shortcut:
        layers.append(_convolution(f"{name}.downsample.0", inputs, 4 * width, 1, size))
        layers.append(_norm(f"{name}.downsample.1", 4 * width, size**2))
    return layers


# BERT and GPT-2 in two sizes each. In all of them the token embedding is the output layer's weight
# too; its gradient is complete only when the backward pass has come to the embedding, at the end.

BERT_VOCABULARY, BERT_POSITIONS, BERT_SEQUENCE, BERT_BATCH = 30522, 512, 384, 7
# On a V100 of 32 GB with mixed precision at this batch (NVIDIA DeepLearningExamples, BERT-large
# on SQuAD, whose sequences have 384 tokens, DGX-1).
BERT_LARGE_SEQUENCES_PER_SECOND = 24.29
GPT2_VOCABULARY, GPT2_SEQUENCE, GPT2_BATCH = 50257, 1024, 2
BERT_LATE = ("bert.embeddings.word_embeddings.weight",)
GPT2_LATE = ("transformer.wte.weight",)
# The number of layers, and their width.
BASE, LARGE = (12, 768), (24, 1024)


def bert_base() -> Architecture:
    """110.1 million parameters with the pre-training heads (Devlin et al. 2019)."""
    layers = _bert_layers(*BASE)
    return Architecture("bert-base", tuple(layers), _seconds(layers, BERT_BATCH), BERT_LATE)


def bert_large() -> Architecture:
    """336.2 million parameters with the pre-training heads (Devlin et al. 2019)."""
    seconds = BERT_BATCH / BERT_LARGE_SEQUENCES_PER_SECOND
    return Architecture("bert-large", tuple(_bert_layers(*LARGE)), seconds, BERT_LATE)


def gpt2_small() -> Architecture:
    """124.4 million parameters (Radford et al. 2019)."""
    layers = _gpt2_layers(*BASE)
    return Architecture("gpt2-small", tuple(layers), _seconds(layers, GPT2_BATCH), GPT2_LATE)


def gpt2_medium() -> Architecture:
    """354.8 million parameters (Radford et al. 2019)."""
    layers = _gpt2_layers(*LARGE)
    return Architecture("gpt2-medium", tuple(layers), _seconds(layers, GPT2_BATCH), GPT2_LATE)


def _seconds(layers: list[Layer], batch: int) -> float:
    """The length of a step at the operations per second of BERT-large: no published throughputs of
    the others on a V100 under the same conditions were found."""
    large = sum(layer.operations for layer in _bert_layers(*LARGE))
    operations_per_second = large * BERT_LARGE_SEQUENCES_PER_SECOND
    return batch * sum(layer.operations for layer in layers) / operations_per_second


def _bert_layers(count: int, width: int) -> list[Layer]:
    tokens, root = BERT_SEQUENCE, "bert.embeddings"
    embeddings = (
        (f"{root}.word_embeddings.weight", (BERT_VOCABULARY, width)),
        (f"{root}.position_embeddings.weight", (BERT_POSITIONS, width)),
        (f"{root}.token_type_embeddings.weight", (2, width)),
    )
    layers = [Layer(embeddings, float(tokens * width)), _norm(f"{root}.LayerNorm", width, tokens)]
    for index in range(count):
        name = f"bert.encoder.layer.{index}"
        layers += [
            _linear(f"{name}.attention.self.query", width, width, tokens),
            _linear(f"{name}.attention.self.key", width, width, tokens),
            _linear(f"{name}.attention.self.value", width, width, tokens),
            _attention(width, tokens),
            _linear(f"{name}.attention.output.dense", width, width, tokens),
            _norm(f"{name}.attention.output.LayerNorm", width, tokens),
            _linear(f"{name}.intermediate.dense", width, 4 * width, tokens),
            _linear(f"{name}.output.dense", 4 * width, width, tokens),
            _norm(f"{name}.output.LayerNorm", width, tokens),
        ]
    head = "cls.predictions"
    return [
        *layers,
        _linear("bert.pooler.dense", width, width),
        _linear(f"{head}.transform.dense", width, width, tokens),
        _norm(f"{head}.transform.LayerNorm", width, tokens),
        Layer(((f"{head}.bias", (BERT_VOCABULARY,)),), 2.0 * tokens * width * BERT_VOCABULARY),
        _linear("cls.seq_relationship", width, 2),
    ]


def _gpt2_layers(count: int, width: int) -> list[Layer]:
    tokens = GPT2_SEQUENCE
    embeddings = (
        ("transformer.wte.weight", (GPT2_VOCABULARY, width)),
        ("transformer.wpe.weight", (GPT2_SEQUENCE, width)),
    )
    layers = [Layer(embeddings, float(tokens * width))]
    for index in range(count):
        name = f"transformer.h.{index}"
        layers += [
            _norm(f"{name}.ln_1", width, tokens),
            _linear(f"{name}.attn.c_attn", width, 3 * width, tokens),
            _attention(width, tokens),
            _linear(f"{name}.attn.c_proj", width, width, tokens),
            _norm(f"{name}.ln_2", width, tokens),
            _linear(f"{name}.mlp.c_fc", width, 4 * width, tokens),
            _linear(f"{name}.mlp.c_proj", 4 * width, width, tokens),
        ]
    output = Layer((), 2.0 * tokens * width * GPT2_VOCABULARY)
    return [*layers, _norm("transformer.ln_f", width, tokens), output]


def _convolution(
    name: str, inputs: int, outputs: int, kernel: int, size: int, has_bias: bool = False
) -> Layer:
    weight = (f"{name}.weight", (outputs, inputs, kernel, kernel))
    bias = ((f"{name}.bias", (outputs,)),) if has_bias else ()
    operations = 2.0 * inputs * outputs * kernel**2 * size**2
    return Layer((weight, *bias), operations)


def _linear(name: str, inputs: int, outputs: int, tokens: int = 1) -> Layer:
    parameters = ((f"{name}.weight", (outputs, inputs)), (f"{name}.bias", (outputs,)))
    return Layer(parameters, 2.0 * inputs * outputs * tokens)


def _attention(width: int, tokens: int) -> Layer:
    """Scores and weighted values: two products of tokens x tokens x width."""
    return Layer((), 4.0 * tokens**2 * width)


def _norm(name: str, width: int, values: int) -> Layer:
    """Of so many values in each of its ``width`` channels."""
    parameters = ((f"{name}.weight", (width,)), (f"{name}.bias", (width,)))
    return Layer(parameters, float(NORM_OPERATIONS * values * width))


CATALOG: dict[str, Callable[[], Architecture]] = {
    "vgg16": vgg16,
    "resnet50": resnet50,
    "bert-base": bert_base,
    "bert-large": bert_large,
    "gpt2-small": gpt2_small,
    "gpt2-medium": gpt2_medium,
}


@cache
def architecture(name: str) -> Architecture:
    """The model of this name, layer by layer; raises KeyError if there is none."""
    return CATALOG[name]()


@cache
def load(name: str) -> Workload:
    """The workload of this name; raises KeyError if there is none."""
    return architecture(name).workload()


# A fixed set: what was measured on these cases stays comparable when the catalog grows.
MODELS = ("vgg16", "resnet50", "bert-large", "gpt2-medium")
RANKS_PER_NODE = 8
# Ethernet with TCP: latencies of its sockets, and the rate at which a few cores copy.
TCP_LATENCY_SECONDS, TCP_FLOW_BYTES_PER_SECOND = 100e-6, 8e9
# Latency of InfiniBand or RoCE between two nodes of one cluster.
RDMA_LATENCY_SECONDS = 5e-6
# GPUs behind a PCIe switch, without NVLink.
PCIE_BYTES_PER_SECOND, PCIE_LATENCY_SECONDS = 10e9, 8e-6


@dataclass(frozen=True)
class Case:
    """A simulated job to be tuned."""

    name: str
    simulator: Simulator


def cases() -> list[Case]:
    """Four models on 6 clusters of 8 GPUs a node.

    10 to 100 Gbit/s, 4 and 16 nodes, TCP and RDMA, with NVLink inside the nodes and without.
    """
    clusters = {
        "10Gbit-4": _cluster(4, "10Gbit"),
        "25Gbit-16": _cluster(16, "25Gbit"),
        "40Gbit-4-pcie": _cluster(4, "40Gbit", has_nvlink=False),
        "100Gbit-16": _cluster(16, "100Gbit"),
        "100Gbit-16-rdma": _cluster(16, "100Gbit", is_rdma=True),
        "100Gbit-4-rdma-pcie": _cluster(4, "100Gbit", has_nvlink=False, is_rdma=True),
    }
    return [
        Case(f"{model}-{name}", Simulator(load(model), cluster))
        for model in MODELS
        for name, cluster in clusters.items()
    ]


def _cluster(nodes: int, bandwidth: str, has_nvlink: bool = True, is_rdma: bool = False) -> Cluster:
    latency_seconds = RDMA_LATENCY_SECONDS if is_rdma else TCP_LATENCY_SECONDS
    cluster = Cluster(nodes, RANKS_PER_NODE, parse_bandwidth(bandwidth), latency_seconds)
    if not is_rdma:
        cluster = replace(cluster, flow_bytes_per_second=TCP_FLOW_BYTES_PER_SECOND)
    if has_nvlink:
        return cluster
    return replace(
        cluster,
        inside_bandwidth_bytes_per_second=PCIE_BYTES_PER_SECOND,
        inside_latency_seconds=PCIE_LATENCY_SECONDS,
    )
