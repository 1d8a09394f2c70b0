"""A module of Bagua's release, as a user might have copied it into a training."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any
from unittest import mock

from bagua_client.launcher import AS_BAGUA
from tests.outside import BAGUA, folder_of


def release_module(path: str) -> Any:
    """The module at ``bagua/torch_api/PATH``, unmodified; its imports of ``bagua`` find ours."""
    place = folder_of(BAGUA) / "bagua" / "torch_api" / path
    spec = importlib.util.spec_from_file_location(f"users_{place.stem}", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "path", [AS_BAGUA, *sys.path]):
        importlib.import_module("bagua.torch_api")
    spec.loader.exec_module(module)
    return module
