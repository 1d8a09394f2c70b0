"""Dependencies point one way, as DESIGN.md has them; a reader may rely on it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
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
    "tuning": {"search", "costs", "model", "store"},
    "views": {"tuning", "search", "costs", "model", "store"},
    "metrics": {"views", "tuning", "model", "store"},
    "bagua": {"api", "tuning", "model", "store"},
    "api": {"views", "metrics", "tuning", "model", "store", "settings"},
    "system": {"search", "model"},
    "cli": {"views", "api", "system", "search", "model", "store", "settings", "server"},
}
WRITER = "tuning.tuner"
MAY_WRITE = ("tuning", "api", "bagua")


def imports(folder: str) -> Iterator[tuple[str, str]]:
    """Each module of the folder, and what it imports of the package, without the package's name."""
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name.startswith("bagua_autotune."):
                    found = name.removeprefix("bagua_autotune.")
                    yield str(path.relative_to(PACKAGE)), found


@pytest.mark.parametrize("folder", LAYERS)
def test_a_folder_imports_only_what_is_below_it(folder: str) -> None:
    allowed = {*LAYERS[folder], folder, "__version__"}
    wrong = [found for found in imports(folder) if found[1].partition(".")[0] not in allowed]
    assert wrong == []


@pytest.mark.parametrize("folder", [folder for folder in LAYERS if folder not in MAY_WRITE])
def test_who_reads_builds_no_tuner(folder: str) -> None:
    assert [found for found in imports(folder) if found[1].startswith(WRITER)] == []


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
        ("bagua_autotune.cli.service_reader", {"skopt", "scipy", "flask"}),
    ],
)
def test_what_takes_long_to_import_waits_until_it_is_needed(
    module: str, unwanted: set[str]
) -> None:
    code = f"import {module}, sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert unwanted & set(run.stdout.split()) == set()
