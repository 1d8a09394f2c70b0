"""Dependencies point one way, as docs/design.md has them, those that only types need too; and
what runs on the training thread makes no request."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import bagua_client
from bagua_client import reporter
from tests.test_arrows import imports as names_of_imports

PACKAGE = Path(bagua_client.__file__).parent
# Torch's private names, and what is known of a job: settings, buckets, what came of a tuning.
TORCHS = {"torch_private"}
THREADS = {"threads"}
KNOWN = {"configuration", "environment", "layout"}
TOLD = {"announcement", "callbacks", "tuning"}
# What each folder, and each module beside the folders, may import of the others.
BUCKETS = {"communication", "compression", "configuration", "layout", *TORCHS}
ALGORITHMS = {"algorithms", *BUCKETS}
TUNABLE = {"tunable", *ALGORITHMS}
AGENT = {"guard", "service", "measuring", "reporter", *THREADS, *TUNABLE, *KNOWN, *TOLD}
INTEGRATIONS = {"checking", "agent", "reducer", "sharded", "zero", "single", *AGENT}
STARTS = {"integrations", "lightning", "startup", *KNOWN}
LAYERS = {
    "torch_private": set[str](),
    "threads": set[str](),
    "triton_kernels": set[str](),
    "compression": {"triton_kernels"},
    "configuration": set[str](),
    "layout": {"configuration"},
    "tuning": {"configuration"},
    "callbacks": {"tuning"},
    "announcement": set[str](),
    "communication": {"compression", "configuration", *THREADS, *TORCHS},
    "algorithms": BUCKETS,
    "environment": {"algorithms", "configuration"},
    "tunable": ALGORITHMS,
    "reducer": TUNABLE,
    "sharded": TUNABLE,
    "zero": TUNABLE,
    "single": TUNABLE,
    "measuring": TUNABLE,
    "service": {"communication", "environment", *TORCHS, *TOLD},
    "reporter": {"service", "measuring", "communication", "environment", *THREADS, *TORCHS, *TOLD},
    "guard": set[str](),
    "agent": AGENT,
    "checking": {"agent", *AGENT},
    "integrations": INTEGRATIONS,
    "lightning": {"integrations", *ALGORITHMS, *KNOWN},
    "startup": {"integrations", "lightning"},
    "testing": {"integrations", *ALGORITHMS, *KNOWN},
    "launcher": STARTS,
    "run": {"launcher", *STARTS},
    "__main__": {"launcher"},
}
# What the packages that stand on the client may import of its folders.
ABOVE = {
    "bagua_training": {"communication", *TORCHS},
    "bagua_compat": {"launcher", "reducer", *STARTS, *ALGORITHMS},
}
REQUESTS = {"requests", "urllib3", "http", "httpx", "aiohttp"}
BESIDE = ("reporter", "service")


@cache
def modules() -> dict[str, Path]:
    """All of the package, by their names without the package's."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts != ("__init__",):
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(of: str) -> Iterator[tuple[str, str]]:
    """Each module of a folder, or the module, and what it imports, ours without the package."""
    for module, path in modules().items():
        if module == of or module.startswith(f"{of}."):
            for name in names_of_imports(path):
                yield module, name.removeprefix("bagua_client.")


def places() -> set[str]:
    return {module.partition(".")[0] for module in modules()}


def imports_of(package: str) -> set[str]:
    """What the modules of a package import, by their whole names."""
    paths = (PACKAGE.parent / package).rglob("*.py")
    return {name for path in paths for name in names_of_imports(path)}


@pytest.mark.parametrize("package", ABOVE)
def test_a_package_above_imports_only_these_folders_of_the_client(package: str) -> None:
    names = (name.split(".") for name in imports_of(package))
    assert {name[1] for name in names if name[0] == "bagua_client"} <= ABOVE[package]


@pytest.mark.parametrize("place", LAYERS)
def test_a_folder_imports_only_what_is_below_it(place: str) -> None:
    allowed = {*LAYERS[place], place}
    ours = [found for found in imports(place) if found[1].partition(".")[0] in places()]
    assert [found for found in ours if found[1].partition(".")[0] not in allowed] == []
    # Of the whole package nobody imports but its version.
    assert [found for found in imports(place) if found[1].startswith("bagua_client")] == []


def test_every_folder_has_its_place_below_those_that_use_it() -> None:
    assert places() == set(LAYERS)
    TopologicalSorter(LAYERS).prepare()


def test_no_modules_import_one_another() -> None:
    graph = {}
    for module in modules():
        names = [name for by, name in imports(module) if by == module]
        shown = {name if name in modules() else name.rpartition(".")[0] for name in names}
        graph[module] = shown & set(modules()) - {module}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("place", [place for place in LAYERS if place not in BESIDE])
def test_what_runs_on_the_training_thread_makes_no_request(place: str) -> None:
    """It has nothing of the thread that does but the names that its package gives."""
    asks = [
        found for found in imports(place) if found[1].partition(".")[0] in {*REQUESTS, "service"}
    ]
    assert [found for found in asks if not found[0].startswith("service")] == []
    has = [
        name.removeprefix("reporter.") for _, name in imports(place) if name.startswith("reporter")
    ]
    assert set(has) <= set(reporter.__all__)
