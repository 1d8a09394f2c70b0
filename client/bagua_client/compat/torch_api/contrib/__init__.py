"""Bagua's extras: this project's data and optimizer modules under Bagua's names."""

from bagua_client.data import (
    CachedDataset,
    CacheLoader,
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)
from bagua_client.optimizers import fuse_optimizer
from bagua_client.sync_batch_norm import SyncBatchNorm

__all__ = [
    "CacheLoader",
    "CachedDataset",
    "LoadBalancingDistributedBatchSampler",
    "LoadBalancingDistributedSampler",
    "SyncBatchNorm",
    "fuse_optimizer",
]
