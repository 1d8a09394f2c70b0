"""What Bagua's release defines in public is in ours: its names, its arguments, its imports. A
script that imports bagua runs on ours, and an installed Bagua stays what it is."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from bagua_client.launcher import AS_BAGUA
from bagua_compat.names import ELSEWHERE
from tests.client.launcher.programs import start
from tests.outside import BAGUA, folder_of

pytestmark = pytest.mark.slow

LEFT_OUT = (
    # bagua-run is in their place.
    "bagua.distributed",
    "bagua.script",
    # Inside Bagua's service; ours is in its place.
    "bagua.service.autotune_system",
    "bagua.service.autotune_task_manager",
    # Inside the layer MoE.
    "bagua.torch_api.model_parallel.moe.experts",
    "bagua.torch_api.model_parallel.moe.sharded_moe",
    # All but fuse_optimizer and is_fused_optimizer, which Bagua's tests import, is inside it.
    "bagua.torch_api.contrib.fuse.optimizer",
)
"""Modules whose names begin so."""
INSIDE = (
    "AutotuneServiceTaskManager",
    "NpEncoder",
    "reset_error_retry",
    "DistutilsPlatformError",
    "BaguaProcessGroupPatch",
    "broadcast_nccl_unique_id",
    "comm",
    "get_communicator",
    "get_hyperparameters_service_client",
    "run_flask_app",
    "start_autotune_server",
    "BatchFetcher",
    "serialize",
    "deserialize",
    "bootstrap_redis_server",
    "create_redis_client",
    "get_host_ip",
    "shutdown_redis_server",
    "to_bagua_process_group",
    "torch_reduce_op_to_bagua",
    "DistributedDataParallel_V1_9_0_Interface",
    "average_by_removing_extreme_values",
    "bagua.torch_api.data_parallel.functional.ReduceOp",
)
"""Names without an underscore that Bagua's own modules use, and nobody else."""


OTHER_ARGUMENTS = {
    # Ours are given a communicator: docs/bagua.md says how to change one of Bagua's algorithms.
    "reify",
    # Groups are made by new_group and from_torch_group.
    "BaguaProcessGroup.__init__",
    # As many bytes as the node can spare, and not 100 GiB whatever it has.
    "RedisStore.__init__",
    # Of none of Bagua's buckets, but of torch's: None is torch's own default.
    "DistributedDataParallel",
    "DistributedDataParallel_V1_9_0.__init__",
    # None and an empty text are the same to requests.
    "AutotuneClient.__init__",
}
INNER_METHODS = {
    "AutotuneService.autotune",
    "LoadBalancingDistributedSampler.shuffle_chunks",
    "LoadBalancingDistributedBatchSampler.generate_batches",
    # Attributes of each instance.
    "DistributedDataParallel_V1_9_0.require_backward_grad_sync",
    "DistributedDataParallel_V1_9_0.parameters_to_ignore",
}
IMPORT = re.compile(
    r"^[ \t]*(?:from bagua[\w.]* import (?:\([^)]*\)|[\w ,]+)|import bagua[\w.]*)", re.MULTILINE
)
FIND = """
import importlib, json, sys
missing = []
for module, name in json.load(open(sys.argv[1])):
    try:
        if name and not hasattr(importlib.import_module(module), name):
            importlib.import_module(f"{module}.{name}")
        importlib.import_module(module)
    except ImportError as error:
        missing.append(f"{module} {name}: {error}")
import bagua.torch_api as api
for place in json.load(open(sys.argv[2])):
    found = sys.modules["bagua"]
    for part in place.split(".")[1:]:
        found = getattr(found, part, None)
    if found is None:
        missing.append(f"{place} after import bagua.torch_api")
print(json.dumps(missing))
"""


def _public(path: Path) -> Iterator[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom) and path.name == "__init__.py":
            yield from (alias.asname or alias.name for alias in node.names)


