"""The client: what runs inside each training process."""

from bagua_client.algorithms import Algorithm, register
from bagua_client.configuration import Configuration
from bagua_client.integrations.distributed_data_parallel import DistributedDataParallel, tune

__all__ = ["Algorithm", "Configuration", "DistributedDataParallel", "register", "tune"]
