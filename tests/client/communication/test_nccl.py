"""How many NCCL groups have room beside one another, and what a job is offered of them."""

from __future__ import annotations

import pytest
import torch

from bagua_client import Configuration
from bagua_client.communication import nccl
from bagua_client.communication.communicator import Communicator
from bagua_client.reducer.offer import ReplicatedOffer
from bagua_client.torch_private.reducer import Caps
from tests.client.communication.test_communicator import CPU, _world
from tests.ranks import RankPool

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("multiprocessors", [1, 8, 20, 40, 58, 80, 108, 132, 148])
def test_the_groups_in_use_at_once_fit_a_gpu(
    multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_multiprocessors", lambda device: multiprocessors)
    channels = nccl.most_channels(GPU)
    assert channels in (1, 2, 4, 8, 16)
    assert channels == 1 or 3 * channels * nccl.most_blocks(GPU, by_node=True) <= multiprocessors
    others = multiprocessors - (channels - 1) * nccl.most_blocks(GPU, by_node=False)
    assert others >= multiprocessors // 2  # are left to the user's own group


def _offered_channels() -> list[object]:
    """Of GPUs of one host, and of CPUs."""
    found = []
    for device in (CPU, GPU):
        communicator = Communicator(_world(), CPU)
        communicator.device = device
        offer = ReplicatedOffer(
            default=Configuration(),
            communicator=communicator,
            default_caps=Caps(1, 1),
            tensors=(),
            in_ready_order=True,
            hook=None,
        )
        found += [offer.values()["channels"], len(offer.reasons())]
    return found


def test_between_the_gpus_of_one_host_there_is_one_channel(two_ranks: RankPool) -> None:
    for every, no_reason, one, reason in two_ranks.run(_offered_channels):
        assert every == [1, 2, 4, 8, 16]
        assert one == [1]
        assert reason == no_reason + 1
