"""The map in docs/design.md: it has every folder of the packages and no other, and the border that
it draws between the tuner and the rest of the client is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "design.md").read_text()
# A section's title names its package; two sections of one package are its two halves.
SECTIONS = re.findall(r"^### `([\w/]+)`: .*\n((?:(?!^#).*\n)*)", PAGE, re.MULTILINE)
PACKAGES = sorted({package for package, _ in SECTIONS})
CLIENT = ROOT / "client" / "bagua_client"
TUNER, REST = (
    {path.split("/")[0] for path in re.findall(r"^\| `([\w/]+)/` \|", text, re.MULTILINE)}
    for package, text in SECTIONS
    if package == "client/bagua_client"
)


def listed(package: str) -> set[str]:
    """The folders that have a row in the package's tables."""
    texts = [text for name, text in SECTIONS if name == package]
    return {name for text in texts for name in re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE)}


def imports(path: Path) -> Iterator[str]:
    """The full names of what a file, or each file of a folder, imports."""
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)


def imported(part: str) -> set[str]:
    """The other parts of the client that a folder or a module of it imports."""
    place = CLIENT / part
    names = imports(place if place.is_dir() else place.with_suffix(".py"))
    return {name.split(".")[1] for name in names if name.startswith("bagua_client.")} - {part}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_map_has_every_folder_of_a_package_and_no_other(package: str) -> None:
    there = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    assert listed(package) == there


def test_what_the_map_names_is_there() -> None:
    for _, text in SECTIONS:
        for name in re.findall(r"`([a-z_]+/[\w/]*|[a-z_]+\.py)`", text):
            assert any((ROOT / package / name).exists() for package in PACKAGES), name


@pytest.mark.parametrize("folder", sorted(TUNER))
def test_the_tuner_imports_nothing_of_the_rest(folder: str) -> None:
    assert imported(folder) & REST == set()


def test_modules_beside_the_folders_are_on_the_tuners_side_or_start_programs() -> None:
    starts = {"__main__", "run"}
    modules = {path.stem for path in Path(CLIENT).glob("*.py")} - starts
    for module in sorted(modules):
        assert imported(module) & REST == set(), module
