"""Optimizer steps in fewer kernels."""

from bagua_training.optimizers.contiguity import calculate_mutual_groups
from bagua_training.optimizers.fused import fuse_optimizer, is_fused_optimizer

__all__ = ["calculate_mutual_groups", "fuse_optimizer", "is_fused_optimizer"]
