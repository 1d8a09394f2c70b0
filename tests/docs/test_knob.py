"""The knob that docs/extending.md adds: its diff is applied to a copy of the client, and tried."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bagua_autotune.model.job import JobSpec
from bagua_wire.words import describe
from tests.docs.checks import RUN_SECONDS, scratch_environment
from tests.docs.pages import ROOT, blocks

pytestmark = pytest.mark.slow

(DIFF,) = (
    block.text + "\n" for block in blocks(ROOT / "docs/extending.md") if block.language == "diff"
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of the knob in a job whose ranks have it, see knob_job.py."""
    folder = tmp_path_factory.mktemp("knob")
    shutil.copytree(ROOT / "client", folder / "client")
    # Not as a part of a repository that the folder may happen to be in.
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    apply = ["git", "apply", "-"]
    subprocess.run(apply, cwd=folder, env=outside, input=DIFF, text=True, check=True)
    answer = folder / "answer.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.knob_job", str(answer)],
        cwd=folder,
        env={
            **scratch_environment(folder),
            "PYTHONPATH": os.pathsep.join([str(folder / "client"), str(ROOT)]),
        },
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(answer.read_text())
    assert Path(result["package"]).is_relative_to(folder)
    return result


def test_it_takes_an_entry_and_what_carries_it_out() -> None:
    assert len(re.findall(r"^\+\+\+ ", DIFF, re.MULTILINE)) == 2


def test_it_is_offered_and_the_service_takes_it(found: dict[str, Any]) -> None:
    registration = found["registration"]
    assert registration["knobs"]["padding"] == {"type": "categorical", "values": [0, 512, 4096]}
    assert registration["default_configuration"]["padding"] == 0
    JobSpec.model_validate_json(json.dumps(registration))


def test_it_is_read_and_a_mistake_is_told(found: dict[str, Any]) -> None:
    assert found["chosen"] == [0, 4096]
    of_variable, of_message = found["errors"]
    assert "or padding= and one or some of 0/512/4096" in of_variable
    assert of_message == "padding must be one of 0, 512, 4096, not 3"


def test_it_is_carried_out_and_reads_well_on_both_sides(found: dict[str, Any]) -> None:
    plain, padded = (describe({"bucket_bytes": 4096, "padding": padding}) for padding in (0, 512))
    assert (plain, padded) == ("bucket 4 KiB", "bucket 4 KiB, padding 512")
    assert found["lengths"][plain] == [310]
    assert found["lengths"][padded] == [512]
    assert found["gradients"] == [2.0]
