"""What `make demo` says before it trains: on which hosts, or that there are none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from benchmarks.testbed import Network
from examples.demo import introduction, made

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        (0, "Emulated link of 200 Mbit/s between two hosts of two ranks on this machine."),
        (1, "Emulated link of 10 Gbit/s between two hosts of one rank on this machine, which share its GPU."),  # noqa: E501
        (2, "Emulated link of 10 Gbit/s between two hosts of one rank on this machine, each with a GPU."),  # noqa: E501
    ],
)  # fmt: skip
def test_it_names_the_emulated_link(
    bridged: Network, monkeypatch: pytest.MonkeyPatch, gpus: int, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with made() as testbed:
        assert introduction(testbed) == said
        seen = [host.environment.get("CUDA_VISIBLE_DEVICES") for host in testbed.hosts]
        assert seen == [[None, None], ["0", "0"], ["0", "1"]][gpus]


def test_without_hosts_it_says_so_and_why(only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    lacks = "ip is not installed"
    if os.geteuid() != 0:
        lacks = "this kernel lets only root make network namespaces"
    with made() as testbed:
        assert introduction(testbed) == (
            "No emulated link here, and maybe nothing to gain: loopback instead of hosts with a "
            f"network of their own: {lacks}."
        )
        assert len(testbed.hosts) == 2
