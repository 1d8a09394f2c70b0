"""Bagua's module names, each for one of ours: ``bagua.torch_api.env`` is the very module
``bagua_compat.torch_api.env``, so that nothing exists twice."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

ELSEWHERE = {
    "bagua.bagua_define": "bagua_compat.service",
    "bagua.distributed": "bagua_client.launcher",
    "bagua.distributed.launch": "bagua_client.run",
    "bagua.distributed.run": "bagua_client.run",
    "bagua.service.autotune_service": "bagua_compat.service",
    "bagua.service.bayesian_optimizer": "bagua_compat.service",
    "bagua.torch_api.algorithms.async_model_average": "bagua_client.algorithms.async_model_average",
    "bagua.torch_api.algorithms.bytegrad": "bagua_client.algorithms.bytegrad",
    "bagua.torch_api.algorithms.gradient_allreduce": "bagua_client.algorithms.gradient_allreduce",
    "bagua.torch_api.checkpoint.checkpointing": "bagua_compat.torch_api.checkpoint",
    "bagua.torch_api.contrib.cache_loader": "bagua_training.data.cached_dataset",
    "bagua.torch_api.contrib.cached_dataset": "bagua_training.data.cached_dataset",
    "bagua.torch_api.contrib.fuse": "bagua_training.optimizers",
    "bagua.torch_api.contrib.fuse.optimizer": "bagua_training.optimizers",
    "bagua.torch_api.contrib.load_balancing_data_loader": "bagua_training.data.load_balancing",
    "bagua.torch_api.contrib.sync_batchnorm": "bagua_training.sync_batch_norm",
    "bagua.torch_api.contrib.utils": "bagua_training.data",
    "bagua.torch_api.contrib.utils.redis_store": "bagua_training.data.redis_store",
    "bagua.torch_api.contrib.utils.store": "bagua_training.data.store",
    "bagua.torch_api.data_parallel.distributed": "bagua_compat.torch_api.data_parallel",
    "bagua.torch_api.data_parallel.functional": "bagua_compat.torch_api.data_parallel",
    "bagua.torch_api.distributed": "bagua_compat.torch_api.module",
    "bagua.torch_api.model_parallel.moe.layer": "bagua_compat.torch_api.model_parallel.moe",
    "bagua.torch_api.model_parallel.moe.utils": "bagua_compat.torch_api.model_parallel.moe",
    "bagua.version": "bagua_compat",
}
"""All others are in ``bagua_compat`` under the same name."""


def install() -> None:
    """Make ``import bagua.torch_api`` and so on find our modules."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith("bagua."):
            return None
        ours = ELSEWHERE.get(name, f"bagua_compat.{name.removeprefix('bagua.')}")
        found = importlib.util.find_spec(ours)
        if found is None:
            return None
        spec = ModuleSpec(name, _Loader(found), origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        if found.submodule_search_locations is None and _is_package_of_bagua(name):
            spec.submodule_search_locations = []
        return spec


def _is_package_of_bagua(name: str) -> bool:
    """Some of Bagua's packages are one module here, whose parts are found by the names above."""
    return any(other.startswith(f"{name}.") for other in ELSEWHERE)


class _Loader(InspectLoader):
    """Answers with the module that is there under our name."""

    def __init__(self, ours: ModuleSpec) -> None:
        self._ours = ours

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(self._ours.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._ours  # Python has just written that of Bagua's name over it.
        if module.__name__ == "bagua_compat.torch_api":
            # Scripts write ``bagua.contrib.fuse.optimizer`` after ``import bagua.torch_api`` alone.
            for name in ELSEWHERE:
                if name.startswith("bagua.torch_api."):
                    with suppress(ImportError):  # No redis here, which few need.
                        importlib.import_module(name)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return a module's code, for ``python -m bagua.distributed.run``."""
        loader = self._ours.loader
        return loader.get_code(self._ours.name) if isinstance(loader, InspectLoader) else None

    def get_source(self, fullname: str) -> str | None:
        loader = self._ours.loader
        return loader.get_source(self._ours.name) if isinstance(loader, InspectLoader) else None
