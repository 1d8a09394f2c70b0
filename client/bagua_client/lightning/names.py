"""The names under which Lightning knows the strategies."""

from __future__ import annotations

from typing import Any

from bagua_client.algorithms import GlobalAlgorithmRegistry

VARIANTS: dict[str, dict[str, Any]] = {
    "bagua": {},
    "bagua_spawn": {"start_method": "spawn"},
    "bagua_fork": {"start_method": "fork"},
    "bagua_notebook": {"start_method": "fork"},
    "bagua_find_unused_parameters_true": {"find_unused_parameters": True},
}
"""Beside one name for each algorithm; as DDPStrategy's are called."""


def register(strategy: type, registry: Any) -> None:
    """Make ``strategy`` known in one of Lightning's registries; once more changes nothing."""
    algorithms = GlobalAlgorithmRegistry.available_algorithms("replicated")
    variants = {f"bagua_{name}": {"algorithm": name} for name in algorithms}
    for name, arguments in {**VARIANTS, **variants}.items():
        told = ", ".join(f"{argument}={value!r}" for argument, value in arguments.items())
        description = f"{strategy.__name__}({told})"
        registry.register(name, strategy, description, override=True, **arguments)
