"""Puts our class in the place of torch's DistributedDataParallel."""

from __future__ import annotations

import sys

from torch.nn import parallel
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from bagua_client.integrations.distributed_data_parallel import DistributedDataParallel

_STAYS_IN = "bagua_client"


def replace_torchs_class() -> None:
    """From now on whoever asks torch for DistributedDataParallel gets ours, in this process and
    those that are forked from it.

    Every module that has torch's class under any name has ours under it: call it before models are
    wrapped. What is pickled names torch's class, and loads where nothing of ours is installed.
    Calling it again does nothing.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _STAYS_IN:
            continue
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if value is TorchDistributedDataParallel:
                setattr(module, key, DistributedDataParallel)
    assert parallel.DistributedDataParallel is DistributedDataParallel
    DistributedDataParallel.__module__ = TorchDistributedDataParallel.__module__
