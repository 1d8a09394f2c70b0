"""A training that recomputes its activations, as anybody writes it, is tuned by the launcher, with
and without torchrun; and it learns what it would have learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.client.launcher.programs import start
from tests.e2e.conftest import LIMITS
from tests.e2e.lines import others
from tests.e2e.service import ServiceProcess
from tests.integrations.arms import needs
from tests.torchrun import WORDS

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"
ROOT = PROGRAMS.parents[2]
STEPS = "400"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def _trained(program: str, folder: Path, *before: str, **variables: str) -> tuple[Any, str]:
    """What the training came to, and what it said."""
    words, file = (*before, str(PROGRAMS / program), STEPS), folder / "came_to.pt"
    done = start(*words, str(file), folder=ROOT, variables={**OFFLINE, **variables})
    assert done.returncode == 0, done.stderr
    return torch.load(file), done.stderr


@pytest.mark.parametrize(
    ("program", "name", "torchrun"),
    [
        ("alone.py", "alone-Model", ()),
        pytest.param("trainer.py", "trainer-GPT2LMHeadModel", WORDS, marks=needs("transformers")),
    ],
)
def test_a_script_is_tuned_and_learns_the_same(
    program: str, name: str, torchrun: tuple[str, ...], service: ServiceProcess, tmp_path: Path
) -> None:
    expected, _ = _trained(program, tmp_path, *torchrun)
    service.start()
    result = tmp_path / "result.jsonl"
    launcher = ("-m", "bagua_client", "--autotune", *torchrun)
    variables = {**LIMITS, "BAGUA_AUTOTUNE_URL": service.url, "BAGUA_AUTOTUNE_RESULT": str(result)}
    found, said = _trained(program, tmp_path, *launcher, **variables)
    assert found["losses"] == expected["losses"]
    assert all(torch.equal(expected["weights"][n], w) for n, w in found["weights"].items())
    assert others(said.splitlines()) == []

    job = service.job()
    overview = service.get(f"jobs/{job['id']}/overview")
    assert (job["name"], job["world_size"]) == (name, 2 if torchrun else 1)
    tried = {trial["configuration"]["recomputed_blocks"] for trial in service.trials()}
    assert 4 in tried
    assert len(tried) > 1
    # A line for each round: on busy cores there may be another one, or none has ended by then.
    lines = result.read_text().splitlines() if result.exists() else []
    assert {json.loads(line)["job"] for line in lines} <= {job["name"]}
    assert lines or job["state"] != "finished"
    if torchrun:
        return
    assert list(overview["knobs"]) == ["recomputed_blocks"]
    assert "backend" not in overview["software"]
    told = json.dumps([overview["why"], overview["job"], overview["trials"]])
    assert "bucket" not in told
    assert "ommunication" not in told
    assert service.get(f"jobs/{job['id']}/curve")["curves"] == []
    assert service.get(f"jobs/{job['id']}/buckets")["layouts"] == []
