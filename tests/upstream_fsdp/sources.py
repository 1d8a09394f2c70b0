"""Where PyTorch's tests of ``fully_shard`` come from: no wheel of PyTorch has them.

They are of one release, and kept in a folder that git does not see. They come from Debian's source
package where this is a Debian, else from PyTorch's own repository.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

RELEASE = "2.6.0"
"""The newest whose sources a registry of packages keeps for good (Debian 13)."""
VARIABLE = "UPSTREAM_FSDP_SOURCES"
"""Names the folder to ranks; set by hand, it is the checkout of another release."""
_COMPOSABLE = "test/distributed/_composable"
_FOLDERS = (
    *(f"{_COMPOSABLE}/fsdp", "test/distributed/checkpoint/fsdp"),
    f"{_COMPOSABLE}/test_composability",
)
_CACHE = Path(__file__).resolve().parents[2] / ".cache" / f"pytorch-{RELEASE}"
_PACKAGE, _SUITE = f"pytorch={RELEASE}+dfsg-7", "trixie"
_REPOSITORY = "https://github.com/pytorch/pytorch"
_SECONDS = 300


class NoSources(RuntimeError):
    """They cannot be had here; the text says what was tried and what helps."""


def find() -> Path:
    """The folder of PyTorch's sources; brings them there if they are not.

    Raises:
        NoSources: they cannot be brought.
    """
    folder = Path(os.environ.get(VARIABLE) or _CACHE)
    if folder == _CACHE and not all((folder / each).is_dir() for each in _FOLDERS):
        _bring()
    if not files_in(folder):
        raise NoSources(f"{folder} has no tests in {_FOLDERS[0]}")
    os.environ[VARIABLE] = str(folder)
    return folder


def files_in(folder: Path) -> list[Path]:
    """The files of tests."""
    return [path for tests in _FOLDERS for path in sorted((folder / tests).glob("test_*.py"))]


def _bring() -> None:
    _CACHE.parent.mkdir(exist_ok=True)
    reasons = []
    for way in (_from_debian, _from_git):
        # Whole or not at all, also for another run that does the same.
        with tempfile.TemporaryDirectory(dir=_CACHE.parent) as made:
            try:
                way(Path(made))
                shutil.rmtree(_CACHE, ignore_errors=True)  # It had fewer folders.
                (Path(made) / "sources").rename(_CACHE)
            except (OSError, subprocess.SubprocessError, tarfile.TarError) as error:
                said = getattr(error, "stderr", None) or str(error)
                reasons.append(said.strip().splitlines()[-1])
            else:
                return
    raise NoSources(
        f"PyTorch's sources of release {RELEASE} cannot be brought here ({'; '.join(reasons)}). "
        f"{VARIABLE} may name the folder of a checkout."
    )


def _from_debian(made: Path) -> None:
    """By ``apt-get``, from where this machine's packages come; needs no root."""
    targets = ("Created-By: Packages", "Origin: Debian", "Label: Debian")
    found = _run("apt-get", "indextargets", "--format", "$(REPO_URI)", *targets).split()
    if not found:
        raise FileNotFoundError("no packages of Debian are known here")
    (made / "sources.list").write_text(f"deb-src {found[0]} {_SUITE} main\n")
    for folder in ("lists", "cache"):
        (made / folder / "partial").mkdir(parents=True)
    settings = {
        "Dir::Etc::SourceList": f"{made}/sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": f"{made}/lists",
        "Dir::Cache": f"{made}/cache",
        "APT::Sandbox::User": "root",  # Else another user, who cannot write here.
    }
    options = [f"--option={name}={value}" for name, value in settings.items()]
    _run("apt-get", *options, "update")
    _run("apt-get", *options, "source", "--download-only", _PACKAGE, folder=made)
    (archive,) = made.glob("*.orig.tar.*")
    with tarfile.open(archive) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # none before 3.11.4
        for member in tar:
            name = member.name.partition("/")[2]
            if member.isfile() and name.startswith(_FOLDERS):
                member.name = f"sources/{name}"
                tar.extract(member, made)


def _from_git(made: Path) -> None:
    _run(
        *("git", "clone", "--quiet", "--depth=1", f"--branch=v{RELEASE}", "--filter=blob:none"),
        *("--sparse", "--config=advice.detachedHead=false", _REPOSITORY, "sources"),
        folder=made,
    )
    _run("git", "sparse-checkout", "set", *_FOLDERS, folder=made / "sources")


def _run(*command: str, folder: Path | None = None) -> str:
    environment: Mapping[str, str] = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        check=True,
        timeout=_SECONDS,
    )
    return done.stdout
