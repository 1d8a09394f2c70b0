"""Optimizer steps in fewer kernels."""

from bagua_client.optimizers.fused import fuse_optimizer, is_fused_optimizer

__all__ = ["fuse_optimizer", "is_fused_optimizer"]
