"""Mixture of experts, spread over the ranks: ``layer`` has the experts, ``gate`` chooses."""

from bagua_client.compat.torch_api.model_parallel.moe.layer import MoE, is_moe_param

__all__ = ["MoE", "is_moe_param"]
