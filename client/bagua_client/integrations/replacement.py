"""Puts our class in the place of torch's DistributedDataParallel, and follows ``fully_shard`` and
``deepspeed.initialize``."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from typing import Any

from torch.nn import parallel
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from bagua_client.environment import Environment
from bagua_client.integrations.distributed_data_parallel import DistributedDataParallel
from bagua_client.tunable.looks import a_look, seen
from bagua_client.zero import is_engine

logger = logging.getLogger(__name__)

_STAYS_IN = "bagua_client"


def replace_torchs_class() -> None:
    """Put ours in the place of torch's DistributedDataParallel, in this process and
    those that are forked from it.

    Every module that has torch's class under any name has ours under it: call it before models are
    wrapped. What is pickled names torch's class, and loads where nothing of ours is installed.
    Calling it again does nothing.
    """
    _replace(TorchDistributedDataParallel, DistributedDataParallel)
    assert parallel.DistributedDataParallel is DistributedDataParallel
    DistributedDataParallel.__module__ = TorchDistributedDataParallel.__module__


def follow_fully_shard(module: str = "torch.distributed.fsdp", name: str = "fully_shard") -> None:
    """From now on each model that ``fully_shard`` shards is one that is tuned, if that is asked
    for; see :func:`replace_torchs_class`.

    Args:
        module, name: of ``fully_shard``, or of a function of torch's that does as it does.
    """
    environment = Environment.read()
    if not environment.autotune and environment.check is None:
        return
    torchs: Any = getattr(importlib.import_module(module), name, None)  # Since torch 2.6.
    if torchs is None or hasattr(torchs, "__wrapped_by_bagua__"):
        return
    from bagua_client.integrations.sharded_model import tune_if_whole

    @a_look
    def follow(model: Any) -> str:
        tune_if_whole(model)
        return ""

    @functools.wraps(torchs)
    def shard(module: Any, *args: Any, **kwargs: Any) -> Any:
        found = torchs(module, *args, **kwargs)
        if not isinstance(module, list | tuple) and (reason := follow(module)):
            logger.warning("autotune is off: %s", reason)
        return found

    shard.__wrapped_by_bagua__ = True  # type: ignore[attr-defined]
    _replace(torchs, shard)


def follow_deepspeed() -> None:
    """From now on each engine that ``deepspeed.initialize`` makes is one that is tuned, if that is
    asked for; see :func:`replace_torchs_class`."""
    environment = Environment.read()
    deepspeed: Any = sys.modules["deepspeed"]
    theirs = deepspeed.initialize
    is_asked_for = environment.autotune or environment.check is not None
    if not is_asked_for or hasattr(theirs, "__wrapped_by_bagua__"):
        return
    from bagua_client.integrations.zero_engine import tune_engine

    @functools.wraps(theirs)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        made = theirs(*args, **kwargs)
        if seen(lambda: is_engine(made[0]), False):
            tune_engine(made[0])
        return made

    initialize.__wrapped_by_bagua__ = True  # type: ignore[attr-defined]
    _replace(theirs, initialize)


def _replace(torchs: Any, ours: Any) -> None:
    """In every module that has it, under any name."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _STAYS_IN:
            continue
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if value is torchs:
                setattr(module, key, ours)
