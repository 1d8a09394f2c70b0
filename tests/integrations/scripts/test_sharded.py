"""The Trainer of transformers, which shards its model with ``fully_shard`` through Accelerate, has,
tuned, the losses and the weights that it has without us: started by the launcher, and where the
program calls ``tune`` itself.

Accelerate shards on GPUs only (``AcceleratorState`` looks at its plugin where the job is of the
type MULTI_GPU or the like, never where it is MULTI_CPU, and then replicates the model without a
word), so on CPUs the script tells it that it has accelerators.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bagua_client import Configuration
from tests import torchrun
from tests.client.agent.scripted_service import ScriptedService
from tests.client.launcher.programs import start
from tests.integrations.lacking import needs

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SCRIPT = str(HERE / "sharded_script.py")
STEPS = 60
DEFAULT = Configuration(64)
TRIED = (
    DEFAULT,
    Configuration(64, kept_units=2, kept_over_micro_batches="on"),
    Configuration(2**20, kept_units=2, kept_over_micro_batches="on"),
    Configuration(64, channels=2, scatter_group="own"),
    Configuration(2**20, channels=2),
)
FEWEST_TRIED = 3
"""Of these, in the steps that a training has on a busy machine."""

pytestmark = [pytest.mark.slow, needs("accelerate", "transformers")]


def _trained(url: str, *words: str) -> None:
    variables = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "BAGUA_AUTOTUNE": "1",
        "BAGUA_AUTOTUNE_URL": url,
    }
    done = start("-W", "ignore", *words, folder=ROOT, variables=variables)
    assert done.returncode == 0, done.stderr


def test_it_trains_as_without_us(tmp_path: Path) -> None:
    by_itself, launched = tmp_path / "by itself", tmp_path / "launched"
    by_itself.mkdir()
    launched.mkdir()
    with ScriptedService([[each.to_json() for each in (*TRIED, DEFAULT)]]) as service:
        # Untouched, and then tuned, in one program; then launched, without a word of ours in it.
        _trained(service.url, *torchrun.WORDS, SCRIPT, str(by_itself), str(STEPS), "tune")
        _trained(
            service.url, "-m", "bagua_client", *torchrun.WORDS, SCRIPT, str(launched), str(STEPS)
        )
        assert service.bodies("disagreement") == []
    for rank in range(2):
        expected = _told(by_itself, "trainer", rank)
        assert expected["in_force"] == []
        for ours in (_told(by_itself, "tuned", rank), _told(launched, "trainer", rank)):
            assert ours["losses"] == expected["losses"]
            assert ours["state"] == expected["state"]
            assert len(ours["in_force"]) >= FEWEST_TRIED, ours["in_force"]


def _told(folder: Path, name: str, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}-{rank}.json").read_text())
    return found
