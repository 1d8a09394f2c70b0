"""Several processes that serve one port, as they are deployed: real ones, over HTTP."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from bagua_autotune.metrics.exposition import Counts, Siblings, listeners
from tests.autotune.api.driving import of, parsed
from tests.autotune.server import PATIENCE_SECONDS, ServeProcess, tuning
from tests.autotune.support import Ranks
from tests.autotune.test_server import is_alive, serve_until_it_fails

pytestmark = pytest.mark.slow

REQUESTS = 40


def children(service: ServeProcess) -> list[int]:
    """The processes that serve, in the order in which they were started."""
    pid = service.process.pid
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until_gone(pids: list[int]) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while any(map(is_alive, pids)):
        assert time.monotonic() < until
        time.sleep(0.05)


def get(url: str) -> requests.Response:
    """On a connection of its own, which goes to any of the processes."""
    return requests.get(url, timeout=PATIENCE_SECONDS)


def test_they_share_the_requests_and_their_port_with_nobody_and_end_together(
    tmp_path: Path,
) -> None:
    with ServeProcess(tmp_path / "a.db", "--processes", "2") as service:
        serving = children(service)
        assert len(serving) == 2
        for _ in range(REQUESTS):
            assert get(f"{service.url}/healthz").ok
        for _ in range(10):  # whichever answers
            counted = of(parsed(get(f"{service.url}/metrics").text), "requests_total")
            healthy = {key[2]: n for key, n in counted.items() if "/healthz" in key}
            assert healthy.keys() == {"0", "1"}
            assert sum(healthy.values()) == REQUESTS
        port = service.url.rpartition(":")[2]
        option = ("--processes", "2", "--database", f"sqlite:///{tmp_path / 'b.db'}")
        second = serve_until_it_fails("--port", port, *option)
        assert second.returncode == 1
        assert f"port {port}: Address already in use" in second.stderr
        assert second.stderr.endswith("; choose another --port, or 0 for any free one\n")
        assert service.stop() == 0
        wait_until_gone(serving)
        assert "Traceback" not in service.log()
        assert service.log().count("\n") == 1, "what it says at its start, it says once"


def test_a_signal_to_all_of_them_ends_them_without_a_word(tmp_path: Path) -> None:
    """As a terminal sends it."""
    with ServeProcess(tmp_path / "a.db", "--processes", "2") as service:
        for pid in [*children(service), service.process.pid]:
            os.kill(pid, signal.SIGINT)
        assert service.process.wait(PATIENCE_SECONDS) == 0
        assert "Traceback" not in service.log()


def test_one_that_is_killed_is_started_again_and_all_end_with_who_watches_them(
    tmp_path: Path,
) -> None:
    """No connection is refused meanwhile."""
    with ServeProcess(tmp_path / "a.db", "--processes", "2") as service:
        before = children(service)
        os.kill(before[0], signal.SIGKILL)
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(get, f"{service.url}/readyz") for _ in range(REQUESTS)]
            assert all(each.result().ok for each in asked)
        after = children(service)
        assert len(after) == 2
        assert after[0] == before[1]
        assert f"process 0 of the service (pid {before[0]}) ended by signal 9" in service.log()
        counted = of(parsed(get(f"{service.url}/metrics").text), "build_info")
        assert {process for process, _ in counted} == {"0", "1"}
        service.stop(signal.SIGKILL)
        wait_until_gone(after)


def test_one_that_cannot_be_started_again_ends_all(tmp_path: Path) -> None:
    with ServeProcess(tmp_path / "a.db", "--processes", "2") as service:
        serving = children(service)
        for path in tmp_path.glob("a.db*"):
            path.unlink()
        (tmp_path / "a.db").mkdir()
        os.kill(serving[1], signal.SIGKILL)
        assert service.process.wait(PATIENCE_SECONDS) == 1
        wait_until_gone(serving)
        assert "process 1 of the service could not be started: see above" in service.log()
        assert "Traceback" not in service.log()


def test_what_none_of_them_can_use_is_said_in_one_sentence() -> None:
    nowhere = ("--database", "sqlite:////proc/no/such.db")
    run = serve_until_it_fails("--port", "0", "--processes", "2", *nowhere)
    assert run.returncode == 1
    assert run.stderr.count("\n") == 1
    assert "/proc/no" in run.stderr


def test_a_job_is_tuned_whichever_of_them_is_asked(tmp_path: Path, empty_url: str) -> None:
    """On a new connection for each request; and every step is counted once."""
    with ServeProcess(tmp_path / "a.db", "--processes", "2", "--database", empty_url) as service:
        ranks = Ranks(noise=0.01)
        *_, last = tuning(service.url, "job", ranks, steps=5)
        assert last["result"]["kept"] == "winner"
        samples = parsed(get(f"{service.url}/metrics").text)
        counts = of(samples, "step_seconds_count")
        assert {process for _, process in counts} == {"0", "1"}
        assert sum(counts.values()) <= ranks.step
        assert len(of(samples, "job_ranks")) == 1
        decided = of(samples, "proposal_seconds_count")
        assert len(decided) == 2
        assert sum(decided.values()) > 3


def test_counts_of_one_that_stands_still_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    sockets = listeners(3)
    told = Counts([b'a{process="1"} 1\n'], {"job": b"\xe2\x98\x83 2\n"})
    Siblings(1, sockets).tell(lambda: told)
    assert Siblings(0, sockets).ask() == [told]
    assert [record.message for record in caplog.records] == [
        "the metrics are without process 2: timed out"
    ]
    for listener in sockets:
        listener.close()
