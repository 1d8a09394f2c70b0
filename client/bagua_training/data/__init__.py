"""What feeds a training: samplers that spread cost evenly over ranks, and a cache for samples."""

from bagua_training.data.cached_dataset import CachedDataset, CacheLoader, CacheStatistics
from bagua_training.data.load_balancing import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)
from bagua_training.data.store import ClusterStore, Store

__all__ = [
    "CacheLoader",
    "CacheStatistics",
    "CachedDataset",
    "ClusterStore",
    "LoadBalancingDistributedBatchSampler",
    "LoadBalancingDistributedSampler",
    "Store",
]
