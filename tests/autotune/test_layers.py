"""Dependencies point one way, as docs/design.md has them; a reader may rely on it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import bagua_autotune

PACKAGE = Path(bagua_autotune.__file__).parent
# What each folder may import of the others; ``tuning.tuner`` is the one that writes.
LAYERS = {
    "model": set[str](),
    "store": {"model"},
    "costs": {"model"},
    "search": {"costs", "model"},
    "measuring": {"model", "store"},
    "earlier": {"measuring", "search", "costs", "model", "store"},
    "deciding": {"earlier", "measuring", "search", "model", "store"},
    "tuning": {"deciding", "earlier", "measuring", "model", "store"},
    "views": {"tuning", "deciding", "earlier", "measuring", "search", "costs", "model", "store"},
    "metrics": {"views", "tuning", "measuring", "model", "store"},
    "api": {"views", "metrics", "tuning", "earlier", "model", "store", "settings"},
    "cli": {"views", "search", "model", "store", "settings", "server"},
}
WRITER = "tuning.tuner"
MAY_WRITE = ("tuning", "api")


def name_of(path: Path) -> str:
    """A module's name, without the package's."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(module: str) -> Iterator[str]:
    """The modules of the package that it imports, anywhere in it and be it for types alone."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if name.startswith("bagua_autotune."):
                found = name.removeprefix("bagua_autotune.")
                yield found if found in MODULES else found.rpartition(".")[0] or found


def imports_of(folder: str) -> list[tuple[str, str]]:
    """Each module of the folder, with each that it imports."""
    own = [name for name in MODULES if name.partition(".")[0] == folder]
    return [(module, found) for module in own for found in imports(module)]


@pytest.mark.parametrize("folder", LAYERS)
def test_a_folder_imports_only_what_is_below_it(folder: str) -> None:
    allowed = {*LAYERS[folder], folder, "__version__"}
    found = [pair for pair in imports_of(folder) if pair[1].partition(".")[0] not in allowed]
    assert found == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    circle: list[str] = []
    try:
        TopologicalSorter({module: set(imports(module)) for module in MODULES}).prepare()
    except CycleError as error:
        circle = error.args[1]
    assert circle == []


@pytest.mark.parametrize("folder", [folder for folder in LAYERS if folder not in MAY_WRITE])
def test_who_reads_builds_no_tuner(folder: str) -> None:
    assert [pair for pair in imports_of(folder) if pair[1] == WRITER] == []


def test_only_the_store_reaches_its_tables() -> None:
    outside = [name for name in MODULES if not name.startswith("store")]
    assert [name for name in outside if "store.engine.tables" in imports(name)] == []


def test_every_folder_has_its_place() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders - {"web"} == set(LAYERS)


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        # What only a decision needs is imported by the thread that decides.
        ("bagua_autotune.app", {"skopt", "sklearn", "scipy", "pandas", "schemathesis"}),
        ("bagua_autotune.search", {"skopt", "sklearn", "scipy", "sqlalchemy", "flask"}),
        # What only some commands need is imported by those.
        (
            "bagua_autotune.cli",
            {"skopt", "scipy", "numpy", "sqlalchemy", "pydantic", "flask"},
        ),
        ("bagua_autotune.cli.reader", {"skopt", "scipy", "flask"}),
    ],
)
def test_what_takes_long_to_import_waits_until_it_is_needed(
    module: str, unwanted: set[str]
) -> None:
    code = f"import {module}, sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert unwanted & set(run.stdout.split()) == set()
