"""The service with a full store: how long the page, its data and /metrics take to answer.

A SQLite store holds 1,000 jobs of 60 trials, with what real jobs leave (filled_store.py): once all
of them are being tuned, once 20 are and the others ended days ago.  `bagua-autotune serve` on it
is asked over one connection, bodies read to the end; the client shares the machine.  Between two
answers of "20 changed" as many jobs report a step, which is not counted in.

- first: a service that was just started; it has read no job yet.
- 304: the client has the newest already.

    python benchmarks/service.py --json service.json
    python benchmarks/service.py --jobs 50 --repeats 5
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles

from filled_store import Filling, fill
from harness import print_table, write_json

from bagua_autotune.store import Store

CHANGED_JOBS = 20
FIRST_LATE_STEP = 10**6
LIST = "/api/v2/jobs?limit=1000"  # what the page of all jobs asks for


@dataclass(frozen=True)
class Answer:
    """One kind of request, answered several times; ``first`` is not among them."""

    active: int
    request: str
    median_ms: float
    p95_ms: float
    body_bytes: int
    repeats: int


class Client:
    """One kept-alive connection."""

    def __init__(self, port: int) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self._step = FIRST_LATE_STEP
        self.etag = ""

    def get(self, path: str, etag: str = "") -> bytes:
        """The body of the answer."""
        return self._send("GET", path, etag=etag)

    def report(self, job_ids: Sequence[str], trial: int) -> None:
        """One more step of a trial that is closed: it is stored, and nothing is decided."""
        self._step += 1
        steps = [{"step": self._step, "seconds": [0.2] * 8, "compute_seconds": [0.15] * 8}]
        body = json.dumps({"trial": trial, "steps": steps}).encode()
        for job_id in job_ids:
            self._send("POST", f"/api/v2/jobs/{job_id}/observations", body)

    def _send(self, method: str, path: str, body: bytes | None = None, etag: str = "") -> bytes:
        headers = {"If-None-Match": etag} if etag else {}
        self._http.request(method, path, body, headers)
        response = self._http.getresponse()
        content = response.read()
        if response.status not in (200, 304):
            raise RuntimeError(f"{method} {path} was answered {response.status}: {content[:500]!r}")
        self.etag = response.headers.get("ETag", "")
        return content


@contextmanager
def serving(database: Path) -> Iterator[Client]:
    """``bagua-autotune serve`` on a free port until the block ends."""
    command = [sys.executable, "-m", "bagua_autotune", "serve", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--database", f"sqlite:///{database}", "--log-level", "error"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
        told = process.stdout.readline()
        if not told:
            raise RuntimeError("the service did not start")
        client = Client(int(told.rsplit(":", 1)[1]))
        time.sleep(2)  # it still loads the search
        yield client
    finally:
        process.terminate()
        process.communicate()


def measure(folder: Path, filling: Filling, repeats: int) -> list[Answer]:
    """Fill a store, serve it, and ask."""
    database = folder / f"{filling.active}.db"
    store = Store(f"sqlite:///{database}")
    active = fill(store, filling)
    store.close()
    with serving(database) as client:
        return list(_ask(client, filling, active, repeats))


def _ask(client: Client, filling: Filling, active: list[str], repeats: int) -> Iterator[Answer]:
    changing = active[:CHANGED_JOBS]
    changed = f"{len(changing)} changed"

    def ask(
        name: str,
        path: str,
        count: int = repeats,
        etag: str = "",
        before: Callable[[], object] = lambda: None,
    ) -> Answer:
        seconds: list[float] = []
        for _ in range(count):
            before()
            started = time.perf_counter()
            body = client.get(path, etag)
            seconds.append(time.perf_counter() - started)
        high = quantiles(seconds, n=20)[18] if count > 1 else seconds[0]
        return Answer(filling.active, name, 1000 * median(seconds), 1000 * high, len(body), count)

    def change() -> None:
        client.report(changing, filling.trials - 1)

    change()  # so that they have their histograms
    yield ask("/metrics, first", "/metrics", 1)
    while client.get("/metrics").count(b"bagua_autotune_job_ranks{") < filling.active:
        pass  # a scrape does not take long, and leaves the rest to the next one
    yield ask("/metrics", "/metrics")
    yield ask(f"/metrics, {changed}", "/metrics", before=change)
    yield ask("/", "/")
    yield ask("list of jobs, first", LIST, 1)
    yield ask("list of jobs", LIST)
    yield ask(f"list of jobs, {changed}", LIST, before=change)
    yield ask("list of jobs, 304", LIST, etag=client.etag)
    overview = f"/api/v2/jobs/{active[0]}/overview"
    yield ask("overview", overview)
    yield ask("overview, changed", overview, before=change)


def show(answers: Sequence[Answer]) -> None:
    rows = [
        (
            answer.request,
            str(answer.active),
            f"{answer.median_ms:.0f}",
            f"{answer.p95_ms:.0f}",
            f"{answer.body_bytes / 1000:.0f}",
        )
        for answer in answers
    ]
    print_table(("request", "active", "median ms", "p95 ms", "kB"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--active", type=int, nargs="+", default=[1000, 20])
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--json", type=Path, help="write every figure here")
    options = parser.parse_args()
    answers: list[Answer] = []
    with tempfile.TemporaryDirectory() as folder:
        for active in options.active:
            filling = Filling(options.jobs, min(active, options.jobs), options.trials)
            answers += measure(Path(folder), filling, options.repeats)
    show(answers)
    if options.json:
        found = [asdict(answer) for answer in answers]
        write_json(options.json, {"jobs": options.jobs, "trials": options.trials, "answers": found})


if __name__ == "__main__":
    main()