def _modules() -> Iterator[tuple[str, Path]]:
    root = folder_of(BAGUA)
    for path in sorted((root / "bagua").rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if not name.startswith(LEFT_OUT):
            yield name, path


def _module(name: str) -> Any:
    ours = ELSEWHERE.get(name, f"bagua_compat{name.removeprefix('bagua')}")
    return importlib.import_module(ours)


def test_all_public_names_are_there() -> None:
    missing = []
    for name, path in _modules():
        module = _module(name)
        for public in _public(path):
            is_inside = public.startswith("_") or public.endswith("Impl") or public in INSIDE
            if not is_inside and not hasattr(module, public):
                missing.append(f"{name}.{public}")
    assert set(missing) <= set(INSIDE)


def _functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The public functions and methods that a module defines, by their qualified names."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef) and not re.match("_|.*Impl$", node.name):
            for member in node.body:
                is_private = re.match("_(?!_init__)", getattr(member, "name", "_"))
                if isinstance(member, ast.FunctionDef) and not is_private:
                    yield f"{node.name}.{member.name}", member


def _declared(node: ast.FunctionDef) -> list[tuple[str, Any]]:
    """Each argument with its default as text; None: it has none."""
    given = node.args.args
    defaults = [None] * (len(given) - len(node.args.defaults)) + list(node.args.defaults)
    return [(a.arg, d and ast.unparse(d)) for a, d in zip(given, defaults, strict=True)]


def _difference(theirs: list[tuple[str, Any]], ours: Any) -> str:
    """Empty: what can be given to theirs can be given to ours, by place or by name."""
    parameters = [p for p in inspect.signature(ours).parameters.values() if p.name != "self"]
    theirs = [argument for argument in theirs if argument[0] not in ("self", "cls")]
    for place, (name, default) in enumerate(theirs):
        if place >= len(parameters) or parameters[place].name != name:
            return f"argument {place} must be {name}"
        if default is not None and parameters[place].default is inspect.Parameter.empty:
            return f"{name} must have a default"
        is_value = default is not None and re.fullmatch(r"[\d .*]+|True|False|None|'.*'", default)
        if is_value and parameters[place].default != eval(default):
            return f"{name} must be {default} by default"
    rest = parameters[len(theirs) :]
    needed = [p.name for p in rest if p.default is p.empty and p.kind not in (2, 4)]
    return f"{needed[0]} must have a default" if needed else ""


def test_a_star_brings_functions_and_no_module() -> None:
    brought: dict[str, Any] = {}
    exec("from bagua_compat.torch_api.communication import *", brought)
    assert {"allreduce", "ReduceOp", "new_group"} <= set(brought)
    brought.pop("__builtins__")
    assert [name for name, value in brought.items() if inspect.ismodule(value)] == []


def test_functions_and_methods_take_bagua_s_arguments() -> None:
    different, compared = [], 0
    for name, path in _modules():
        module = _module(name)
        for qualified, node in _functions(path):
            if not {qualified, qualified.split(".")[-1]} & {*OTHER_ARGUMENTS, *INNER_METHODS}:
                owner, _, method = qualified.rpartition(".")
                holder = getattr(module, owner, None) if owner else module
                if holder is None or (not owner and not hasattr(holder, method)):
                    continue  # Looked for above.
                ours = inspect.getattr_static(holder, method, None)
                if ours is None:
                    different.append(f"{name}.{qualified} is missing")
                elif not isinstance(ours, property):
                    compared += 1
                    if difference := _difference(_declared(node), getattr(holder, method)):
                        different.append(f"{name}.{qualified}: {difference}")
    assert different == []
    assert compared > 140


def _imports() -> set[tuple[str, str]]:
    """Of Bagua's names, by all of the release: outside of the package all, inside it the public."""
    root = folder_of(BAGUA)
    found = set()
    for path in [p for kind in ("*.py", "*.md", "*.rst") for p in root.rglob(kind)]:
        place = path.relative_to(root).parts[0]
        if place not in ("rust", "bagua_core"):
            for statement in IMPORT.findall(path.read_text(errors="ignore")):
                (node,) = ast.parse(statement.strip()).body
                assert isinstance(node, ast.Import | ast.ImportFrom)
                for alias in node.names:
                    if isinstance(node, ast.Import):
                        found.add((alias.name, ""))
                    elif place != "bagua" or not re.match("_|" + "|".join(INSIDE), alias.name):
                        found.add((node.module or "", alias.name))
    return found


def test_every_import_of_the_release_works_under_bagua_s_name(tmp_path: Path) -> None:
    imports = _imports()
    assert ("bagua.torch_api.contrib.fuse.optimizer", "is_fused_optimizer") in imports
    modules = [name for name, _ in _modules()] + sorted(ELSEWHERE)
    inside = [name for name in modules if name.startswith("bagua.torch_api")]
    for file, content in (("imports", sorted(imports)), ("modules", inside)):
        (tmp_path / file).write_text(json.dumps(content))
    words = "-c", FIND, "imports", "modules"
    assert _found(tmp_path, *words, variables=_path(AS_BAGUA))[0] == "[]"


SCRIPT = """
import json, multiprocessing, os, pickle, sys
import bagua
import bagua.torch_api as api
import bagua_core
from bagua.torch_api.communication import ReduceOp

try:
    import bagua.torch_api.no_such_module
except ModuleNotFoundError as error:
    assert str(error) == "No module named 'bagua.torch_api.no_such_module'", error
else:
    raise AssertionError("a module that ours lacks is missing under bagua's name")

def seen():
    import bagua.torch_api
    import torch
    ours = sys.modules.get("bagua_compat.torch_api")
    return {
        "version": bagua.__version__,
        "is_ours": bagua.torch_api is ours,
        "argv": sys.argv[1:],
        "class": torch.nn.parallel.DistributedDataParallel.__init__.__code__.co_filename,
    }

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        child = pool.apply(seen)
    assert pickle.loads(pickle.dumps(ReduceOp.AVG)) is api.ReduceOp.AVG
    bagua_core.show_version()
    print(json.dumps([seen(), child]))
"""
REAL = "__version__ = 'their own'\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def _path(first: Path | str) -> dict[str, str]:
    """PYTHONPATH with a folder before what this process has there."""
    given = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(first), *([given] if given else [])])}


