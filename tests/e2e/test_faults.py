"""Whatever happens to the service or to a rank, the training loses no step and ends right."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from bagua_autotune.store import Store
from bagua_autotune.store.engine.location import default_url
from bagua_client import Configuration
from tests.autotune.support import stored_jobs
from tests.e2e.conftest import LIMITS
from tests.e2e.programs.training import DEFAULT, Report, train
from tests.e2e.service import ServiceProcess, unused_port
from tests.e2e.test_tuning import check
from tests.ranks import Outcome, RankPool
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


def begin(pool: RankPool, *args: Any) -> Future[list[Report]]:
    """Let the ranks train while the test goes on."""
    executor = ThreadPoolExecutor(1)
    future = executor.submit(pool.run, train, *args, timeout_seconds=200)
    executor.shutdown(wait=False)
    return future


class _Nonsense(BaseHTTPRequestHandler):
    """Answers every request in the way that the server was told."""

    answer: tuple[int, bytes, float]

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, body, seconds = self.answer
        time.sleep(seconds)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET = do_PUT

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def nonsense(status: int, body: bytes, seconds: float = 0.0, port: int = 0) -> Iterator[str]:
    """A server that answers nothing else; gives its address."""
    handler = type("Handler", (_Nonsense,), {"answer": (status, body, seconds)})
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_service_that_comes_late_dies_and_raves_comes_back_and_tuning_resumes_where_it_was(
    service: ServiceProcess, tuned_ranks: Callable[..., RankPool], tmp_path: Path
) -> None:
    steps_file = tmp_path / "steps"

    def steps() -> int:
        return int(steps_file.read_text())

    def await_steps(count: int) -> None:
        before = steps()
        wait_until(lambda: steps() > before + count, f"{count} steps")

    pool = tuned_ranks(service.url, (2,), BAGUA_AUTOTUNE_SERVER_WAIT_TIME="0.5")
    training = begin(pool, 20000, True, str(steps_file))
    wait_until(lambda: steps_file.exists() and steps() > 30, "30 steps", 120)
    service.start()
    wait_until(lambda: bool(service.job()) and len(service.trials()) >= 4, "the fourth trial", 120)
    before = service.trials()
    service.kill()
    killed = steps()
    await_steps(300)
    for answer in ((500, b"Traceback"), (200, b"\x00 not JSON"), (200, b"{}", 30.0)):
        with nonsense(*answer, port=service.port):
            await_steps(20)
    service.start()
    back = steps()
    reports = training.result()
    check(reports)
    assert all(report.tuned for report in reports)
    # Without it they leave the trial that ran.
    assert set(reports[0].configurations[killed + 200 : back]) == {DEFAULT}
    assert sum("use their default" in line for line in reports[0].logged) >= 1
    assert service.job()["state"] == "finished"
    after = service.trials()
    closed = [_as_measured(trial) for trial in before if trial["state"] == "measured"]
    assert len(closed) > 1
    # The last one's steps that came until its ranks had switched were still to be told.
    *known, last = [_as_measured(trial) for trial in after[: len(closed)]]
    assert known == closed[:-1]
    assert last["configuration"] == closed[-1]["configuration"]
    assert last["state"] == "measured"
    assert [trial["index"] for trial in after] == list(range(len(after)))
    assert all(trial["seconds"] < 0.5 for trial in after if trial["seconds"])


def _as_measured(trial: dict[str, Any]) -> dict[str, Any]:
    """Without its speed-up, which counts all trials of the default, later ones too."""
    return {key: value for key, value in trial.items() if key != "speedup"}


@pytest.fixture(scope="module")
def raving() -> Iterator[tuple[int, RankPool]]:
    """A port, and two ranks that take what listens there for their service."""
    port = unused_port()
    variables = {**LIMITS, "BAGUA_AUTOTUNE_URL": f"http://127.0.0.1:{port}"}
    pool = RankPool([2], collective_timeout_seconds=40, variables=variables)
    yield port, pool
    pool.close()


@pytest.mark.parametrize(
    ("status", "body", "seconds"),
    [
        pytest.param(500, b"Traceback (most recent call last)", 0.0, id="server error"),
        pytest.param(
            200, b'{"trial": {"index": "x"}, "result": [], "progress": 3}', 0.0, id="shape"
        ),
        pytest.param(200, b"{}", 30.0, id="30 seconds"),
        *(
            pytest.param(
                200,
                b'{"trial": {"index": 0}, "configuration": %s, "result": null,'
                b'"progress": {"trials_measured": 0, "max_trials": 1, "speedup": null},'
                b'"deciding": false, "round": 0}' % text,
                0.0,
                id=name,
            )
            for name, text in (
                ("channels nobody has", b'{"bucket_bytes": 4096, "channels": 3}'),
                ("buckets of another model", b'{"bucket_bytes": 4096, "buckets": [5, 1]}'),
            )
        ),
        pytest.param(401, b'{"detail": "wrong token"}', 0.0, id="refused"),
    ],
)
def test_a_service_that_answers_nonsense_costs_no_step(
    raving: tuple[int, RankPool], status: int, body: bytes, seconds: float
) -> None:
    port, pool = raving
    with nonsense(status, body, seconds, port):
        reports = pool.run(train, 80, False, timeout_seconds=60)
    check(reports)
    assert reports[0].steps == 80
    assert set(reports[0].configurations) == {DEFAULT}
    # A few lines for the reader, not one for each step or answer.
    assert len(reports[0].logged) < 20


def test_a_rank_that_stands_still_for_5_seconds_spoils_no_trial(
    service: ServiceProcess, tuned_ranks: Callable[..., RankPool]
) -> None:
    service.start()
    pool = tuned_ranks(service.url, (2,))
    training = begin(pool, 5000)
    wait_until(lambda: bool(service.job()) and len(service.trials()) >= 3, "the third trial")
    os.kill(pool.pids[1], signal.SIGSTOP)
    time.sleep(5)
    os.kill(pool.pids[1], signal.SIGCONT)
    reports = training.result()
    check(reports)
    assert service.job()["state"] == "finished"
    assert all(trial["seconds"] < 2.5 for trial in service.trials())


@pytest.mark.parametrize("victim", [0, 3])
def test_when_a_rank_is_killed_the_others_end_and_nothing_is_left(
    tuned_ranks: Callable[..., RankPool], tmp_path: Path, victim: int
) -> None:
    pool = tuned_ranks(None)
    steps_file = tmp_path / "steps"
    executor = ThreadPoolExecutor(1)
    outcomes: Future[dict[int, Outcome]] = executor.submit(
        pool.outcomes, train, 5000, True, str(steps_file), timeout_seconds=100
    )
    executor.shutdown(wait=False)
    wait_until(lambda: steps_file.exists() and int(steps_file.read_text()) > 60, "60 steps", 90)
    store = Store(default_url())
    wait_until(lambda: len(stored_jobs(store)) == 1, "the job", 60)
    ours = [psutil.Process(pid) for pid in pool.pids]
    ours += [child for process in ours for child in process.children(recursive=True)]
    assert any("bagua_autotune" in process.cmdline() for process in ours)
    (job,) = stored_jobs(store)
    # Not while the ranks make process groups: gloo waits long there for one that is gone.
    wait_until(lambda: _states(store, job.id)[-1:] == ["running"], "a trial that runs", 60)
    os.kill(pool.pids[victim], signal.SIGKILL)
    for rank, outcome in outcomes.result().items():
        error = outcome.error or ""
        if rank == victim:
            assert "exit code -9" in error
        else:
            # torch.distributed's own words; nothing of the agent's stands before them.
            assert "RuntimeError" in error or "DistBackendError" in error
            assert "gloo" in error.lower()
    wait_until(lambda: not any(_lives(process) for process in ours), "the end of all", 30)
    (job,) = stored_jobs(store)
    assert job.phase == "ended"
    # Rank 0 says goodbye itself, where it lives and still comes to it.
    said = ["the training process was gone", "the training process ended"]
    assert store.events.of(job.id)[-1].message in said[: 1 if victim == 0 else 2]
    store.close()


def _states(store: Store, job_id: str) -> list[str]:
    return [trial.state for trial in store.trials.of(job_id)]


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_ranks_that_disagree_return_to_the_baseline_and_go_on(
    service: ServiceProcess, tuned_ranks: Callable[..., RankPool]
) -> None:
    service.start()
    reports = tuned_ranks(service.url).run(train, 3000, True, None, 3, timeout_seconds=200)
    check(reports)
    errors = [line for report in reports for line in report.logged if line.startswith("ERROR")]
    assert len(errors) == 1
    assert "rank 3 disagreed" in errors[0]
    assert "default" in errors[0]
    assert service.job()["state"] == "finished"
    failed = [trial for trial in service.trials() if trial["state"] == "failed"]
    assert len(failed) == 1
    assert "rank 3 disagreed" in failed[0]["failure"]
    wrong = Configuration.from_json(failed[0]["configuration"])
    assert wrong not in reports[0].configurations
