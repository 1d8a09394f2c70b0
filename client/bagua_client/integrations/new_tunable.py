"""The reducer that a wrapper is tuned by, and the channels that it starts with."""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bagua_client.algorithms import Algorithm
from bagua_client.communication.communicator import Communicator
from bagua_client.reducer.offer import refusal_of
from bagua_client.reducer.tunable_reducer import TunableReducer
from bagua_client.torch_private.reducer import caps_of, user_hook_of

logger = logging.getLogger(__name__)


def channels_of(wrapper: DistributedDataParallel, asked: int) -> int:
    """The number of channels asked for, or 1 where the buckets are not ours to carry; the same on
    all ranks."""
    if asked == 1:
        return 1
    obstacle = refusal_of(wrapper, caps_of(wrapper))
    if not obstacle and user_hook_of(wrapper) is not None:
        obstacle = "the training's own communication hook carries the buckets"
    if obstacle:
        _warn_of_channels(asked, obstacle)
    return 1 if obstacle else asked


def _warn_of_channels(asked: int, obstacle: str) -> None:
    if dist.get_rank() == 0:
        logger.warning("BAGUA_DEFAULT_CHANNELS=%d is not possible here: %s", asked, obstacle)


def new_tunable(
    wrapper: DistributedDataParallel, algorithm: Algorithm, channels: int = 1
) -> TunableReducer:
    """The reducer of ``wrapper``, with a communicator of its own. All ranks call it together.

    Args:
        channels: to start from, as far as there is room for them.
    """
    group = wrapper.process_group
    on_cpu = dist.get_backend(group) == dist.Backend.GLOO
    communicator = Communicator(group, torch.device("cpu") if on_cpu else wrapper.device)
    most = communicator.most_channels
    if channels > most:
        _warn_of_channels(channels, communicator.obstacle or f"this GPU has room for {most}")
        channels = most
    tunable = TunableReducer(wrapper, algorithm, communicator)
    weakref.finalize(wrapper, communicator.close).atexit = False
    if channels > 1:
        tunable.start_from(replace(tunable.default, channels=channels))
    return tunable
