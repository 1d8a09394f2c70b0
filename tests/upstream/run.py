"""PyTorch's own tests of DistributedDataParallel, run against torch's class and ours.

    python tests/upstream/run.py --modes stock ours recut --world-sizes 2 3 --json upstream.json
    python tests/upstream/run.py --modes ours --world-sizes 2 --only test_ddp_uneven
    python tests/upstream/run.py --native --modes recut --world-sizes 2 --seconds 200

The tests come from the installed wheel of PyTorch and need ``expecttest``.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Ranks import this file too, to find the functions that they are given.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

if __name__ == "__main__":
    from tests.upstream.runner.command import main
    from tests.upstream.suite import NATIVE, SUBJECT

    sys.exit(main(SUBJECT, NATIVE))
