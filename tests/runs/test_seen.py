"""A stored search, where jobs are seen: the API, the page's requests, metrics and commands."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from click.testing import CliRunner

from bagua_autotune.app import create_app
from bagua_autotune.cli import main
from bagua_autotune.model.job import RUNS, Event
from bagua_autotune.settings import Settings
from bagua_autotune.store import Store
from bagua_autotune.store.maintenance.retention import thin
from bagua_autotune.tuning.tuner import Tuner
from bagua_runs.job import Interrupted
from bagua_runs.report import describe_price, job_result
from bagua_wire.messages import JobPhase
from tests.autotune.server import ServeProcess, serving_here
from tests.autotune.support import make_spec
from tests.runs.recorded import Searching

pytestmark = pytest.mark.slow

READ = ("", "/overview", "/curve", "/buckets", "/trials", "/observations", "/profiles", "/events",
        "/state", "/trials.csv", "/export.json")  # fmt: skip
STEPS = {"trial": 0, "steps": [{"step": 9, "seconds": [1.0, 1.0]}]}


def searched(
    store: Store, phase: JobPhase, has_seconds: bool = True, fingerprint: str = "f" * 64
) -> str:
    """A search in this phase, of a step time of some milliseconds or of a score; its id."""
    searching = Searching(store, has_seconds, fingerprint=fingerprint)
    searching.clock.now = time.time()
    if phase == "finished":
        search, verdict, record = searching.part()
        price = describe_price(record.spent_seconds(), 2, verdict.gain)
        record.finish(job_result(search, verdict, price, record.spent_seconds(), has_seconds))
        return record.job_id or ""
    with pytest.raises(Interrupted):
        searching.part(runs=5)
    job_id = store.jobs.contacts()[0].id
    if phase == "ended":
        store.jobs.end(job_id, searching.clock())
    if phase == "lost":
        lost = Event("lost", at=searching.clock())
        store.jobs.lose_silent("runs" if has_seconds else "scores", searching.clock.now, lost)
    return job_id


@pytest.fixture
def served(store: Store) -> Iterator[str]:
    with serving_here(create_app(Settings(database="sqlite://"), store)) as url:
        yield url


@pytest.mark.parametrize(
    ("phase", "has_seconds"),
    [("tuning", False), ("ended", True), ("lost", False), ("finished", True)],
)
def test_a_search_is_read_wherever_a_job_is(
    store: Store, served: str, phase: JobPhase, has_seconds: bool
) -> None:
    job_id = searched(store, phase, has_seconds)
    path = f"{served}/api/v2/jobs/{job_id}"
    found = {place: requests.get(path + place, timeout=60) for place in READ}
    assert [answer.url for answer in found.values() if not answer.ok] == []
    overview: dict[str, Any] = found["/overview"].json()
    job = overview["job"]
    assert (job["state"], job["name"]) == (phase, "train.py")
    assert job["protocol"] == ("runs" if has_seconds else "scores")
    assert overview["stock_ddp"] == ""
    assert overview["trials"][0]["words"].startswith("NCCL_SOCKET_NTHREADS=1, ")
    assert (overview["trials"][0]["seconds"] is not None) == has_seconds
    assert (overview["steps"]["points"] != []) == has_seconds
    assert found["/buckets"].json()["layouts"] == found["/curve"].json()["curves"] == []
    (listed,) = requests.get(f"{served}/api/v2/jobs", timeout=60).json()["jobs"]
    assert listed["headline"] == job["headline"]
    words = {"ended": "The search is interrupted", "lost": "The search is interrupted",
             "tuning": "Tuning: ", "finished": "Tuned: "}  # fmt: skip
    assert job["headline"].startswith(words[phase])
    metrics = requests.get(f"{served}/metrics", timeout=60).text
    assert "bagua_autotune_failed_decisions_total 0.0" in metrics
    # Nothing was decided in it, whatever was asked.
    trials = store.trials.of(job_id)
    assert len(trials) == len(overview["trials"])


def test_a_search_takes_no_reports_and_tunes_no_other(store: Store, served: str) -> None:
    job_id = searched(store, "tuning")
    path = f"{served}/api/v2/jobs/{job_id}"
    body = json.loads(make_spec().model_dump_json(exclude={"team"}))
    answers = [
        requests.put(path, json=body, timeout=60),
        requests.post(f"{path}/observations", json=STEPS, timeout=60),
        requests.post(f"{path}/events", json={"kind": "ended"}, timeout=60),
        requests.post(f"{path}/progress", json={"step": 1, "seconds": 1.0}, timeout=60),
        requests.get(f"{path}/copy", timeout=60),
    ]
    assert [answer.status_code for answer in answers] == [409] * len(answers)
    assert "bagua-autotune system" in answers[1].json()["detail"]
    # A poll begins nothing.
    polled = requests.post(f"{path}/observations", json={"trial": 0, "steps": []}, timeout=60)
    assert polled.status_code in (200, 409)
    assert len(store.trials.of(job_id)) == 6
    tuner = Tuner(store)
    spec = make_spec(name="train.py", fingerprint="f" * 64)
    assert tuner.register("training", spec)
    assert store.jobs.get("training").inherited is None
    assert len(store.lives.of("training")) == 1


def test_a_search_is_lost_once_it_is_silent_but_not_if_it_said_so_or_is_over(store: Store) -> None:
    paused = searched(store, "ended")
    silent = Searching(store, has_seconds=True, fingerprint="silent")
    with pytest.raises(Interrupted):
        silent.part(runs=3)
    killed = store.jobs.latest(protocols=RUNS, fingerprint="silent")
    assert killed is not None
    Tuner(store, clock=lambda: 5_000_000.0).leases.look()
    assert store.jobs.get(paused).phase == "ended"
    assert store.jobs.get(killed.id).phase == "lost"
    (event,) = store.events.of(killed.id)
    assert event.message.endswith("the search is interrupted")


def test_a_search_is_kept_whole_and_deleted_whole(store: Store, served: str) -> None:
    running = f"{served}/api/v2/jobs/{searched(store, 'tuning', fingerprint='other')}"
    refused = requests.delete(running, timeout=60)
    assert refused.status_code == 409
    assert "the search then goes on without being stored" in refused.json()["detail"]
    assert requests.delete(f"{running}?force=true", timeout=60).status_code == 200
    job_id = searched(store, "finished")
    assert thin(store, 0.0, 1e12) == 0
    path = f"{served}/api/v2/jobs/{job_id}"
    assert requests.delete(path, timeout=60).status_code == 200
    assert requests.get(path, timeout=60).status_code == 404


def test_the_commands_show_a_search(tmp_path: Path) -> None:
    database = tmp_path / "autotune.db"
    store = Store(f"sqlite:///{database}")
    job_id = searched(store, "finished")
    store.close()

    def told(*arguments: str) -> str:
        return CliRunner().invoke(main, arguments).output

    with ServeProcess(database) as service:
        for source in (["--database", f"sqlite:///{database}"], ["--url", service.url]):
            shown = told("show", job_id, *source)
            assert "the memory" not in shown
            assert "ran out of memory: here" in shown
            assert "the run failed: ended with exit code 1" in shown
            assert "on 2 GPUs); pays after" in shown
            assert "DistributedDataParallel" not in shown
            assert "train.py" in told("jobs", *source)
            assert "Tuned: " in told("watch", job_id, *source)
            table = told("export", job_id, "--csv", *source)
            assert table.startswith("index,NCCL_SOCKET_NTHREADS,")
            exported = json.loads(told("export", job_id, "--json", *source))
            assert exported["result"]["kept"] == "winner"
            refused = told("export", job_id, "--configuration", *source)
            assert "is a search of 'bagua-autotune system'" in refused
            assert "Traceback" not in told("export", job_id, "--profile", *source)
