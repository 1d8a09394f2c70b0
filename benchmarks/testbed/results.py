"""The JSON files that a script writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def written(folder: Path) -> dict[Path, int]:
    """The JSON files that are there, and when each was written, in nanoseconds."""
    return {path: path.stat().st_mtime_ns for path in sorted(folder.glob("*.json"))}


def read_since(folder: Path, before: dict[Path, int]) -> tuple[dict[str, Any], list[str]]:
    """What the files that are new or changed hold, by name, and a sentence for each unreadable one.

    Args:
        before: what ``written`` said then.
    """
    found: dict[str, Any] = {}
    problems = []
    for path, time_ns in written(folder).items():
        if time_ns == before.get(path):
            continue
        try:
            found[path.name] = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            problems.append(f"{path} cannot be read: {error}")
    return found, problems
