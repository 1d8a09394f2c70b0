"""The benchmarks are scripts: their packages are found beside them."""

from __future__ import annotations

import sys
from pathlib import Path

# At the end: nothing of it may hide another module.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
