"""Several services on one database, of which one is killed every few seconds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import requests
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.testbed.job import free_port
from tests.autotune.server import ServeProcess

from .proxy import FaultyProxy
from .trouble import QUIET_SECONDS, TROUBLE_SECONDS, Troubled

FAILED = "a decision failed"
DECIDED = "bagua_autotune_proposal_seconds_count"


class Replicas(Troubled):
    """So many ``bagua-autotune serve`` behind a proxy; each has its turn.

    Args:
        url: of the database that they share.
        folder: where they write their logs.
        seed: decides when which is killed, and for how long.
        crash_database: is called once, in place of a kill.
        crash_after: so many kills.

    Attributes:
        troubles: how often a replica was killed, and the database crashed.
        decided: how many decisions the replicas said that they made; those that were killed, a
            moment before.
    """

    def __init__(
        self,
        url: str,
        count: int,
        folder: Path,
        seed: int,
        crash_database: Callable[[], None],
        crash_after: int,
    ) -> None:
        self._url = url
        self._folder = folder
        self._crash_database = crash_database
        self._crash_after = crash_after
        self._ports = _free_ports(count)
        self.decided = 0
        self._services: list[ServeProcess] = []
        super().__init__(FaultyProxy(self._ports, seed, every=0), seed)

    def __enter__(self) -> Replicas:
        self._services = [self._begun(place) for place in range(len(self._ports))]
        for service in self._services:
            service.__enter__()
        return super().__enter__()

    def _end(self) -> None:
        with ExitStack() as stack:
            stack.push(self.proxy)
            for place, service in enumerate(self._services):
                stack.push(service)
                self.decided += _decisions(self._ports[place])
                service.stop()

    def said(self, words: str) -> int:
        """In how many lines the replicas' logs, of all that there were, have the words."""
        logs = [path.read_text() for path in self._folder.glob("replica-*.log")]
        return sum(words in line for log in logs for line in log.splitlines())

    def _begun(self, place: int) -> ServeProcess:
        """Its log goes on where that of the one before ended."""
        shared = ("--database", self._url)  # the last one given is taken
        port = str(self._ports[place])
        return ServeProcess(self._folder / f"replica-{place}.db", "--port", port, *shared)

    def _trouble(self) -> None:
        while not self._over.wait(self._random.uniform(*QUIET_SECONDS)):
            if self.troubles["kill"] == self._crash_after and not self.troubles["crash"]:
                self._crash_database()
                self.troubles["crash"] += 1
                continue
            place = self._random.randrange(len(self._services))
            self.decided += _decisions(self._ports[place])
            self._services[place].__exit__(None, None, None)
            self.troubles["kill"] += 1
            if not self._over.wait(self._random.uniform(*TROUBLE_SECONDS)):
                self._services[place] = self._begun(place).__enter__()


def _free_ports(count: int) -> list[int]:
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


def _decisions(port: int) -> int:
    """How many the replica there has made; 0 if it does not answer."""
    with suppress(requests.RequestException):
        answer = requests.get(f"http://127.0.0.1:{port}/metrics", timeout=10)
        families = text_string_to_metric_families(answer.text)
        samples = [sample for family in families for sample in family.samples]
        return sum(int(sample.value) for sample in samples if sample.name == DECIDED)
    return 0
