"""The environment by which each process of a job replaces torch's class when it imports torch.

It does not matter what starts the processes (torchrun, Accelerate, Lightning, ``multiprocessing``,
a shell script): they inherit two environment variables, and their command lines stay as they are.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from bagua_client.startup import REPLACES_VARIABLE

_PACKAGE = Path(__file__).resolve().parents[1]
STARTUP = str(_PACKAGE / "startup")
AS_BAGUA = str(_PACKAGE.parent / "bagua_compat" / "as_bagua")
"""The folder that holds the package ``bagua``; whoever has it on PYTHONPATH imports ours. It is
part of ``bagua_compat``, which may have been left out."""


def inherited(as_bagua: bool = False) -> dict[str, str]:
    """The variables, beside those that are there already, of a job whose torch has our class.

    Args:
        as_bagua: whether ``import bagua`` finds ours in it; it goes on doing so in a job that is
            started in such a job.
    """
    given = os.environ.get("PYTHONPATH")
    # An empty path stands for the working directory, but nothing for no path.
    paths = [path for path in given.split(os.pathsep) if path != STARTUP] if given else []
    if as_bagua and AS_BAGUA not in paths:
        paths.insert(0, AS_BAGUA)
    root = str(_PACKAGE.parent)
    # "python -m" finds modules in the working directory, where a script does not.
    first, *others = map(os.path.abspath, sys.path)
    if first == root and root not in others:
        paths.append(root)
    return {REPLACES_VARIABLE: "1", "PYTHONPATH": os.pathsep.join([STARTUP, *paths])}


def obstacle(as_bagua: bool) -> str:
    """Why this Python's children would not inherit it; empty: they do."""
    if as_bagua and not os.path.isdir(AS_BAGUA):
        return "--as-bagua needs the package bagua_compat, which is not installed"
    if sys.flags.ignore_environment or sys.flags.no_site:
        return (
            "an unmodified script cannot be tuned with Python's options -E, -I and -S, which "
            "disable PYTHONPATH or sitecustomize; start it without them, or wrap the model in "
            "bagua_client.DistributedDataParallel"
        )
    return ""


def notice() -> str:
    """Return what to tell who runs a script as Bagua's beside Bagua itself; empty: it is not
    installed.
    """
    place = _installed_bagua()
    if place is None:
        return ""
    return (
        f"Bagua itself is installed ({place}); this job uses bagua_client in its place, and "
        "nothing of it is changed"
    )


def _installed_bagua() -> str | None:
    """Return where ``import bagua`` would find Bagua itself; None: it is not installed."""
    places = [place for place in sys.path if os.path.abspath(place) != AS_BAGUA]
    spec = PathFinder.find_spec("bagua", places)
    return spec.origin if spec is not None and spec.has_location else None
