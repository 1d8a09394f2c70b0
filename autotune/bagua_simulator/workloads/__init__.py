"""The models that can be simulated without a measured job.

Computing times are those of one NVIDIA V100, from published throughputs; each module names them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from bagua_simulator.workload import Architecture, Workload
from bagua_simulator.workloads.convolutional import resnet50, vgg16
from bagua_simulator.workloads.transformers import (
    bert_base,
    bert_large,
    gpt2_medium,
    gpt2_small,
)

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
