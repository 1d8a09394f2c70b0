"""Where Bagua's release runs: an environment of its own, made in ``.cache`` when first needed."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.outside import BAGUA, folder_of

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = ROOT / ".cache" / "bagua-environment"
PACKAGES = ("flask", "gevent", "pydantic", "requests", "scikit-optimize", "typing_extensions")
PYTHON = ENVIRONMENT / "bin" / "python"


def prepare() -> None:
    """Make the environment, unless it is there with all packages.

    Raises:
        RuntimeError: it cannot be had.
    """
    release_path()
    complete = ENVIRONMENT / "complete"
    if complete.exists() and complete.read_text() == " ".join(PACKAGES):
        return
    print(f"making an environment for Bagua in {ENVIRONMENT}", file=sys.stderr)
    venv.create(ENVIRONMENT, clear=True)
    # What the project's own environment has need not be installed again.
    (site,) = ENVIRONMENT.glob("lib/python*/site-packages")
    (site / "project.pth").write_text(sysconfig.get_path("purelib") + "\n")
    constraints = str(ROOT / "constraints.txt")
    pip = [sys.executable, "-m", "pip", "--python", str(PYTHON)]
    if subprocess.run([*pip, "install", "--quiet", *PACKAGES, "-c", constraints]).returncode:
        raise RuntimeError("Bagua's environment could not be made")
    complete.write_text(" ".join(PACKAGES))


def release_path() -> Path:
    """A folder for ``sys.path`` that holds ``bagua`` and a stand-in for its compiled core.

    Raises:
        RuntimeError: the release cannot be had.
    """
    try:
        return folder_of(BAGUA)
    except pytest.skip.Exception as error:
        raise RuntimeError(str(error)) from None
