"""The copies of tunings that trainings keep on this host, as files (see docs/elastic.md).

The client writes them (``bagua_client.reporter.handover``): the time in a line, and then the copy
as compressed JSON, which names the jobs that are in it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from bagua_autotune.store.engine.location import data_folder

LARGEST_BYTES = 16 * 1024**2  # as JSON


def folder() -> Path:
    """Where this user's trainings keep them."""
    return data_folder() / "copies"


def forget(job_ids: Collection[str]) -> None:
    """Delete the copies in which one of the jobs is. A training that runs writes another one."""
    wanted = set(job_ids)
    for file in folder().glob("*.copy") if wanted else ():
        with suppress(OSError):
            if not wanted.isdisjoint(_job_ids(file.read_bytes())):
                file.unlink()


def _job_ids(kept: bytes) -> set[str]:
    """The jobs in a copy; none if it cannot be read, as no training could."""
    try:
        inflated = zlib.decompressobj().decompress(kept.partition(b"\n")[2], LARGEST_BYTES)
        copy: Any = json.loads(inflated)
        return {str(job["id"]) for job in copy["jobs"]}
    except (zlib.error, ValueError, RecursionError, KeyError, TypeError):
        return set()
