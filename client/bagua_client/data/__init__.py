"""What feeds a training: samplers that spread cost evenly over ranks."""

from bagua_client.data.load_balancing import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)

__all__ = ["LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"]
