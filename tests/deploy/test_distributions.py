"""The wheel and the sdist: they have all that they need, and the wheel works where no source is.

deploy/build_distributions.sh does the same with build environments of their own, from PyPI.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

pytestmark = pytest.mark.slow

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 and newer")
pytest.importorskip("setuptools", minversion="77", reason="setuptools 77 or newer builds them")

ROOT = Path(__file__).parents[2]
PINS = ROOT / "constraints.txt"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
PACKAGES = (
    "autotune/bagua_autotune",
    "autotune/bagua_runs",
    "autotune/bagua_simulator",
    "autotune/bagua_v1",
    "client/bagua_client",
    "client/bagua_compat",
    "client/bagua_training",
    "client/bagua_wire",
)
BUILD = "from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
# Asks for the page, and for every file of it.
LOOK = """
from contextlib import closing
from pathlib import Path
import bagua_autotune, bagua_client.service.client
from bagua_autotune.app import create_app
from bagua_autotune.settings import Settings
from bagua_autotune.store import Store

web = Path(bagua_autotune.__file__).parent / "web"
with closing(Store("sqlite://")) as store:
    client = create_app(Settings(database="sqlite://"), store).test_client()
    for file in filter(Path.is_file, (web / "static").rglob("*")):
        assert client.get(f"/static/{file.relative_to(web / 'static')}").status_code == 200
    assert client.get("/").status_code == 200
print(web)
"""


def run(*command: object, folder: Path) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=folder, capture_output=True, text=True, check=False, env={}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, as building writes beside the sources."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder)
    for name in ("autotune", "client", "tests"):
        unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-c", "import sys; " + BUILD.format(kind="sdist"), out, folder=folder)
    return out / f"bagua_autotune-{VERSION}.tar.gz"


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist alone, as everybody may."""
    folder = tmp_path_factory.mktemp("unpacked")
    shutil.unpack_archive(sdist, folder)
    source = folder / f"bagua_autotune-{VERSION}"
    build = "import sys; " + BUILD.format(kind="wheel")
    run(sys.executable, "-c", build, sdist.parent, folder=source)
    return sdist.parent / f"bagua_autotune-{VERSION}-py3-none-any.whl"


def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*"))
    expected = {
        path.relative_to(ROOT).as_posix().partition("/")[2]
        for path in files
        if path.is_file() and path.suffix != ".pyc"
    }
    assert packed == expected
    assert "bagua_autotune/web/jobs.html" in packed


def test_the_sdist_has_no_tests_and_the_licence(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names
    assert not any(name.startswith("tests/") for name in names)


def test_every_pinned_version_takes_the_oldest_python_that_the_readme_names() -> None:
    (oldest,) = re.findall(r"With Python (3\.\d+) or newer", (ROOT / "README.md").read_text())
    pins = [Requirement(line) for line in PINS.read_text().splitlines() if line[:1] not in "#"]
    looked_at = 0
    for pin in pins:
        try:
            takes = metadata.metadata(pin.name).get("Requires-Python", "")
        except metadata.PackageNotFoundError:
            continue  # of another machine
        assert f"{oldest}.0" in SpecifierSet(takes), f"{pin} takes Python {takes}"
        looked_at += 1
    assert looked_at > 100


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_only_what_is_pinned_and_here(workflow: Path) -> None:
    document = yaml.safe_load(workflow.read_text())
    assert document["permissions"] == {"contents": "read"}
    for job in document["jobs"].values():
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"])
            for script in re.findall(r"(?:deploy|\.ci)/\w+(?:\.sh)?", step.get("run", "")):
                assert (ROOT / script).stat().st_mode & 0o111, script


def test_the_release_says_where_each_of_its_parts_comes_from() -> None:
    (release,) = [path for path in WORKFLOWS if path.name == "release.yml"]
    jobs = yaml.safe_load(release.read_text())["jobs"]
    used = {
        name: [step["uses"].partition("@")[0] for step in job["steps"] if "uses" in step]
        for name, job in jobs.items()
    }
    for name in ("distributions", "image"):
        assert "actions/attest-build-provenance" in used[name]
        assert jobs[name]["permissions"]["attestations"] == "write"
    (pushed,) = [step for step in jobs["image"]["steps"] if step.get("id") == "build"]
    assert pushed["with"]["provenance"] == "mode=max"
    assert pushed["with"]["sbom"] is True
    assert "latest" not in pushed["with"]["tags"]
    # Trusted publishing, after everything else: what is on PyPI cannot be taken back.
    assert jobs["pypi"]["needs"] == ["distributions", "image"]
    assert jobs["pypi"]["permissions"] == {"id-token": "write"}


def _bagua_s_wheel(folder: Path) -> Path:
    """A distribution that owns a package ``bagua``, as PyPI has several."""
    made = folder / "bagua-0.9.2-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("bagua/__init__.py", "__version__ = 'their own'\n")
        archive.writestr("bagua/torch_api/__init__.py", "")
        about = "bagua-0.9.2.dist-info"
        archive.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: bagua\nVersion: 0.9.2\n"
        )
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{about}/WHEEL", tags)
        archive.writestr(f"{about}/RECORD", "".join(f"{n},,\n" for n in archive.namelist()))
    return made


def test_the_installed_wheel_works_and_leaves_an_installed_bagua_whole(
    wheel: Path, tmp_path: Path
) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", folder=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    code = "import bagua; print(bagua.__version__, bagua.__file__)"

    def files() -> dict[str, str]:
        folder = Path(run(python, "-c", code, folder=tmp_path).split(" ")[-1]).parent
        return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.py")}

    run(*pip, "install", "--no-index", _bagua_s_wheel(tmp_path), folder=tmp_path)
    before = files()
    assert sorted(before) == ["__init__.py", "torch_api/__init__.py"]
    run(*pip, "install", "--no-deps", "--no-index", wheel, folder=tmp_path)
    assert run(python, "-c", code, folder=tmp_path).startswith("their own ")
    assert files() == before
    # What it requires comes from the environment of the test; the wheel is found before.
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    requirements = packages / "requirements.pth"
    requirements.write_text(sysconfig.get_path("purelib") + "\n")
    said = run(python.with_name("bagua-autotune"), "--version", folder=tmp_path)
    assert said == f"bagua-autotune, version {VERSION}"
    assert Path(run(python, "-c", LOOK, folder=tmp_path)).is_relative_to(packages)
    requirements.unlink()
    run(*pip, "uninstall", "--yes", "bagua-autotune", folder=tmp_path)
    assert files() == before
    assert run(python, "-c", code, folder=tmp_path).startswith("their own ")
