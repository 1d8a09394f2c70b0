"""Compares WSGI servers for the service: requests per second, latency and memory of each.

Each serves the real application on a SQLite file of its own, one process with 16 threads, while
concurrent connections (as many jobs) post observations of 10 steps of 4 ranks, or get /healthz.
The servers take turns, so that a drift of the machine hits all alike; the client shares the
machine, so the figures compare servers and are no upper bounds.  `bagua-autotune serve` has
loaded scikit-optimize (about 80 MB), which the others would do at the first proposal.

The choice is waitress.  Granian answers an empty request three times as fast, but what a job
sends is bound by the store, where the three are close; and waitress is one process in pure
Python that starts in the service's own, so that it ends with the job and needs no manager.

    python benchmarks/wsgi.py --rounds 3 --seconds 4 --connections 16 --json wsgi.json
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psutil

THREADS = "16"
CLIENT_PROCESSES = 2
START_SECONDS = 60
DATABASE = "BENCHMARK_DATABASE"  # how gunicorn and granian hand the database to make_app
TARGET = f"{Path(__file__).stem}:make_app"
COMMANDS: dict[str, Callable[[str, str], list[str]]] = {
    "waitress": lambda port, database: [
        *("bagua_autotune", "serve", "--port", port, "--database", database),
        *("--searcher", "random"),
    ],
    "gunicorn gthread": lambda port, database: [
        *("gunicorn", "--bind", f"127.0.0.1:{port}", "--worker-class", "gthread"),
        *("--workers", "1", "--threads", THREADS, "--log-level", "warning", f"{TARGET}()"),
    ],
    "granian": lambda port, database: [
        *("granian", "--interface", "wsgi", "--host", "127.0.0.1", "--port", port),
        *("--workers", "1", "--blocking-threads", THREADS, "--log-level", "warning"),
        *("--factory", TARGET),
    ],
}
WORKLOADS = ("observations", "healthz")


@dataclass(frozen=True)
class Measurement:
    """One server under one workload for one round; latencies in milliseconds."""

    server: str
    workload: str
    requests_per_second: float
    median_ms: float
    p99_ms: float
    processes: int
    resident_mb: float


def make_app() -> Any:
    """The application as gunicorn and granian load it."""
    from bagua_autotune.app import create_app
    from bagua_autotune.settings import Settings
    from bagua_autotune.store import Store

    settings = Settings.load({}, database=os.environ[DATABASE], searcher="random")
    return create_app(settings, Store(settings.database))


@contextmanager
def running(server: str) -> Iterator[tuple[int, psutil.Process]]:
    """The server on a free port and an empty database, until the block ends."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        database = f"sqlite:///{folder}/autotune.db"
        process = subprocess.Popen(
            [sys.executable, "-m", *COMMANDS[server](str(port), database)],
            env={**os.environ, DATABASE: database},
            cwd=Path(__file__).parent,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait_until_ready(port, process)
            yield port, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


def _wait_until_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/healthz")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.1)
        finally:
            connection.close()
    raise RuntimeError(f"the server did not start (exit code {process.poll()})")


class Connection:
    """One kept-alive connection and the job it reports for."""

    def __init__(self, port: int, workload: str, number: str) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._path = f"/api/v2/jobs/bench-{number}"
        self._workload = workload
        self._trial, self._step = 0, 0
        self.latencies_seconds: list[float] = []
        if workload == "observations":
            self._send("PUT", self._path, _registration())

    def run(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while (started := time.perf_counter()) < end:
            if self._workload == "healthz":
                self._send("GET", "/healthz")
            else:
                self._observe()
            self.latencies_seconds.append(time.perf_counter() - started)

    def _observe(self) -> None:
        steps = [
            {"step": self._step + i, "seconds": [0.1 + 0.001 * ((self._step + i) % 7)] * 4}
            for i in range(10)
        ]
        self._step += 10
        body = {"trial": self._trial, "steps": steps}
        state = self._send("POST", f"{self._path}/observations", body)
        if state["trial"]:
            self._trial = state["trial"]["index"]

    def _send(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        self._http.request(method, path, data, {"Content-Type": "application/json"})
        response = self._http.getresponse()
        answer = json.loads(response.read())
        if response.status >= 300:
            raise RuntimeError(f"{method} {path} was answered {response.status}: {answer}")
        return answer


def _registration() -> dict[str, Any]:
    tensor = {"elements": 10**5, "bytes": 4 * 10**5, "dtype": "float32", "group": "float32/cpu"}
    return {
        "name": "bench",
        "world_size": 4,
        "ranks_per_node": [2, 2],
        "tensors": [{"name": f"t{i}", **tensor} for i in range(200)],
        "knobs": {
            "bucket_bytes": {"type": "log_integer", "low": 2**16, "high": 2**30},
            "hierarchical": {"type": "categorical", "values": ["off", "leaders"]},
        },
        "default_configuration": {"bucket_bytes": 25 * 2**20, "hierarchical": "off"},
        "fingerprint": "bench",
    }


def _client(port: int, workload: str, share: range, seconds: float, results: Any) -> None:
    """One client process with a thread for each of its connections."""
    connections = [Connection(port, workload, str(number)) for number in share]
    threads = [threading.Thread(target=each.run, args=(seconds,)) for each in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put([latency for each in connections for latency in each.latencies_seconds])


def measure(server: str, workload: str, connections: int, seconds: float) -> Measurement:
    """Run one server under one workload."""
    context = multiprocessing.get_context("fork")
    with running(server) as (port, process):
        results = context.Queue()
        clients = [
            context.Process(
                target=_client,
                args=(port, workload, range(i, connections, CLIENT_PROCESSES), seconds, results),
            )
            for i in range(CLIENT_PROCESSES)
        ]
        for client in clients:
            client.start()
        latencies = sorted(latency for _ in clients for latency in results.get(timeout=600))
        for client in clients:
            client.join()
        family = [process, *process.children(recursive=True)]
        resident = sum(member.memory_info().rss for member in family)
    return Measurement(
        server=server,
        workload=workload,
        requests_per_second=len(latencies) / seconds,
        median_ms=1000 * median(latencies),
        p99_ms=1000 * quantiles(latencies, n=100)[98],
        processes=len(family),
        resident_mb=resident / 1e6,
    )


def table(measurements: list[Measurement]) -> str:
    """Medians over the rounds, with the range of the requests per second."""
    head = ("workload", "server", "req/s", "(range)", "p50 ms", "p99 ms", "proc.", "MB")
    line = "{:<14}{:<18}{:>8} {:<15}{:>8}{:>9}{:>7}{:>7}"
    lines = [line.format(*head)]
    for workload in WORKLOADS:
        for server in COMMANDS:
            rounds = [m for m in measurements if (m.server, m.workload) == (server, workload)]
            rates = [m.requests_per_second for m in rounds]
            lines.append(
                line.format(
                    workload,
                    server,
                    f"{median(rates):.0f}",
                    f"({min(rates):.0f} to {max(rates):.0f})",
                    f"{median(m.median_ms for m in rounds):.1f}",
                    f"{median(m.p99_ms for m in rounds):.1f}",
                    rounds[0].processes,
                    f"{median(m.resident_mb for m in rounds):.0f}",
                )
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of each measurement")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    arguments = parser.parse_args()
    measurements = [
        measure(server, workload, arguments.connections, arguments.seconds)
        for _ in range(arguments.rounds)
        for workload in WORKLOADS
        for server in COMMANDS
    ]
    print(table(measurements))
    if arguments.json:
        document = [asdict(measurement) for measurement in measurements]
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
