"""The class that the tests get in each mode, and where it stands in for torch's."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.upstream.runner.subject import STOCK

OURS = "ours"
RECUT = "recut"
_NAME = "DistributedDataParallel"


def class_of(mode: str, test: str = "") -> type[DistributedDataParallel]:
    """The class that the test of this name is run with; what it needs is imported only then."""
    if mode == STOCK:
        return DistributedDataParallel
    if mode == OURS:
        import bagua_client

        return bagua_client.DistributedDataParallel
    from tests.upstream import recut

    return recut.distributed_data_parallel(test)


def counts_of(mode: str) -> Counter[str]:
    """What the class under test has done in this process so far, by its own count."""
    if mode != RECUT:
        return Counter()
    from tests.upstream import recut

    return Counter(recut.counts)


@contextmanager
def standing_in(replacement: type[DistributedDataParallel]) -> Iterator[None]:
    """The tests meet ``replacement`` wherever they say DistributedDataParallel.

    They reach it through ``torch.nn.parallel`` and by their own imports. Not replaced in
    ``torch.nn.parallel.distributed``: no test looks there, and torch's own methods keep state on
    the class which they find there, as they do in a training that uses a subclass.
    """
    with ExitStack() as stack:
        for module in (torch.nn.parallel, *_importers()):
            stack.enter_context(mock.patch.object(module, _NAME, replacement))
        yield


def _importers() -> list[object]:
    return [
        module
        for name, module in [*sys.modules.items()]
        if name.startswith("torch.testing.")
        and module.__dict__.get(_NAME) is DistributedDataParallel
    ]
