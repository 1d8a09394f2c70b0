"""PyTorch's own tests of ``fully_shard``, with torch alone and with models that we change.

    python tests/upstream_fsdp/run.py --world-sizes 2 4 --json upstream_fsdp.json
    python tests/upstream_fsdp/run.py --world-sizes 2 --only frozen
    python tests/upstream_fsdp/run.py --native --world-sizes 2 --seconds 200

Where the tests come from, and what happens where they cannot be had: ``sources.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Ranks import this file too, to find the functions that they are given.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

if __name__ == "__main__":
    from tests.upstream.runner.command import main
    from tests.upstream_fsdp import sources
    from tests.upstream_fsdp.suite import NATIVE, SUBJECT

    try:
        sources.find()
    except sources.NoSources as reason:
        print(f"SKIPPED: {reason}")
        sys.exit(0)
    sys.exit(main(SUBJECT, NATIVE))
