"""A service of the benchmark's own, and what it is asked to store."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagua_autotune.model.job import JobSpec, Trial
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.store import Store
from tests.autotune.server import ServeProcess

RANKS = 8
LOADING_SECONDS = 2.0
DEFAULT = {"bucket_bytes": 25 * 2**20}


@dataclass(frozen=True)
class Service:
    port: int
    pid: int


@contextmanager
def serving(url: str, *arguments: str, **environment: str) -> Iterator[Service]:
    """``bagua-autotune serve`` on this database until the block ends, with further arguments and
    variables."""
    shared = ("--database", url, "--log-level", "error", *arguments)
    with (
        tempfile.TemporaryDirectory() as folder,
        ServeProcess(Path(folder) / "service.db", *shared, **environment) as service,
    ):
        time.sleep(LOADING_SECONDS)  # it still loads the search
        yield Service(int(service.url.rpartition(":")[2]), service.process.pid)


def registration(job_id: str, warmup_seconds: float = 0.0) -> dict[str, Any]:
    """The body that registers a job of eight ranks and 100 tensors."""
    tensors = [
        {"name": f"t{i}", "elements": 250_000, "bytes": 10**6, "dtype": "f", "group": "g"}
        for i in range(100)
    ]
    return {
        "name": job_id,
        "world_size": RANKS,
        "ranks_per_node": [RANKS],
        "tensors": tensors,
        "knobs": {"bucket_bytes": {"type": "log_integer", "low": 2**16, "high": 2**30}},
        "default_configuration": DEFAULT,
        "fingerprint": "benchmark",
        "limits": {"warmup_seconds": warmup_seconds},
    }


def register(url: str, job_ids: list[str], warmup_seconds: float) -> None:
    """Store such jobs, as their clients would register them."""
    store = Store(url)
    for job_id in job_ids:
        spec = JobSpec.model_validate_json(json.dumps(registration(job_id, warmup_seconds)))
        first = Trial(0, "search", Configuration(DEFAULT))
        store.create_job(job_id, spec, at=time.time(), first=first)
    store.close()