def _found(folder: Path, *words: str, variables: Mapping[str, str] | None = None) -> list[str]:
    done = start(*words, folder=folder, variables=variables)
    assert done.returncode == 0, done.stderr
    return [done.stdout.splitlines()[-1], done.stderr]


def _is_ours(seen: str) -> bool:
    """In the script and its child: version, module, and that torch's class is tuned."""
    return all(
        process["version"] == "0.9.2" and process["is_ours"] and "bagua_client" in process["class"]
        for process in json.loads(seen)
    )


def test_bagua_run_gives_a_script_and_its_children_ours(folder: Path) -> None:
    launcher = "-m", "bagua_client.run", "--as-bagua", "--nproc-per-node", "1", "--standalone"
    seen, _ = _found(folder, *launcher, "train.py", "--as-bagua", "b")
    assert _is_ours(seen)
    assert json.loads(seen)[0]["argv"] == ["--as-bagua", "b"]


def test_bagua_s_own_launchers_are_ours(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import bagua; print(bagua.__version__)")
    launcher = ("-m", "bagua.distributed.launch", "--nproc_per_node=1", "--master_port=0")
    assert _found(tmp_path, *launcher, "train.py", variables=_path(AS_BAGUA))[0] == "0.9.2"


def test_a_script_gets_ours_and_an_installed_bagua_is_named_and_left_alone(folder: Path) -> None:
    real = folder / "site" / "bagua" / "__init__.py"
    real.parent.mkdir(parents=True)
    real.write_text(REAL)
    variables = _path(real.parents[1])
    words = "-u", "-m", "bagua_compat", "train.py", "--as-bagua", "b"
    seen, said = _found(folder, *words, variables=variables)
    assert _is_ours(seen)
    assert json.loads(seen)[0]["argv"] == ["--as-bagua", "b"]
    assert f"Bagua itself is installed ({real})" in said
    prints = ("-c", "import bagua_compat.torch_api, bagua; print(bagua.__version__)")
    assert _found(folder, *prints, variables=variables)[0] == "their own"
    assert real.read_text() == REAL
    assert [path.name for path in real.parent.iterdir() if path.is_file()] == ["__init__.py"]


def test_lightning_s_own_import_of_bagua_s_strategy_is_ours(folder: Path) -> None:
    """Also where lightning-bagua itself is installed."""
    pytest.importorskip("lightning")
    real = folder / "site" / "lightning_bagua.py"
    real.parent.mkdir()
    real.write_text("raise ImportError('needs Bagua for CUDA 11')")
    (folder / "fit.py").write_text(
        "from lightning_bagua import BaguaStrategy\nprint(BaguaStrategy.__module__)"
    )
    seen, _ = _found(folder, "-m", "bagua_compat", "fit.py", variables=_path(real.parent))
    assert seen == "bagua_client.lightning.of_lightning"
