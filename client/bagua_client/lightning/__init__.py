"""Bagua's algorithms and the tuning for Lightning. Importing this makes ``strategy="bagua"`` known,
and ``bagua_bytegrad`` and so on, to the Trainer and to Fabric, in ``lightning`` and in
``pytorch_lightning``, whichever is installed.

``BaguaStrategy`` and ``BaguaFabricStrategy`` are for ``lightning``; for ``pytorch_lightning`` where
the script has imported that before, or has nothing else.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from bagua_client.algorithms import GlobalAlgorithmRegistry

_STRATEGIES = {"lightning": "of_lightning", "pytorch_lightning": "of_pytorch_lightning"}
"""The module for each of Lightning's packages; each has its own base classes, and takes no
others."""
_VARIANTS: dict[str, dict[str, Any]] = {
    "bagua": {},
    "bagua_spawn": {"start_method": "spawn"},
    "bagua_fork": {"start_method": "fork"},
    "bagua_notebook": {"start_method": "fork"},
    "bagua_find_unused_parameters_true": {"find_unused_parameters": True},
}
"""Names of the strategies beside one for each algorithm; as DDPStrategy's are called."""


def _import_strategies() -> dict[str, ModuleType]:
    found = {}
    for package, module in _STRATEGIES.items():
        try:
            found[package] = importlib.import_module(f"{__name__}.{module}")
        except ModuleNotFoundError as error:
            # Without the package, or with a folder of that name that is not it.
            if (error.name or "").partition(".")[0] not in (package, "lightning_fabric"):
                raise
    if not found:
        raise ImportError(
            "bagua_client.lightning needs Lightning, and neither lightning nor pytorch_lightning "
            "is installed: pip install lightning"
        )
    return found


def _register(strategy: type, registry: Any) -> None:
    """Make ``strategy`` known in one of Lightning's registries; once more changes nothing."""
    algorithms = GlobalAlgorithmRegistry.available_algorithms("replicated")
    variants = {f"bagua_{name}": {"algorithm": name} for name in algorithms}
    for name, arguments in {**_VARIANTS, **variants}.items():
        told = ", ".join(f"{argument}={value!r}" for argument, value in arguments.items())
        description = f"{strategy.__name__}({told})"
        registry.register(name, strategy, description, override=True, **arguments)


_imported_before = [package for package in _STRATEGIES if package in sys.modules]
_found = _import_strategies()
for _strategies in _found.values():
    _register(_strategies.BaguaStrategy, _strategies.StrategyRegistry)
    _register(_strategies.BaguaFabricStrategy, _strategies.STRATEGY_REGISTRY)
_chosen = next(_found[package] for package in (*_imported_before, *_found) if package in _found)

BaguaStrategy = _chosen.BaguaStrategy
BaguaFabricStrategy = _chosen.BaguaFabricStrategy

__all__ = ["BaguaFabricStrategy", "BaguaStrategy"]
