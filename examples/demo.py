"""The whole path in a few minutes: a service, a real training of 4 ranks, its tuning, the result.

Starts the service on a free port with a database of its own, then examples/digits.py on two
"nodes" of two ranks with BAGUA_AUTOTUNE=1, says how the tuning goes, and shows what came of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import launch
import requests

from bagua_autotune.model.text import describe

LIMITS = {
    "BAGUA_AUTOTUNE_MAX_SAMPLES": "12",
    "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": "4",
    "BAGUA_AUTOTUNE_WARMUP_TIME_S": "8",
}
TRAINING = [str(Path(__file__).with_name("digits.py")), "--epochs", "20", "--minutes", "3.5"]


def start_service(database: str) -> tuple[subprocess.Popen[str], str]:
    """The service and its address."""
    command = [sys.executable, "-m", "bagua_autotune", "serve", "--port", "0"]
    command += ["--database", database, "--log-level", "warning"]
    service = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert service.stdout is not None
    address = service.stdout.readline().rpartition(" ")[2].strip()
    if not address:
        sys.exit("the service did not start; its message stands above")
    return service, address


def show_progress(url: str, training: Sequence[subprocess.Popen[bytes]]) -> None:
    """A line for each new trial and one for the result, until the training has ended."""
    seen: object = None
    while any(process.poll() is None for process in training):
        time.sleep(0.5)
        jobs = requests.get(f"{url}/api/v2/jobs", timeout=10).json()["jobs"]
        if (
            jobs
            and (now := (jobs[0]["state"], jobs[0]["trial"] and jobs[0]["trial"]["index"])) != seen
        ):
            seen = now
            print(progress_line(jobs[0]), flush=True)


def progress_line(job: dict[str, Any]) -> str:
    progress, trial, result = job["progress"], job["trial"], job["result"]
    if result is not None:
        return f"[tuned] {result['summary']}"
    if trial is None:
        return f"[{job['state']}]"
    parts = [f"trial {trial['index'] + 1} of at most {progress['max_trials']}"]
    if trial["purpose"] == "confirm":
        parts = ["winner and default in turns"]
    parts.append(describe(trial["configuration"]))
    if progress["speedup"] is not None:
        parts.append(f"best so far {progress['speedup']:.2f}x")
    if progress["seconds_left"] is not None:
        parts.append(f"at most {progress['seconds_left']:.0f} s left")
    return f"[tuning] {', '.join(parts)}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        database = f"sqlite:///{folder}/demo.db"
        service, url = start_service(database)
        print(f"2 nodes x 2 ranks begin to train; watch it at {url}", flush=True)
        tuned = {"BAGUA_AUTOTUNE": "1", "BAGUA_AUTOTUNE_URL": url, "BAGUA_AUTOTUNE_JOB": "digits"}
        training = launch.start(TRAINING, environment={**os.environ, **LIMITS, **tuned})
        try:
            show_progress(url, training)
        finally:
            code = launch.wait(training)
            service.terminate()
            service.wait()
        if code:
            sys.exit(code)
        print(flush=True)
        show = [sys.executable, "-m", "bagua_autotune", "show", "digits", "--database", database]
        subprocess.run(show, check=True)


if __name__ == "__main__":
    main()
