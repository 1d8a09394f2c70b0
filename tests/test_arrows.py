"""Which package may import which: arrows point down one table, and each optional package can be
left out; and a class name stands for one thing. What folders of one package may import,
autotune/test_layers.py and client/test_layers.py hold."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT: dict[str, set[str]] = {
    "bagua_wire": set(),
    "bagua_client": {"bagua_wire"},
    "bagua_training": {"bagua_client", "bagua_wire"},
    "bagua_compat": {"bagua_training", "bagua_client", "bagua_wire"},
    "bagua_autotune": {"bagua_wire"},
    "bagua_v1": {"bagua_autotune", "bagua_wire"},
    "bagua_runs": {"bagua_autotune", "bagua_wire"},
    "bagua_simulator": {"bagua_wire"},
    "bagua_simulator.commands": {"bagua_simulator", "bagua_autotune", "bagua_wire"},
}
OPTIONAL = ("bagua_training", "bagua_compat", "bagua_v1", "bagua_runs", "bagua_simulator")
FOLDERS = {
    path.parent.name: path.parent
    for side in ("autotune", "client")
    for path in sorted((ROOT / side).glob("*/__init__.py"))
}
THERE = [package for package in OPTIONAL if package in FOLDERS]
# What all of them import of others is imported once; then, in a fork for each hidden package, every
# module that does not need it.
IMPORT_ALL = """
import importlib, json, os, sys
from importlib.abc import MetaPathFinder

class Hidden(MetaPathFinder):
    def __init__(self, name):
        self.name = name

    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == self.name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def imported(names):
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:  # of other packages some are optional, such as triton
            if (error.name or "bagua").startswith("bagua"):
                raise

others, modules_without = json.loads(sys.argv[1])
imported(others)
failed = []
for hidden, modules in modules_without.items():
    if not os.fork():
        sys.meta_path.insert(0, Hidden(hidden))
        imported(modules)
        sys.stderr.flush()
        os._exit(0)
    if os.wait()[1]:
        failed.append(hidden)
sys.exit(", ".join(failed) or 0)
"""


def modules_of(package: str) -> dict[str, Path]:
    """Its modules by their full names, without what stands in no package."""
    folder = FOLDERS[package]
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        if "as_bagua" not in parts:
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(path: Path) -> Iterator[str]:
    """The full names of all that a file imports, in functions, for types, by name."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ImportFrom(module=str(module)):
                yield from (f"{module}.{alias.name}" for alias in node.names)
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.Call(
                func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]
            ):
                yield name


def top(name: str) -> str:
    return name.partition(".")[0]


def place_of(name: str) -> str:
    """The entry of the table that a module belongs to; its package where there is none."""
    inside = [entry for entry in MAY_IMPORT if f"{name}.".startswith(f"{entry}.")]
    return max(inside, key=len, default=top(name))


def needs(place: str) -> set[str]:
    """The packages that an entry of the table stands on, its own among them."""
    return {top(place)}.union(*map(needs, MAY_IMPORT[place]))


@pytest.mark.parametrize("package", FOLDERS)
def test_a_package_imports_only_what_is_below_it(package: str) -> None:
    up = []
    for module, path in modules_of(package).items():
        own = place_of(module)
        others = {place_of(name) for name in imports(path)} & set(MAY_IMPORT)
        up += [(module, other) for other in sorted(others - MAY_IMPORT[own] - {own})]
    assert up == []


@pytest.mark.parametrize("package", FOLDERS)
def test_a_class_name_stands_for_one_thing(package: str) -> None:
    """But for the classes that each of Lightning's two packages has."""
    found = Counter(
        node.name
        for module, path in modules_of(package).items()
        if ".lightning.of_" not in module
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, times in found.items() if times > 1] == []


def test_every_package_has_its_place_and_there_is_no_circle() -> None:
    assert set(FOLDERS) <= set(MAY_IMPORT)
    assert {"bagua_wire", "bagua_client", "bagua_autotune", "bagua_simulator"} <= set(FOLDERS)
    TopologicalSorter(MAY_IMPORT).prepare()


@pytest.mark.parametrize("path", modules_of("bagua_wire").values(), ids=lambda path: path.stem)
def test_the_wire_imports_the_standard_library_and_itself(path: Path) -> None:
    assert set(map(top, imports(path))) - sys.stdlib_module_names <= {"bagua_wire"}


def test_nothing_on_the_services_side_needs_torch() -> None:
    for package, folder in FOLDERS.items():
        if folder.parent.name == "autotune":
            paths = modules_of(package).values()
            assert "torch" not in {top(name) for path in paths for name in imports(path)}, package


def test_tests_import_no_benchmark_but_those_of_benchmarks() -> None:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if ROOT / "tests" / "benchmarks" not in path.parents:
            assert "benchmarks" not in map(top, imports(path)), path


@pytest.mark.slow
def test_without_an_optional_package_all_others_are_imported() -> None:
    modules_without = {
        hidden: [
            module
            for package in FOLDERS
            for module in modules_of(package)
            if hidden not in needs(place_of(module))
            # These do something when they are imported.
            and module.split(".")[-1] not in ("__main__", "sitecustomize")
        ]
        for hidden in THERE
    }
    paths = [path for package in FOLDERS for path in modules_of(package).values()]
    others = {top(name) for path in paths for name in imports(path)}
    others = {name for name in others if name not in sys.stdlib_module_names}
    asked = json.dumps([sorted(others - {*FOLDERS}), modules_without])
    run = subprocess.run([sys.executable, "-c", IMPORT_ALL, asked], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
