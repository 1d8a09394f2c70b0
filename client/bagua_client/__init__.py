"""The client: what runs inside each training process."""

from bagua_client.algorithms import Algorithm, Communicates, When, register
from bagua_client.configuration import Configuration
from bagua_client.integrations.distributed_data_parallel import DistributedDataParallel

__all__ = [
    "Algorithm",
    "Communicates",
    "Configuration",
    "DistributedDataParallel",
    "When",
    "register",
]
