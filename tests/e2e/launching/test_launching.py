"""The trainings that docs/launching.md and docs/sharded.md start are tuned.

Their ranks are forked. Launchers start processes of their own in docs/test_commands.py (torchrun),
in tests/client/launcher/test_run.py (bagua-run) and in tests/integrations (Accelerate's).
"""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from bagua_client.launcher import FLAGS, GONE
from tests import torchrun
from tests.client.launcher.programs import start
from tests.e2e.lines import others
from tests.integrations.arms import needs

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "launching.md").read_text()
PAGES = PAGE + (ROOT / "docs" / "sharded.md").read_text()


@needs("accelerate", "transformers")
@pytest.mark.parametrize("line", re.findall(r"^\$ (.*)", PAGES, re.MULTILINE))
def test_a_command_starts_a_training_that_is_tuned(line: str, tmp_path: Path) -> None:
    training = shlex.split(line.partition(" --autotune ")[2])
    words = ["-m", "bagua_client", "--autotune", *torchrun.WORDS, *training]
    # What the service that rank 0 starts remembers is a file of this test's.
    variables = {"XDG_DATA_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = start(*words, folder=ROOT, variables=variables)
    assert done.returncode == 0, done.stderr
    # On a busy machine the training may be over before its service has started.
    said = "is being tuned, see http://|the training ended before its tuning did"
    assert re.search(f"autotune: .*({said})", done.stderr), done.stderr
    assert re.search("step +20  loss|.train_loss.:", done.stdout), done.stdout
    lines = done.stderr.splitlines()
    assert others(lines) == []
    *_, last = [line for line in lines if "autotune: " in line]
    assert ("to see the job again, on" in last) == ("is being tuned, see" in done.stderr)


def test_the_command_is_installed_with_the_client() -> None:
    """Read as text: what this Python has installed may be older."""
    line = next(x for x in (ROOT / "pyproject.toml").read_text().splitlines() if "bagua-run" in x)
    module, name = line.split('"')[1].split(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_the_table_of_flags_is_whole() -> None:
    told = set(re.findall(r"`--([\w-]+)", PAGE))
    assert {flag.name for flag in FLAGS} | {gone.name for gone in GONE} <= told
