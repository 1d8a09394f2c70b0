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


def _replace() -> None:
    try:
        importlib.import_module("bagua_client.integrations.replacement").replace_torchs_class()
    except Exception as error:
        _say(f"trains with torch's own DistributedDataParallel and is not tuned: {error!r}")


def _follow_sharding(*place: str) -> None:
    try:
        importlib.import_module("bagua_client.integrations.replacement").follow_fully_shard(*place)
    except Exception as error:
        _say(f"does not tune what fully_shard shards: {error!r}")


def _follow_first_model() -> None:
    try:
        importlib.import_module("bagua_client.integrations.single_model").follow_first_model()
    except Exception as error:
        _say(f"does not tune what a process trains by itself: {error!r}")


def _follow_engines() -> None:
    try:
        importlib.import_module("bagua_client.integrations.replacement").follow_deepspeed()
    except Exception as error:
        _say(f"does not tune DeepSpeed's engines: {error!r}")


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
        AfterImport("torch", _replace)
        AfterImport("torch", _follow_first_model)
        AfterImport("torch.distributed.fsdp", _follow_sharding)
        AfterImport(REPLICATES[0], lambda: _follow_sharding(*REPLICATES))
        AfterImport("deepspeed", _follow_engines)
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
