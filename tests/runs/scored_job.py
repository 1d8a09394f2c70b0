"""A job whose number depends on two variables alone, so that equal searches are equal.

scored_job.py FOLDER [SECONDS]: appends a line to FOLDER/starts, waits for so long, and prints its
speed, which it appends to FOLDER/ends.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def main() -> None:
    folder = Path(sys.argv[1])
    threads, buffers = (int(os.environ.get(name, "1")) for name in ("THREADS", "BUFFERS"))
    _note(folder / "starts", f"{threads} {buffers}")
    time.sleep(float(sys.argv[2] if len(sys.argv) > 2 else 0))
    if buffers == 16:
        _note(folder / "ends", f"{threads} {buffers}")
        sys.exit("these buffers are too large")
    noise = (1.0, 0.99, 1.01)[(3 * threads + buffers) % 3]
    speed = 100 * {1: 1.0, 2: 1.2, 4: 1.5, 8: 1.4}[threads] * {1: 1.0, 4: 1.1, 8: 1.2}[buffers]
    print(f"Total img/sec on 2 GPU(s): {speed * noise:.2f} +-1.0", flush=True)
    _note(folder / "ends", f"{threads} {buffers}")


def _note(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(f"{line}\n")


if __name__ == "__main__":
    main()
