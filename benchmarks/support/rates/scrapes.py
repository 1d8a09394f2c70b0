"""How long ``/metrics`` takes with a full store: most of its jobs are over, some report."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from sqlalchemy import Connection as Database
from sqlalchemy import create_engine, text

from bagua_autotune.store import Store
from bagua_autotune.store.engine.tables import Base
from bagua_autotune.tuning.tuner import Tuner
from bagua_simulator import Cluster, Simulator
from bagua_simulator.workloads import load
from benchmarks.support.rates.load import Connection, register, report_content, serving
from tests.autotune.simulated_job import SimulatedJob

MOST_SCRAPE_MS = 200.0
DAY_SECONDS = 86_400.0
# Nothing is decided, nor deleted, while it is measured.
WARMUP_SECONDS = 86_400.0
UPKEEP = {"BAGUA_AUTOTUNE_THIN_DAYS": "0", "BAGUA_AUTOTUNE_KEEP_DAYS": "0"}
ORIGINAL = "original"
MOST_STEPS = 5000
TRIALS = 6
# Of jobs that have reported: so many are surely read anew by one scrape.
READ_AT_ONCE = 10
STARTED, TOLD = (b"\nbagua_autotune_job_started_timestamp_seconds{", b"\nbagua_autotune_job_ranks{")


@dataclass(frozen=True)
class Past:
    """Jobs that are over: their last words are spread over so many seconds; whether they told of
    their end."""

    name: str
    seconds: float
    is_ended: bool


PASTS = (
    Past("ended within 90 days", 90 * DAY_SECONDS, is_ended=True),
    Past("ended within a day", DAY_SECONDS, is_ended=True),
    # All of these are shown, and not yet taken for lost.
    Past("tuned, not ended", 600.0, is_ended=False),
)


@dataclass(frozen=True)
class Scrapes:
    """Of one store, in milliseconds: the first one after a start; others while nothing changes; and
    others that each come after a report of every live job."""

    past: str
    jobs: int
    live: int
    shown: int
    first_ms: float
    still_ms: Sequence[float]
    changed_ms: Sequence[float]
    answer_bytes: int

    @property
    def worst_median_ms(self) -> float:
        return max(median(self.still_ms), median(self.changed_ms))

    @property
    def holds(self) -> bool:
        return self.worst_median_ms < MOST_SCRAPE_MS


def measure_scrapes() -> list[Scrapes]:
    """Each past in a SQLite store of its own."""
    return [measure_past(past, jobs=10_000, live=200, scrapes=15) for past in PASTS]


def measure_past(past: Past, jobs: int, live: int, scrapes: int) -> Scrapes:
    """A store that was filled before the service started."""
    job_ids = [f"live-{number:04}" for number in range(live)]
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder) / 'autotune.db'}"
        fill(url, past, jobs)
        register(url, job_ids, WARMUP_SECONDS)
        with serving(url, **UPKEEP) as service:
            connection = Connection(service.port)
            first_ms, answer = _scrape(connection)
            while answer.count(TOLD) < answer.count(STARTED):  # some have no text yet
                answer = _scrape(connection)[1]
            _report(connection, job_ids, 0)
            for _ in range(0, live, READ_AT_ONCE):
                answer = _scrape(connection)[1]
            still = [_scrape(connection)[0] for _ in range(scrapes)]
            changed = []
            for step in range(1, scrapes + 1):
                _report(connection, job_ids, step)
                changed.append(_scrape(connection)[0])
    shown = answer.count(STARTED)
    return Scrapes(past.name, jobs, live, shown, first_ms, still, changed, len(answer))


def _scrape(connection: Connection) -> tuple[float, bytes]:
    began = time.perf_counter()
    answer = connection.get("/metrics")
    return 1e3 * (time.perf_counter() - began), answer


def _report(connection: Connection, job_ids: Sequence[str], step: int) -> None:
    for job_id in job_ids:
        connection.post(f"/api/v2/jobs/{job_id}/observations", report_content(step))


def fill(url: str, past: Past, jobs: int) -> None:
    """Store so many jobs that are over: one that was tuned, and copies of it."""
    store = Store(url)
    cluster = Cluster(
        nodes=2, ranks_per_node=4, bandwidth_bytes_per_second=1.25e9, latency_seconds=1e-4
    )
    simulator = Simulator(load("resnet50"), cluster)
    limits = {"max_samples": TRIALS}
    job = SimulatedJob(Tuner(store, "random"), simulator, ORIGINAL, seed=0, limits=limits)
    job.run(MOST_STEPS, until_finished=True)
    store.close()
    engine = create_engine(url)
    with engine.begin() as database:
        _copy(database, past, jobs)
    engine.dispose()


def _copy(database: Database, past: Past, jobs: int) -> None:
    """Copies with names of their own, spread over the time; the original is the last heard of."""
    of = {"original": ORIGINAL}
    database.execute(text("CREATE TEMP TABLE numbers (number INTEGER PRIMARY KEY)"))
    numbers = [{"number": number} for number in range(1, jobs)]
    database.execute(text("INSERT INTO numbers VALUES (:number)"), numbers)
    own = {"id": "'past-' || number", "name": "'past-' || number"}
    database.execute(text(_copying("jobs", own, "jobs, numbers WHERE jobs.id = :original")), of)
    source = "{0} JOIN numbers ON {0}.job_id = :original"
    for table in ("trials", "events"):
        own = {"job_id": "'past-' || number"}
        database.execute(text(_copying(table, own, source.format(table))), of)
    source = (
        "observations JOIN trials AS old ON old.id = trial_id AND old.job_id = :original "
        'JOIN trials AS new ON new."index" = old."index" AND new.job_id LIKE \'past-%\''
    )
    database.execute(text(_copying("observations", {"trial_id": "new.id"}, source)), of)
    last = ":now - :seconds * number / :jobs"
    ended = last if past.is_ended else "NULL"
    database.execute(
        text(
            f"UPDATE jobs SET last_contact_at = {last}, ended_at = {ended}, "
            f"created_at = {last} - 3600 FROM (SELECT 'past-' || number AS name, number "
            f"FROM numbers UNION SELECT :original, 0) AS found WHERE jobs.name = found.name"
        ),
        {"original": ORIGINAL, "now": time.time(), "seconds": past.seconds, "jobs": jobs},
    )


def _copying(table: str, changed: dict[str, str], source: str) -> str:
    """Copies the table's rows, with other values in some columns; the row's number is a new one."""
    names = [column.name for column in Base.metadata.tables[table].columns]
    columns = [name for name in names if name != "id" or "id" in changed]
    values = [changed.get(name, f'{table}."{name}"') for name in columns]
    listed = ", ".join(f'"{name}"' for name in columns)
    return f"INSERT INTO {table} ({listed}) SELECT {', '.join(values)} FROM {source}"
