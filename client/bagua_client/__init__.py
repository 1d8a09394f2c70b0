"""The client: what runs inside each training process."""

from bagua_client import callbacks
from bagua_client.algorithms import Algorithm, register
from bagua_client.configuration import Configuration
from bagua_client.integrations.distributed_data_parallel import DistributedDataParallel, tune
from bagua_client.tuning import Tuning, on_tuned

__all__ = [
    "Algorithm",
    "Configuration",
    "DistributedDataParallel",
    "Tuning",
    "callbacks",
    "on_tuned",
    "register",
    "tune",
]
