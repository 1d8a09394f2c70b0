"""``DistributedDataParallel`` with torch's arguments and Bagua's."""

from bagua_client.compat.torch_api.data_parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
