"""A script that imports bagua runs on ours, and an installed Bagua stays what it is."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from bagua_client.launcher import AS_BAGUA
from tests.client.launcher.programs import start

pytestmark = pytest.mark.slow

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
