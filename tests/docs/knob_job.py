"""A tuned job of a package that has the knob of docs/extending.md, and what became of the knob."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

import bagua_client
from bagua_client.communication.pipeline import Arrival
from bagua_client.configuration import Configuration
from bagua_client.knob_choices import read_choices
from bagua_client.reducer.carrier import Carrier
from tests.client.agent.scripted_service import ScriptedService

RANKS = 2
MOST_STEPS = 1000
TRIED = [{"bucket_bytes": 4096}, {"bucket_bytes": 4096, "padding": 512}]


def _train(rank: int, url: str, store: str) -> tuple[dict[str, list[int]], list[float]]:
    """The lengths that travelled, by the configuration in words; and the last step's gradients."""
    lengths: dict[str, set[int]] = {}
    carry = Carrier.carry

    def watched(
        carrier: Carrier,
        flat: torch.Tensor,
        configuration: Configuration,
        on_end: Callable[[], None] | None = None,
    ) -> Arrival:
        lengths.setdefault(str(configuration), set()).add(flat.numel())
        return carry(carrier, flat, configuration, on_end)

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"BAGUA_AUTOTUNE": "1", "BAGUA_AUTOTUNE_URL": url}
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    with mock.patch.object(Carrier, "carry", watched):
        model = bagua_client.DistributedDataParallel(torch.nn.Linear(30, 10))
        for _ in range(MOST_STEPS):
            model.zero_grad()
            model(torch.ones(2, 30)).sum().backward()
            if not model.is_tuning:
                break
    gradients = {value for p in model.parameters() for value in p.grad.flatten().tolist()}
    dist.destroy_process_group()
    return {words: sorted(found) for words, found in lengths.items()}, sorted(gradients)


def _error(read: Callable[[], object]) -> str:
    try:
        read()
    except ValueError as error:
        return str(error)
    return ""


def main(answer: str) -> None:
    """Write it as JSON to the file of this name."""
    service = ScriptedService([TRIED])
    # The ranks are forked while there is one thread, so they need not import torch again.
    with (
        tempfile.TemporaryDirectory() as folder,
        multiprocessing.get_context("fork").Pool(RANKS) as ranks,
        service,
    ):
        each = [(rank, service.url, f"{folder}/store") for rank in range(RANKS)]
        lengths, gradients = ranks.starmap(_train, each, chunksize=1)[0]
        (registration,) = service.bodies("PUT")
    found = {
        "package": bagua_client.__file__,
        "registration": registration,
        "lengths": lengths,
        "gradients": gradients,
        "chosen": read_choices("padding=0/4096")["padding"].values,
        "errors": [
            _error(lambda: read_choices("padding=3")),
            _error(lambda: Configuration.from_json({"padding": 3})),
        ],
    }
    Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
