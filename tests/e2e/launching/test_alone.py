"""A training of one process, as anybody writes it, is tuned by the launcher: no process group, no
torchrun; and it learns what it would have learned."""

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

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "alone.py"
ROOT = PROGRAM.parents[3]
STEPS = "400"


def _trained(folder: Path, *before: str, **variables: str) -> tuple[Any, str]:
    """What the training came to, and what it said."""
    file = folder / "came_to.pt"
    done = start(*before, str(PROGRAM), STEPS, str(file), folder=ROOT, variables=variables)
    assert done.returncode == 0, done.stderr
    return torch.load(file), done.stderr


def test_a_single_process_is_tuned_and_learns_the_same(
    service: ServiceProcess, tmp_path: Path
) -> None:
    expected, _ = _trained(tmp_path)
    service.start()
    result = tmp_path / "result.jsonl"
    launcher = ("-m", "bagua_client", "--autotune")
    variables = {**LIMITS, "BAGUA_AUTOTUNE_URL": service.url, "BAGUA_AUTOTUNE_RESULT": str(result)}
    found, said = _trained(tmp_path, *launcher, **variables)
    assert found["losses"] == expected["losses"]
    assert all(torch.equal(expected["weights"][n], w) for n, w in found["weights"].items())
    assert others(said.splitlines()) == []

    job = service.job()
    overview = service.get(f"jobs/{job['id']}/overview")
    assert (job["name"], job["world_size"]) == ("alone-Model", 1)
    assert list(overview["knobs"]) == ["recomputed_blocks"]
    assert "backend" not in overview["software"]
    assert len(overview["trials"]) > 1
    told = json.dumps([overview["why"], overview["job"], overview["trials"]])
    assert "bucket" not in told
    assert "ommunication" not in told
    assert service.get(f"jobs/{job['id']}/curve")["curves"] == []
    assert service.get(f"jobs/{job['id']}/buckets")["layouts"] == []
    # A line for each round: on busy cores there may be another one, or none has ended by then.
    lines = result.read_text().splitlines() if result.exists() else []
    assert {json.loads(line)["job"] for line in lines} <= {job["name"]}
    assert lines or job["state"] != "finished"
