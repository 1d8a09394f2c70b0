"""That NCCL keeps the order in which several communicators' kernels are launched."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from bagua_client import Configuration
from bagua_client.communication.communicator import Communicator
from bagua_client.communication.launch_order import ORDER, RACE, ask_for, obstacle
from bagua_client.reducer.offer import Offer
from bagua_client.torch_private.reducer import Caps
from tests.client.communication.test_communicator import CPU, _world
from tests.ranks import RankPool

TUNED = {"BAGUA_AUTOTUNE": "1"}


@pytest.mark.parametrize(
    ("given", "order"),
    [
        (TUNED, "1"),
        ({"BAGUA_DEFAULT_CHANNELS": "4"}, "1"),
        ({**TUNED, ORDER: "0"}, "0"),
        ({}, None),
        ({"BAGUA_AUTOTUNE": "off"}, None),
        ({"BAGUA_AUTOTUNE": "nonsense"}, None),
    ],
)
def test_the_order_is_asked_for_where_a_job_is_tuned_and_its_user_says_nothing(
    given: dict[str, str], order: str | None
) -> None:
    environment = dict(given)
    ask_for(environment)
    assert environment.get(ORDER) == order
    assert (RACE in environment) == (order == "1")


def test_it_is_asked_for_when_the_client_is_imported() -> None:
    script = f"import os, bagua_client; print(os.environ.get({ORDER!r}))"
    environment = {name: text for name, text in os.environ.items() if name != ORDER} | TUNED
    told = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert told.stdout.strip() == "1", told.stderr


@pytest.mark.parametrize(
    ("version", "environment", "says"),
    [
        ((2, 28, 3), {ORDER: "1"}, ""),
        ((2, 26, 0), {ORDER: "1"}, ""),
        ((2, 21, 5), {ORDER: "1"}, "NCCL 2.21 may wait for ever"),
        ((2, 28, 3), {}, f"without {ORDER}=1"),
        ((2, 28, 3), {ORDER: "0"}, f"without {ORDER}=1"),
    ],
)
def test_without_the_order_there_is_one_communicator(
    version: tuple[int, ...], environment: dict[str, str], says: str
) -> None:
    found = obstacle(version, environment)
    assert says in found if says else not found


def _asked_when_it_is_too_late() -> bool:
    environment = dict(TUNED)
    ask_for(environment)
    return ORDER in environment


def test_once_groups_were_made_it_is_too_late_to_ask(two_ranks: RankPool) -> None:
    assert two_ranks.run(_asked_when_it_is_too_late) == [False] * 2


def _offered_channels() -> list[object]:
    """Of GPUs of one host, and of CPUs."""
    offer = Offer(
        default=Configuration(), baseline=Caps(1, 1), tensors=(), in_ready_order=True, hook=None
    )
    found = []
    for device in (CPU, torch.device("cuda", 0)):
        communicator = Communicator(_world(), CPU)
        communicator.device = device
        found += [offer.values(communicator)["channels"], len(offer.reasons(communicator))]
    return found


def test_between_the_gpus_of_one_host_there_is_one_channel(two_ranks: RankPool) -> None:
    for every, no_reason, one, reason in two_ranks.run(_offered_channels):
        assert every == [1, 2, 4, 8, 16]
        assert one == [1]
        assert reason == no_reason + 1
