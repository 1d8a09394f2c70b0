"""The reducer that a wrapper is tuned by, and the buckets and channels that it starts with."""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bagua_client.algorithms import DEFAULT_ALGORITHM, Algorithm
from bagua_client.communication.agreement import Vote
from bagua_client.communication.communicator import Communicator
from bagua_client.communication.verdict import REFUSAL
from bagua_client.environment import Environment
from bagua_client.integrations.agreed import UNSET, agreed
from bagua_client.reducer.offer import refusal_of
from bagua_client.reducer.tunable_reducer import TunableReducer
from bagua_client.torch_private import reducer as torchs
from bagua_client.torch_private.wrapper import parameters_of
from bagua_client.tunable.looks import a_look, seen, together

logger = logging.getLogger(__name__)

CHANNELS, SIZE = "BAGUA_DEFAULT_CHANNELS", "BAGUA_DEFAULT_BUCKET_SIZE"
DIFFERS = "it has another value on rank {} than on the other ranks; set the same value on all ranks"


def channels_of(wrapper: DistributedDataParallel, environment: Environment) -> int:
    """The number of channels asked for; 1 where the buckets are not ours to carry, or the ranks ask
    for different numbers. The same on all ranks."""
    asked = environment.default_channels
    if not environment.asks:
        return 1
    answer = UNSET if asked == 1 else str(asked)
    if asked > 1 and (obstacle := _channels_obstacle(wrapper)):
        answer = f"{REFUSAL}{obstacle}"
    return asked if agreed(wrapper.process_group, CHANNELS, answer, DIFFERS) else 1


@a_look
def _channels_obstacle(wrapper: DistributedDataParallel) -> str:
    if obstacle := refusal_of(wrapper, torchs.caps_of(wrapper)):
        return obstacle
    is_theirs = torchs.user_hook_of(wrapper) is not None
    return "the training's own communication hook carries the buckets" if is_theirs else ""


def agree_on_size(wrapper: DistributedDataParallel, size_bytes: int | None) -> None:
    """Cut a new wrapper's buckets as torch does by default, unless all ranks cut them to this size.

    Args:
        size_bytes: what they were cut to; None: it is not set on this rank.
    """
    group = wrapper.process_group
    if not seen(lambda: torchs.has_reducer(wrapper), True) or dist.get_world_size(group) == 1:
        return
    answer = UNSET if size_bytes is None else str(size_bytes)
    if not agreed(group, SIZE, answer, DIFFERS) and size_bytes is not None:
        hook = torchs.user_hook_of(wrapper)
        torchs.new_reducer(wrapper, parameters_of(wrapper), torchs.DEFAULT_CAPS)
        wrapper.bucket_bytes_cap = torchs.DEFAULT_CAPS.bucket_bytes
        if hook is not None:
            torchs.register_user_hook(wrapper, hook, None)


def new_tunable(
    wrapper: DistributedDataParallel, algorithm: Algorithm, channels: int = 1
) -> TunableReducer:
    """The reducer of ``wrapper``, with a communicator of its own. All ranks call it together.

    Args:
        channels: to start from, as far as there is room for them on all ranks.

    Raises:
        NotTuned: a rank cannot make it, and the algorithm is the default, which torch has anyway.
        ValueError: another algorithm does not work for this model.
    """
    group = wrapper.process_group
    on_cpu = dist.get_backend(group) == dist.Backend.GLOO
    communicator = Communicator(group, torch.device("cpu") if on_cpu else wrapper.device)
    if channels > 1:
        # GPUs of different kinds have room for different numbers.
        room = seen(lambda: communicator.most_channels, 1)
        most = min(Vote(room, group, communicator.device).values())
        if channels > most and communicator.rank == 0:
            obstacle = communicator.obstacle or f"a GPU has room for {most}"
            logger.warning("BAGUA_DEFAULT_CHANNELS=%d is not possible here: %s", channels, obstacle)
        channels = min(channels, most)
    make = partial(TunableReducer, wrapper, algorithm, communicator)
    if algorithm.name == DEFAULT_ALGORITHM:
        tunable = together(make, TunableReducer.forget, group, communicator.device)
    else:
        tunable = make()
    weakref.finalize(wrapper, communicator.close).atexit = False
    if channels > 1:
        tunable.start_from(replace(tunable.default, channels=channels))
    return tunable
