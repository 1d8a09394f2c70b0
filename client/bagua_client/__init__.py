"""The client: what runs inside each training process."""

import sys
from pathlib import Path

try:
    # First: what the launcher does when torch has been imported needs our modules whole.
    import torch  # noqa: F401

    from bagua_client import callbacks
    from bagua_client.algorithms import Algorithm, register
    from bagua_client.configuration import Configuration
    from bagua_client.integrations.distributed_data_parallel import DistributedDataParallel, tune
    from bagua_client.tuning import Tuning, on_tuned
except ModuleNotFoundError as error:
    # Of a command (which "python -m" calls "-m" while this is imported) a sentence is enough.
    if error.name == "torch" and Path(sys.argv[0]).name in ("-m", "bagua-run"):
        sys.exit("bagua_client needs PyTorch, which is not installed: pip install torch")
    raise

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
