"""Bagua's extras: this project's data and optimizer modules under Bagua's names."""

from bagua_training.data import (
    CachedDataset,
    CacheLoader,
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)
from bagua_training.optimizers import fuse_optimizer
from bagua_training.sync_batch_norm import SyncBatchNorm

__all__ = [
    "CacheLoader",
    "CachedDataset",
    "LoadBalancingDistributedBatchSampler",
    "LoadBalancingDistributedSampler",
    "SyncBatchNorm",
    "fuse_optimizer",
]
