"""Runs a training script while one of our looks at its model fails; the script is not asked.

    python -m bagua_client --autotune tests/integrations/scripts/failing_look.py LOOK SCRIPT ...

LOOK is ``module:name`` or ``module:class.name``. It fails on rank 1 alone.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from operator import attrgetter
from unittest import mock


def fail(*_: object, **__: object) -> None:
    print("a look fails", flush=True)
    raise TypeError("it fails on purpose")


if __name__ == "__main__":
    module, _, path = sys.argv[1].partition(":")
    *owners, name = path.split(".")
    owner = importlib.import_module(module)
    if owners:
        owner = attrgetter(".".join(owners))(owner)
    del sys.argv[:2]
    if os.environ["RANK"] == "1":
        mock.patch.object(owner, name, fail).start()
    runpy.run_path(sys.argv[0], run_name="__main__")
