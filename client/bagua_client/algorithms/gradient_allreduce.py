"""Gradients averaged over all ranks in every step: DistributedDataParallel's own algorithm.

It stands alone because Bagua has a module of this name, for which bagua_compat gives this one.
"""

from __future__ import annotations

from bagua_client.algorithms.base import Algorithm, register

DEFAULT_ALGORITHM = "gradient_allreduce"


@register(DEFAULT_ALGORITHM, "gradients are averaged over all ranks")
class GradientAllReduceAlgorithm(Algorithm):
    """Synchronous data parallelism (Li et al., PyTorch Distributed, VLDB 2020).

    Args:
        hierarchical: begin with reducing inside nodes first.
        average: over the ranks; else gradients are summed.
    """

    models: tuple[str, ...] = ("replicated", "sharded")

    def __init__(self, hierarchical: bool = False, average: bool = True) -> None:
        self.hierarchical = hierarchical
        self.average = average
        self.is_torchs = average
        if not average:  # Torch divides the gradients of a sharded model as the training says.
            self.models = ("replicated",)

    def scale(self, world_size: int) -> float:
        return 1.0 / world_size if self.average else 1.0
