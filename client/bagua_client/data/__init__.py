"""What feeds a training: samplers that spread cost evenly over ranks, and a cache for samples."""

from bagua_client.data.cached_dataset import CachedDataset, CacheLoader
from bagua_client.data.load_balancing import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)
from bagua_client.data.statistics import CacheStatistics
from bagua_client.data.store import ClusterStore, Store

__all__ = [
    "CacheLoader",
    "CacheStatistics",
    "CachedDataset",
    "ClusterStore",
    "LoadBalancingDistributedBatchSampler",
    "LoadBalancingDistributedSampler",
    "Store",
]
