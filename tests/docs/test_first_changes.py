"""The first changes of docs/extending.md, each of which passes its contract: a search method and an
algorithm in a package of a stranger's, and a knob in a copy of the client."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.checks import RUN_SECONDS, scratch_environment
from tests.docs.pages import ROOT, blocks
from tests.strangers import lay

pytestmark = pytest.mark.slow

WITHOUT = ("-p", "no:cacheprovider", "-p", "no:schemathesis")
BLOCKS = list(blocks(ROOT / "docs/extending.md"))
(DIFF,) = (block.text + "\n" for block in BLOCKS if block.language == "diff")
FILES = {
    block.first_line.removeprefix("# "): block.text + "\n"
    for block in BLOCKS
    if re.fullmatch(r"# \w+\.(py|toml)", block.first_line)
}


def passes(arguments: list[str], folder: Path, *path: Path) -> None:
    """Pytest finds tests in the folder, and none fails; with these packages before all others."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *WITHOUT, *arguments],
        cwd=folder,
        env={
            **scratch_environment(folder),
            "PYTEST_ADDOPTS": "",  # a caller's are for the run around it
            "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT / "client", ROOT / "autotune"))),
        },
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stranger's package, as pip would install it."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 and newer")
    folder = tmp_path_factory.mktemp("stranger")
    lay(folder, FILES, tomllib.loads(FILES["pyproject.toml"])["project"]["entry-points"])
    return folder


@pytest.mark.parametrize("test", ["test_grid.py", "test_halving.py"])
def test_a_package_of_a_stranger_passes_its_contract(package: Path, test: str) -> None:
    passes([test], package, package)


def test_it_is_found_by_its_names(package: Path) -> None:
    code = """
from bagua_autotune.cli import main
from bagua_autotune.search import make_searcher, names
from bagua_autotune.testing import BASELINE, CANDIDATES, JOB, Problem
from bagua_client.algorithms import find

assert "grid" in names()
assert make_searcher("grid", Problem(JOB, CANDIDATES)).ask() == BASELINE
assert type(find("halved")).__name__ == "Halved"
main(["serve", "--searcher", "grid", "--port", "-2"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=package,
        env=scratch_environment(package),
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    # The service has nothing against the name, only against the port.
    assert "--port" in done.stderr
    assert "grid" not in done.stderr


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with the knob."""
    folder = tmp_path_factory.mktemp("knob")
    for name in ("client", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    # Not as a part of a repository that the folder may happen to be in.
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    apply = ["git", "apply", "-"]
    subprocess.run(apply, cwd=folder, env=outside, input=DIFF, text=True, check=True)
    return folder


def test_a_knob_passes_the_contract_of_what_is_changed(copy: Path) -> None:
    passes(["tests/contracts/test_tunables.py", "-k", "padding"], copy, copy / "client")
