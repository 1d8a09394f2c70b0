"""DeepSpeed by itself, by Accelerate and by the Trainer of transformers, tuned, has the losses and
the weights that it has without us: started by the launcher, and where the program calls ``tune``
itself. Checkpoints are written and read in the midst."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bagua_client import Configuration
from tests.client.agent.scripted_service import ScriptedService
from tests.client.launcher.programs import start
from tests.integrations.arms import needs

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SCRIPT = str(HERE / "zero_script.py")
TORCHRUN = ("-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
STEPS = 60
DEFAULT = Configuration(2800)
STAGES_1_AND_2 = (DEFAULT, Configuration(400), Configuration(5600), Configuration(1200), DEFAULT)
STAGE_3 = (
    Configuration(2800, prefetch_bytes=1200),
    Configuration(400, prefetch_bytes=1200),
    Configuration(1200),
    Configuration(2800, prefetch_bytes=4000),
    Configuration(2800, prefetch_bytes=1200),
)
TRIED = {
    "zero-1": STAGES_1_AND_2,
    "zero-2": STAGES_1_AND_2,
    "accelerate": STAGES_1_AND_2,
    "zero-3": STAGE_3,
    "trainer": STAGE_3,
}
FEWEST_TRIED = 3
"""Of these, in the steps that a training has on a busy machine."""

pytestmark = [pytest.mark.slow, needs("deepspeed", "accelerate", "transformers")]


def _trained(url: str, *words: str) -> None:
    variables = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "BAGUA_AUTOTUNE": "1",
        "BAGUA_AUTOTUNE_URL": url,
    }
    if not torch.cuda.is_available():
        variables |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2"}
    done = start(*TORCHRUN, *words, folder=ROOT, variables=variables)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", TRIED)
def test_it_trains_as_without_us(tmp_path: Path, name: str) -> None:
    by_itself, launched = tmp_path / "by itself", tmp_path / "launched"
    by_itself.mkdir()
    launched.mkdir()
    with ScriptedService([[each.to_json() for each in TRIED[name]]]) as service:
        # Untouched, and then tuned, in one program; then launched, without a word of ours in it.
        _trained(service.url, SCRIPT, str(by_itself), str(STEPS), name, "tune", name)
        _trained(service.url, "-m", "bagua_client", SCRIPT, str(launched), str(STEPS), name)
        assert service.bodies("disagreement") == []
    for rank in range(2):
        expected = _told(by_itself, name, rank)
        assert expected["in_force"] == []
        for ours in (_told(by_itself, f"{name}-tuned", rank), _told(launched, name, rank)):
            assert ours["losses"] == expected["losses"]
            assert ours["state"] == expected["state"]
            assert len(ours["in_force"]) >= FEWEST_TRIED, ours["in_force"]


def _told(folder: Path, name: str, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}-{rank}.json").read_text())
    return found
