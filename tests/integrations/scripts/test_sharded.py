"""Frameworks that shard their models with ``fully_shard``, tuned, have the losses and the weights
that they have without us: started by the launcher, and where the program calls ``tune`` itself.

The same processes serve all frameworks. Accelerate, and with it the Trainer, shards on GPUs only
(``AcceleratorState`` looks at its plugin where the job is of the type MULTI_GPU or the like, never
where it is MULTI_CPU, and then replicates the model without a word), so on CPUs the script tells it
that it has accelerators.
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
from tests.integrations.arms import needs

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SCRIPT = str(HERE / "sharded_script.py")
FRAMEWORKS = ("accelerate", "trainer", "fabric", "lightning")
LAUNCHED = ("trainer", "lightning")
"""The Trainer shards through Accelerate, Fabric by the function that Lightning is given, too."""
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

pytestmark = [pytest.mark.slow, needs("accelerate", "transformers", "lightning")]


def _trained(url: str, *words: str) -> None:
    variables = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "BAGUA_AUTOTUNE": "1",
        "BAGUA_AUTOTUNE_URL": url,
    }
    done = start("-W", "ignore", *words, folder=ROOT, variables=variables)
    assert done.returncode == 0, done.stderr


def test_they_train_as_without_us(tmp_path: Path) -> None:
    by_itself, launched = tmp_path / "by itself", tmp_path / "launched"
    by_itself.mkdir()
    launched.mkdir()
    with ScriptedService([[each.to_json() for each in (*TRIED, DEFAULT)]]) as service:
        # Untouched, and then tuned, in one program; then launched, without a word of ours in it.
        told = SCRIPT, str(by_itself), str(STEPS), *FRAMEWORKS, "tune", *FRAMEWORKS
        _trained(service.url, *torchrun.WORDS, *told)
        ours = "-m", "bagua_client", *torchrun.WORDS
        _trained(service.url, *ours, SCRIPT, str(launched), str(STEPS), *LAUNCHED)
        assert service.bodies("disagreement") == []
    for name in FRAMEWORKS:
        for rank in range(2):
            expected = _told(by_itself, name, rank)
            assert expected["in_force"] == []
            found = [_told(by_itself, f"{name}-tuned", rank)]
            found += [_told(launched, name, rank)] if name in LAUNCHED else []
            for ours in found:
                assert ours["losses"] == expected["losses"], name
                assert ours["state"] == expected["state"], name
                assert len(ours["in_force"]) >= FEWEST_TRIED, (name, ours["in_force"])


def _told(folder: Path, name: str, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}-{rank}.json").read_text())
    return found
