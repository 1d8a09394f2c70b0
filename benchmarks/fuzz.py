"""Sends many thousand wrong requests to a real service, then checks that nothing was damaged.

A tenth of them are made by schemathesis from the OpenAPI document (where it is installed), the
others by hypothesis for both APIs; of these some are cut off in the middle, and some come byte by
byte. Every 200th has up to 16 MiB that would grow when parsed. Ends with 1 if anything was answered
by a 5xx or with a traceback, if what was stored before is not as it was, if the database is
damaged, if the service took 400 MiB, or if /healthz took over a second meanwhile.

    python benchmarks/fuzz.py
    python benchmarks/fuzz.py --requests 2000 --seed 7
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import itertools
import json
import random
import re
import socket
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import DataObject, data

sys.path.append(str(Path(__file__).parents[1]))  # where benchmarks and tests are

from bagua_autotune.api.bodies import LARGEST_BODY_BYTES
from bagua_autotune.store import Store
from tests.autotune.api.garbage import TENSORS, V1, Request, requests
from tests.autotune.server import ServeProcess
from tests.autotune.support import registration, stored_jobs

PATIENCE_SECONDS = 60.0
SLOW_PAUSE_SECONDS = 0.01
SLOW_PIECES = 20
AMPLIFIED_EVERY = 200
ELEMENTS = (b"[]", b"{}", b'{"":0}', b"0", b'""', b"[[[]]]", b'{"a":{}}', b"1e5")
FIELDS = ("tensors", "software", "knobs", "steps", "buckets", "spans", "tensor_list", "jobs", "x")
MOST_PEAK_MIB = 400
HEALTH_PAUSE_SECONDS = 0.05
AT_ONCE = 500  # hypothesis keeps all that it has made in one go
REGISTRATION = registration(tensors=registration()["tensors"][:TENSORS])
KEPT = [{"step": step, "seconds": [0.1] * 4} for step in range(4)]
JSON_TYPE = {"Content-Type": "application/json"}


class Service:
    """What ``bagua-autotune serve`` on a SQLite file is sent, and what it answers."""

    def __init__(self, database: Path, served: ServeProcess) -> None:
        self.database = database
        self.process = served.process
        self.port = int(served.url.rpartition(":")[2])
        self.http = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)
        self.statuses: Counter[str] = Counter()
        self.failures: list[str] = []

    def send(self, request: Request) -> bytes:
        """On the kept connection, which is made anew when the service closed it."""
        try:
            self.http.request(request.method, request.path, request.body, JSON_TYPE)
            response = self.http.getresponse()
            return self.note(request, response.status, response.read())
        except (http.client.HTTPException, OSError) as error:
            self.http.close()
            self.statuses[f"no answer ({type(error).__name__})"] += 1
            return b""

    def send_in_pieces(self, request: Request, is_whole: bool) -> None:
        """Slowly; or only half of what was announced, and then no more."""
        head = (
            f"{request.method} {request.path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(request.body)}\r\n\r\n"
        )
        body = request.body if is_whole else request.body[: len(request.body) // 2]
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE_SECONDS) as connection:
            connection.sendall(head.encode())
            size = len(body) // SLOW_PIECES + 1
            for begin in range(0, len(body), size):
                connection.sendall(body[begin : begin + size])
                if is_whole:
                    time.sleep(SLOW_PAUSE_SECONDS)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.makefile("rb").read()
        status = answer.split(None, 2)[1] if answer else b""
        if status.isdigit():
            self.note(request, int(status), answer)
        else:
            self.statuses["cut off, no answer"] += 1

    def note(self, request: Request, status: int, body: bytes) -> bytes:
        self.statuses[str(status)] += 1
        if status >= 500 or b"Traceback (most" in body:
            self.failures.append(
                f"{request.method} {request.path} {request.body[:500]!r}: {body!r}"
            )
        return body

    def peak_mib(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        return int(found[1]) // 1024 if found else 0

    def damage(self) -> list[str]:
        """What is wrong with what it has stored; after its end."""
        with closing(sqlite3.connect(self.database)) as connection:
            (verdict,) = connection.execute("PRAGMA integrity_check").fetchone()
        found = [] if verdict == "ok" else [f"integrity check: {verdict}"]
        store = Store(f"sqlite:///{self.database}")
        for job in stored_jobs(store):
            store.jobs.tensors(job.id), store.trials.of(job.id), store.profiles.of(job.id)
            store.events.of(job.id), list(store.observations.of(job.id))
        kept = [list(o.values) for _, o in store.observations.of("job", 0)][: len(KEPT)]
        store.close()
        if kept != [step["seconds"] for step in KEPT]:
            found.append(f"the first observations are {kept}")
        return found


def draw_many(count: int, number: int, act: Callable[[DataObject], None]) -> None:
    """Let hypothesis make so many inputs; each seed makes its own."""
    for begin in range(0, count, AT_ONCE):

        @seed(number + begin)
        @settings(
            max_examples=min(AT_ONCE, count - begin),
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(data())
        def run(drawn: DataObject) -> None:
            act(drawn)

        run()


def send_garbage(service: Service, count: int, number: int) -> None:
    """Of both APIs; every 50th is cut off, every 200th is slow."""
    strategy, turn, rng = requests(REGISTRATION), itertools.count(1), random.Random(number)

    def act(drawn: DataObject) -> None:
        request, index = drawn.draw(strategy), next(turn)
        if index % AMPLIFIED_EVERY == 0:
            service.send(amplified(rng))
        elif index % 50 == 0 and request.body:
            service.send_in_pieces(request, is_whole=rng.random() < 0.25)
        else:
            service.send(request)

    draw_many(count, number, act)


def amplified(rng: random.Random) -> Request:
    """A body of one small element over and over, in a list or as unknown fields of an object."""
    paths = [f"/api/v2/jobs/job/{kind}" for kind in ("observations", "profiles", "events")]
    paths += [f"/api/v1/{kind}" for kind in V1] + ["/api/v2/copies", "/api/v2/jobs/new"]
    path, element = rng.choice(paths), rng.choice(ELEMENTS)
    size_bytes = rng.choice([60_000, 1_000_000, 4_000_000, LARGEST_BODY_BYTES - 1000])
    field = rng.choice(FIELDS).encode()
    if rng.random() < 0.25:
        size_bytes = min(size_bytes, 4_000_000)
        inner = b",".join(b'"%x":%b' % (n, element) for n in range(size_bytes // 12))
        body = b'{"%b":{%b}}' % (field, inner)
    else:
        many = size_bytes // (len(element) + 1)
        body = b'{"%b":[%b%b]}' % (field, (element + b",") * (many - 1), element)
    return Request("PUT" if path.endswith("new") else "POST", path, body)


class Health:
    """Asks for /healthz all the while, on new connections, and keeps the longest time it took."""

    def __init__(self, port: int) -> None:
        self.slowest_seconds = 0.0
        self._port = port
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._is_over.wait(HEALTH_PAUSE_SECONDS):
            began = time.monotonic()
            with closing(http.client.HTTPConnection("127.0.0.1", self._port)) as connection:
                connection.request("GET", "/healthz")
                connection.getresponse().read()
            self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - began)


def send_described(service: Service, count: int, number: int) -> None:
    """What schemathesis makes of the OpenAPI document, valid and not."""
    import schemathesis

    document = json.loads(service.send(Request("GET", "/api/v2/openapi.json")))
    operations = [
        found.ok() for found in schemathesis.openapi.from_dict(document).get_all_operations()
    ]
    modes = list(schemathesis.GenerationMode)
    made = [
        operation.as_strategy(generation_mode=mode) for operation in operations for mode in modes
    ]
    for index, strategy in enumerate(made):

        def act(drawn: DataObject, strategy: object = strategy) -> None:
            case = drawn.draw(strategy)
            response = case.call(base_url=f"http://127.0.0.1:{service.port}")
            request = Request(case.method, case.path, repr(case.body).encode())
            service.note(request, response.status_code, response.content)

        with suppress(Unsatisfiable):  # of some nothing invalid can be made
            draw_many(count // len(made) + 1, number + index, act)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=51_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slowest-seconds", type=float, default=1.0, help="of /healthz")
    given_ = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ServeProcess(Path(folder) / "fuzz.db") as served:
        service = Service(Path(folder) / "fuzz.db", served)
        health_seen = Health(service.port)
        body = json.dumps(REGISTRATION).encode()
        service.send(Request("PUT", "/api/v2/jobs/job", body))
        body = json.dumps({"trial": 0, "steps": KEPT}).encode()
        service.send(Request("POST", "/api/v2/jobs/job/observations", body))
        described = 0
        if importlib.util.find_spec("schemathesis"):
            described = given_.requests // 10
            send_described(service, described, given_.seed)
        else:
            print("schemathesis is not installed: hypothesis makes all requests")
        began = time.monotonic()
        send_garbage(service, given_.requests - described, given_.seed)
        rate = (given_.requests - described) / (time.monotonic() - began)
        health = service.send(Request("GET", "/readyz"))
        peak_mib = service.peak_mib()
        health_seen.stop()
        served.stop()
        tracebacks = served.log().count("Traceback (most recent call last)")
        damage = service.damage()
    for status, count in sorted(service.statuses.items()):
        print(f"{count:8} {status}")
    print(f"{service.statuses.total():8} requests, {rate:.0f} a second; peak memory {peak_mib} MiB")
    print(f"         slowest /healthz {health_seen.slowest_seconds:.2f} s")
    print(f"{len(service.failures):8} answered by 5xx or with a traceback; {tracebacks} in the log")
    for failure in service.failures[:5]:
        print(f"    {failure[:1500]}")
    print(f"at the end: {health.decode()}; store: {'; '.join(damage) or 'intact'}")
    is_slow = health_seen.slowest_seconds > given_.slowest_seconds
    sys.exit(bool(service.failures or damage or is_slow or peak_mib >= MOST_PEAK_MIB))


if __name__ == "__main__":
    main()
