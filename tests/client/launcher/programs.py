"""Python programs started as a user would, with the variables of this process but ours."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.torch_aborts import again_if_torch_aborts


def start(
    *words: str, folder: Path, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """``python WORDS`` in ``folder``, to its end."""
    return again_if_torch_aborts(
        lambda: _start(words, folder, variables or {}), lambda done: done.stderr
    )


def _start(
    words: Sequence[str], folder: Path, variables: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("BAGUA_")}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )
