"""How fast the service answers with a full store: the page, its data and /metrics.

A SQLite store holds 1,000 jobs of 60 trials, with what real jobs leave (filled_store.py): once all
of them are being tuned, once 20 are and the others ended days ago.  `bagua-autotune serve` on it
is asked over one connection, bodies read to the end; the client shares the machine.  Between two
answers of "20 changed" and "all changed" so many jobs report a step, which is not counted in.

- the page: its shell at ``/`` and the first list that it asks for; what a browser waits for.
- first: a service that was just started; it has read no job yet.
- 304: the client has the newest already.
- scrapes until all is new: how far figures lag behind once all jobs changed.

    python benchmarks/service.py --json service.json
    python benchmarks/service.py --jobs 50 --repeats 5
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles

from filled_store import Filling, fill
from harness import print_table, write_json

from bagua_autotune.store import Store

CHANGED_JOBS = 20
REPEATS_OF_ALL = 8  # a thousand reports between two answers take seconds
FIRST_LATE_STEP = 10**6
LIST = "/api/v2/jobs?limit=100"  # what the page of all jobs asks for at first
LONG_LIST = "/api/v2/jobs?limit=1000"


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

    def __init__(self, port: int, pid: int) -> None:
        self.port, self.pid = port, pid
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self._step = FIRST_LATE_STEP
        self.etag = ""

    def get(self, path: str, etag: str = "") -> bytes:
        """The body of the answer."""
        return self._send("GET", path, etag=etag)

    def report(self, job_ids: Sequence[str], trial: int) -> None:
        """One more step of a trial that is closed: it is stored, and nothing is decided."""
        self._step += 1
        seconds = 0.2 + 1e-5 * (self._step - FIRST_LATE_STEP)  # no figure stays as it was
        steps = [{"step": self._step, "seconds": [seconds] * 8, "compute_seconds": [0.15] * 8}]
        body = json.dumps({"trial": trial, "steps": steps}).encode()
        for job_id in job_ids:
            self._send("POST", f"/api/v2/jobs/{job_id}/observations", body)

    def _send(self, method: str, path: str, body: bytes | None = None, etag: str = "") -> bytes:
        headers = {"Content-Type": "application/json"}
        if etag:
            headers["If-None-Match"] = etag
        self._http.request(method, path, body, headers)
        response = self._http.getresponse()
        content = response.read()
        if response.status not in (200, 304):
            raise RuntimeError(f"{method} {path} was answered {response.status}: {content[:500]!r}")
        self.etag = response.headers.get("ETag", "")
        return content


@contextmanager
def serving(url: str, **environment: str) -> Iterator[Client]:
    """``bagua-autotune serve`` on a free port until the block ends, with further variables."""
    command = [sys.executable, "-m", "bagua_autotune", "serve", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--database", url, "--log-level", "error"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        assert process.stdout
        told = process.stdout.readline()
        if not told:
            raise RuntimeError("the service did not start")
        client = Client(int(told.rsplit(":", 1)[1]), process.pid)
        time.sleep(2)  # it still loads the search
        yield client
    finally:
        process.terminate()
        process.communicate()


def measure(folder: Path, filling: Filling, repeats: int) -> tuple[list[Answer], int]:
    """Fill a store, serve it, and ask; the answers, and the scrapes until all is new."""
    database = f"sqlite:///{folder / f'{filling.active}.db'}"
    store = Store(database)
    active = fill(store, filling)
    store.close()
    with serving(database) as client:
        answers = list(_ask(client, filling, active, repeats))
        return answers, scrapes_behind(client, filling, active)


def _ask(client: Client, filling: Filling, active: list[str], repeats: int) -> Iterator[Answer]:
    some = active[:CHANGED_JOBS]

    def ask(
        name: str,
        *paths: str,
        changing: Sequence[str] = (),
        count: int = repeats,
        etag: str = "",
    ) -> Answer:
        seconds: list[float] = []
        for _ in range(count):
            client.report(changing, filling.trials - 1)
            started = time.perf_counter()
            bodies = [client.get(path, etag) for path in paths]
            seconds.append(time.perf_counter() - started)
        high = quantiles(seconds, n=20)[18] if count > 1 else seconds[0]
        size = sum(map(len, bodies))
        return Answer(filling.active, name, 1000 * median(seconds), 1000 * high, size, count)

    client.report(active, filling.trials - 1)  # so that they have their histograms
    yield ask("/metrics, first", "/metrics", count=1)
    while client.get("/metrics").count(b"bagua_autotune_job_ranks{") < filling.active:
        pass  # a scrape does not take long, and leaves the rest to the next one
    yield ask("/metrics", "/metrics")
    yield ask("shell of the page", "/")
    yield ask("the page, first", "/", LIST, count=1)
    overview = f"/api/v2/jobs/{active[0]}/overview"
    for name, paths in (("the page", ("/", LIST)), ("list of 1,000", (LONG_LIST,))):
        yield ask(name, *paths)
        yield ask(f"{name}, 304", *paths, etag=client.etag)
    yield ask("a job's overview", overview)
    yield ask("a job's overview, changed", overview, changing=some[:1])
    for changing, count in ((some, repeats), (active, min(repeats, REPEATS_OF_ALL))):
        who = "all changed" if changing is active else f"{len(changing)} changed"
        yield ask(f"/metrics, {who}", "/metrics", changing=changing, count=count)
        yield ask(f"the page, {who}", "/", LIST, changing=changing, count=count)
        yield ask(f"list of 1,000, {who}", LONG_LIST, changing=changing, count=count)


def scrapes_behind(client: Client, filling: Filling, active: list[str]) -> int:
    """How many scrapes it takes until the figures of all jobs, which changed, are the newest."""
    client.report(active, filling.trials - 1)
    told = [_told(client)]
    while len(told) < 2 or told[-1] != told[-2]:
        told.append(_told(client))
    return len(told) - 1


def _told(client: Client) -> set[bytes]:
    """A figure of each job that every step changes."""
    start = b"bagua_autotune_exposed_communication_seconds{"
    return {line for line in client.get("/metrics").splitlines() if line.startswith(start)}


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
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    options = parser.parse_args()
    answers: list[Answer] = []
    behind: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for active in options.active:
            filling = Filling(options.jobs, min(active, options.jobs), options.trials)
            found, behind[active] = measure(Path(folder), filling, options.repeats)
            answers += found
    show(answers)
    for active, scrapes in behind.items():
        print(f"scrapes until all is new, {active} active: {scrapes}")
    if options.json:
        content = {
            "jobs": options.jobs,
            "trials": options.trials,
            "answers": [asdict(answer) for answer in answers],
            "scrapes_until_all_is_new": behind,
        }
        write_json(options.json, content)


if __name__ == "__main__":
    main()
