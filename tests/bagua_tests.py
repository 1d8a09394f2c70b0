"""Bagua's own tests from its PyPI release, unmodified, of ours under Bagua's names.

Run as a script in a process of its own, as the release's tests are a package ``tests``, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import types
import unittest
from contextlib import suppress
from importlib import import_module
from pathlib import Path

MODULES = {
    ".torch_api.contrib.cached_dataset": "bagua_client.data.cached_dataset",
    ".torch_api.contrib.fuse.optimizer": "bagua_client.optimizers.contiguity",
    ".torch_api.contrib.load_balancing_data_loader": "bagua_client.data.load_balancing",
    ".torch_api.contrib.utils.redis_store": "bagua_client.data.redis_store",
}
"""Bagua's, and ours that have the same names in them."""
PACKAGES = ("", ".torch_api", ".torch_api.contrib", ".torch_api.contrib.fuse")


def run(name: str, release: Path, folder: Path) -> str:
    """Run one module of the release's ``tests.contrib``.

    Args:
        release: the unpacked release.
        folder: where what the tests write is left.

    Returns:
        What ``unittest`` printed.
    """
    command = [sys.executable, __file__, str(release), f"tests.contrib.{name}", "--verbose"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # With a GPU they would be skipped.
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=100, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def _take_the_names() -> None:
    data = import_module("bagua_client.data")
    optimizers = import_module("bagua_client.optimizers")
    redis_server = import_module("bagua_client.data.redis_server")
    for name in PACKAGES:
        sys.modules[f"bagua{name}"] = types.ModuleType(f"bagua{name}")
    for name, ours in MODULES.items():
        with suppress(ImportError):  # redis-py is an extra
            sys.modules[f"bagua{name}"] = import_module(ours)
    environment = types.ModuleType("bagua.torch_api.env")
    vars(environment).update(find_free_network_port=redis_server.free_port)
    sys.modules["bagua.torch_api.env"] = environment
    contrib = sys.modules["bagua.torch_api.contrib"]
    for package in (data, optimizers):
        vars(contrib).update({name: getattr(package, name) for name in package.__all__})
    vars(sys.modules["bagua.torch_api"]).update(contrib=contrib)


if __name__ == "__main__":
    _take_the_names()
    sys.path[0] = sys.argv.pop(1)
    unittest.main(module=None)
