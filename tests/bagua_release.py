"""Bagua's own client from its PyPI release, for tests that drive the service as it does.

Only pure-Python files of the sdist are used, and nothing is built.  Its compiled core is
replaced by empty classes, which is enough to import ``bagua.service``.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

RELEASE = "bagua==0.9.2"
CACHE = Path(__file__).parent.parent / ".cache" / "bagua-0.9.2"

# Bagua declares its messages as typing.TypedDict, which pydantic 2 refuses below Python 3.12.
_CORE = """
import typing
import typing_extensions

typing.TypedDict = typing_extensions.TypedDict


class BaguaSingleCommunicatorPy: ...
class BaguaCommBackendPy: ...
class BaguaBucketPy: ...
class BaguaTensorPy: ...


def show_version(): ...
"""


def release_path() -> Path:
    """A folder for ``sys.path`` that holds ``bagua`` and a stand-in for ``bagua_core``.

    Skips the test, with the reason, where the release cannot be had.
    """
    if not (CACHE / "bagua_core").exists():
        _download()
    return CACHE


def _download() -> None:
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-binary", ":all:", "--dest", folder, RELEASE]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"{RELEASE} cannot be downloaded: {error.stderr.strip()[-300:]}")
        except subprocess.TimeoutExpired:
            pytest.skip(f"{RELEASE} cannot be downloaded within 300 s")
        (archive,) = Path(folder).glob("bagua-*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        (unpacked,) = (path.parent for path in Path(folder).glob("bagua-*/bagua"))
        core = unpacked / "bagua_core"
        for stale in core.glob("*"):
            stale.unlink()
        core.mkdir(exist_ok=True)
        (core / "__init__.py").write_text(_CORE)
        if not CACHE.exists():
            unpacked.rename(CACHE)
