"""Python imports a module of this name when it starts; this one waits for torch to be imported.

It may run in another Python than the command that put it there, with another release of
bagua_client or none, and in programs that never import torch. So it imports nothing of
bagua_client, and an error in it never ends the program.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

LIGHTNING = "lightning", "pytorch_lightning"
"""The same library under its two names; each has a list of strategies of its own."""
REPLICATES = "torch.distributed._composable.replicate_with_fsdp", "replicate"
"""Where torch has its other function that makes a model one as ``fully_shard`` does."""
SHARDED = "does not tune what fully_shard shards", "replacement", "follow_fully_shard"
WHEN_IMPORTED = (
    (
        "torch",
        "trains with torch's own DistributedDataParallel and is not tuned",
        "replacement",
        "replace_torchs_class",
    ),
    (
        "torch",
        "does not tune what a process trains by itself",
        "single_model",
        "follow_first_model",
    ),
    ("torch.distributed.fsdp", *SHARDED),
    (REPLICATES[0], *SHARDED, *REPLICATES),
    ("deepspeed", "does not tune DeepSpeed's engines", "replacement", "follow_deepspeed"),
)
"""By the module: what is not done where it fails, and what does it, of ``integrations``."""


class AfterImport:
    """Calls something when a module has been imported; an importer of ``sys.meta_path``."""

    def __init__(self, name: str, call: Callable[[], object]) -> None:
        self._name = name
        self._call = call
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._name or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return self._watched(spec)
        return None

    def _watched(self, spec: Any) -> Any:
        """Many look for a module (``importlib.util.find_spec``) without importing it."""
        execute = getattr(spec.loader, "exec_module", None)

        def execute_and_call(module: Any) -> None:
            execute(module)  # type: ignore[misc]
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._call()

        if execute is not None:
            spec.loader.exec_module = execute_and_call
        return spec


def _attempt(fails: str, module: str, function: str, *given: str) -> Callable[[], None]:
    def call() -> None:
        try:
            place = importlib.import_module(f"bagua_client.integrations.{module}")
            getattr(place, function)(*given)
        except Exception as error:
            _say(f"{fails}: {error!r}")

    return call


def _register_strategies() -> None:
    try:
        if importlib.util.find_spec("bagua_client.lightning") is not None:
            importlib.import_module("bagua_client.lightning")
    except Exception as error:
        _say(f'has no strategy "bagua" in Lightning: {error!r}')


def _say(what: str) -> None:
    rank = os.environ.get("RANK")
    who = f"rank {rank}" if rank else f"process {os.getpid()} ({sys.executable})"
    print(f"bagua_client: {who} {what}", file=sys.stderr)


def _prepare() -> None:
    file, _, steps = os.environ.get("BAGUA_AUTOTUNE_PROBE", "").rpartition(":")
    if file and steps.isdigit():
        recorder = importlib.import_module("step_times").Recorder(file, int(steps))
        AfterImport("torch", recorder.begin)
    if os.environ.get("BAGUA_REPLACES_DDP") == "1":
        for name, fails, *what in WHEN_IMPORTED:
            AfterImport(name, _attempt(fails, *what))
        for name in LIGHTNING:
            AfterImport(name, _register_strategies)


def _give_way() -> None:
    """Run what this folder hides, too: a ``sitecustomize`` of the installation."""
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != own]
    spec = importlib.machinery.PathFinder.find_spec(__name__, sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules[__name__] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    try:
        _prepare()
    finally:
        _give_way()
