"""What Bagua's release defines in public is in ours, under the same module's name."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua_client.compat.names import ELSEWHERE
from tests.bagua_release import release_path

LEFT_OUT = (
    # bagua-run is in their place.
    "bagua.distributed",
    "bagua.script",
    # Inside Bagua's service; ours is in its place.
    "bagua.service.autotune_system",
    "bagua.service.autotune_task_manager",
    # The public names of these are in the package above.
    "bagua.torch_api.checkpoint.checkpointing",
    "bagua.torch_api.model_parallel.moe.",
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


def _public(path: Path) -> Iterator[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom) and path.name == "__init__.py":
            yield from (alias.asname or alias.name for alias in node.names)


def _modules() -> Iterator[tuple[str, Path]]:
    root = release_path()
    for path in sorted((root / "bagua").rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if not name.startswith(LEFT_OUT):
            yield name, path


def test_all_public_names_are_there() -> None:
    missing = []
    for name, path in _modules():
        module = importlib.import_module(
            ELSEWHERE.get(name, f"bagua_client.compat{name.removeprefix('bagua')}")
        )
        for public in _public(path):
            is_inside = public.startswith("_") or public.endswith("Impl") or public in INSIDE
            if not is_inside and not hasattr(module, public):
                missing.append(f"{name}.{public}")
    assert set(missing) <= set(INSIDE)


@pytest.mark.parametrize("ours", sorted(set(ELSEWHERE.values())))
def test_modules_of_ours_that_have_bagua_s_names_exist(ours: str) -> None:
    assert importlib.util.find_spec(ours) is not None
