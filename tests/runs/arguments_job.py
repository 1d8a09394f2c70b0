"""A job for real runs whose speed depends on its arguments and its file, in a known way.

arguments_job.py FOLDER [--ddp-bucket-size N] [--overlap-grad-reduce] [--overlap-param-gather]
[--kept-layers N] [--config FILE]: notes its arguments and what its file holds in FOLDER. Like
Megatron it refuses to overlap the gathering alone; kept layers take 200 MB each.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ddp-bucket-size", type=int, default=40_000_000)
    parser.add_argument("--overlap-grad-reduce", action="store_true")
    parser.add_argument("--overlap-param-gather", action="store_true")
    parser.add_argument("--kept-layers", type=int, default=0)
    parser.add_argument("--config", type=Path)
    given = parser.parse_args()
    config = json.loads(given.config.read_text()) if given.config else {}
    note(given.folder, {**vars(given), "config_content": config})
    if given.overlap_param_gather and not given.overlap_grad_reduce:
        parser.error("Must use --overlap-param-gather with --overlap-grad-reduce")
    kept = [bytes(200_000_000) for _ in range(given.kept_layers)]
    print(f"step time: {1000 * seconds(given, config, len(kept)):.3f} ms", flush=True)


def seconds(given: argparse.Namespace, config: dict[str, Any], kept: int) -> float:
    """Of a step: 40 ms of communication, of which the overlap hides most with the right size."""
    exposed = 0.04
    if given.overlap_grad_reduce:
        exposed = 0.01 + 0.004 * abs(math.log2(given.ddp_bucket_size / 10_000_000))
        exposed -= 0.004 * given.overlap_param_gather
    slow = 0.0 if config.get("zero", {}).get("fast") else 0.02
    return 0.1 + exposed - 0.003 * kept + slow


def note(folder: Path, what: dict[str, Any]) -> None:
    number = len(list(folder.glob("run-*"))) + 1
    text = json.dumps({**what, "TUNED": os.environ.get("TUNED")}, default=str)
    (folder / f"run-{number}").write_text(text)


if __name__ == "__main__":
    main()
