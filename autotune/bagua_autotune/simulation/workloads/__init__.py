"""The models that can be simulated without having been run.

Computing times are those of one NVIDIA V100, from published throughputs; each module says which.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from bagua_autotune.simulation.workload import Workload
from bagua_autotune.simulation.workloads.convolutional import resnet50, vgg16
from bagua_autotune.simulation.workloads.transformers import bert_large, gpt2_medium

CATALOG: dict[str, Callable[[], Workload]] = {
    "vgg16": vgg16,
    "resnet50": resnet50,
    "bert-large": bert_large,
    "gpt2-medium": gpt2_medium,
}


@cache
def load(name: str) -> Workload:
    """The workload of this name; raises KeyError if there is none."""
    return CATALOG[name]()
