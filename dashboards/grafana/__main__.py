"""Write the dashboards, or say whether the committed ones are up to date."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards.grafana import fleet, trials

FOLDER = Path(__file__).parent
DASHBOARDS: dict[str, Callable[[], Dashboard]] = {
    "tuning-trials.json": trials.dashboard,
    "fleet.json": fleet.dashboard,
}


def documents() -> Iterator[tuple[Path, str]]:
    """Each dashboard's file, and what belongs into it."""
    for name, dashboard in DASHBOARDS.items():
        built = dashboard().build()
        yield FOLDER / name, json.dumps(built, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dashboards.grafana", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a file differs")
    check = parser.parse_args().check
    differing = 0
    for path, text in documents():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        differing += 1
        if not check:
            path.write_text(text, encoding="utf-8")
        print(f"{path.name}: {'differs from what the program writes' if check else 'written'}")
    return 1 if check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
